"""One rank of a run: its process, started by the launcher, and its watchdog.

The launcher's private folder holds the payload. The rank with local rank N adds its `output-N`, later a link to its
log, `position-N` in training, `ready-N-PID` once it handles signals, `outcome-N`, and rank 0 its display events.
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import pickle
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.distributed.environment import DEVICE, restart_count
from flatout.utils.console import Console, Relay
from flatout.utils.errors import InputError, RankLost, Stopped, TrainingFailed, exit_code, is_out_of_memory
from flatout.utils.files import write_atomically

_LOOK_SECONDS = 0.5
# Time limit of the interpreter's exit, when a library's threads may hang.
_EXIT_SECONDS = 10.0
_POSITION = struct.Struct("qq")


class PeerSilent(RankLost):
    """Another rank did not take part in a collective operation in time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the function of a rank ended, when, and its result or the exception to raise.

    "lost" and "silent" have a cause in another rank, "error" is for the user to read, "memory" and "crash" are a
    TrainingFailed with the text of what was raised; a rank that has written nothing was killed.
    """

    kind: Literal["done", "stopped", "lost", "silent", "error", "memory", "crash", "killed"]
    value: Any
    time: float


class Watch:
    """The watchdog thread: ends this rank when its parent process has ended, or when it makes no progress.

    The timeout is that of `faulthandler`, which also interrupts C code and writes the stack to stderr. It applies from
    the first training step on, except while the rank waits for others.
    """

    def __init__(self, folder: Path | None = None, local_rank: int = 0) -> None:
        # Seconds without progress after which the process ends with code 1.
        self.limit: float | None = None
        # Whether the rank has left the others properly.
        self.has_left = False
        self._folder, self._thread = folder, None
        self._has_begun = False
        self._progress = self._pauses = 0
        self._position: bytearray | mmap.mmap = bytearray(_POSITION.size)
        if folder:
            path = folder / f"position-{local_rank}"
            path.write_bytes(_POSITION.pack(-1, 0))
            with path.open("r+b") as file:
                self._position = mmap.mmap(file.fileno(), 0)

    def start(self, parent: int | None = None) -> None:
        """Start the thread unless it is running; `parent` is the process that must be alive."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(parent or os.getppid(),), name="watch", daemon=True)
            self._thread.start()

    def report_step(self, epoch: int, step: int) -> None:
        """Report the position: finished epochs, and finished steps of the next."""
        _POSITION.pack_into(self._position, 0, epoch, step)
        self.keep_alive()

    def keep_alive(self) -> None:
        """Report progress at the same position, such as a batch of an evaluation."""
        self._has_begun = True
        self._progress += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the timeout in a block: this rank waits for others, or they wait for its long work."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._progress += 1

    def _run(self, parent: int) -> None:
        seen = -1
        while os.getppid() == parent:
            if not self._has_begun or self._pauses or not self.limit:
                faulthandler.cancel_dump_traceback_later()
                seen = -1
            elif self._progress != seen:
                seen = self._progress
                faulthandler.dump_traceback_later(self.limit, exit=True, file=2)
            time.sleep(_LOOK_SECONDS)
        own, others = os.getpid(), set[int]()
        if self._folder:
            # Stopped processes (SIGSTOP) cannot end themselves.
            others = {*ready_ranks(self._folder).values()} - {own}
            shutil.rmtree(self._folder, ignore_errors=True)
        for pid in (*others, own):
            end_group(pid)
        os.kill(own, signal.SIGKILL)


def ready_ranks(folder: Path) -> dict[int, int]:
    """Return the running processes, by local rank, that handle signals."""
    numbers = [path.name.split("-")[1:] for path in folder.glob("ready-*")]
    return {int(local_rank): int(pid) for local_rank, pid in numbers}


