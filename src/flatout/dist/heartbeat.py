"""Heartbeats: what each rank of a host does, in memory that they share, and which rank is lost.

A rank writes its position (epoch, step, working or waiting) into its slot; a thread of it writes the time. flatout's
launcher reads the slots and ends ranks that are stopped or hang. Where another launcher started the ranks, such as
torchrun, they watch each other. `torch.distributed.elastic.timer` cannot do this: its timers expire for a rank that waits
for the others, too.
"""

import contextlib
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

BEAT_SECONDS = 0.5
# Tests shorten all limits by this factor.
_SCALE = float(os.environ.get("FLATOUT_TIMEOUT_SCALE", "1"))
# A rank without a heartbeat for this long is stopped: a busy one gets a core and the interpreter lock within 2 s.
SILENT_SECONDS = 7.0 * _SCALE
# A rank that keeps all others waiting for this long, plus three times its longest step, hangs. A rank that starts may take
# longer (imports from a network drive, the first use of CUDA).
STALLED_SECONDS = 8.0 * _SCALE
STARTING_SECONDS = 300.0
# A rank has this long to end by itself after another one has ended.
GRACE_SECONDS = 4.0 * _SCALE

_HEADER = np.dtype([("owner", "i8"), ("local_size", "i8")])


class Phase(IntEnum):
    """What the main thread of a rank does."""

    STARTING = 0
    WORKING = 1
    WAITING = 2
    ALONE = 3
    ENDED = 4


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank has written, times by time.monotonic; an observer adds the last two.

    `epoch` and `step` are the epochs done (-1 before training) and the steps done in the next one.
    """

    pid: int
    rank: int
    device: str
    beat: float
    epoch: int
    step: int
    phase: Phase
    # The last change of position or phase, and the longest work between two.
    since: float
    longest: float
    # How many collective operations it has begun; which one it waits in, or the work that the others wait for.
    collectives: int = 0
    doing: str = ""
    silent_seconds: float = 0.0
    stalled_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", Phase(self.phase))

    @property
    def name(self) -> str:
        """The rank, for messages."""
        return f"rank {self.rank} ({self.device}, process {self.pid})"

    @property
    def position(self) -> str:
        """The position, for messages."""
        if self.phase == Phase.ALONE:
            return f"while {self.doing}"
        return f"in epoch {self.epoch + 1}, step {self.step}" if self.epoch >= 0 else "while starting"


_TYPES = {int: "i8", float: "f8", Phase: "i8", str: "S96"}
_SLOT = np.dtype([(field.name, _TYPES[field.type]) for field in fields(RankState)[:-2]])  # pyright: ignore[reportArgumentType]


class Board:
    """The shared memory with one slot for each rank of this host, made by process `owner`; others open `path`."""

    def __init__(self, memory: "mmap.mmap | bytearray", path: str = "", file: int = -1) -> None:
        self._memory, self.path, self._file = memory, path, file
        header = np.frombuffer(memory, _HEADER, 1)[0]
        self.owner, self.local_size = int(header["owner"]), int(header["local_size"])
        self.slots = np.frombuffer(memory, _SLOT, self.local_size, _HEADER.itemsize)

    def read(self, local_rank: int) -> RankState:
        """Return the state of one rank."""
        state: dict[str, Any] = {}
        for name, value in zip(_SLOT.names or (), self.slots[local_rank].item(), strict=True):
            state[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        return RankState(**state)

    def read_all(self) -> list[RankState]:
        """Return the states of the ranks that have started."""
        return [state for state in map(self.read, range(self.local_size)) if state.pid]

    def close(self) -> None:
        """Release the memory; it is freed when the last process has released it."""
        if self._file >= 0:
            os.close(self._file)
            if not self.path.startswith("/proc/"):
                Path(self.path).unlink(missing_ok=True)


def create(local_size: int) -> Board:
    """Return shared memory for the ranks of this host; on Linux without a file that could be left behind."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        file = os.memfd_create("flatout-heartbeat")
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="flatout-heartbeat-")
    os.ftruncate(file, _HEADER.itemsize + local_size * _SLOT.itemsize)
    memory = mmap.mmap(file, 0)
    np.frombuffer(memory, _HEADER, 1)[0] = (os.getpid(), local_size)
    return Board(memory, path, file)


