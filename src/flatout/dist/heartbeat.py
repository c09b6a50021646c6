"""Signs of life of the ranks of one host, in a little memory that they share.

Each rank says where it stands (epoch, step, whether it works or waits), and a thread of it beats. Who watches:

- The launcher (`supervise.py`) watches the processes it started: exit codes, hearts that no longer beat (a stopped
  process), ranks that keep all others waiting (a main thread that hangs). It ends what is to be ended.
- The thread in each rank watches what the launcher cannot or, under plain torchrun, what nobody else does: that the
  parent is still there, and that no other local rank is gone; then it ends its own process. Where the memory was not
  made by the parent, the lowest healthy rank also ends peers that are stopped or that hang.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

# Seconds between two heartbeats.
BEAT_SECONDS = 0.5

# Process that made the memory, number of slots.
_HEADER = struct.Struct("<qq")
_HEADER_BYTES = 64
# pid, rank, device; heartbeat; epoch, step, since, longest, phase; what it does alone.
_WHO, _BEAT, _WHERE, _TASK = struct.Struct("<qq24s"), struct.Struct("<d"), struct.Struct("<qqddq"), struct.Struct("48s")
_BEAT_AT = _WHO.size
_WHERE_AT = _BEAT_AT + _BEAT.size
_TASK_AT = _WHERE_AT + _WHERE.size
_SLOT_BYTES = _TASK_AT + _TASK.size


class Phase(IntEnum):
    """What a rank's main thread does."""

    STARTING = 0
    WORKING = 1
    WAITING = 2
    ALONE = 3
    ENDED = 4


@dataclass(frozen=True, kw_only=True)
class Vital:
    """The state of one rank.

    Attributes:
        pid: its process; 0 until it has attached.
        rank, device: who it is.
        beat: time.monotonic of its last heartbeat, which is the same clock in all processes of a host.
        epoch, step: where it stands in training: epochs done, -1 before training, and steps of the next.
        phase: what it does.
        since: time.monotonic of the last sign of progress: a step, a phase.
        longest: seconds of the longest piece of work between two signs of progress.
        task: what it does while the others wait for it, in words.
        silent_seconds, stalled_seconds: how long an observer has seen no heartbeat, no progress.
    """

    pid: int
    rank: int
    device: str
    beat: float
    epoch: int
    step: int
    phase: Phase
    since: float
    longest: float
    task: str
    silent_seconds: float = 0.0
    stalled_seconds: float = 0.0

    @property
    def name(self) -> str:
        """Who it is, for messages."""
        return f"rank {self.rank} ({self.device}, process {self.pid})"

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        if self.phase == Phase.ALONE:
            return f"while {self.task}"
        if self.epoch < 0:
            return "while starting"
        return f"in epoch {self.epoch + 1}, step {self.step}"


class Board:
    """The shared memory: a slot for each local rank.

    Attributes:
        path: where other processes open it.
    """

    def __init__(self, memory: "mmap.mmap | bytearray", path: str, fd: int = -1) -> None:
        self.memory, self.path, self._fd = memory, path, fd
        self.owner, self.local_size = _HEADER.unpack_from(memory, 0)

    def read(self, local_rank: int) -> Vital:
        """Return the state of one rank."""
        at = slot(local_rank)
        pid, rank, device = _WHO.unpack_from(self.memory, at)
        epoch, step, since, longest, phase = _WHERE.unpack_from(self.memory, at + _WHERE_AT)
        return Vital(
            pid=pid,
            rank=rank,
            device=_text(device),
            beat=_BEAT.unpack_from(self.memory, at + _BEAT_AT)[0],
            epoch=epoch,
            step=step,
            phase=Phase(phase),
            since=since,
            longest=longest,
            task=_text(_TASK.unpack_from(self.memory, at + _TASK_AT)[0]),
        )

    def close(self) -> None:
        """Let go of the memory; it is gone when the last process has."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if not self.path.startswith("/proc/"):
                Path(self.path).unlink(missing_ok=True)


def slot(local_rank: int) -> int:
    """Return the offset of a rank's slot, in bytes."""
    return _HEADER_BYTES + local_rank * _SLOT_BYTES


