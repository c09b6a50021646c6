"""Images of several sizes in one run, on both engines, against loops written by hand."""

import contextlib
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.config import Recipe
from flatout.data.batches import Split, training_batches
from flatout.distributed.world import World
from flatout.engine.augment import training_size
from flatout.engine.torch.engine import TorchEngine
from flatout.models.weights import read_weights
from flatout.train.loop import LoopHooks, run_loop
from flatout.train.progress import Progress
from flatout.utils.errors import InputError, Stopped
from tests.engine.engines import make_engine
from tests.engine.test_against_plain_loop import SILENT, assert_close, make_recipe, make_samples
from tests.engine.test_tape import run

LARGER = {"data.eval_size": 16, "optimizer.lr": 0.05}


def pooled_net() -> nn.Module:
    """A net for images of any size."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )


def pixels_of(samples: Split) -> torch.Tensor:
    return (torch.from_numpy(samples.images).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.3


def trained_by_hand(images: Sequence[torch.Tensor], samples: Split, recipe: Recipe) -> nn.Module:
    """Train on images [N, C, H, W] of each epoch."""
    net, labels = pooled_net().train(), torch.from_numpy(samples.labels)
    optimizer = torch.optim.SGD(net.parameters(), lr=recipe.optimizer.lr)
    for epoch, x in enumerate(images):
        for batch in training_batches(recipe.seed, epoch, len(samples), recipe.batch_size):
            chosen = torch.from_numpy(batch.samples[: batch.count])
            optimizer.zero_grad()
            functional.cross_entropy(net(x[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval()


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_evaluation_sees_larger_images_than_training(engine: str) -> None:
    samples, recipe = make_samples(size=16), make_recipe(**LARGER)
    assert recipe.stored_sides == (16, 16)
    x = pixels_of(samples)
    net = trained_by_hand([x[:, :, 2:14, 2:14]] * recipe.epochs, samples, recipe)
    with torch.no_grad():
        expected = net(x).softmax(1)
    made = make_engine(engine, pooled_net(), recipe)
    placed = made.place(samples)
    placed.compile()
    run_loop(made, World(), recipe, {"train": placed}, Progress(), SILENT)
    found, state = placed.evaluate(with_probabilities=True).probabilities, made.state()
    made.close()
    assert_close({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, net.state_dict())
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_output_of_a_frozen_prefix_is_not_shared_between_sizes() -> None:
    net = pooled_net()
    for parameter in net[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    engine = TorchEngine(net, make_recipe(**LARGER))
    assert engine.cut is None
    engine.close()


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def without_pictures() -> Any:
    """Leave out pictures and report, which take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.report.page.draw_all", lambda run: None)
        yield


def arrays() -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(60) % 3
    noise = np.random.default_rng(0).integers(0, 40, (60, 20, 20))
    return (noise + 90 * labels[:, None, None]).astype(np.uint8), labels


KEYS: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 16, "epochs": 2, "image_size": 16}


def test_evaluation_and_prediction_have_the_size_of_the_recipe(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=arrays()[0], labels=arrays()[1])
    path = tmp_path / "run"
    run = flatout.fit(data=tmp_path / "images.npz", out=path, model="fast-cnn-16", eval_size=20, **KEYS)
    metadata = read_weights(path / "weights.safetensors")[1]
    assert (metadata["image_size"], metadata["stored_size"], metadata["eval_size"]) == ("16", "20", "20")
    assert run.evaluate(devices="cpu")["test_loss"] == pytest.approx(run.summary["test_loss"], rel=1e-6)
    seen: list[torch.Size] = []
    run.model.register_forward_pre_hook(lambda module, images: seen.append(images[0].shape))
    run.predict(arrays()[0][:2])
    assert seen == 3 * [torch.Size((2, 1, 20, 20))], "the views of test-time augmentation"


@pytest.mark.parametrize("model", ["keras-cnn", "timm:test_vit"])
def test_a_model_for_one_size_is_named_before_training(model: str, tmp_path: Path) -> None:
    size = {"keras-cnn": 18, "timm:test_vit": 32}[model]
    message = rf"data.eval_size = 40: the model '{model}', built for images of {size} pixels, does not take others \("
    with pytest.raises(InputError, match=message):
        flatout.fit(data=arrays(), out=tmp_path / "run", model=model, eval_size=40, **{**KEYS, "image_size": size})


def test_images_are_not_stored_smaller_than_they_are_shown() -> None:
    message = "data.stored_size = 14: must be at least 16, the largest of image_size and data.eval_size, or 0 for that"
    with pytest.raises(InputError, match=message):
        make_recipe(**LARGER, **{"data.stored_size": 14})


# --- images that grow -------------------------------------------------------------------------------------------------

GROWING = {"epochs": 4, "image_size": 16, "augment.start_size": 8, "optimizer.lr": 0.05}


