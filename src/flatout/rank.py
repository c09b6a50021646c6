"""One process of a run that `launch.py` started: `python -m flatout.rank FOLDER`.

The folder is the launcher's, private and temporary. It has the payload, and gets what the process says (`said-RANK`,
until it opens its log), where its log is (`log-RANK`), rank 0's display (`display`) and how the process ended
(`outcome-RANK`).
"""

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import vitals
from flatout.console import Console, Relay
from flatout.errors import InputError, RankLost, Stopped, TrainingFailed
from flatout.files import write_atomically

DONE, FAILED, WRONG_INPUT, INTERRUPTED, SIGNALLED = 0, 1, 2, 130, 128

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What a rank is given.

    Attributes:
        launcher: its process.
        path: the launcher's sys.path, and
        python_path: its PYTHONPATH, which the start of the rank used up.
        call: the function and its arguments, from cloudpickle.
        shows: whether rank 0's console is to be shown, and
        has_bar: whether by a bar.
        lines: what the launcher's console printed before.
    """

    launcher: int
    path: list[str]
    python_path: str | None
    call: bytes
    shows: bool
    has_bar: bool
    lines: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: the result or the exception, from cloudpickle; empty where it cannot be pickled.
        error: the exception in one line; empty for a result.
        is_expected: whether it is one of those in `errors.py` or an interrupt, whose message is for the user.
        is_secondary: whether another rank is the cause.
        is_memory: whether memory did not suffice.
    """

    value: bytes
    error: str = ""
    is_expected: bool = False
    is_secondary: bool = False
    is_memory: bool = False


class _RankConsole(Console):
    """The console of a launched rank: once its log is open, all that the process writes goes there."""

    def __init__(self, folder: Path, payload: Payload, rank: int, device: str) -> None:
        display = None
        if rank == 0 and payload.shows:
            display = Relay(folder / "display", has_bar=payload.has_bar)
        super().__init__(rank=rank, device=device, display=display)
        if rank == 0:
            self.take_over(payload.lines)
        self._folder = folder

    def open_log(self, path: Path) -> None:
        super().open_log(path)
        said = said_file(self._folder, self.rank)
        sys.stdout.flush()
        with path.open("ab") as log:
            log.write(said.read_bytes())
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        log_file(self._folder, self.rank).write_text(str(path.absolute()), encoding="utf-8")


def said_file(folder: Path, rank: int) -> Path:
    """Return where a rank's output goes before its log is open."""
    return folder / f"said-{rank}"


def log_file(folder: Path, rank: int) -> Path:
    """Return the file that names a rank's log."""
    return folder / f"log-{rank}"


def outcome_file(folder: Path, rank: int) -> Path:
    """Return where a rank's outcome goes."""
    return folder / f"outcome-{rank}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the function of the payload as one rank; return the exit code as `flatout.cli.main` does."""
    (name,) = arguments or sys.argv[1:]
    folder, rank = Path(name), int(os.environ["RANK"])
    # One file for both, as two that write to the same file would overwrite each other.
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable()
    # A shell's background jobs ignore it, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device = os.environ["FLATOUT_DEVICE"]
    payload: Payload = pickle.loads((folder / "payload").read_bytes())
    life = vitals.attach(os.environ["FLATOUT_VITALS"], int(os.environ["LOCAL_RANK"]), device, rank=rank)
    life.watch(payload.launcher, lambda _: _remove_orphaned(folder, payload.launcher))
    sys.path[:] = payload.path
    os.environ.pop("PYTHONPATH")
    if payload.python_path is not None:
        os.environ["PYTHONPATH"] = payload.python_path
    console = _RankConsole(folder, payload, rank, device)
    code = _run(payload, console, outcome_file(folder, rank), life)
    console.close()
    return code


def _run(payload: Payload, console: Console, path: Path, life: vitals.Vitals) -> int:
    import cloudpickle

    try:
        with _termination_unwinds():
            function, arguments = pickle.loads(payload.call)
            result = function(console, *arguments)
            outcome, code = Outcome(value=cloudpickle.dumps(result)), DONE
    except BaseException as error:
        outcome, code = _outcome_of(error), _exit_code(error)
        if not outcome.is_expected:
            traceback.print_exc()
    write_atomically(path, pickle.dumps(outcome))
    if outcome.is_expected or not outcome.error:
        life.end()
    return code


def _outcome_of(error: BaseException) -> Outcome:
    import cloudpickle

    said = "".join(traceback.format_exception_only(error)).strip()
    try:
        value = cloudpickle.dumps(error)
    except Exception:
        # An exception may hold anything, a lock or a socket; what it says is kept.
        value = b""
    expected = isinstance(error, (InputError, TrainingFailed, Stopped, KeyboardInterrupt))
    memory = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in said.lower() for words in _OUT_OF_MEMORY)
    )
    return Outcome(
        value=value,
        error=said,
        is_expected=expected and not isinstance(error, RankLost),
        is_secondary=isinstance(error, RankLost),
        is_memory=memory and not expected,
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, InputError):
        return WRONG_INPUT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return SIGNALLED + error.signal_number if isinstance(error, Stopped) else FAILED


@contextlib.contextmanager
def _termination_unwinds():
    """Let SIGTERM end the rank as an exception does, until training takes the signal over."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        # From here on the outcome is written, which takes no time.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _remove_orphaned(folder: Path, launcher: int) -> None:
    """Remove the launcher's folder, if the launcher is gone and cannot do it."""
    if os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # As the module that the launcher knows: what is pickled here must be found there.
    from flatout import rank

    sys.exit(rank.main())
