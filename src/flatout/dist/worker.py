"""One process of a run that `launch.py` started: `python -m flatout.dist.worker FOLDER`.

The folder is the launcher's, private and temporary. It has the payload, and gets what the process says (`said-RANK`,
until it opens its log), where its log is (`log-RANK`), rank 0's display (`display`) and how the process ended
(`outcome-RANK`). What is pickled there comes from this run's own processes.
"""

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.dist import heartbeat as vitals
from flatout.console import Console, Relay
from flatout.errors import DONE, InputError, RankLost, Stopped, TrainingFailed, exit_code, is_out_of_memory
from flatout.files import write_atomically

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
        value: the result, or an expected exception, from cloudpickle.
        error: the exception in one line; empty for a result.
        is_expected: whether it is one of those in `errors.py` or an interrupt, whose message is for the user.
        is_stop: whether somebody asked for the end.
        is_secondary: whether another rank is the cause.
        is_memory: whether memory did not suffice.
    """

    value: bytes
    error: str = ""
    is_expected: bool = False
    is_stop: bool = False
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
        before = path.stat().st_size if path.exists() else 0
        super().open_log(path)
        sys.stdout.flush()
        with path.open("ab") as log:
            log.write(said_file(self._folder, self.rank).read_bytes())
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _log_name(self._folder, self.rank).write_text(f"{before} {path.absolute()}", encoding="utf-8")


def said_file(folder: Path, rank: int) -> Path:
    """Return where a rank's output goes before its log is open."""
    return folder / f"said-{rank}"


def log_of(folder: Path, rank: int) -> tuple[Path | None, str]:
    """Return where a rank's log is and what it has written there; without a path, what it said before it had one."""
    named = _log_name(folder, rank)
    if not named.exists():
        said = said_file(folder, rank)
        return None, said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    start, _, name = named.read_text(encoding="utf-8").partition(" ")
    try:
        with Path(name).open("rb") as log:
            log.seek(int(start))
            return Path(name), log.read().decode(errors="replace")
    except OSError as error:
        return Path(name), f"(cannot be read: {error.strerror})"


def _log_name(folder: Path, rank: int) -> Path:
    """Return the file that says where a rank's log is, and at which byte of it this run begins."""
    return folder / f"log-{rank}"


def outcome_file(folder: Path, rank: int) -> Path:
    """Return where a rank's outcome goes."""
    return folder / f"outcome-{rank}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the function of the payload as one rank; return the exit code as `flatout.cli.main` does."""
    (name,) = arguments or sys.argv[1:]
    folder, rank = Path(name), int(os.environ["RANK"])
    # Signals wait until they unwind what runs: the launcher sends them once the vitals are there.
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
    device = os.environ["FLATOUT_DEVICE"]
    life = vitals.attach(os.environ["FLATOUT_VITALS"], int(os.environ["LOCAL_RANK"]), device, rank=rank)
    life.watch(payload.launcher, lambda reason: _lost(reason, folder, rank, payload.launcher))
    console = _RankConsole(folder, payload, rank, device)
    outcome, code = _run(payload.call, console)
    console.close()
    write_atomically(outcome_file(folder, rank), pickle.dumps(outcome))
    if outcome.is_expected or not outcome.error:
        life.end()
    return code


def _run(call: bytes, console: Console) -> tuple[Outcome, int]:
    """Call the function; return its outcome and the exit code."""
    import cloudpickle

    raised: list[BaseException] = []
    try:
        with _signals_unwind(raised):
            function, arguments = pickle.loads(call)
            result = function(console, *arguments)
            return Outcome(value=cloudpickle.dumps(result)), DONE
    except BaseException as error:
        # An import that a signal cuts short may turn its exception into one of its own, as torch's does.
        error = raised[0] if raised else error
        outcome = _outcome_of(error)
        if not outcome.is_expected:
            traceback.print_exc()
        return outcome, exit_code(error)


def _outcome_of(error: BaseException) -> Outcome:
    import cloudpickle

    said = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, RankLost):
        return Outcome(value=b"", error=str(error), is_secondary=True)
    if isinstance(error, (InputError, TrainingFailed, Stopped, KeyboardInterrupt)):
        is_stop = isinstance(error, (Stopped, KeyboardInterrupt))
        return Outcome(value=cloudpickle.dumps(error), error=str(error) or said, is_expected=True, is_stop=is_stop)
    return Outcome(value=b"", error=said, is_memory=is_out_of_memory(error))


@contextlib.contextmanager
def _signals_unwind(raised: list[BaseException]) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the rank as exceptions do, until training takes them over.

    Args:
        raised: takes those exceptions.
    """

    def stop(number: int, frame: Any) -> None:
        raised.append(KeyboardInterrupt() if number == signal.SIGINT else Stopped(number))
        raise raised[-1]

    # A shell's background jobs ignore SIGINT, and their children inherit that.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        # From here on the outcome is written, which takes no time.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _lost(reason: str, folder: Path, rank: int, launcher: int) -> None:
    """Leave word why the watchdog ends this rank; where the launcher is gone, clean up in its place."""
    if os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)
        return
    # Not over an outcome that the main thread has reached.
    with contextlib.suppress(FileExistsError), outcome_file(folder, rank).open("xb") as file:
        file.write(pickle.dumps(Outcome(value=b"", error=reason, is_secondary=True)))


if __name__ == "__main__":
    # As the module that the launcher knows: what is pickled here must be found there.
    from flatout.dist import worker as rank

    sys.exit(rank.main())
