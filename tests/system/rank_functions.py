"""What the ranks of the launcher's tests do.

This module imports no torch, which would be most of what a rank costs. Functions that need it import it themselves.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.console import Console
from flatout.dist import heartbeat
from flatout.distributed.launch import launch
from flatout.errors import InputError, RankLost, Stopped, TrainingFailed

if TYPE_CHECKING:
    from flatout.distributed.world import World

TWO = ("cpu", "cpu")
RANK = "RANK"


def run(function: Callable[..., Any], *args: Any, names: Sequence[str] = TWO, **options: Any) -> Any:
    """Launch ranks that call a function of this module; return what the first one returns."""
    return spawn(function, args, names=names, threads=1, console=Console(), **options)


def is_main() -> bool:
    return os.environ[RANK] == "0"


def step(number: int) -> None:
    heartbeat.current().report_step(0, number)


def wait_for_the_others() -> None:
    """Block as a collective does in which not all take part."""
    with heartbeat.current().waiting("all_reduce"):
        time.sleep(1000)


# --- what comes back --------------------------------------------------------------------------------------------------


def describe(console: Console, logs: Path) -> dict[str, str]:
    rank = os.environ[RANK]
    print("said before the log")
    console.note(f"rank {rank} notes")
    console.open_log(logs / f"rank-{rank}.log")
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


def end_while_looked_at(console: Console) -> str:
    """Rank 1 ends between rank 0's reading of its state and the look at its process."""
    if not is_main():
        time.sleep(1.0)
        return ""
    status, looked = heartbeat._status, []

    def see_it_end(pid: int) -> str:
        if pid != os.getpid():
            psutil.wait_procs([psutil.Process(pid)], timeout=10)
            looked.append(pid)
        return status(pid)

    heartbeat._status = see_it_end
    while not looked:
        time.sleep(0.05)
    # A rank that takes another one for lost is ended after this time.
    time.sleep(heartbeat.GRACE_SECONDS + 1.0)
    return "went on"


# --- ranks that do not go on ------------------------------------------------------------------------------------------


def fail(console: Console, logs: Path, how: str) -> None:
    console.open_log(logs / f"rank-{os.environ[RANK]}.log")
    step(17)
    if is_main():
        wait_for_the_others()
    console.note("the last line")
    if how == "exception":
        raise ZeroDivisionError("of all things")
    if how == "memory":
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")
    if how == "exit":
        os._exit(7)
    if how == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(1000)


def lose(console: Console) -> None:
    if is_main():
        raise RankLost("rank 0 lost touch with the others")
    time.sleep(1.5)
    raise ValueError("the cause")


def lose_all(console: Console) -> None:
    raise RankLost("lost touch")


def refuse_on_one(console: Console) -> None:
    if not is_main():
        raise InputError("these data are not mine")
    wait_for_the_others()


def meet(console: Console, world: "World") -> tuple[int, list[str]]:
    """Return the sum over all ranks, and what listens meanwhile in this process and the launcher."""
    import torch

    total = world.all_reduce(torch.tensor(world.rank + 1))
    processes = [psutil.Process(), psutil.Process(os.getppid())]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    world.barrier()
    return int(total), listening


def meet_until_told(console: Console, world: "World", folder: Path) -> None:
    """Meet, and stay until a file `told` is in the folder."""
    meet(console, world)
    (folder / f"met-{world.rank}").touch()
    while not (folder / "told").exists():
        world.heartbeat.keep_alive()
        time.sleep(0.05)


def meet_and_part(console: Console, world: "World", folder: Path) -> None:
    """Meet; then disagree in a collective of objects, note what is said about that, and then in one of tensors."""
    import torch

    (folder / f"met-{world.rank}").write_text(json.dumps(meet(console, world)))
    try:
        world.broadcast_object(1) if world.is_main else world.barrier()
    except TrainingFailed as error:
        (folder / f"said-{world.rank}").write_text(str(error))
    world.all_reduce(torch.ones(1)) if world.is_main else world.broadcast([torch.ones(1)])


def die_while_reporting(console: Console) -> None:
    Path.replace = lambda self, target: os._exit(9)  # pyright: ignore[reportAttributeAccessIssue]
    os.replace = Path.replace  # pyright: ignore[reportAttributeAccessIssue]


# --- restarts ---------------------------------------------------------------------------------------------------------


def die_on_each_rank_once(console: Console) -> tuple[int, str]:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    step(attempt)
    if attempt == int(os.environ[RANK]):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < 2:
        wait_for_the_others()
    return attempt, os.environ["WORLD_SIZE"]


def refuse_once(console: Console, folder: Path) -> None:
    (folder / f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    raise InputError("not this")


# --- ranks whose launcher is stopped or killed ------------------------------------------------------------------------


def announce(folder: Path) -> None:
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))


def stay(console: Console, folder: Path) -> None:
    stop = []
    signal.signal(signal.SIGINT, lambda number, frame: stop.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    announce(folder)
    while not stop:
        step(1)
        time.sleep(0.05)
    (folder / f"stopped-{os.environ[RANK]}").touch()
    raise Stopped(stop[0])


def wait_for_each_other(console: Console, folder: Path) -> None:
    # As in a collective of torch's, where Python handles no signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    announce(folder)
    step(1)
    wait_for_the_others()


def ignore_signals(console: Console, folder: Path) -> None:
    signal.signal(signal.SIGINT, lambda number, frame: (folder / f"heard-{os.environ[RANK]}").touch())
    announce(folder)
    while True:
        step(1)
        time.sleep(0.05)


# --- several hosts ----------------------------------------------------------------------------------------------------


def describe_place(console: Console) -> dict[str, str]:
    """Connect to the store; return the variables that describe this rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    place = {name: os.environ[name] for name in names}
    socket.create_connection((place["MASTER_ADDR"], int(place["MASTER_PORT"])), timeout=10).close()
    return place


def count(console: Console) -> int:
    """Return the sum over all ranks."""
    from flatout.engine.factory import join

    world = join(f"{os.environ['LOCAL_WORLD_SIZE']}xcpu")
    total, listening = meet(console, world)
    world.leave()
    assert set(listening) <= {"127.0.0.1"}
    return total


def die_on_the_second_host(console: Console, how: str) -> None:
    step(3)
    if not is_main():
        if how == "hang":
            time.sleep(1000)
        os._exit(7)
    wait_for_the_others()