def end_group(pid: int) -> None:
    """Kill the process group that a process leads or has led, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def read_position(folder: Path, local_rank: int) -> str:
    """Return the position of a rank, for messages."""
    epoch = -1
    with contextlib.suppress(OSError, struct.error):
        epoch, step = _POSITION.unpack((folder / f"position-{local_rank}").read_bytes())
    return f"in epoch {epoch + 1}, step {step}" if epoch >= 0 else "while starting"


_watch: Watch | None = None


def current_watch() -> Watch:
    """Return the watch of this process."""
    global _watch
    _watch = _watch or Watch()
    return _watch


# --- the process of a rank --------------------------------------------------------------------------------------------


class _RankConsole(Console):
    """The console of a rank. Once its log is open, all output of the process goes there."""

    def __init__(self, output: Path, rank: int, display: Relay | None, lines: list[tuple[str, str]]) -> None:
        super().__init__(rank=rank, display=display)
        self._pending += lines  # which another process's console has shown
        self._output = output

    def open_log(self, path: Path, device: str) -> None:
        super().open_log(path, os.environ[DEVICE])
        sys.stdout.flush()
        with path.open("ab") as log:
            log.write(self._output.read_bytes())
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._output.unlink()
        self._output.symlink_to(path.absolute())


def main() -> int:
    """Run the function of the payload as one rank, and return the exit code.

    It is 0 if the agent need not end the other ranks: the function has returned, or this rank has left them.
    """
    import cloudpickle

    global _watch
    folder, rank, local_rank = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    output = folder / f"output-{local_rank}"
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        if getattr(sys, name) is None:  # closed by the user, as by `>&-`
            setattr(sys, name, os.fdopen(number, "w"))
        getattr(sys, name).reconfigure(line_buffering=True, errors="backslashreplace")
    # Only of the crashed thread: the stacks of all would hide the last lines of the log.
    faulthandler.enable(all_threads=False)
    launcher, call, has_bar, lines = pickle.loads((folder / "payload").read_bytes())
    _watch = Watch(folder, local_rank)
    _watch.start(launcher)
    display = None if rank or has_bar is None else Relay(folder / "display", has_bar=has_bar)
    console = _RankConsole(output, rank, display, lines if rank == restart_count() == 0 else [])
    ready = folder / f"ready-{local_rank}-{os.getpid()}"
    outcome = _run(call, console, ready)
    console.close()
    write_atomically(folder / f"outcome-{local_rank}", cloudpickle.dumps(outcome))
    ready.unlink(missing_ok=True)
    # On several hosts, a stop may also be part of a restart, which only the launcher can distinguish.
    has_left = _watch.has_left and not (outcome.kind == "stopped" and os.environ["GROUP_WORLD_SIZE"] != "1")
    code = 0 if outcome.kind == "done" or has_left else exit_code(outcome.value)
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    gc.freeze()  # so that the exit does not search the objects of torch for garbage
    return code


def _run(call: bytes, console: Console, ready: Path) -> Outcome:
    """Call the function, and tell how it ended."""
    raised: list[BaseException] = []
    is_running = True

    def stop(number: int, frame: object) -> None:
        nonlocal is_running
        if is_running:
            is_running = False
            raised.append(KeyboardInterrupt() if number == signal.SIGINT else Stopped(number))
            raise raised[-1]

    try:
        try:
            # Until training installs its own handlers. Children of a shell's background job would ignore SIGINT.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            ready.touch()
            function, arguments = pickle.loads(call)
            return Outcome(kind="done", value=function(console, *arguments), time=time.time())
        finally:
            # The outcome is written next, which is fast.
            is_running = False
    except BaseException as error:
        # torch's imports, for one, turn an exception that a signal raises into another one.
        error = raised[0] if raised else error
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            kind = "stopped"
        elif isinstance(error, RankLost):
            kind = "silent" if isinstance(error, PeerSilent) else "lost"
        elif isinstance(error, (InputError, TrainingFailed)):
            kind = "error"
        else:
            traceback.print_exc()
            kind = "memory" if is_out_of_memory(error) else "crash"
            error = TrainingFailed("".join(traceback.format_exception_only(error)).strip())
        return Outcome(kind=kind, value=error, time=time.time())
