"""Signs of life of the ranks of one host, in a little memory that they share.

Each rank says where it stands (epoch, step, whether it works or waits), and a thread of it beats. Who watches:

- The launcher (`launch.py`) watches the processes it started: exit codes, hearts that no longer beat (a stopped
  process), ranks that keep all others waiting (a main thread that hangs). It ends what is to be ended.
- The thread in each rank watches what the launcher cannot or, under plain torchrun, what nobody else does: that the
  parent is still there, and that no other local rank is gone; then it ends its own process. Where the memory was not
  made by the parent, the lowest healthy rank also ends peers that are stopped or that hang.
"""

import contextlib
import mmap
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType

# Seconds between two heartbeats.
BEAT_SECONDS = 0.5
# A heart that is silent for so long belongs to a stopped process: a busy one still gets a slice of a core, and the
# interpreter lock, within a second or two.
SILENT_SECONDS = 7.0
# A rank that keeps all others waiting for this and three times its longest piece of work so far hangs; one that is
# still starting (imports over a network, CUDA's first contact) may take longer.
STALLED_SECONDS = 8.0
STARTING_SECONDS = 300.0
# What the main thread of a rank has to leave by itself once a peer is gone.
GRACE_SECONDS = 4.0

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
        self._phase, self._outer = Phase.STARTING, [Phase.STARTING]
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
        self._enter(Phase.WORKING if self._phase == Phase.STARTING else self._phase)

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
        if self._phase != Phase.ENDED:
            threading.Thread(target=_Watch(self, parent_pid, on_lost).run, name="vitals", daemon=True).start()

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self._phase == Phase.WORKING and now - self._since > self._longest:
            self._longest = now - self._since
        self._phase, self._since = phase, now
        self._write()

    def _write(self) -> None:
        _WHERE.pack_into(self._memory, self._at + _WHERE_AT, *self._place, self._since, self._longest, self._phase)

    def _push(self, phase: Phase) -> None:
        self._outer.append(self._phase)
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
    return next((v for v in vitals if v.silent_seconds > SILENT_SECONDS and v.phase != Phase.ENDED), None)


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


class _Watch:
    """The thread of one rank."""

    def __init__(self, vitals: Vitals, parent_pid: int, on_lost: Callable[[str], None] | None) -> None:
        self._vitals, self._parent, self._on_lost = vitals, parent_pid, on_lost
        self._observer = Observer(vitals.board)
        self._is_watched = vitals.board.owner == parent_pid

    def run(self) -> None:
        vitals = self._vitals
        while True:
            vitals.beat()
            if os.getppid() != self._parent:
                self._lose("the process that started this one is gone")
                self._end_all()
            if vitals._phase == Phase.ENDED:
                time.sleep(BEAT_SECONDS)
                continue
            peers = self._observer.look()
            gone = next((v for v in peers if v.phase != Phase.ENDED and not _is_running(v.pid)), None)
            if gone:
                self._lose(f"{gone.name} is gone, last seen {gone.place}")
                time.sleep(GRACE_SECONDS)
                if vitals._phase != Phase.ENDED:
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


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)


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
