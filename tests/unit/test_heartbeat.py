"""Heartbeats: what a rank writes, another reads; and which rank is stopped or hangs."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from flatout.dist import heartbeat
from flatout.distributed.heartbeat import (
    SILENT_SECONDS,
    STALLED_SECONDS,
    STARTING_SECONDS,
    Heartbeat,
    Observer,
    Phase,
    RankState,
    find_lost,
)

LONG = STALLED_SECONDS + 1


def state_of(rank: int, phase: Phase = Phase.WORKING, **changes: Any) -> RankState:
    state = RankState(
        pid=os.getpid(),
        rank=rank,
        device="cpu",
        beat=0.0,
        epoch=0,
        step=1,
        phase=phase,
        since=0.0,
        longest=0.0,
    )
    return replace(state, **changes)


def stalled(rank: int, phase: Phase = Phase.WORKING, *, seconds: float = LONG, **changes: Any) -> RankState:
    return state_of(rank, phase, stalled_seconds=seconds, **changes)


def test_another_process_reads_what_a_rank_says() -> None:
    with contextlib.closing(heartbeat.create(2)) as board:
        code = (
            "import os, sys; from flatout.dist import heartbeat\n"
            "life = heartbeat.attach(sys.argv[1], 1, 'cuda:1', rank=5)\n"
            "life.report_step(2, 17)\n"
            "with life.waiting('barrier'):\n"
            "    os._exit(0)\n"
        )
        subprocess.run([sys.executable, "-c", code, board.path], check=True, timeout=60)
        state = board.read(1)
        assert (state.rank, state.device, state.epoch, state.step, state.phase) == (5, "cuda:1", 2, 17, Phase.WAITING)
        assert state.name == f"rank 5 (cuda:1, process {state.pid})"
        assert state.position == "in epoch 3, step 17"
        assert board.read(0).pid == 0


def test_phases_nest_and_are_told_in_words() -> None:
    with contextlib.closing(heartbeat.create(1)) as board:
        life = Heartbeat(board, 0, "cpu", 0)
        assert (board.read(0).phase, board.read(0).position) == (Phase.STARTING, "while starting")
        with life.waiting():
            assert board.read(0).phase == Phase.WAITING
        assert board.read(0).phase == Phase.STARTING
        life.report_step(0, 1)
        with life.alone("writing the report"):
            assert board.read(0).position == "while writing the report"
            with life.waiting():
                assert board.read(0).phase == Phase.WAITING
            assert board.read(0).phase == Phase.ALONE
        assert (board.read(0).phase, board.read(0).position) == (Phase.WORKING, "in epoch 1, step 1")
        life.end()
        assert board.read(0).phase == Phase.ENDED


def test_the_longest_piece_of_work_does_not_count_waiting() -> None:
    with contextlib.closing(heartbeat.create(1)) as board:
        life = Heartbeat(board, 0, "cpu", 0)
        life.report_step(0, 1)
        time.sleep(0.02)
        life.report_step(0, 2)
        worked = board.read(0).longest
        assert worked >= 0.02
        with life.waiting():
            time.sleep(2 * worked)
        life.report_step(0, 3)
        assert board.read(0).longest < 2 * worked


def test_one_process_alone_may_say_the_same() -> None:
    heartbeat.NONE.report_step(0, 1)
    with heartbeat.NONE.alone("packing"), heartbeat.NONE.waiting():
        assert heartbeat.NONE.board.read(0).phase == Phase.WAITING


def test_an_observer_sees_silence_and_standstill() -> None:
    with contextlib.closing(heartbeat.create(2)) as board:
        life = Heartbeat(board, 0, "cpu", 0)
        observer = Observer(board)
        assert [v.rank for v in observer.read()] == [0]
        time.sleep(0.02)
        life.beat()
        (state,) = observer.read()
        assert state.silent_seconds == 0
        assert state.stalled_seconds >= 0.02
        life.report_step(0, 1)
        (state,) = observer.read()
        assert state.stalled_seconds == 0
        assert state.silent_seconds > 0


def lost_rank(states: list[RankState], **options: bool) -> int | None:
    found = find_lost(states, **options)
    return found[0].rank if found else None


def test_a_silent_rank_is_found_unless_it_has_ended_or_loads_libraries() -> None:
    silent: dict[str, Any] = {"silent_seconds": SILENT_SECONDS + 1}
    assert lost_rank([state_of(0), state_of(1)]) is None
    assert lost_rank([state_of(0), state_of(1, **silent)]) == 1
    assert lost_rank([state_of(0), state_of(1, Phase.ENDED, **silent)]) is None
    assert lost_rank([state_of(0), state_of(1, Phase.STARTING, **silent)]) is None
    assert lost_rank([state_of(0), state_of(1, Phase.STARTING, silent_seconds=STARTING_SECONDS + 1)]) == 1


@pytest.mark.parametrize(
    ("ranks", "hung"),
    [
        # One works, the others wait for it.
        ([stalled(0, Phase.WAITING), stalled(1)], 1),
        ([stalled(0), stalled(1, Phase.WAITING), stalled(2, Phase.WAITING)], 0),
        # The host of an accelerator runs ahead of it, until its queue is full.
        ([stalled(0, step=9), stalled(1, step=4)], 1),
        # Not for long enough, or all have had as long a piece of work before.
        ([stalled(0, Phase.WAITING), state_of(1, stalled_seconds=STALLED_SECONDS - 1)], None),
        ([stalled(0, Phase.WAITING, longest=60), stalled(1)], None),
        # One of the others makes progress.
        ([stalled(0, Phase.WAITING), stalled(1), state_of(2)], None),
        # All do long work at once, or all wait for the same: no rank holds up another.
        ([stalled(0), stalled(1)], None),
        ([stalled(0, Phase.WAITING), stalled(1, Phase.WAITING)], None),
        ([stalled(0, Phase.WAITING, doing="barrier"), stalled(1, Phase.WAITING, doing="barrier")], None),
        # They wait for it with good reason.
        ([stalled(0, Phase.ALONE), stalled(1, Phase.WAITING)], None),
        ([stalled(0, Phase.STARTING, epoch=-1), stalled(1, Phase.WAITING)], None),
        ([stalled(0, Phase.STARTING, epoch=-1, seconds=301), stalled(1, Phase.WAITING, seconds=301)], 0),
        ([stalled(0, Phase.ENDED), stalled(1)], None),
        # They wait in different collectives, or the device of one may still work.
        ([stalled(0, Phase.WAITING, doing="barrier"), stalled(1, Phase.WAITING, doing="all_reduce")], 1),
        (
            [
                stalled(0, Phase.WAITING, doing="all_reduce", collectives=7),
                stalled(1, Phase.WAITING, doing="all_reduce", collectives=8),
            ],
            0,
        ),
        ([stalled(0, Phase.WAITING, doing="barrier"), stalled(1, Phase.WAITING)], None),
        ([], None),
    ],
)
def test_a_rank_that_holds_up_all_others_is_found(ranks: list[RankState], hung: int | None) -> None:
    assert lost_rank(ranks) == hung


def test_ranks_that_wait_for_each_other_are_lost_once_the_user_has_ended_the_run() -> None:
    assert lost_rank([stalled(0, Phase.WAITING), stalled(1, Phase.WAITING)], is_stopping=True) == 1
    assert lost_rank([stalled(0), stalled(1)], is_stopping=True) is None
