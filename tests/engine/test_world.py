"""Numbers of several ranks become one: the same bits on each, through shared memory and through gloo."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.distributed.environment import Launched
from flatout.distributed.world import Flag, World
from flatout.engine.torch.gradients import ALIGNMENT
from flatout.train.run import agree
from flatout.utils.errors import InputError, RankLost
from tests.engine.ranks import Backend, on_ranks
from tests.engine.test_against_plain_loop import make_recipe

RANKS: dict[str, tuple[int, Backend]] = {"memory": (3, "memory"), "gloo": (2, "gloo")}
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
# One row of shared memory holds 16,384 floats of 32 bits.
SUMS = ((), (0,), (1,), (7, 3), (16_384,), (16_385,), (200_000,))
BUCKETS = (5, 1, 3 * ALIGNMENT, 20_001)
ROUNDS = 7


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([rank, seed, len(shape)])
    values = torch.from_numpy(np.asarray(rng.standard_normal(shape) * 1000))
    return values.to(dtype)


def exercise(world: World) -> dict[str, Any]:
    got: dict[str, Any] = {}
    for dtype, shape in itertools.product(DTYPES, SUMS):
        mine = numbers(world.rank, shape, dtype)
        before = mine.clone()
        got[f"sum {dtype} {shape}"] = world.all_reduce(mine)
        assert torch.equal(mine, before)
    got["large"] = float(world.all_reduce(torch.full((1_000_000,), world.rank + 1.0)).mean())
    image = numbers(world.rank, (2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last)
    got["sum channels_last"] = world.all_reduce(image)
    for dtype in DTYPES:
        got[f"buckets {dtype}"] = use_buckets(world, dtype)
    turned = numbers(world.rank, (4, 3, 2), torch.float32).movedim(1, -1)
    got["rows"] = [rows.clone() for rows in world.all_gather(turned)]
    got["broadcast"] = various(world.rank)
    world.broadcast(got["broadcast"])
    got["share"] = world.broadcast_object({"rank": world.rank})
    got["gather"] = world.all_gather_object(f"rank {world.rank}")
    got["received"] = [request_in_dispatch(world, step) for step in (1, None)]
    other = Launched(rank=world.rank, size=world.size + 1)
    with pytest.raises(InputError) as caught:
        World(other).join(other)
    got["other world"] = str(caught.value)
    own = 1 + world.rank
    got["other recipe"] = refusal(world, {"optimizer.lr": 0.1 * own})
    got["other length"] = refusal(world, {"max_steps": own})
    got["other corrections"] = refusal(world, {"schedule.corrections": f"{own}:7"})
    return got


def refusal(world: World, changes: dict[str, object]) -> str:
    """Return how ranks with different recipes are refused."""
    pack: Any = SimpleNamespace(classes=(), splits={}, fingerprint="")
    with pytest.raises(InputError) as caught:
        agree(world, make_recipe(**changes), pack)
    return str(caught.value)


def use_buckets(world: World, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Fill the buckets several times, so that each half of their memory is used again."""
    buckets, rounds = world.buckets([(size, dtype) for size in BUCKETS]), []
    for turn in range(ROUNDS):
        for size, bucket in zip(BUCKETS, buckets, strict=True):
            bucket.input.copy_(numbers(world.rank, (size,), dtype, turn))
            bucket.start()
        for bucket in buckets:
            bucket.add()
        totals = [bucket.finish() for bucket in buckets]
        rounds.append([total.clone() for total in totals])
        # Others may be a step ahead afterwards; what this rank got must not change under it.
        world.all_reduce(torch.zeros(1))
        assert world.rank != turn % 2 or all(torch.equal(a, b) for a, b in zip(totals, rounds[-1], strict=True))
    return rounds


def request_in_dispatch(world: World, step: int | None) -> Flag:
    """Let rank 1 request a checkpoint in one of three steps that are sent at once; return what was received."""
    for number in range(3):
        is_due = world.rank == 1 and number == step
        world.control.request(Flag.CHECKPOINT if is_due else Flag.NONE)
    world.control.exchange()
    return world.control.received()


def various(rank: int) -> list[torch.Tensor]:
    """Return tensors such as a model holds."""
    return [
        numbers(rank, (6, 3, 4, 4), torch.float32).to(memory_format=torch.channels_last),
        numbers(rank, (3, 4), torch.float64).T,
        numbers(rank, (), torch.int64),
        numbers(rank, (5,), torch.float32) > 0,
        numbers(rank, (5,), torch.float16),
        numbers(rank, (5,), torch.bfloat16),
        numbers(rank, (5,), torch.uint8),
        torch.nn.Parameter(numbers(rank, (2, 2), torch.float32)),
    ]


