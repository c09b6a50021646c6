"""Slices of parameters and optimizer state on several ranks, against the plain loop in one process."""

import copy
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
from flatout.engine.torch.fsdp import shard
from flatout.train.loop import run_loop
from flatout.train.progress import Progress
from flatout.utils.errors import InputError
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import OPTIMIZERS, SILENT, make_recipe, make_samples

NAMES = ("momentum", "adagrad", "adamw")
# What each optimizer keeps for a parameter.
KEPT = {"momentum": 1, "adagrad": 1, "adamw": 2}


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
    """Train with every optimizer for one epoch, or for another one from a saved state; return states and bytes held."""
    found = {}
    for name in NAMES:
        engine, progress = TorchEngine(Net(), recipe_of(name, shard="full"), world=world), Progress()
        if saved:
            state, progress = copy.deepcopy(saved[name][:2])
            engine.load_state(state)
        placed = engine.place(make_samples())
        shorter = engine.recipe.override({"epochs": 2 if saved else 1})
        run_loop(engine, world, shorter, {"train": placed, "valid": placed}, progress, SILENT)
        held = [engine.snapshot().tensors.values(), engine.snapshot(weights_only=True).tensors.values()]
        found[name] = engine.state(), progress, [sum(value.nbytes for value in values) for values in held]
        engine.close()
    return found


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    return on_ranks(3, train_all, None)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_slices_train_as_a_plain_loop_and_go_on_with_any_number_of_ranks(
    ranks: int, three_ranks: list[dict[str, Any]]
) -> None:
    later = on_ranks(ranks, train_all, three_ranks[0])
    for name in NAMES:
        for (state, *_), epochs in ((three_ranks[0][name], 1), (later[0][name], 2)):
            net = Net()
            optimizer = OPTIMIZERS[name][1]([p for p in net.parameters() if p.requires_grad])
            expected = plain_loop(net, make_samples(), recipe_of(name, epochs=epochs), optimizer).state
            for key, value in expected.items():
                torch.testing.assert_close(state[f"model.{key}"], value, rtol=1e-3, atol=2e-5)
        assert all(rank[name][0] == {} for rank in later[1:]), "the first rank alone has the whole state"


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_its_slices_alone(three_ranks: list[dict[str, Any]], name: str) -> None:
    """None holds more than its share, in rows rounded up; buffers and step counts are not sliced."""
    net, rest = Net(), 1000
    rows = {parameter: -(-len(parameter) // 3) * parameter[0].nbytes for parameter in net.parameters()}
    share = sum(nbytes * (1 + KEPT[name] * p.requires_grad) for p, nbytes in rows.items())
    assert all(rank[name][2][0] <= share + rest for rank in three_ranks)


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
