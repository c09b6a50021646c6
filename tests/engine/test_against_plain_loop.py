"""The engines against a plain hand-written torch loop, which is the oracle."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flatout.config import Optimizer, Recipe
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.engine.base import Evaluation
from flatout.train.loop import LoopHooks, run_loop
from flatout.train.progress import Progress
from tests.engine.engines import ENGINES, make_engine
from tests.engine.plain_loop import plain_loop

SILENT = LoopHooks()


def make_samples(count: int = 70, size: int = 12, channels: int = 1, classes: int = 5) -> Split:
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return Split(images=images, rows=np.arange(count), labels=rng.integers(0, classes, count))


def make_net(channels: int = 1, classes: int = 5) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(72, classes),
    )


def make_recipe(**changes: object) -> Recipe:
    base = Recipe(model="test", image_size=12, channels=1, epochs=2, batch_size=16)
    return base.override({"data.mean": [0.4], "data.std": [0.3], "keep": "last", **changes})


def engine_weights(
    net: nn.Module,
    samples: Split,
    recipe: Recipe,
    engine: str = "torch",
    *,
    world: World | None = None,
    **options: object,
) -> dict[str, torch.Tensor]:
    made = make_engine(engine, net, recipe, world=world, **options)
    placed = made.place(samples)
    placed.compile()
    run_loop(made, world or World(), recipe, {"train": placed}, Progress(), SILENT)
    state = made.state()
    made.close()
    return {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}


OPTIMIZERS = {
    "sgd": (Optimizer(name="sgd", lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": (
        Optimizer(name="sgd", lr=0.05, momentum=0.9, dampening=0.1, weight_decay=1e-3),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    ),
    "nesterov": (
        Optimizer(name="momentum", lr=0.05, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adagrad": (Optimizer(name="adagrad", lr=0.01), lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "adam": (Optimizer(name="adam", lr=0.001), lambda p: torch.optim.Adam(p, lr=0.001)),
    "adamw": (
        Optimizer(name="adamw", lr=0.001, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.01),
    ),
}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 2e-5) -> None:
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


USUAL = make_recipe(**{"optimizer.lr": 0.05})


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What an engine has after the usual training, which takes XLA seconds to compile."""

    engine: str
    weights: dict[str, torch.Tensor]
    progress: Progress
    evaluation: Evaluation


@pytest.fixture(scope="module", params=ENGINES)
def usual(request: pytest.FixtureRequest) -> Usual:
    engine, progress = make_engine(request.param, make_net(), USUAL), Progress()
    placed = engine.place(make_samples())
    placed.compile()
    run_loop(engine, World(), USUAL, {"train": placed, "valid": placed}, progress, SILENT)
    evaluation = placed.evaluate(with_probabilities=True)
    weights = {k.removeprefix("model."): v for k, v in engine.state().items() if k.startswith("model.")}
    engine.close()
    return Usual(engine=request.param, weights=weights, progress=progress, evaluation=evaluation)


def test_equals_plain_loop(usual: Usual) -> None:
    """Two epochs with a short last batch (70 = 4 * 16 + 6) and batch normalisation."""
    net = make_net()
    expected = plain_loop(net, make_samples(), USUAL).state
    assert_close(usual.weights, expected)


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_frozen_statistics_equal_those_of_a_plain_loop(engine: str) -> None:
    recipe = USUAL.override({"norm": "frozen", "pretrained": True})
    nets = [make_net(), make_net()]
    for net in nets:
        net.load_state_dict({name: value + 0.2 for name, value in net.state_dict().items() if "running" in name}, False)
    expected = plain_loop(nets[0], make_samples(), recipe).state
    assert_close(engine_weights(nets[1], make_samples(), recipe, engine), expected)


def test_counts_are_of_every_sample_once(usual: Usual) -> None:
    assert [r.images for r in usual.progress.history] == [70, 70]
    assert usual.progress.images_trained == 140
    result = usual.evaluation
    assert len(result.labels) == 70
    assert result.probabilities is not None
    assert result.probabilities.shape == (70, 5)
    right = int((result.probabilities.argmax(1) == make_samples().labels).sum())
    assert result.metrics["correct"] == right
    assert usual.progress.history[-1].metrics["valid_accuracy"] == right / 70


@pytest.mark.parametrize("placement", ["device", "disk", pytest.param("memory", marks=pytest.mark.slow)])
def test_where_the_images_live_changes_nothing(placement: str, usual: Usual, tmp_path: Path) -> None:
    samples = make_samples()
    np.save(tmp_path / "images.npy", samples.images)
    mapped = Split(images=np.load(tmp_path / "images.npy", mmap_mode="r"), rows=samples.rows, labels=samples.labels)
    found = engine_weights(make_net(), mapped, USUAL.override({"data.placement": placement}), usual.engine)
    assert all(torch.equal(value, found[key]) for key, value in usual.weights.items())


def small_net() -> nn.Module:
    """What XLA compiles in a second."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 5))


# The update is the same program on any number of devices.
@pytest.mark.parametrize("engine", ["torch", "xla 8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_torchs(name: str, engine: str) -> None:
    section, make = OPTIMIZERS[name]
    samples, net = make_samples(), small_net()
    recipe = make_recipe().override({f"optimizer.{k}": v for k, v in vars(section).items()})
    expected = plain_loop(net, samples, recipe, make(net.parameters())).state
    assert_close(engine_weights(small_net(), samples, recipe, engine), expected)


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_label_smoothing_class_weights_and_drop_last(engine: str) -> None:
    recipe = make_recipe(label_smoothing=0.1, drop_last=True, **{"optimizer.lr": 0.05})
    weights = np.array([0.5, 1, 2, 1, 1], np.float32)
    expected = plain_loop(make_net(), make_samples(), recipe, class_weights=torch.from_numpy(weights)).state
    assert_close(engine_weights(make_net(), make_samples(), recipe, engine, class_weights=weights), expected)


@pytest.mark.parametrize(
    ("engine", "threads"), [("torch", "1"), ("torch", "2"), pytest.param("xla 8", "1", marks=pytest.mark.slow)]
)
def test_same_seed_gives_the_same_bits(engine: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    samples, recipe = make_samples(), make_recipe(**{"augment.rotate": 10.0, "augment.flip": True})
    first, second = (engine_weights(make_net(), samples, recipe, engine) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = engine_weights(make_net(), samples, recipe.override({"seed": 2}), engine)
    assert not torch.equal(first["0.weight"], other["0.weight"])
