"""The engines against a plain hand-written torch loop, which is the oracle."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.config import Optimizer, Recipe
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.train.loop import LoopHooks
from tests.engine.engines import make_engine, train
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
    train(made, recipe, samples, world=world)
    state = made.state()
    made.close()
    return {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}


_OPTIMIZERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("sgd", torch.optim.SGD, {"lr": 0.05}),
    "momentum": ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-3}),
    "nesterov": ("momentum", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", torch.optim.Adagrad, {"lr": 0.01}),
    "adam": ("adam", torch.optim.Adam, {"lr": 0.001}),
    "adamw": ("adamw", torch.optim.AdamW, {"lr": 0.001, "weight_decay": 0.01}),
}
# The section of a recipe, and torch's optimizer of parameters.
OPTIMIZERS = {
    key: (Optimizer(name=name, **options), partial(by_torch, **options))
    for key, (name, by_torch, options) in _OPTIMIZERS.items()
}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=atol)


USUAL = make_recipe(**{"optimizer.lr": 0.05})


@pytest.mark.parametrize(
    ("engine", "placements"),
    [
        ("torch", ("device", "disk", "memory")),
        ("xla 8", ("device", "disk")),
        pytest.param("xla 1", (), marks=pytest.mark.slow),
    ],
)
def test_equals_plain_loop_wherever_the_images_live(engine: str, placements: tuple[str, ...], tmp_path: Path) -> None:
    """Two epochs with a short last batch (70 = 4 * 16 + 6) and batch normalisation."""
    samples = make_samples()
    weights = engine_weights(make_net(), samples, USUAL, engine)
    assert_close(weights, plain_loop(make_net(), samples, USUAL).state)
    np.save(tmp_path / "images.npy", samples.images)
    mapped = Split(images=np.load(tmp_path / "images.npy", mmap_mode="r"), rows=samples.rows, labels=samples.labels)
    for placement in placements:
        found = engine_weights(make_net(), mapped, USUAL.override({"data.placement": placement}), engine)
        assert all(torch.equal(value, found[key]) for key, value in weights.items()), placement


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_frozen_statistics_equal_those_of_a_plain_loop(engine: str) -> None:
    recipe = USUAL.override({"norm": "frozen", "pretrained": True})
    nets = [make_net(), make_net()]
    for net in nets:
        net.load_state_dict({name: value + 0.2 for name, value in net.state_dict().items() if "running" in name}, False)
    expected = plain_loop(nets[0], make_samples(), recipe).state
    assert_close(engine_weights(nets[1], make_samples(), recipe, engine), expected)


def small_net(classes: int = 5) -> nn.Module:
    """What XLA compiles in a second."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, classes))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_xlas_optimizers_equal_torchs(name: str) -> None:
    """The update is the same program on any number of devices. The torch engine: test_data_parallel.py."""
    section, make = OPTIMIZERS[name]
    samples, net = make_samples(), small_net()
    recipe = make_recipe().override({f"optimizer.{k}": v for k, v in vars(section).items()})
    expected = plain_loop(net, samples, recipe, make(net.parameters())).state
    assert_close(engine_weights(small_net(), samples, recipe, "xla 8"), expected)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_same_seed_gives_the_same_bits(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    samples, recipe = make_samples(), make_recipe(epochs=1, **{"augment.rotate": 10.0, "augment.flip": True})
    first, second = (engine_weights(make_net(), samples, recipe) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = engine_weights(make_net(), samples, recipe.override({"seed": 2}))
    assert not torch.equal(first["0.weight"], other["0.weight"])
