"""The same bits on any number of CPU ranks and threads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from flatout.dist.world import World
from flatout.engine.eager.engine import TorchEngine
from flatout.engine.eager.exact_sums import exact_sums
from flatout.errors import InputError
from flatout.models.nets import FashionCNN
from flatout.run.loop import train
from flatout.run.progress import Progress
from tests.engine.ranks import Backend, on_ranks
from tests.engine.test_against_plain_loop import SILENT, make_recipe, make_samples

State = dict[str, torch.Tensor]


def make_net(outputs: int = 5) -> nn.Module:
    """Convolutions, batch normalisation, pooling, linear layers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 20, 3, padding=1, bias=False),
        nn.BatchNorm2d(20),
        nn.ReLU(),
        # A product of matrices, whose bits depend on the number of rows.
        nn.Conv2d(20, 6, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(150, 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


# A batch that does not divide evenly, a short last one, and enough steps at a high rate for a difference to grow.
RECIPES = {
    "momentum": {"optimizer.momentum": 0.9, "optimizer.lr": 0.05, "batch_size": 50},
    "adam, augmented": {"optimizer.name": "adam", "optimizer.lr": 0.01, "augment.flip": True, "augment.rotate": 9.0},
    "several labels": {"task": "multi-label", "loss": "binary-cross-entropy", "optimizer.lr": 0.1, "batch_size": 37},
    "numbers": {"task": "regression", "loss": "huber", "optimizer.lr": 0.05, "batch_size": 50},
    "binary": {"loss": "binary-cross-entropy", "optimizer.lr": 0.1, "batch_size": 37},
}
# Rows of 80 and 200 bytes, so that ranks begin at other places within a line of the cache.
NARROW = {"batch_size": 25, "image_size": 16, "optimizer.lr": 0.05}


def trained(world: World) -> dict[str, State]:
    states = {}
    for name, changes in RECIPES.items():
        classes = 2 if name == "binary" else 5
        states[name] = state_after(world, make_net(1 if name in ("binary", "numbers") else 5), 12, classes, changes)
    torch.manual_seed(3)
    states["narrow"] = state_after(world, FashionCNN(image_size=16), 16, 10, NARROW)
    return states


def state_after(world: World, net: nn.Module, size: int, classes: int, changes: dict[str, object]) -> State:
    samples = make_samples(count=200, size=size, classes=classes)
    recipe = make_recipe(**{"epochs": 2, "exact_sums": True, **changes})
    if recipe.task == "multi-label":
        samples = replace(samples, labels=(samples.labels[:, None] >= np.arange(classes)).astype(np.uint8))
    elif recipe.task == "regression":
        samples = replace(samples, labels=samples.labels.astype(np.float32) / 3)
    engine = TorchEngine(net, recipe, world=world)
    train(engine, world, recipe, {"train": engine.place(samples)}, Progress(), SILENT)
    state = engine.snapshot().tensors
    engine.close()
    return state


@pytest.fixture(scope="module")
def alone() -> dict[str, State]:
    return trained(World())


def differing(states: dict[str, State], others: dict[str, State]) -> list[str]:
    return [
        f"{name}: {key}"
        for name, state in states.items()
        for key, value in state.items()
        if not torch.equal(value, others[name][key])
    ]


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "gloo"), pytest.param(3, "memory", marks=pytest.mark.slow), (4, "memory")]
)
def test_any_number_of_ranks(size: int, backend: Backend, alone: dict[str, State]) -> None:
    """On one host or, by gloo, between several."""
    for states in on_ranks(size, trained, backend=backend):
        assert differing(alone, states) == []


def test_any_number_of_threads(alone: dict[str, State], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert differing(alone, trained(World())) == []


REFUSED = {
    "norm = 'per-device'": {"norm": "per-device"},
    "shard = 'full'": {"shard": "full"},
    "micro_batch = 4": {"micro_batch": 4},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_recipe_that_does_not_permit_exact_sums_is_refused(reason: str) -> None:
    with pytest.raises(InputError, match=f"exact_sums = true is not available: {reason}"):
        TorchEngine(make_net(), make_recipe(exact_sums=True, **REFUSED[reason]))


def test_large_convolutions_are_refused_unless_frozen() -> None:
    recipe, large = make_recipe(exact_sums=True), nn.Conv2d(256, 256, 3)
    with pytest.raises(InputError, match="the convolution weight has more than 262,144 weights"):
        TorchEngine(large, recipe)
    TorchEngine(nn.Sequential(large.requires_grad_(False), nn.Conv2d(256, 2, 3)), recipe).close()


class Sequences(nn.Module):
    """Its linear layer is applied to [B, rows, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(12, 8), nn.Linear(96, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(x[:, 0]).flatten(1))


def test_layers_whose_sums_are_not_exact_are_refused() -> None:
    with pytest.raises(InputError, match=r"exact_sums = true is not available: rows\.weight belongs to no"):
        state_after(World(), Sequences(), 12, 5, {})


def test_more_ranks_than_supported_are_refused() -> None:
    world = World()
    world.size = 5
    with pytest.raises(InputError, match="5 ranks; at most 4 are supported"):
        exact_sums(make_net(), make_recipe(), world, "fp32")


def test_dropout_is_refused_on_several_ranks() -> None:
    """Ranks draw for their own samples, so the weights depend on their number."""
    world, dropout = World(), nn.Dropout(0.2)
    net = nn.Sequential(make_net(), dropout)
    exact_sums(net, make_recipe(), world, "fp32")
    world.size = 2
    with pytest.raises(InputError, match="exact_sums = true is not available: dropout draws"):
        exact_sums(net, make_recipe(), world, "fp32")
    dropout.p = 0.0
    exact_sums(net, make_recipe(), world, "fp32")


def test_the_default_agrees_to_rounding() -> None:
    """Few steps, so that no difference in the last bit has grown."""
    states = [
        state_after(World(), make_net(), 12, 5, {**RECIPES["momentum"], "epochs": 1, "exact_sums": exact})
        for exact in (True, False)
    ]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
