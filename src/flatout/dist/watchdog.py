"""Judge from their vitals which ranks are stopped or hung; the thread in each rank that watches parent and peers."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flatout.dist.heartbeat import BEAT_SECONDS, Board, Phase, Vital, Vitals

# A heart that is silent for so long belongs to a stopped process: a busy one still gets a slice of a core, and the
# interpreter lock, within a second or two.
SILENT_SECONDS = 7.0
# A rank that keeps all others waiting for this and three times its longest piece of work so far hangs; one that is
# still starting (imports over a network, CUDA's first contact) may take longer.
STALLED_SECONDS = 8.0
STARTING_SECONDS = 300.0
# What the main thread of a rank has to leave by itself once a peer is gone.
GRACE_SECONDS = 4.0


class Observer:
    """Looks at a board from time to time and tells how long each rank has been silent and has stood still.

    Time in which the observer itself did not run does not count: then the whole machine stood still.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looked = time.monotonic()
        self._seen: dict[int, Vital] = {}

    def look(self) -> list[Vital]:
        """Return the state of every local rank that has attached, with the times filled in."""
        now = time.monotonic()
        passed = min(now - self._looked, 2 * BEAT_SECONDS)
        self._looked = now
        vitals = []
        for i in range(self._board.local_size):
            vital, before = self._board.read(i), self._seen.get(i)
            if vital.pid == 0:
                continue
            if before:
                silent = before.silent_seconds + passed if vital.beat == before.beat else 0.0
                stalled = before.stalled_seconds + passed if vital.since == before.since else 0.0
                vital = replace(vital, silent_seconds=silent, stalled_seconds=stalled)
            self._seen[i] = vital
            vitals.append(vital)
        return vitals


def find_silent(vitals: Sequence[Vital]) -> Vital | None:
    """Return a rank whose heart does not beat, or None. One that has ended needs no heart."""
    return next((v for v in vitals if _is_silent(v)), None)


def _is_silent(vital: Vital) -> bool:
    if vital.silent_seconds <= SILENT_SECONDS or vital.phase == Phase.ENDED:
        return False
    # Loading a large library holds the interpreter lock, for long where it lies on a slow disk.
    return vital.phase != Phase.STARTING or vital.silent_seconds > STARTING_SECONDS or _is_stopped(vital.pid)


def _is_stopped(pid: int) -> bool:
    return _status(pid) in ("stopped", "tracing-stop")


def _is_running(pid: int) -> bool:
    return _status(pid) not in ("", "zombie", "dead")


def _status(pid: int) -> str:
    """Return what the system says of a process, in psutil's words; empty if there is none."""
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def find_hung(vitals: Sequence[Vital]) -> Vital | None:
    """Return the rank whose main thread holds up all others, or None.

    That is one that works on the same step while every rank stands still and at least one waits or is further on
    (an accelerator's host runs ahead). Work that all do at once, however long, holds up nobody.
    """
    running = [v for v in vitals if v.phase != Phase.ENDED]
    if not running or any(v.phase == Phase.ALONE for v in running):
        return None
    busy = [v for v in running if v.phase != Phase.WAITING]
    if not busy:
        return None
    last = min(busy, key=lambda v: (v.epoch, v.step))
    limit = STALLED_SECONDS + 3 * max(v.longest for v in running)
    if last.phase == Phase.STARTING:
        limit = STARTING_SECONDS
    if any(v.stalled_seconds <= limit for v in running):
        return None
    held_up = any(v.phase == Phase.WAITING or (v.epoch, v.step) > (last.epoch, last.step) for v in running)
    return last if held_up else None


def end_process(pid: int) -> None:
    """Kill a process and, where it leads a group of its own, what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


class Watchdog:
    """What the thread of one rank does.

    Args:
        vitals: the rank's own.
        parent_pid: the process that started it.
        on_lost: called with the reason before the process is ended.
    """

    def __init__(self, vitals: Vitals, parent_pid: int, on_lost: Callable[[str], None] | None) -> None:
        self._vitals, self._parent, self._on_lost = vitals, parent_pid, on_lost
        self._observer = Observer(vitals.board)
        self._is_watched = vitals.board.owner == parent_pid

    def run(self) -> None:
        """Beat and look around until the process ends."""
        vitals = self._vitals
        while True:
            vitals.beat()
            if os.getppid() != self._parent:
                self._lose("the process that started this one is gone")
                self._end_all()
            if vitals.phase == Phase.ENDED:
                time.sleep(BEAT_SECONDS)
                continue
            peers = self._observer.look()
            gone = next((v for v in peers if v.phase != Phase.ENDED and not _is_running(v.pid)), None)
            if gone:
                self._lose(f"{gone.name} is gone, last seen {gone.place}")
                time.sleep(GRACE_SECONDS)
                if vitals.phase != Phase.ENDED:
                    end_process(os.getpid())
            if not self._is_watched:
                self._end_sick(peers)
            time.sleep(BEAT_SECONDS)

    def _end_sick(self, peers: list[Vital]) -> None:
        """End a peer that is stopped or hangs, if this is the lowest healthy rank."""
        silent, hung = find_silent(peers), find_hung(peers)
        sick = silent or hung
        if sick is None:
            return
        healthy = [v.pid for v in peers if v is not sick and v.silent_seconds < SILENT_SECONDS / 2]
        if healthy and healthy[0] == os.getpid():
            how = "does not answer" if silent else "keeps all others waiting"
            _say(f"{sick.name} {how}, {sick.place}: it is ended")
            end_process(sick.pid)

    def _lose(self, reason: str) -> None:
        self._vitals.lost = reason
        _say(f"{reason}: this rank ends")
        if self._on_lost:
            self._on_lost(reason)

    def _end_all(self) -> None:
        """End every rank of this host, stopped ones included, which cannot do it themselves."""
        board = self._vitals.board
        for vital in map(board.read, range(board.local_size)):
            if vital.pid not in (0, os.getpid()) and vital.phase != Phase.ENDED:
                end_process(vital.pid)
        end_process(os.getpid())


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)