@pytest.fixture(scope="module", params=RANKS)
def got(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    size, backend = RANKS[request.param]
    return on_ranks(size, exercise, backend=backend)


def assert_is_sum(found: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
    """Check that all ranks have the same bits, and that these are the rows' sum."""
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0].shape, found[0].dtype) == (rows[0].shape, rows[0].dtype)
    exact = torch.stack([row.double() for row in rows]).sum(0)
    rtol, atol = (2e-2, 20.0) if rows[0].dtype == torch.bfloat16 else (1e-5, 1e-3)
    torch.testing.assert_close(found[0].double(), exact, rtol=rtol, atol=atol)
    if rows[0].dtype == torch.int64:
        assert torch.equal(found[0], torch.stack(rows).sum(0))


def test_sums(got: list[dict[str, Any]]) -> None:
    """Of any type and size, and in any memory order."""
    for dtype, shape in itertools.product(DTYPES, SUMS):
        rows = [numbers(rank, shape, dtype) for rank in range(len(got))]
        assert_is_sum([one[f"sum {dtype} {shape}"] for one in got], rows)
    rows = [numbers(rank, (2, 3, 4, 5), torch.float32) for rank in range(len(got))]
    assert_is_sum([one["sum channels_last"] for one in got], rows)
    assert {one["large"] for one in got} == {sum(range(1, len(got) + 1))}


def test_buckets_take_turns(got: list[dict[str, Any]]) -> None:
    for dtype, turn, (place, size) in itertools.product(DTYPES, range(ROUNDS), enumerate(BUCKETS)):
        rows = [numbers(rank, (size,), dtype, turn) for rank in range(len(got))]
        assert_is_sum([one[f"buckets {dtype}"][turn][place] for one in got], rows)


def test_ranks_get_the_values_of_all_and_of_the_first(got: list[dict[str, Any]]) -> None:
    rows = [numbers(rank, (4, 3, 2), torch.float32).movedim(1, -1) for rank in range(len(got))]
    for one in got:
        assert all(torch.equal(a, b) for a, b in zip(one["rows"], rows, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one["broadcast"], various(0), strict=True))
        assert one["share"] == {"rank": 0}
        assert one["gather"] == [f"rank {rank}" for rank in range(len(got))]


def test_a_request_in_any_step_of_a_dispatch_reaches_every_rank(got: list[dict[str, Any]]) -> None:
    assert [one["received"] for one in got] == [[Flag.CHECKPOINT, Flag.NONE]] * len(got)


def test_other_ranks_and_other_recipes_are_refused(got: list[dict[str, Any]]) -> None:
    start = f"RANK=1 and WORLD_SIZE={len(got) + 1}, but the process group that is initialised has this process as"
    assert got[1]["other world"].startswith(start)
    (said,) = {one["other recipe"] for one in got}
    assert "recipe optimizer.lr = 0.2, but rank 0 (host" in said


@pytest.mark.parametrize(
    ("case", "message"),
    [("other length", "recipe max_steps = 2, but"), ("other corrections", "recipe schedule.corrections = '2:7', but")],
)
def test_ranks_with_another_length_of_the_run_are_refused(case: str, message: str, got: list[dict[str, Any]]) -> None:
    assert all(message in one[case] for one in got)


@pytest.mark.parametrize("address", ["nowhere.invalid", "192.0.2.1"])
def test_an_address_that_is_not_of_rank_0_is_refused(address: str) -> None:
    first = Launched(rank=0, size=2, address=address, port=29500)
    with pytest.raises(InputError, match=rf"^MASTER_ADDR {address}, MASTER_PORT 29500: .*; MASTER_ADDR must be an "):
        World(first).join(first)


def part(world: World, how: str) -> str:
    """Leave as rank 1 while the others wait for it; return what they are told."""
    (bucket,) = world.buckets([(10, torch.float32)])
    if world.rank == 1:
        return ""
    try:
        if how == "sum":
            for _ in range(3):
                world.all_reduce(torch.ones(3))
        else:
            with world.translate_errors("a wait"):
                for _ in range(3):
                    bucket.start()
                    bucket.add()
                    bucket.finish()
    except RankLost as lost:
        return str(lost)
    return "nothing"


@pytest.mark.parametrize(("backend", "how"), [("memory", "sum"), ("memory", "bucket"), ("gloo", "bucket")])
def test_who_waits_for_a_rank_that_left_is_told(backend: Backend, how: str) -> None:
    told, _ = on_ranks(2, part, how, backend=backend, together=False)
    assert "rank 1 is gone" in told or "rank 0 lost touch with the others" in told
