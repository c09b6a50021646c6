"""Copies of the training state: snapshots on the device, whole states on rank 0."""

import torch

from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.train.loop import LoopHooks, run_loop
from flatout.train.progress import Progress
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import make_net, make_recipe, make_samples

State = dict[str, torch.Tensor]
RECIPE = make_recipe(**{"optimizer.name": "adam", "optimizer.lr": 0.01, "keep": "last"})


def equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def trained(engine: TorchEngine, world: World, epochs: int) -> None:
    splits = {"train": engine.place(make_samples())}
    run_loop(engine, world, RECIPE.override({"epochs": epochs}), splits, Progress(), LoopHooks())


def snapshots(world: World, shard: str) -> dict[str, object]:
    """Train, go back, go on from a state; return what each rank saw."""
    engine = TorchEngine(make_net(), RECIPE.override({"shard": shard}), world=world)
    begun = engine.snapshot()
    trained(engine, world, 1)
    state, snapshot, weights = engine.state(), engine.snapshot(), engine.snapshot(weights_only=True)
    trained(engine, world, 1)
    later = engine.state()
    seen: dict[str, object] = {
        "names": list(state),
        "held": sum(v.nbytes for v in snapshot.tensors.values()),
        "moved": not equal(state, later) or not world.is_main,
        "of a snapshot": equal(engine.state(snapshot), state),
        "weights alone": sorted(engine.state(weights)) == sorted(n for n in state if n.startswith("model.")),
    }
    engine.restore(snapshot)
    seen["restored"] = equal(engine.state(), state)
    trained(engine, world, 1)
    seen["goes on"] = equal(engine.state(), later)
    engine.load_state(state)
    seen["loaded"] = equal(engine.state(), state)
    engine.restore(begun)
    seen["back at the beginning"] = engine.state().keys() == {n for n in state if n.startswith("model.")} or not state
    seen["finite"] = engine.is_finite()
    if world.rank == world.size - 1:
        # A shard of one rank alone.
        with torch.no_grad():
            parameter = next(iter(engine.parameters.values()))
            getattr(parameter, "to_local", lambda: parameter)().view(-1)[0] = torch.nan
    seen["broken"] = engine.is_finite()
    engine.close()
    return seen


WANTED = ("moved", "of a snapshot", "weights alone", "restored", "goes on", "loaded", "back at the beginning", "finite")


def test_a_state_goes_back_and_on_and_is_whole_on_the_first_rank_alone() -> None:
    alone, *ranks = on_ranks(1, snapshots, "none") + on_ranks(2, snapshots, "full")
    for seen in (alone, *ranks):
        assert {name: seen[name] for name in WANTED} == dict.fromkeys(WANTED, True)
        assert not seen["broken"]
    assert all(seen["held"] < 0.7 * alone["held"] for seen in ranks)
    assert [seen["names"] for seen in ranks] == [alone["names"], []]
