"""The engine on several ranks against a plain torch loop in one process, which is the oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.train.loop import TrainingLoop
from flatout.train.request import Progress
from tests.engine import odd_nets
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import Backend, on_ranks
from tests.engine.test_against_plain_loop import OPTIMIZERS, SILENT, make_net, make_recipe, make_samples

# Summation order is all that may differ; five steps are too few for a rounding error to flip a ReLU.
RTOL, ATOL = 1e-4, 2e-6
SIZES: dict[str, tuple[int, Backend]] = {"1": (1, "memory"), "2 by gloo": (2, "gloo"), "3": (3, "memory")}


usual_sgd = partial(torch.optim.SGD, lr=0.05)
sgd_with_decay = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
DECAY: dict[str, Any] = {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A net, and what differs from the usual recipe, to train it for one epoch: 4 batches of 16, and one of 6."""

    net: Callable[[], nn.Module] = make_net
    recipe: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = usual_sgd
    class_weights: tuple[float, ...] | None = None
    in_shares: bool = False  # the oracle must compute rank by rank: the net is another function of parts of a batch
    count: int = 70

    def full_recipe(self) -> Recipe:
        return make_recipe(**{"epochs": 1, "optimizer.lr": 0.05, **self.recipe})


CASES = {
    name: Case(recipe={f"optimizer.{k}": v for k, v in vars(section).items()}, optimizer=make)
    for name, (section, make) in OPTIMIZERS.items()
} | {
    "label smoothing": Case(recipe={"label_smoothing": 0.1}),
    "class weights": Case(class_weights=(0.5, 1, 2, 1, 3)),
    "drop last": Case(recipe={"drop_last": True}),
    "streamed": Case(recipe={"data.placement": "memory"}),
    "norm per device": Case(recipe={"norm": "per-device"}, in_shares=True),
    "frozen stem": Case(net=odd_nets.frozen_stem),
    "flat frozen stem": Case(net=odd_nets.flat_frozen_stem),
    "spare parts": Case(net=odd_nets.SpareParts, recipe=DECAY, optimizer=sgd_with_decay),
    "parts used by some ranks": Case(net=odd_nets.Chooses, recipe=DECAY, optimizer=sgd_with_decay, in_shares=True),
    "shared layers": Case(net=odd_nets.Shared),
    "3D convolution": Case(net=odd_nets.deep_net),
    "mixed types": Case(net=odd_nets.MixedTypes),
    "half first": Case(net=odd_nets.HalfFirst, recipe={"batch_size": 331}, count=700),
    "own buffers": Case(net=odd_nets.OwnBuffers),
    "own buffers, averaged": Case(net=odd_nets.OwnBuffers, recipe={"ema": 0.9}),
    "more micro-batches than samples of a rank": Case(net=odd_nets.Shared, recipe={"batch_size": 4, "micro_batch": 1}),
    "several buckets": Case(
        net=odd_nets.large_net, recipe={"optimizer.lr": 0.001}, optimizer=partial(torch.optim.SGD, lr=0.001)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    state: dict[str, Tensor]
    parameters: list[Tensor]
    loss: float
    images: int


def train_case(world: World, case: Case) -> Trained:
    recipe, weights = case.full_recipe(), case.class_weights
    net = case.net()
    if world.rank:
        # What counts is what rank 0 begins with.
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.zero_()
    samples = make_samples(case.count)
    engine = TorchEngine(
        net, recipe, world=world, class_weights=None if weights is None else np.array(weights, np.float32)
    )
    progress = Progress()
    TrainingLoop(engine, world, recipe, {"train": engine.place(samples)}, progress, SILENT).run()
    held = engine.snapshot(weights_only=True).tensors
    state = {name.removeprefix("model."): value for name, value in held.items() if name.startswith("model.")}
    engine.close()
    record = progress.history[0]
    parameters = [p.detach().clone() for p in net.parameters()]
    return Trained(state=state, parameters=parameters, loss=record["train_loss"], images=record["images"])


# --- beside the weights -----------------------------------------------------------------------------------------------

EVALUATED = {"batch 16": (101, 16), "batch 101": (101, 101), "three": (3, 16), "one": (1, 16)}


def one_by_one(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a user, which takes no empty batch."""
    return torch.stack([functional.cross_entropy(logits[i], targets[i]) for i in range(len(targets))])


def evaluate_all(world: World) -> dict[str, tuple[int, int, float, np.ndarray]]:
    """Evaluate a net that is the same everywhere on so many samples; return right ones, all, the loss, the table."""
    results = {}
    for name, (count, batch_size) in EVALUATED.items():
        loss = one_by_one if name == "three" else None
        engine = TorchEngine(make_net(), make_recipe(batch_size=batch_size), world=world, loss=loss)
        placed = engine.place(make_samples(count))
        found = placed.evaluate(with_probabilities=True, with_logits=True, keep_features=np.array)
        engine.close()
        columns = [found.probabilities, found.logits, found.features]
        table = np.concatenate([column for column in columns if column is not None], axis=1)
        assert table.shape[1] > 10
        results[name] = (found.metrics["correct"], len(found.labels), found.loss, table)
    return results


class ShowsDropout(nn.Module):
    """Keeps what its dropout dropped in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.dropped = nn.Linear(144, 5), nn.Dropout(0.5), []

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones(4, 144))
        self.dropped.append(mask == 0)
        return self.layer(x.flatten(1) * mask[0])


def drop(world: World) -> list[Tensor]:
    """Return what was dropped in three steps."""
    net = ShowsDropout()
    engine, samples = TorchEngine(net, make_recipe(epochs=1, batch_size=24), world=world), make_samples()
    TrainingLoop(engine, world, engine.recipe, {"train": engine.place(samples)}, Progress(), SILENT).run()
    engine.close()
    return net.dropped


# --- tests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answers:
    trained: dict[str, Trained]
    evaluated: dict[str, tuple[int, int, float, np.ndarray]]
    dropped: list[list[Tensor]]


def answer(world: World) -> Answers:
    return Answers(
        trained={name: train_case(world, case) for name, case in CASES.items()},
        evaluated=evaluate_all(world),
        dropped=[drop(world), drop(world)],
    )


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> list[Answers]:
    size, backend = SIZES[request.param]
    return on_ranks(size, answer, backend=backend)


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop(name: str, ranks: list[Answers]) -> None:
    case, trained = CASES[name], [answers.trained[name] for answers in ranks]
    recipe, samples, net = case.full_recipe(), make_samples(case.count), case.net()
    expected = plain_loop(
        net,
        samples,
        recipe,
        case.optimizer([p for p in net.parameters() if p.requires_grad]),
        class_weights=None if case.class_weights is None else torch.tensor(case.class_weights),
        shares=len(ranks) if case.in_shares else 1,
    )
    found = trained[0]
    torch.testing.assert_close(found.state, expected.state, rtol=RTOL, atol=ATOL)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.images == (case.count // 16 * 16 if recipe.drop_last else case.count)
    for other in trained[1:]:
        assert (other.loss, other.images) == (found.loss, found.images)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters, found.parameters, strict=True))
        assert all(torch.equal(other.state[key], value) for key, value in found.state.items())


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_gives_the_same_bits_on_any_number_of_ranks(name: str, ranks: list[Answers]) -> None:
    correct, count, loss, table = evaluate_all(World())[name]
    assert count == EVALUATED[name][0]
    for answers in ranks:
        found = answers.evaluated[name]
        assert found[:2] == (correct, count)
        assert found[2] == pytest.approx(loss, rel=1e-6)
        assert np.array_equal(found[3], table)


def test_ranks_drop_different_things_and_the_same_ones_again(ranks: list[Answers]) -> None:
    masks = [torch.stack(answers.dropped[0]) for answers in ranks]
    for mask, answers in zip(masks, ranks, strict=True):
        assert torch.equal(mask, torch.stack(answers.dropped[1]))
        assert 0.4 < mask.float().mean() < 0.6
    steps = torch.cat(masks)
    agreement = (steps[:, None] == steps[None]).float().mean((2, 3))
    assert torch.equal(agreement == 1, torch.eye(len(steps), dtype=torch.bool))
