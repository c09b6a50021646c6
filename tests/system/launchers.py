"""Processes that launch ranks and are sent signals: forks of one process that has imported torch for all of them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# What a run may take to end once something is wrong with it; and its start on a busy machine.
END_SECONDS, START_SECONDS = 15, 60


def eventually(condition: Callable[[], Any], seconds: float = END_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Launcher:
    """A process that launches two ranks, which call a function of `rank_functions` with a folder."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.process, self._errors = psutil.Process(pid), folder / "errors"
        files = [folder / f"pid-{rank}" for rank in (0, 1)]
        assert eventually(lambda: all(f.exists() and f.read_text() for f in files), START_SECONDS), self.error()
        self.ranks = [int(f.read_text()) for f in files]

    def error(self) -> str:
        """Return the last line on standard error once the process has ended."""
        self.process.wait(END_SECONDS)
        return self._errors.read_text().splitlines()[-1]


class LauncherServer:
    """The process that forks the launchers."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from tests.system import launchers; launchers.serve()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, function: Callable[..., None], folder: Path, **limits: float) -> Launcher:
        """Fork a launcher, and wait for its ranks.

        Args:
            function: the ranks call it.
            folder: its second argument, where each rank announces itself.
            limits: other values for constants of `heartbeat`.
        """
        assert self.process.stdin
        assert self.process.stdout
        order = {"function": function.__name__, "folder": str(folder), "limits": limits, "environment": {**os.environ}}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Launcher(int(self.process.stdout.readline()), folder)

    def close(self) -> None:
        self.process.communicate()


def serve() -> None:
    """Fork a launcher for each line of standard input, and print its process."""
    import flatout.distributed.elastic
    import flatout.distributed.rendezvous  # noqa: F401

    # Launchers that have ended leave no zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _launch(**json.loads(line))
    return None


def _launch(function: str, folder: str, limits: dict[str, float], environment: dict[str, str]) -> None:
    from flatout.dist import heartbeat
    from tests.system import rank_functions

    with (Path(folder) / "errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    for number, name in ((0, os.devnull), (1, os.devnull)):
        os.dup2(os.open(name, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for name, seconds in limits.items():
        setattr(heartbeat, name, seconds)
    rank_functions.run(getattr(rank_functions, function), Path(folder))
