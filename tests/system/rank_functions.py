"""What the ranks of the launcher's tests do.

This module imports no torch, which would be most of what a rank costs. Functions that need it import it themselves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.distributed.launch import launch
from flatout.distributed.rank import current_watch
from flatout.utils.console import Console
from flatout.utils.errors import InputError, RankLost, Stopped

if TYPE_CHECKING:
    from flatout.distributed.world import World

TWO = ("cpu", "cpu")
# The command without pictures and report, which take longer than a small run.
FLATOUT = (
    sys.executable,
    "-c",
    "import sys; from flatout.cli.main import main; from flatout.train.request import Options\n"
    "Options.__init__.__kwdefaults__['report'] = False; sys.exit(main())",
)
RANK, ATTEMPT = "RANK", "TORCHELASTIC_RESTART_COUNT"


def run(function: Callable[..., Any], *args: Any, names: Sequence[str] = TWO, **options: Any) -> Any:
    """Launch ranks that call a function of this module; return what the first one returns."""
    return launch(function, args, names=names, threads=1, console=Console(), **options)


def is_main() -> bool:
    return os.environ[RANK] == "0"


def step(number: int) -> None:
    current_watch().report_step(0, number)


# --- what comes back --------------------------------------------------------------------------------------------------


def describe(console: Console, logs: Path) -> dict[str, str]:
    rank = os.environ[RANK]
    print("said before the log")
    console.note(f"rank {rank} notes")
    console.open_log(logs / f"rank-{rank}.log", "cpu")
    os.write(1, b"written past Python\n")
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")}


def do_nothing(console: Console) -> None:
    pass


def raise_the_same(console: Console, error: Exception) -> None:
    raise error


def start_grandchild(console: Console) -> int:
    if is_main():
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
    return 0


# --- ranks that do not go on ------------------------------------------------------------------------------------------


def fail(console: Console, logs: Path, how: str) -> None:
    console.open_log(logs / f"rank-{os.environ[RANK]}.log", "cpu")
    step(17)
    if is_main():
        time.sleep(1000)
    console.note("the last line")
    if how == "exception":
        raise ZeroDivisionError("of all things")
    if how == "memory":
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")
    os.kill(os.getpid(), getattr(signal, how))


def lose(console: Console) -> None:
    if not is_main():
        raise ValueError("the cause")
    # As a connection that is closed: when the other process has ended.
    outcome = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("outcome-1")
    while not outcome.exists():
        time.sleep(0.01)
    raise RankLost("rank 0 lost touch with the others")


def lose_on_one(console: Console) -> None:
    if is_main():
        raise RankLost("lost touch")
    # Until the agent ends it, which is no stop of the user's.
    time.sleep(1000)


def refuse_on_one(console: Console) -> None:
    if not is_main():
        raise InputError("these data are not mine")
    time.sleep(1000)


def stay_behind(world: "World") -> None:
    """Let the first rank wait for the second one."""
    import torch

    if world.rank == 1:
        time.sleep(1000)
    world.all_reduce(torch.ones(3))


def prepare_long_and_stay_behind(console: Console, world: "World") -> None:
    """Let the second rank wait in collectives of objects, before and after the first step; then the first rank."""
    world.barrier()
    if world.is_main:
        time.sleep(2.5)
    world.barrier()
    world.watch.report_step(0, 1)
    assert world.from_main(lambda: time.sleep(2.5) or "done") == "done"
    world.watch.report_step(0, 5)
    stay_behind(world)


def stop_soon_after(console: Console) -> None:
    """Join with short limits, and let the second rank be stopped."""
    from flatout.distributed import world as module
    from flatout.engine.factory import join

    module._MARGIN_SECONDS = 1.0
    world = join("2xcpu", hang_timeout=1.0)
    world.watch.report_step(0, 5)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    stay_behind(world)


def meet_until_told(console: Console, world: "World", folder: Path) -> None:
    """Add up, and stay until a file `told` is in the folder."""
    import torch

    assert world.all_reduce(torch.tensor(world.rank + 1)) == 3
    (folder / f"met-{world.rank}").touch()
    while not (folder / "told").exists():
        time.sleep(0.05)


# --- restarts ---------------------------------------------------------------------------------------------------------


def die_on_each_rank_once(console: Console) -> tuple[int, str]:
    attempt = int(os.environ[ATTEMPT])
    step(attempt)
    if attempt == int(os.environ[RANK]):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < 2:
        time.sleep(1000)
    return attempt, os.environ["WORLD_SIZE"]


def refuse_once(console: Console, folder: Path) -> None:
    (folder / f"attempt-{os.environ[ATTEMPT]}").touch()
    raise InputError("not this")


# --- ranks whose launcher is stopped or killed ------------------------------------------------------------------------


def stay(console: Console, folder: Path) -> None:
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))
    while not stop:
        time.sleep(0.05)
    (folder / f"stopped-{os.environ[RANK]}").touch()
    raise Stopped(stop[0])


def ignore_signals(console: Console, folder: Path) -> None:
    signal.signal(signal.SIGINT, lambda number, frame: (folder / f"heard-{os.environ[RANK]}").touch())
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))
    time.sleep(1000)


# --- several hosts ----------------------------------------------------------------------------------------------------


def wait_for_the_last(console: Console, folder: Path) -> None:
    import torch

    from flatout.engine.factory import join

    world = join("cpu")
    (folder / f"met-{world.rank}").touch()
    if world.rank == world.size - 1:
        time.sleep(1000)
    world.all_reduce(torch.ones(1))


def count_and_die(console: Console, folder: Path) -> None:
    """Write the sum over all ranks, where this rank is, and the addresses that listen in its processes; the last dies.

    Names of files are those of ranks.
    """
    import torch

    from flatout.engine.factory import join

    names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    world = join(f"{os.environ['LOCAL_WORLD_SIZE']}xcpu")
    total = int(world.all_reduce(torch.tensor(world.rank + 1)))
    processes = [psutil.Process(), psutil.Process(os.getppid())]
    listening = sorted({c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"})
    found = {"sum": total, "listening": listening, **{name: os.environ[name] for name in names}}
    (folder / os.environ[RANK]).write_text(json.dumps(found))
    world.barrier()
    step(3)
    if world.rank == world.size - 1:
        os._exit(7)
    world.all_reduce(torch.ones(1))
