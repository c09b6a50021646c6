"""One rank that the launcher started: `python -m flatout.dist.worker FOLDER`.

The launcher's temporary folder holds the payload. Each rank adds its output (`output-N`, until its log is open), the path of
its log (`log-N`), rank 0's display (`display`) and its outcome (`outcome-N`), where N is the local rank. The outcome has the
format of torch's error files. All pickles in the folder come from processes of this run.
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
from flatout.dist.env import restart_count
from flatout.errors import DONE, InputError, RankLost, Stopped, TrainingFailed, exit_code, is_out_of_memory
from flatout.files import write_atomically

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How an interpreter may take to end; a library's threads may hang then.
_EXIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What a rank gets from its launcher.

    Attributes:
        launcher: its process.
        path: its sys.path.
        python_path: its PYTHONPATH; the rank was started with another one.
        call: the function and its arguments, from cloudpickle.
        has_display, has_bar: whether rank 0's console is shown, and with a progress bar.
        lines: what the launcher's console has printed.
    """

    launcher: int
    path: list[str]
    python_path: str | None
    call: bytes
    has_display: bool
    has_bar: bool
    lines: list[tuple[str, str]]


class _RankConsole(Console):
    """The console of a rank. Once its log is open, all output of the process goes there."""

    def __init__(self, folder: Path, payload: Payload, rank: int, device: str) -> None:
        display = None
        if rank == 0 and payload.has_display:
            display = Relay(folder / "display", has_bar=payload.has_bar)
        super().__init__(rank=rank, device=device, display=display)
        if rank == 0 and restart_count() == 0:
            self.take_over(payload.lines)
        self._folder = folder

    def open_log(self, path: Path) -> None:
        before = path.stat().st_size if path.exists() else 0
        super().open_log(path)
        sys.stdout.flush()
        local_rank = os.environ["LOCAL_RANK"]
        with path.open("ab") as log:
            log.write((self._folder / f"output-{local_rank}").read_bytes())
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        (self._folder / f"log-{local_rank}").write_text(f"{before} {path.absolute()}", encoding="utf-8")


def read_log(folder: Path, local_rank: int) -> tuple[Path | None, str]:
    """Return the path of a rank's log and what this run has written there; before it is open, None and the output."""
    named, output = folder / f"log-{local_rank}", folder / f"output-{local_rank}"
    if not named.exists():
        return None, output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    start, _, name = named.read_text(encoding="utf-8").partition(" ")
    try:
        with Path(name).open("rb") as log:
            log.seek(int(start))
            return Path(name), log.read().decode(errors="replace")
    except OSError as error:
        return Path(name), f"(cannot be read: {error.strerror})"


def main() -> int:
    """Run the function of the payload as one rank; return the exit code, as the command line does."""
    folder, rank, local_rank = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Signals wait until they can raise exceptions: the launcher sends them once there is a heartbeat.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # One file for both, as two that write to the same file would overwrite each other.
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable()
    payload: Payload = pickle.loads((folder / "payload").read_bytes())
    sys.path[:] = payload.path
    os.environ.pop("PYTHONPATH")
    if payload.python_path is not None:
        os.environ["PYTHONPATH"] = payload.python_path
    device, outcome = os.environ["FLATOUT_DEVICE"], folder / f"outcome-{local_rank}"
    life = heartbeat.attach(os.environ["FLATOUT_HEARTBEAT"], local_rank, device, rank=rank)
    life.watch(payload.launcher, lambda reason: _lost(reason, folder, outcome, payload.launcher))
    console = _RankConsole(folder, payload, rank, device)
    report, code = _run(payload.call, console)
    console.close()
    _write(outcome, report)
    if report["kind"] != "unexpected":
        life.end()
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def _run(call: bytes, console: Console) -> tuple[dict[str, str], int]:
    """Call the function; return its outcome and the exit code."""
    raised: list[BaseException] = []
    try:
        with _signals_raise(raised):
            function, arguments = pickle.loads(call)
            return _report("result", "", function(console, *arguments)), DONE
    except BaseException as error:
        # torch's imports, for one, turn an exception that a signal raises into another one.
        error = raised[0] if raised else error
        text = str(error) or "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, RankLost):
            return _report("secondary", text), exit_code(error)
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            return _report("stop", text, error), exit_code(error)
        if isinstance(error, (InputError, TrainingFailed)):
            return _report("expected", text, error), exit_code(error)
        traceback.print_exc()
        text = "".join(traceback.format_exception_only(error)).strip()
        return _report("memory" if is_out_of_memory(error) else "unexpected", text), exit_code(error)


def _report(kind: str, message: str, value: Any = None) -> dict[str, str]:
    """Return an outcome in the format of torch's error files, with its kind and a value for the launcher."""
    import cloudpickle

    pickled = base64.b64encode(cloudpickle.dumps(value)).decode()
    return {"message": message, "timestamp": str(int(time.time())), "kind": kind, "value": pickled}


def _write(outcome: Path, report: dict[str, str]) -> None:
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


def _lost(reason: str, folder: Path, outcome: Path, launcher: int) -> None:
    """Report why the heartbeat thread ends this rank; clean up in place of a launcher that is gone."""
    if os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)
    elif not outcome.exists():
        _write(outcome, _report("secondary", reason))


if __name__ == "__main__":
    # As the module that the launcher knows: what is pickled here must be found there.
    from flatout.dist import worker

    sys.exit(worker.main())
