"""Slices of parameters and optimizer state on several ranks, against the plain loop in one process."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flatout.config import Recipe
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.engine.torch.gradients import shard
from flatout.train.loop import TrainingLoop
from flatout.train.request import Progress
from flatout.utils.errors import InputError
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import OPTIMIZERS, SILENT, assert_close, make_recipe, make_samples

NAMES = ("momentum", "adagrad", "adamw")


class Net(nn.Module):
    """Rows of parameters that no number of ranks divides, a parameter of the model's own, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(320, 7), nn.ReLU(), nn.Linear(7, 5))
        self.scale = nn.Parameter(torch.ones(1))
        for parameter in (*self.features[1].parameters(), self.features[3].bias):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.classifier(self.features(x))


def recipe_of(name: str, **changes: Any) -> Recipe:
    return make_recipe(**{f"optimizer.{key}": value for key, value in vars(OPTIMIZERS[name][0]).items()}, **changes)


def train_all(world: World, saved: dict[str, Any] | None) -> dict[str, Any]:
    """Train with every optimizer for one epoch, or for another one from a saved state; return the states."""
    found = {}
    for name in NAMES:
        engine, progress = TorchEngine(Net(), recipe_of(name, shard="full"), world=world), Progress()
        if saved:
            state, progress = copy.deepcopy(saved[name])
            engine.load_state(state)
        placed = engine.place(make_samples())
        shorter = engine.recipe.override({"epochs": 2 if saved else 1})
        TrainingLoop(engine, world, shorter, {"train": placed, "valid": placed}, progress, SILENT).run()
        found[name] = engine.state(), progress
        engine.close()
    return found


def test_slices_train_as_a_plain_loop_and_go_on_with_any_number_of_ranks() -> None:
    first = on_ranks(3, train_all, None)[0]
    later = [on_ranks(ranks, train_all, first)[0] for ranks in (1, 2)]
    for name, epochs in itertools.product(NAMES, (1, 2)):
        net = Net()
        optimizer = OPTIMIZERS[name][1]([p for p in net.parameters() if p.requires_grad])
        expected = plain_loop(net, make_samples(), recipe_of(name, epochs=epochs), optimizer).state
        for state, _ in [found[name] for found in (later if epochs == 2 else [first])]:
            assert_close({key: state[f"model.{key}"] for key in expected}, expected)


# --- a group of one ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def units(model: nn.Module) -> list[str]:
    shard(model, torch.device("cpu"))
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.usefixtures("group_of_one")
def test_parameters_read_without_a_call_are_gathered() -> None:
    """Attention reads its projection's weight, and the second layer is the first one's weight again."""
    attention = nn.TransformerEncoderLayer(8, 2, dim_feedforward=1, batch_first=True)
    assert "self_attn" in units(attention)
    assert attention(torch.ones(2, 3, 8)).shape == (2, 3, 8)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert units(tied) == [""]
    tied(torch.ones(2, 4)).sum().backward()
    assert tied[2].weight is tied[0].weight


@pytest.mark.usefixtures("group_of_one")
def test_a_view_may_be_changed_in_place() -> None:
    """The mark on a unit's output, by which its weights are gathered again for the backward pass, must not get lost."""

    class Rows(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).flatten(1)

    gradients = []
    for sharded in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(Rows(4, 4), nn.ReLU(inplace=True), nn.Linear(12, 2))
        if sharded:
            assert "0" in units(net)
        net(torch.ones(2, 3, 4)).sum().backward()
        gradients.append([whole(parameter.grad) for parameter in net.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("change", ["shape", "missing"])
def test_a_state_of_another_model_is_refused(change: str) -> None:
    engine = TorchEngine(Net(), make_recipe())
    state = engine.state()
    weight = state.pop("model.classifier.2.weight")
    if change == "shape":
        state["model.classifier.2.weight"] = weight[:1]
    with pytest.raises(InputError, match=r"the checkpoint does not fit the model: classifier\.2\.weight"):
        engine.load_state(state)


def test_a_parameter_without_rows_is_refused() -> None:
    net = Net()
    net.register_parameter("gain", nn.Parameter(torch.ones(())))
    with pytest.raises(InputError, match="the parameter gain is a single number"):
        shard(net, torch.device("cpu"))
