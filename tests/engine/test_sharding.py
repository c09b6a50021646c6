"""Slices of parameters and optimizer state on several ranks, against a plain loop in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from flatout.config import Optimizer
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.torch.fsdp import build_optimizer, shard
from flatout.engine.torch.state import gathered, load, named_tensors
from flatout.models.layers import set_train_mode
from flatout.utils.errors import InputError
from tests.engine.ranks import on_ranks

CPU = torch.device("cpu")
SAMPLES, STEPS, SAVED_AT = 23, 5, 3
SGD, AdamW, Adagrad = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad

State = dict[str, torch.Tensor]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Optimizer, Make]] = {
    "momentum": (
        Optimizer(name="sgd", lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    ),
    "adagrad": (Optimizer(name="adagrad", lr=0.01), lambda p: Adagrad(p, lr=0.01)),
    "adamw": (Optimizer(name="adamw", lr=0.001, weight_decay=0.01), lambda p: AdamW(p, lr=0.001, weight_decay=0.01)),
}


class Net(nn.Module):
    """Rows of parameters that no number of ranks divides, a parameter of the model's own, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(320, 7), nn.ReLU(), nn.Linear(7, 2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.classifier(self.features(x))


def make_net() -> nn.Module:
    torch.manual_seed(3)
    net = Net()
    for parameter in (*net.features[1].parameters(), net.features[3].bias):
        parameter.requires_grad_(False)
    set_train_mode(net)
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(SAMPLES, 1, 12, 12), torch.randint(0, 2, (SAMPLES,))


def train_steps(net: nn.Module, update: Callable[[], None], steps: range, rank: int = 0, size: int = 1) -> None:
    """Train on this rank's share of every batch, evaluating in between; the last rank evaluates nothing."""
    for step in steps:
        images, labels = (part.tensor_split(size)[rank] for part in batch(step))
        for parameter in net.parameters():
            parameter.grad = None
        (functional.cross_entropy(net(images), labels, reduction="sum") / SAMPLES).backward()
        update()
        net.eval()
        with torch.no_grad():
            net(images if rank < size - 1 else images[:0])
        set_train_mode(net)


def plain_loop(make: Make, steps: int) -> dict[str, torch.Tensor]:
    """Return the state after training as anybody would by hand."""
    net = make_net()
    optimizer = make(list(trained(net).values()))
    for step in range(steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in trained(net).items():
        kept = optimizer.state[parameter].items()
        state |= {f"optimizer.{name}.{key}": value for key, value in kept if value is not None}
    return state


# --- one of several ranks ---------------------------------------------------------------------------------------------


def full_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    return gathered(named_tensors(net, optimizer, parameters, weights_only=False), None, World())


def held_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*net.parameters(), *(value for kept in optimizer.state.values() for value in kept.values())]
    return sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has for each optimizer: the whole state after some steps, on rank 0 alone, and the bytes it holds."""

    states: dict[str, dict[int, State]]
    held: dict[str, int]


def train_all(world: World, resumed: dict[str, State] | None) -> Trained:
    """Train with every optimizer, from the beginning or from a state after SAVED_AT steps."""
    answer = Trained(states={}, held={})
    for name, (section, _) in OPTIMIZERS.items():
        net = make_net()
        shard(net, CPU)
        parameters = trained(net)
        optimizer = build_optimizer(section, parameters)
        update, first, states = optim.plain_step(optimizer), 0, {}
        if resumed:
            load_into(resumed[name], net, optimizer, parameters)
            first = SAVED_AT
        for steps in (range(first, SAVED_AT), range(SAVED_AT, STEPS)):
            train_steps(net, update, steps, world.rank, world.size)
            state = full_state(net, optimizer, parameters)
            if world.is_main:
                states[steps.stop] = state
        answer.states[name], answer.held[name] = states, held_bytes(net, optimizer)
    return answer


@pytest.fixture(scope="module")
def three_ranks() -> list[Trained]:
    return on_ranks(3, train_all, None)


@pytest.fixture(scope="module")
def two_ranks(three_ranks: list[Trained]) -> list[Trained]:
    """Two ranks that go on where three were after three steps."""
    return on_ranks(2, train_all, {name: states[SAVED_AT] for name, states in three_ranks[0].states.items()})


def load_into(state: Any, net: nn.Module, optimizer: torch.optim.Optimizer, parameters: Any) -> None:
    load(state, named_tensors(net, optimizer, parameters, weights_only=False), optimizer, parameters, World())


def assert_equal_states(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_train_as_a_plain_loop_and_go_on_with_fewer_ranks(
    name: str, three_ranks: list[Trained], two_ranks: list[Trained]
) -> None:
    for ranks, steps in ((three_ranks, SAVED_AT), (three_ranks, STEPS), (two_ranks, STEPS)):
        assert_equal_states(ranks[0].states[name][steps], plain_loop(OPTIMIZERS[name][1], steps))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_rank_holds_its_slices_alone(three_ranks: list[Trained], name: str) -> None:
    """Together the ranks hold everything once, and none more than its share, in rows rounded up."""
    net, kept = make_net(), {"adamw": 2}.get(name, 1)
    times = {parameter: 1 + kept * parameter.requires_grad for parameter in net.parameters()}
    held = [rank.held[name] for rank in three_ranks]
    assert sum(held) == sum(parameter.nbytes * n for parameter, n in times.items())
    assert max(held) <= sum(-(-len(parameter) // 3) * parameter[0].nbytes * n for parameter, n in times.items())


# --- a group of one ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def units(model: nn.Module) -> list[str]:
    shard(model, CPU)
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


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("change", ["shape", "missing"])
def test_a_state_of_another_model_is_refused(change: str) -> None:
    net = make_net()
    shard(net, CPU)
    optimizer = build_optimizer(OPTIMIZERS["momentum"][0], trained(net))
    state = full_state(net, optimizer, trained(net))
    weight = state.pop("model.classifier.2.weight")
    if change == "shape":
        state["model.classifier.2.weight"] = weight[:1]
    with pytest.raises(InputError, match=r"the checkpoint does not fit the model: classifier\.2\.weight"):
        load_into(state, net, optimizer, trained(net))


def test_a_parameter_without_rows_is_refused() -> None:
    net = make_net()
    net.register_parameter("gain", nn.Parameter(torch.ones(())))
    with pytest.raises(InputError, match="the parameter gain is a single number"):
        shard(net, CPU)
