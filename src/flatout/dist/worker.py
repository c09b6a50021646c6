"""One rank that the launcher started: `python -m flatout.dist.worker FOLDER`.

The launcher's temporary folder holds the payload. Each rank adds its output (`output-N`, later a link to its log), rank 0's
display (`display`) and its outcome (`outcome-N`, in the format of torch's error files), where N is the local rank. All pickles
in the folder come from processes of this run.
"""

import base64
import contextlib
import faulthandler
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.console import Console, Relay
from flatout.dist import heartbeat
from flatout.dist.env import DEVICE, restart_count
from flatout.errors import DONE, InputError, RankLost, Stopped, TrainingFailed, exit_code, is_out_of_memory
from flatout.files import write_atomically
from flatout.host import start_quickly

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# An interpreter may take this long to end; a library's threads may hang then.
_EXIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What a rank gets from its launcher: its process, search paths, console and call, `(function, args)` pickled."""

    launcher: int
    path: list[str]
    python_path: str | None
    has_display: bool
    has_bar: bool
    lines: list[tuple[str, str]]
    call: bytes


class _RankConsole(Console):
    """The console of a rank. Once its log is open, all output of the process goes there."""

    def __init__(self, folder: Path, payload: Payload, rank: int, device: str) -> None:
        is_shown = rank == 0 and payload.has_display
        display = Relay(folder / "display", has_bar=payload.has_bar) if is_shown else None
        super().__init__(rank=rank, device=device, display=display)
        if rank == 0 and restart_count() == 0:
            self.take_over(payload.lines)
        self._output = folder / f"output-{os.environ['LOCAL_RANK']}"

    def open_log(self, path: Path) -> None:
        super().open_log(path)
        sys.stdout.flush()
        with path.open("ab") as log:
            if not self._output.is_symlink():  # to an earlier log, as that of an earlier fold
                log.write(self._output.read_bytes())
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._output.unlink()
        self._output.symlink_to(path.absolute())


def main() -> int:
    """Run the function of the payload as one rank; return the exit code, as the command line does."""
    start_quickly()
    folder, rank, local_rank = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Signals wait until they can raise exceptions: the launcher sends them once there is a heartbeat.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # One file for both streams, as two that write to the same file would overwrite each other.
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    # Of the thread that crashed alone: the stacks of all would hide the last lines of the log.
    faulthandler.enable(all_threads=False)
    payload: Payload = pickle.loads((folder / "payload").read_bytes())
    sys.path[:] = payload.path
    os.environ.pop("PYTHONPATH")
    if payload.python_path is not None:
        os.environ["PYTHONPATH"] = payload.python_path
    device, outcome = os.environ[DEVICE], folder / f"outcome-{local_rank}"
    life = heartbeat.attach(os.environ["FLATOUT_HEARTBEAT"], local_rank, device, rank=rank)

    def lost(reason: str) -> None:
        if os.getppid() != payload.launcher:
            # Clean up in its place.
            shutil.rmtree(folder, ignore_errors=True)
        elif not outcome.exists():
            _report(outcome, "secondary", reason)

    life.watch(payload.launcher, lost)
    console = _RankConsole(folder, payload, rank, device)
    kind, message, value, code = _run(payload.call, console)
    console.close()
    _report(outcome, kind, message, value)
    if kind != "unexpected":
        life.end()
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def _run(call: bytes, console: Console) -> tuple[str, str, Any, int]:
    """Call the function; return the kind of the outcome, its message, a value for the launcher and the exit code."""
    raised: list[BaseException] = []
    try:
        with _signals_raise(raised):
            function, arguments = pickle.loads(call)
            return "result", "", function(console, *arguments), DONE
    except BaseException as error:
        # torch's imports, for one, turn an exception that a signal raises into another one.
        error = raised[0] if raised else error
        text = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            return "stop", text, error, exit_code(error)
        if isinstance(error, (InputError, TrainingFailed)):
            return "secondary" if isinstance(error, RankLost) else "expected", str(error), error, exit_code(error)
        traceback.print_exc()
        return "memory" if is_out_of_memory(error) else "unexpected", text, None, exit_code(error)


def _report(outcome: Path, kind: str, message: str, value: Any = None) -> None:
    """Write an outcome: torch's keys of an error file, and ours."""
    import cloudpickle

    pickled = base64.b64encode(cloudpickle.dumps(value)).decode()
    report = {"message": message, "timestamp": str(int(time.time())), "kind": kind, "value": pickled}
    write_atomically(outcome, json.dumps(report).encode())


@contextlib.contextmanager
def _signals_raise(raised: list[BaseException]) -> Iterator[None]:
    """Let SIGINT and SIGTERM raise exceptions, which `raised` collects, until training handles the signals itself."""

    def stop(number: int, frame: Any) -> None:
        raised.append(KeyboardInterrupt() if number == signal.SIGINT else Stopped(number))
        raise raised[-1]

    # A shell's background jobs ignore SIGINT, and their children inherit that.
    for number in _SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        # The outcome is written next, which takes no time.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


if __name__ == "__main__":
    # As the module that the launcher knows: what is pickled here must be found there.
    from flatout.dist import worker

    sys.exit(worker.main())
