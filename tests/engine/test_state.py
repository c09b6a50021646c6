"""Copies of the training state: snapshots on the device, whole states on rank 0."""

from typing import Any

import pytest
import torch
from torch import nn

from flatout.distributed.world import World
from flatout.engine.xla.engine import XlaEngine
from tests.engine.engines import make_engine, train
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import make_recipe, make_samples

State = dict[str, torch.Tensor]
RECIPE = make_recipe(**{"optimizer.name": "adam", "optimizer.lr": 0.01, "epochs": 1})


def equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def snapshots(world: World, shard: str, name: str = "torch") -> dict[str, Any]:
    """Train, go back, go on from a state; return what each rank saw."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    engine = make_engine(name, net, RECIPE.override({"shard": shard}), world=world)

    def train_epoch() -> None:
        train(engine, RECIPE, make_samples(), world=world)

    begun = engine.snapshot()
    train_epoch()
    state, snapshot, weights = engine.state(), engine.snapshot(), engine.snapshot(weights_only=True)
    train_epoch()
    later = engine.state()
    seen: dict[str, Any] = {
        "names": list(state),
        "held": sum(v.nbytes for v in snapshot.tensors.values()) if name == "torch" else 0,
        "moved": not equal(state, later) or not world.is_main,
        "of a snapshot": equal(engine.state(snapshot), state),
        "weights alone": sorted(engine.state(weights)) == sorted(n for n in state if n.startswith("model.")),
    }
    engine.restore(weights)
    models = {n: value for n, value in state.items() if n.startswith("model.")}
    seen["weights restored"] = equal(engine.state(), later | models)
    engine.restore(snapshot)
    seen["restored"] = equal(engine.state(), state)
    train_epoch()
    seen["goes on"] = equal(engine.state(), later)
    engine.restore(snapshot)
    seen["restored again"] = equal(engine.state(), state)
    train_epoch()
    engine.load_state(state)
    seen["loaded"] = equal(engine.state(), state)
    engine.restore(begun)
    seen["back at the beginning"] = engine.state().keys() == models.keys()
    seen["finite"] = engine.is_finite()
    if state:
        # In the shard of the last rank alone.
        state["model.1.weight"][-1, -1] = torch.nan
    engine.load_state(state)
    seen["broken"] = engine.is_finite()
    engine.close()
    return seen


def test_a_state_goes_back_and_on_and_is_whole_on_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, *ranks = on_ranks(1, snapshots, "none") + on_ranks(2, snapshots, "full")
    on_device = snapshots(World(), "full", "xla 2")
    monkeypatch.setattr(XlaEngine, "_has_room", lambda *_: False)
    on_host = snapshots(World(), "full", "xla 2")
    for seen in (alone, *ranks, on_device, on_host):
        assert [name for name, value in seen.items() if value is False] == ["broken"]
    assert all(seen["held"] < 0.7 * alone["held"] for seen in ranks)
    assert [seen["names"] for seen in ranks] == [alone["names"], []]
