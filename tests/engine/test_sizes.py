"""Images of several sizes in one run, on both engines, against loops written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.distributed.world import World
from flatout.models.weights import read_weights
from flatout.train.loop import TrainingLoop
from flatout.train.request import Progress
from flatout.utils.errors import InputError
from tests.engine.engines import make_engine, train
from tests.engine.plain_loop import normalised, plain_loop
from tests.engine.test_against_plain_loop import SILENT, assert_close, make_net, make_recipe, make_samples
from tests.system.run_files import grey_levels

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")
LARGER = {"data.eval_size": 16, "optimizer.lr": 0.05}


def pooled_net() -> nn.Module:
    """A net for images of any size."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_evaluation_sees_larger_images_than_training(engine: str) -> None:
    samples, recipe = make_samples(size=16), make_recipe(**LARGER)
    assert recipe.stored_sides == (16, 16)
    x, net = normalised(samples, recipe), pooled_net()
    plain_loop(net, samples, recipe, inputs=lambda: x[:, :, 2:14, 2:14])
    with torch.no_grad():
        expected = net.eval()(x).softmax(1)
    made = make_engine(engine, pooled_net(), recipe)
    placed = made.place(samples)
    placed.compile()
    TrainingLoop(made, World(), recipe, {"train": placed}, Progress(), SILENT).run()
    found, state = placed.evaluate(with_probabilities=True).probabilities, made.state()
    made.close()
    assert_close({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, net.state_dict())
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=1e-4)


# --- whole runs -------------------------------------------------------------------------------------------------------


IMAGES, LABELS = grey_levels(60, size=20)
KEYS: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 16, "epochs": 2, "image_size": 16}


def test_evaluation_and_prediction_have_the_size_of_the_recipe(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=IMAGES, labels=LABELS)
    path = tmp_path / "run"
    run = flatout.fit(data=tmp_path / "images.npz", out=path, model="fast-cnn-16", eval_size=20, **KEYS)
    metadata = read_weights(path / "weights.safetensors")[1]
    assert (metadata["image_size"], metadata["stored_size"], metadata["eval_size"]) == ("16", "20", "20")
    assert run.evaluate(devices="cpu")["test_loss"] == pytest.approx(run.summary["test_loss"], rel=1e-6)
    seen: list[torch.Size] = []
    run.model.register_forward_pre_hook(lambda module, images: seen.append(images[0].shape))
    run.predict(IMAGES[:2])
    assert seen == 3 * [torch.Size((2, 1, 20, 20))], "the views of test-time augmentation"


@pytest.mark.parametrize("model", ["keras-cnn", "timm:test_vit"])
def test_a_model_for_one_size_is_named_before_training(model: str, tmp_path: Path) -> None:
    size = {"keras-cnn": 18, "timm:test_vit": 32}[model]
    message = rf"data.eval_size = 40: the model '{model}', built for images of {size} pixels, does not take others \("
    with pytest.raises(InputError, match=message):
        flatout.fit(model, (IMAGES, LABELS), out=tmp_path / "run", eval_size=40, **{**KEYS, "image_size": size})


def test_convolutions_compute_channels_last() -> None:
    """With one channel both orders are contiguous, and torch's convolutions would choose the slower one."""
    net, seen = make_net(), list[bool]()
    for layer in (module for module in net.modules() if isinstance(module, nn.Conv2d)):
        layer.register_forward_hook(
            lambda module, images, found: seen.append(found.is_contiguous(memory_format=torch.channels_last))
        )
    train(make_engine("torch", net, make_recipe()), make_recipe(), make_samples())
    assert seen
    assert all(seen)
