"""The command line: signals, and how a command ends: one message and an exit code."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import DONE, InputError, Stopped, TrainingFailed, exit_code
from flatout.parser import make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 training failed, 2 wrong input, 130 or 143 stopped."""
    parsed = make_parser().parse_args(arguments)
    # How often a thread of the OpenMP that torch brings looks for work before it sleeps. By default that is so long
    # that on a busy machine waiting threads keep others from the work they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A class or file name that the terminal cannot show is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        with _termination_unwinds():
            parsed.command(parsed)
    except BrokenPipeError:
        # Whoever read the output has gone, as `| head` does; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InputError, TrainingFailed, Stopped, KeyboardInterrupt) as error:
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        if not isinstance(error, Stopped):
            print(f"flatout: {message}", file=sys.stderr)
        return exit_code(error)
    return DONE


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does, so that locks and temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