def create(local_size: int) -> Board:
    """Make the memory for the ranks of this host.

    It has no name in a file system where Linux allows that, so that nothing stays behind whatever is killed.
    """
    size = slot(local_size)
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        fd = os.memfd_create("flatout-vitals")
        path = f"/proc/{os.getpid()}/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="flatout-vitals-")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    _HEADER.pack_into(memory, 0, os.getpid(), local_size)
    return Board(memory, path, fd)


def attach(path: str, local_rank: int, device: str, *, rank: int | None = None) -> "Vitals":
    """Take a rank's slot in the memory that another process made, and make it this process's own.

    Args:
        path: of the board.
        local_rank: which slot.
        device: torch's name of the rank's device.
        rank: the rank among all hosts; default: the local one.
    """
    global _current
    with open(path, "r+b") as file:  # noqa: PTH123
        board = Board(mmap.mmap(file.fileno(), 0), path)
    _current = Vitals(board, local_rank, device, local_rank if rank is None else rank)
    return _current


class Vitals:
    """What one rank says about itself.

    Args:
        board: the shared memory.
        local_rank: the slot.
        device, rank: who it is.
    """

    def __init__(self, board: Board, local_rank: int, device: str, rank: int) -> None:
        self.board, self.local_rank = board, local_rank
        # Why this rank cannot go on, once that is known: whoever waits in a loop looks at it.
        self.lost = ""
        self._memory, self._at = board.memory, slot(local_rank)
        self._place = (-1, 0)
        self.phase, self._outer = Phase.STARTING, [Phase.STARTING]
        self._longest, self._since = 0.0, time.monotonic()
        self._waiting = _Waiting(self)
        self._write()
        self.beat()
        _WHO.pack_into(self._memory, self._at, os.getpid(), rank, device.encode()[:24])

    def at(self, epoch: int, step: int) -> None:
        """Say how far training has come: at every step, and at every batch of an evaluation (the same place again).

        Args:
            epoch: the number of epochs done.
            step: the number of steps done in the next.
        """
        self._place = (epoch, step)
        self._enter(Phase.WORKING if self.phase == Phase.STARTING else self.phase)

    def waiting(self) -> "_Waiting":
        """Return a context in which this rank is blocked on others."""
        return self._waiting

    @contextlib.contextmanager
    def alone(self, task: str):
        """Mark long work for which the other ranks legitimately wait, such as `writing the report`."""
        _TASK.pack_into(self._memory, self._at + _TASK_AT, task.encode()[:48])
        self._push(Phase.ALONE)
        try:
            yield
        finally:
            self._pop()

    def beat(self) -> None:
        """Say that this process runs."""
        _BEAT.pack_into(self._memory, self._at + _BEAT_AT, time.monotonic())

    def end(self) -> None:
        """Say that this rank is done and no other needs it: it may go, and is not missed."""
        self._enter(Phase.ENDED)

    def read(self, local_rank: int) -> Vital:
        """Return the state of a rank of this host."""
        return self.board.read(local_rank)

    def watch(self, parent_pid: int, on_lost: Callable[[str], None] | None = None) -> None:
        """Start the thread that beats and looks after this process's parent and peers.

        Args:
            parent_pid: the launcher or agent that started this process.
            on_lost: called in that thread with the reason before it ends the process.
        """
        from flatout.dist.watchdog import Watchdog

        if self.phase != Phase.ENDED:
            threading.Thread(target=Watchdog(self, parent_pid, on_lost).run, name="vitals", daemon=True).start()

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self.phase == Phase.WORKING and now - self._since > self._longest:
            self._longest = now - self._since
        self.phase, self._since = phase, now
        self._write()

    def _write(self) -> None:
        _WHERE.pack_into(self._memory, self._at + _WHERE_AT, *self._place, self._since, self._longest, self.phase)

    def _push(self, phase: Phase) -> None:
        self._outer.append(self.phase)
        self._enter(phase)

    def _pop(self) -> None:
        self._enter(self._outer.pop())


class _Waiting:
    """The context of `Vitals.waiting`: one object for all uses, as it is entered several times in a step."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    def __enter__(self) -> None:
        self._vitals._push(Phase.WAITING)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._vitals._pop()


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _private() -> Vitals:
    memory = bytearray(slot(1))
    _HEADER.pack_into(memory, 0, os.getpid(), 1)
    return Vitals(Board(memory, ""), 0, "", 0)


NONE = _private()
"""For a run of one process, which nobody watches."""

_current = NONE


def current() -> Vitals:
    """Return what this process attached to, or `NONE`."""
    return _current
