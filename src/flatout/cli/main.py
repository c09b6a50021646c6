"""The command line: runs a command, prints its result, and converts errors to one message and an exit code."""

import atexit
import gc
import io
import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence

from flatout.cli.commands import COMMANDS
from flatout.cli.flags import parse
from flatout.distributed.environment import Launched, launched
from flatout.utils.console import Console
from flatout.utils.errors import DONE, InputError, Stopped, TrainingFailed, exit_code, signals_handled

# Hostile names in data could contain terminal escape sequences.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 training failed, 2 wrong input, 130 or 143 stopped.

    If another launcher has started the ranks, an error ends this process with its code.
    """
    args = parse(arguments)
    # At exit, Python would search the objects of torch and timm for garbage, for a second.
    atexit.register(gc.freeze)
    # Limits spinning of idle OpenMP threads, whose default starves other processes of a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # torch's warnings about lost connections repeat flatout's messages.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Class and file names may have characters that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    found: Launched | None = None
    try:
        found = launched()
        # SIGTERM ends the command as an exception does, so that locks and temporary files are removed.
        with signals_handled(_stop, signal.SIGTERM):
            _run(args, found.rank if found else 0)
    except (InputError, TrainingFailed, Stopped, KeyboardInterrupt) as error:
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        if not isinstance(error, Stopped):
            print(f"flatout: {message.translate(_ESCAPED)}", file=sys.stderr)
        if isinstance(error, InputError) and error.details and getattr(args, "json", False):
            print(json.dumps({"error": message, **error.details}, indent=2), flush=True)
        if found and found.size > 1:
            # torch's threads could crash the interpreter's exit; ending them first would wait for the other ranks.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code(error))
        return exit_code(error)
    return DONE


def _run(args: Namespace, rank: int) -> None:
    """Run a command. Only rank 0 prints; progress goes to stderr where stdout has a result."""
    console = Console(None if rank else sys.stdout if args.command == "train" else sys.stderr, rank=rank)
    try:
        output = COMMANDS[args.command].do(args, console)
    finally:
        console.close()
    if output is None or rank:
        return
    from flatout.utils.run_files import plain  # imports NumPy, which the help texts do without

    result, lines = output
    try:
        print(json.dumps(plain(result), indent=2) if getattr(args, "json", False) else "\n".join(lines), flush=True)
    except BrokenPipeError:
        # The pipe is closed, as by `| head`. Python would report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise InputError(f"the standard output cannot be written: {error.strerror}") from None


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)