def attach(path: str, local_rank: int, device: str, *, rank: int | None = None) -> "Heartbeat":
    """Take a rank's slot in the memory that another process made; it becomes this process's `current()`."""
    global _current
    with Path(path).open("r+b") as file:
        board = Board(mmap.mmap(file.fileno(), 0), path)
    _current = Heartbeat(board, local_rank, device, local_rank if rank is None else rank)
    return _current


class Heartbeat:
    """One rank's slot, for writing."""

    def __init__(self, board: Board, local_rank: int, device: str, rank: int) -> None:
        self.board = board
        self._slot = {name: board.slots[name][local_rank : local_rank + 1] for name in _SLOT.names or ()}
        self.phase, self._outer = Phase.STARTING, [Phase.STARTING]
        self._since, self._longest = time.monotonic(), 0.0
        for name, value in {"rank": rank, "device": device.encode(), "epoch": -1}.items():
            self._slot[name][0] = value
        self._enter(Phase.STARTING)
        self.beat()
        self._slot["pid"][0] = os.getpid()

    def report_step(self, epoch: int, step: int) -> None:
        """Write the position: epochs done, and steps done in the next one."""
        self._slot["epoch"][0], self._slot["step"][0] = epoch, step
        self.keep_alive()

    def keep_alive(self) -> None:
        """Report progress at the same position, such as a batch of an evaluation."""
        self._enter(Phase.WORKING if self.phase == Phase.STARTING else self.phase)

    def count_collective(self) -> None:
        """Count a collective operation: all ranks begin the same ones in the same order."""
        self._slot["collectives"] += 1

    def waiting(self, collective: str = "") -> contextlib.AbstractContextManager[None]:
        """Mark a block in which this rank waits for others, or, without the name of a collective, for its device."""
        return self._in_phase(Phase.WAITING, collective)

    def alone(self, task: str) -> contextlib.AbstractContextManager[None]:
        """Mark long work that the other ranks wait for, such as `writing the report`."""
        return self._in_phase(Phase.ALONE, task)

    def beat(self) -> None:
        """Write the time."""
        self._slot["beat"][0] = time.monotonic()

    def end(self) -> None:
        """Mark the end: the other ranks no longer need this one."""
        self._enter(Phase.ENDED)

    def watch(self, parent: int, on_lost: Callable[[str], None] = lambda reason: None) -> None:
        """Start the thread that writes heartbeats and watches the parent process and the other ranks.

        Before it ends this process it calls `on_lost` with the reason.
        """
        if self.phase != Phase.ENDED:
            threading.Thread(target=_watch, args=(self, parent, on_lost), name="heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def _in_phase(self, phase: Phase, doing: str) -> Iterator[None]:
        self._slot["doing"][0] = doing.encode()
        self._outer.append(self.phase)
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(self._outer.pop())

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self.phase == Phase.WORKING and now - self._since > self._longest:
            self._slot["longest"][0] = self._longest = now - self._since
        self.phase, self._since = phase, now
        self._slot["phase"][0], self._slot["since"][0] = phase, now


# --- which rank is lost -----------------------------------------------------------------------------------------------


class Observer:
    """Reads a board repeatedly and measures how long each rank has been silent and has stood still.

    Time in which the observer itself did not run does not count: then the whole machine stood still.
    """

    def __init__(self, board: Board) -> None:
        self._board, self._read_at = board, time.monotonic()
        self._before: dict[int, RankState] = {}

    def read(self) -> list[RankState]:
        """Return the states of the ranks that have started, with their times."""
        now = time.monotonic()
        passed, self._read_at = min(now - self._read_at, 2 * BEAT_SECONDS), now
        states = []
        for state in self._board.read_all():
            before = self._before.get(state.rank, state)
            silent = before.silent_seconds + passed if state.beat == before.beat else 0.0
            stalled = before.stalled_seconds + passed if state.since == before.since else 0.0
            states.append(replace(state, silent_seconds=silent, stalled_seconds=stalled))
        self._before = {state.rank: state for state in states}
        return states


def find_lost(states: Sequence[RankState], *, is_stopping: bool = False) -> tuple[RankState, str] | None:
    """Return a rank that is stopped or hangs, and the reason in words; None if all is well.

    Args:
        states: of all ranks that are known, from `Observer.read`.
        is_stopping: the user has ended the run, so ranks that all wait for each other are lost in any collective.
    """
    for state in states:
        if _is_silent(state):
            return state, f"did not answer for {state.silent_seconds:.0f} s"
    running = [state for state in states if state.phase != Phase.ENDED]
    busy = [state for state in running if state.phase != Phase.WAITING]
    if not running or any(state.phase == Phase.ALONE for state in busy):
        return None
    # Busy ranks may be as far as each other; of waiting ones the one with the fewest collectives is behind.
    last = min(busy or running, key=lambda state: (state.epoch, state.step, state.collectives, -state.rank))
    limit = STALLED_SECONDS + 3 * max(state.longest for state in running)
    if last.phase == Phase.STARTING:
        limit = STARTING_SECONDS
    seconds = min(state.stalled_seconds for state in running)
    if seconds <= limit:
        return None
    if busy:
        # An accelerator's host runs ahead of it, so the others may also be further.
        is_hung = any(
            state.phase == Phase.WAITING or (state.epoch, state.step) > (last.epoch, last.step) for state in running
        )
        return (last, f"kept all others waiting for {seconds:.0f} s") if is_hung else None
    if is_stopping:
        return last, f"did not stop for {seconds:.0f} s"
    other = next((s for s in running if (s.doing, s.collectives) != (last.doing, last.collectives)), None)
    if other is None or not all(state.doing for state in running):
        return None
    where = f"rank {other.rank} in {other.doing} ({other.collectives})"
    return last, f"waited in {last.doing} (collective {last.collectives}) and {where} for {seconds:.0f} s"


def _is_silent(state: RankState) -> bool:
    if state.silent_seconds <= SILENT_SECONDS or state.phase == Phase.ENDED:
        return False
    # Loading a large library from a slow disk holds the interpreter lock.
    is_starting = state.phase == Phase.STARTING and state.silent_seconds <= STARTING_SECONDS
    return not is_starting or _status(state.pid) in ("stopped", "tracing-stop")


def _status(pid: int) -> str:
    """Return psutil's status of a process; empty if there is none."""
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def end_process(pid: int) -> None:
    """Kill a process and, if it leads a process group, the whole group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _watch(heartbeat: Heartbeat, parent: int, on_lost: Callable[[str], None]) -> None:
    """Write heartbeats; end this process when its parent or another rank of this host is gone."""

    def lose(reason: str) -> None:
        _log(f"{reason}: this rank ends")
        on_lost(reason)

    observer, own = Observer(heartbeat.board), os.getpid()
    while True:
        heartbeat.beat()
        peers = [state for state in observer.read() if state.phase != Phase.ENDED]
        if os.getppid() != parent:
            lose("the process that started this rank is gone")
            # Stopped ranks cannot end themselves.
            for pid in [state.pid for state in peers if state.pid != own] + [own]:
                end_process(pid)
        if heartbeat.phase != Phase.ENDED:
            gone = next((state for state in peers if _status(state.pid) in ("", "zombie", "dead")), None)
            # It may have ended, as it should, since it was read.
            if gone and any(state.pid == gone.pid and state.phase != Phase.ENDED for state in heartbeat.board.read_all()):
                lose(f"{gone.name} is gone, last seen {gone.position}")
                time.sleep(GRACE_SECONDS)
                if heartbeat.phase != Phase.ENDED:
                    end_process(own)
            lost = find_lost(peers) if heartbeat.board.owner != parent else None
            # No launcher of ours looks at the board: the lowest rank that is well acts.
            if lost and next((state.pid for state in peers if state is not lost[0]), 0) == own:
                _log(f"{lost[0].name} {lost[1]}, {lost[0].position}: it is ended")
                end_process(lost[0].pid)
        time.sleep(BEAT_SECONDS)


def _log(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)


def _private() -> Heartbeat:
    memory = bytearray(_HEADER.itemsize + _SLOT.itemsize)
    np.frombuffer(memory, _HEADER, 1)[0] = (os.getpid(), 1)
    return Heartbeat(Board(memory), 0, "", 0)


NONE = _private()
"""For a run of one process, which nothing watches."""

_current = NONE


def current() -> Heartbeat:
    """Return the heartbeat that this process has attached to, or `NONE`."""
    return _current
