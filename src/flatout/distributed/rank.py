"""One rank of a run: its process, started by the launcher, and its watchdog.

The launcher's private folder holds the payload. Each rank adds its output (`output-N`, later a link to its log), its
position in training (`position-N`), `ready-N-PID` once it handles signals, its outcome (`outcome-N`, in the format of
torch's error files), and rank 0 its display events (`display`). N is the local rank. All pickles in the folder come
from processes of this run.
"""

import base64
import contextlib
import faulthandler
import json
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
from pathlib import Path
from typing import Any

from flatout.distributed.environment import DEVICE, restart_count
from flatout.utils.console import Console, Relay
from flatout.utils.errors import FAILED, InputError, RankLost, Stopped, TrainingFailed, exit_code, is_out_of_memory
from flatout.utils.files import write_atomically

_LOOK_SECONDS = 0.5
# Time limit of the interpreter's exit, when a library's threads may hang.
_EXIT_SECONDS = 10.0
_POSITION = struct.Struct("qq")


class PeerSilent(RankLost):
    """Another rank did not take part in a collective operation in time."""


class Watch:
    """The watchdog thread: ends this rank when its parent process has ended, or when it makes no progress.

    The timeout is that of `faulthandler`, which also interrupts C code and writes the stack to stderr. It applies from
    the first training step on, except while the rank waits for others.

    Attributes:
        limit: seconds without progress after which the process ends with code 1; None for no limit.
        has_left: whether the rank has left the others properly.
    """

    def __init__(self, folder: Path | None = None, local_rank: int = 0) -> None:
        self.limit: float | None = None
        self.has_left = False
        self._folder, self._thread = folder, None
        self._has_begun = False
        self._progress = self._pauses = 0
        self._position: Any = bytearray(_POSITION.size)
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
    try:
        epoch, step = _POSITION.unpack((folder / f"position-{local_rank}").read_bytes())
    except (OSError, struct.error):
        return "while starting"
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
        super().__init__(rank=rank, device=os.environ[DEVICE], display=display)
        self.take_over(lines)
        self._output = output

    def open_log(self, path: Path) -> None:
        super().open_log(path)
        sys.stdout.flush()
        with path.open("ab") as log:
            if not self._output.is_symlink():  # to an earlier log, such as that of a previous fold
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
    global _watch
    folder, rank, local_rank = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    output = folder / f"output-{local_rank}"
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream.fileno())
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    # Only of the crashed thread: the stacks of all would hide the last lines of the log.
    faulthandler.enable(all_threads=False)
    payload: dict[str, Any] = pickle.loads((folder / "payload").read_bytes())
    _watch = Watch(folder, local_rank)
    _watch.start(payload["launcher"])
    is_shown = rank == 0 and payload["has_display"]
    display = Relay(folder / "display", has_bar=payload["has_bar"]) if is_shown else None
    console = _RankConsole(output, rank, display, payload["lines"] if rank == restart_count() == 0 else [])
    ready = folder / f"ready-{local_rank}-{os.getpid()}"
    kind, message, value = _run(payload["call"], console, ready)
    console.close()
    _report(folder / f"outcome-{local_rank}", kind, message, value)
    ready.unlink(missing_ok=True)
    # On several hosts, a stop may also be part of a restart, which only the launcher can distinguish.
    has_left = _watch.has_left and not (kind == "stopped" and os.environ["GROUP_WORLD_SIZE"] != "1")
    code = 0 if kind == "done" or has_left else exit_code(value) if value else FAILED
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def _run(call: bytes, console: Console, ready: Path) -> tuple[str, str, Any]:
    """Call the function; return the kind of outcome, its message, and the value or the exception for the launcher."""
    raised: list[BaseException] = []
    is_running = True

    def stop(number: int, frame: Any) -> None:
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
            return "done", "", function(console, *arguments)
        finally:
            # The outcome is written next, which is fast.
            is_running = False
    except BaseException as error:
        # torch's imports, for one, turn an exception that a signal raises into another one.
        error = raised[0] if raised else error
        text = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            return "stopped", text, error
        if isinstance(error, RankLost):
            return "silent" if isinstance(error, PeerSilent) else "lost", str(error), error
        if isinstance(error, (InputError, TrainingFailed)):
            return "error", str(error), error
        traceback.print_exc()
        return "memory" if is_out_of_memory(error) else "crash", text, None


def _report(outcome: Path, kind: str, message: str, value: Any) -> None:
    """Write an outcome with the keys of torch's error files, and ours."""
    import cloudpickle

    pickled, now = base64.b64encode(cloudpickle.dumps(value)).decode(), time.time()
    report = {"message": message, "timestamp": str(int(now)), "kind": kind, "time": now, "value": pickled}
    write_atomically(outcome, json.dumps(report).encode())
