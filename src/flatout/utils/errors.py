"""Expected errors that end a run, each with its exit code."""

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

DONE, FAILED, WRONG_INPUT, _SIGNALLED = 0, 1, 2, 128


class InputError(ValueError):
    """A file, a flag or a value is wrong. The message is all that the user sees: it names the cause and the fix.

    `details` are plain values that `--json` prints: complete lists where the message is shortened.
    """

    exit_code = WRONG_INPUT

    def __init__(self, message: str = "", details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})


class WeightsUnavailable(InputError):
    """Published weights are not on this host and cannot be downloaded now: no network, offline, refused.

    `problem` is the message without the fix, for callers that continue without the weights.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.problem = problem


class TrainingFailed(RuntimeError):
    """Training cannot continue: a loss that is not finite, a lost device, a full disk."""

    exit_code = FAILED


class CallbackFailed(TrainingFailed):
    """A user's callback raised an exception. The message names both."""


class DiskFull(TrainingFailed):
    """A file cannot be written for lack of space."""


class RankLost(TrainingFailed):
    """Another rank of the run has ended, so a collective operation cannot finish. Never the first cause."""


class Stopped(BaseException):
    """The user or the system asked the run to end, by the signal `signal_number`; no failure that could be handled."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.exit_code = _SIGNALLED + signal_number

    @property
    def how(self) -> str:
        """How the run ended, in a word."""
        return "interrupted" if self.signal_number == signal.SIGINT else "terminated"


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals by a function inside the block; only in the main thread."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return _SIGNALLED + signal.SIGINT
    return getattr(error, "exit_code", FAILED)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory; torch raises RuntimeError for both."""
    said = re.search(r"out of memory|can(no|')t allocate memory", str(error), re.I)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(said))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its chain of causes, the first cause last."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def one_line(text: object) -> str:
    """Shorten a text from a file and escape unprintable characters, for a message."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:300])
