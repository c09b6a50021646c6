"""Test-time augmentation on both engines, against views moved and averaged by hand in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.config import Recipe
from flatout.data.batches import Split
from flatout.engine.base import Evaluation
from flatout.engine.torch.engine import TorchEngine
from tests.conftest import Command
from tests.engine.engines import make_engine
from tests.engine.plain_loop import normalised
from tests.engine.test_against_plain_loop import make_net, make_recipe, make_samples, small_net
from tests.engine.test_prefix import frozen_net
from tests.system.conftest import leave_out_pictures

MOVES = {12: (0, 1, -1), 64: (0, 2, -2)}


def mean_by_hand(net: nn.Module, images: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return float64 [N, K], the mean of the probabilities of all views."""
    size, views = images.shape[1], []
    for move in MOVES[size]:
        # Pixel i of the view is pixel i + move of the image, and that at the edge where there is none.
        places = np.clip(np.arange(size) + move, 0, size - 1)
        moved = images[:, places][:, :, places]
        views += [moved, moved[:, :, ::-1]] if recipe.augment.flip else [moved]
    found = []
    for view in views:
        x = (torch.from_numpy(view.copy()).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.3
        with torch.no_grad():
            logits = net.eval()(x).double()
        positive = logits.sigmoid()
        found.append(torch.cat([1 - positive, positive], 1) if logits.shape[1] == 1 else logits.softmax(1))
    return torch.stack(found).mean(0).numpy()


def assert_is_mean(result: Evaluation, expected: np.ndarray, samples: Split) -> None:
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities, expected, atol=1e-5)
    assert (result.predicted == expected.argmax(1)).all()
    loss = -np.log(expected[np.arange(len(expected)), samples.labels]).sum()
    assert result.loss_sum == pytest.approx(loss, rel=1e-4)


def one_logit() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(4096, 1))


FLIP = {"augment.flip": True}
BINARY = {**FLIP, "image_size": 64, "loss": "binary-cross-entropy"}
# Large images move by two pixels. The output of a frozen prefix is cached, and the views pass the prefix all the same.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, int]]] = {
    "as they are": (make_net, {}, {}),
    "mirrored": (small_net, FLIP, {}),
    "by two pixels": (one_logit, BINARY, {"size": 64, "classes": 2}),
    "frozen prefix": (frozen_net, {}, {}),
}


@pytest.mark.parametrize(
    ("engine", "case"), [*(("torch", case) for case in CASES), ("xla 8", "mirrored"), ("xla 8", "by two pixels")]
)
def test_probabilities_are_the_mean_over_the_views(engine: str, case: str) -> None:
    make, changes, shape = CASES[case]
    samples, recipe = make_samples(70, **shape), make_recipe(**changes)
    made = make_engine(engine, make(), recipe)
    placed = made.place(samples)
    result = placed.evaluate(with_probabilities=True, tta=True)
    assert_is_mean(result, mean_by_hand(make(), samples.images, recipe), samples)
    plain = placed.evaluate(with_logits=True).logits
    made.close()
    assert plain is not None
    with torch.no_grad():
        np.testing.assert_allclose(plain, make().eval()(normalised(samples, recipe)), atol=1e-5)


def test_a_view_that_is_the_image_itself_is_evaluated_from_the_cached_prefix() -> None:
    net, samples, passed = frozen_net(), make_samples(20), list[int]()
    net[0].register_forward_hook(lambda module, arguments, output: passed.append(len(output)))  # type: ignore[index]
    engine = TorchEngine(net, make_recipe(linear_probe=True, freeze="all-but-last-1"))
    placed = engine.place(samples)
    plain = placed.evaluate(with_probabilities=True)
    computed = sum(passed)
    seen = placed.evaluate(with_probabilities=True, tta=True)
    assert sum(passed) == computed >= len(samples)
    assert plain.probabilities is not None
    assert seen.probabilities is not None
    np.testing.assert_allclose(seen.probabilities, plain.probabilities, atol=1e-6)


def test_a_run_says_that_its_metrics_are_of_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    leave_out_pictures(monkeypatch)
    rng = np.random.default_rng(2)
    labels = np.arange(60) % 2
    images = np.clip(rng.normal(90 + 60 * labels[:, None, None], 60, (60, 16, 16)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    keys: dict[str, Any] = {"epochs": 1, "batch_size": 10, "image_size": 18, "augment": {"flip": True}}
    keys |= {"data": tmp_path / "images.npz", "devices": "cpu", "quiet": True}
    run, plain = (flatout.fit("keras-cnn", out=tmp_path / str(tta), tta=tta, **keys) for tta in (True, False))
    assert (run.summary["tta"], plain.summary["tta"]) == (True, False)
    assert "test-time augmentation: evaluated on 6 views of each image" in run.summary["notes"]
    with_views, without = (one.summary["test_loss"] for one in (run, plain))
    assert plain.evaluate(devices="cpu", tta=True)["test_loss"] == pytest.approx(with_views, rel=1e-6) != without
    assert run.evaluate(devices="cpu")["test_loss"] == pytest.approx(with_views, rel=1e-6)
    views, alone = ([p.probabilities for p in plain.predict(images[:8], tta=tta)] for tta in (True, False))
    assert views == [p.probabilities for p in run.predict(images[:8])] != alone
    shown = command("evaluate", plain.path, "--devices", "cpu", "--tta")
    assert shown.splitlines()[0].endswith(", with test-time augmentation")
