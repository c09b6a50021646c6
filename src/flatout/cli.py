"""The command line: signals, and how a command ends: one message and an exit code."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import InputError, Stopped, TrainingFailed
from flatout.parser import WRONG_INPUT, make_parser

DONE, FAILED, INTERRUPTED = 0, 1, 130
SIGNALLED = 128


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
    except InputError as error:
        print(f"flatout: {error}", file=sys.stderr)
        return WRONG_INPUT
    except TrainingFailed as error:
        print(f"flatout: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("flatout: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone, as `| head` does; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Stopped as stopped:
        return SIGNALLED + stopped.signal_number
    except _Terminated:
        return SIGNALLED + signal.SIGTERM
    return DONE


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does, so that locks and temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminated(Exception):
    """SIGTERM where nothing has taken it over."""