@pytest.mark.parametrize(
    ("size", "start", "epochs", "expected"),
    [
        (16, 8, 4, [8, 8, 12, 16]),
        (128, 64, 8, [64, 64, 64, 96, 96, 96, 128, 128]),
        (160, 100, 4, [100, 100, 132, 160]),
        (64, 63, 4, [63, 63, 63, 64]),
        (28, 8, 3, [8, 16, 28]),
        (28, 8, 1, [28]),
        (28, 28, 2, [28, 28]),
        (28, 0, 2, [28, 28]),
    ],
)
def test_the_size_is_a_function_of_the_epoch(size: int, start: int, epochs: int, expected: list[int]) -> None:
    recipe = make_recipe(image_size=size, epochs=epochs, **{"augment.start_size": start})
    assert [training_size(recipe, epoch) for epoch in range(epochs)] == [(side, side) for side in expected]


def test_sides_grow_in_proportion() -> None:
    recipe = make_recipe(image_size=[24, 40], epochs=4, **{"augment.start_size": [12, 20]})
    assert [training_size(recipe, epoch) for epoch in range(4)] == [(12, 20), (14, 24), (19, 32), (24, 40)]


def reduced_by_hand(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return each pixel as the mean of those that it covers, at least in part."""

    def ends(length: int, size: int) -> list[tuple[int, int]]:
        return [(i * length // size, math.ceil((i + 1) * length / size)) for i in range(size)]

    columns = ends(x.shape[3], width)
    rows = [torch.stack([x[:, :, a:b, c:d].mean((2, 3)) for c, d in columns], 2) for a, b in ends(x.shape[2], height)]
    return torch.stack(rows, 2)


@pytest.mark.parametrize("size", [(8, 8), (12, 12), (15, 15), (9, 14)])
def test_both_engines_reduce_alike(size: tuple[int, int]) -> None:
    import jax.numpy as jnp

    from flatout.engine.xla.augment import reduced

    x = pixels_of(make_samples(4, size=16))
    expected = reduced_by_hand(x, *size)
    torch.testing.assert_close(functional.interpolate(x, size=size, mode="area"), expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(np.asarray(reduced(jnp.asarray(x), size)), expected, atol=1e-5)


@pytest.mark.parametrize("engines", [("torch", "torch"), pytest.param(("xla 8", "torch"), marks=pytest.mark.slow)])
def test_training_on_growing_images_and_resuming_equals_a_plain_loop(engines: tuple[str, str]) -> None:
    """The second engine continues in the middle, where the images have grown already."""
    samples, recipe = make_samples(size=16), make_recipe(**GROWING)
    x = pixels_of(samples)
    grown = [reduced_by_hand(x, size, size) for size in (8, 8, 12, 16)]
    expected = trained_by_hand(grown, samples, recipe).state_dict()
    state, progress = {}, Progress()
    for number, name in enumerate(engines):
        engine = make_engine(name, pooled_net(), recipe)
        placed = engine.place(samples)
        placed.compile()
        if number:
            engine.load_state(state)
        callbacks = LoopHooks() if number else StopAfter(3)
        with contextlib.suppress(Stopped):
            run_loop(engine, World(), recipe, {"train": placed}, progress, callbacks)
        state = engine.state()
        engine.close()
    assert progress.epoch == 4
    assert_close({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, expected)


class StopAfter(LoopHooks):
    """Stops the run after an epoch."""

    def __init__(self, epochs: int) -> None:
        self._left = epochs

    def epoch(self, *, is_best: bool) -> None:
        self._left -= 1
        if not self._left:
            raise Stopped(signal.SIGINT)


def test_each_size_is_recorded_once() -> None:
    recipe = make_recipe(**GROWING | {"epochs": 8, "batch_size": 8})
    states = []
    for record in (True, False):
        state, _, recorded = run(recipe, pooled_net(), record=record)
        states.append(state)
        # Of full batches and of the padded one.
        assert recorded == (6 if record else 0)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_mixtures_and_micro_batches_are_reduced() -> None:
    recipe = make_recipe(**GROWING, **{"augment.mixup": 0.4, "augment.flip": True})
    whole, _, _ = run(recipe, flat_free_net(), record=False)
    parts, _, _ = run(recipe.override({"micro_batch": 4}), flat_free_net(), record=False)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


def flat_free_net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def test_what_cannot_grow_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"augment.start_size = 20: must be at most image_size \(16\)"):
        make_recipe(**GROWING | {"augment.start_size": 20})
    keys: dict[str, Any] = KEYS | {"image_size": 28, "model": "keras-cnn", "augment": {"start_size": 20}}
    with pytest.raises(
        InputError, match=r"augment.start_size = 20: the model 'keras-cnn', built for images of 28 pixels"
    ):
        flatout.fit(data=arrays(), out=tmp_path / "run", **keys)
    with pytest.raises(
        InputError, match=r"--minutes 1: cannot plan steps on images that grow; set augment.start_size = 0"
    ):
        flatout.fit(data=arrays(), out=tmp_path / "run", minutes=1, **keys)
