"""Processes of a run: what comes back from them, and how they end when one of them, or the launcher, does not go on."""

import io
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flatout.console import Console
from flatout.dist import heartbeat
from flatout.dist.hosts import Hosts
from flatout.dist.launcher import spawn
from flatout.dist.world import World
from flatout.errors import InputError, RankLost, Stopped, TrainingFailed
from flatout.run.launch import run_on_devices

# What a run may take to end once something is wrong with it; and its start on a busy machine.
END_SECONDS, START_SECONDS = 15, 60
TWO = ("cpu", "cpu")
RANK = "RANK"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no process, no temporary file and no listening socket outlives a test."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = listening()
    yield
    assert eventually(lambda: not psutil.Process().children(recursive=True))
    assert eventually(lambda: not list(temporary.iterdir())), list(temporary.iterdir())
    assert eventually(lambda: listening() <= before)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher in this process take ranks for lost sooner."""
    for name in ("SILENT_SECONDS", "STALLED_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(heartbeat, name, 2.5)


def listening() -> set[int]:
    """Return the ports on which this process listens; groups of torch's that other tests made may be among them."""
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}


def eventually(condition: Callable[[], Any], seconds: float = END_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def run(function: Callable[..., Any], *args: Any, names: Sequence[str] = TWO, **options: Any) -> Any:
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


def test_the_first_rank_answers_and_is_shown_and_each_keeps_its_log(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    shown = io.StringIO()
    console = Console(shown)
    console.note("before the start")
    answer = spawn(describe, (tmp_path,), names=TWO, threads=3, console=console)
    assert answer == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    assert shown.getvalue().splitlines() == ["before the start", "rank 0 notes"]
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert re.search(rf"^\d{{4}}-\S+ rank {rank} \(cpu\)  rank {rank} notes$", log, re.MULTILINE)
        assert "said before the log\n" in log
        assert "written past Python\n" in log
    assert "before the start" in logs[0]
    assert "before the start" not in logs[1]


def meet(console: Console) -> tuple[int, list[str]]:
    """Add up over the ranks through torch; return what listens meanwhile in this process and the launcher."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    processes = [psutil.Process(), psutil.Process(os.getppid())]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    dist.barrier()
    dist.destroy_process_group()
    return int(total), listening


def test_ranks_meet_and_listen_on_loopback_alone() -> None:
    total, listening = run(meet)
    assert total == 3
    assert listening
    assert set(listening) == {"127.0.0.1"}


def raise_the_same(console: Console, error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [InputError("--flag 1: no"), TrainingFailed("the loss is not finite"), Stopped(15)])
def test_an_error_for_the_user_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run(raise_the_same, error)
    assert caught.value.args == error.args


SCRIPT = """
    import sys
    from flatout.console import Console
    from flatout.dist.launcher import spawn

    class Model:
        def __init__(self, size):
            self.size = size

    def grow(console, model):
        return Model(model.size + 1)

    grown = spawn(grow, (Model(3),), names=["cpu", "cpu"], threads=1, console=Console(sys.stdout))
    print(type(grown) is Model, grown.size)
"""


def test_classes_of_a_script_without_a_guard_go_and_come_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert (done.stdout, done.stderr) == ("True 4\n", "")


def run_in_thread(result: list[Any]) -> None:
    result.append(run(meet))


def test_it_works_beside_the_main_thread() -> None:
    result: list[Any] = []
    thread = threading.Thread(target=run_in_thread, args=(result,))
    thread.start()
    thread.join(START_SECONDS)
    assert result[0][0] == 3


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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exception", "failed in epoch 1, step 17: ZeroDivisionError: of all things"),
        ("memory", "ran out of memory in epoch 1, step 17: .*can't allocate memory.* smaller batch_size "),
        ("exit", "ended with exit code 7 in epoch 1, step 17"),
        ("SIGKILL", "was killed by SIGKILL in epoch 1, step 17"),
        ("SIGSEGV", "was killed by SIGSEGV in epoch 1, step 17"),
        ("SIGSTOP", r"did not answer for \d+ s in epoch 1, step 17 and was killed"),
        ("hang", r"kept all others waiting for \d+ s in epoch 1, step 17 and was killed"),
    ],
)
@pytest.mark.usefixtures("short_limits")
def test_a_lost_rank_ends_the_run_and_is_named(how: str, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        run(fail, tmp_path, how)
    assert time.monotonic() - began < START_SECONDS + END_SECONDS
    assert not isinstance(caught.value, RankLost)
    assert re.match(rf"rank 1 \(cpu, process \d+\) {said}", str(caught.value))
    assert "the other ranks were ended" in str(caught.value)
    assert "rank-1.log" in str(caught.value)
    assert "rank 1 (cpu)  the last line" in str(caught.value)


def lose(console: Console) -> None:
    if is_main():
        raise RankLost("rank 0 lost touch with the others")
    time.sleep(1.5)
    raise ValueError("the cause")


def test_a_rank_that_lost_another_is_never_the_cause() -> None:
    with pytest.raises(TrainingFailed, match=r"^rank 1 .* ValueError: the cause"):
        run(lose)


def lose_all(console: Console) -> None:
    raise RankLost("lost touch")


def test_ranks_that_lost_touch_say_so_where_nothing_else_is_known() -> None:
    with pytest.raises(RankLost, match="lost touch"):
        run(lose_all)


def refuse_on_one(console: Console) -> None:
    if not is_main():
        raise InputError("these data are not mine")
    wait_for_the_others()


def test_what_one_rank_refuses_ends_the_run() -> None:
    with pytest.raises(InputError, match="not mine"):
        run(refuse_on_one)


def call_different_collectives(console: Console, world: World, how: str) -> None:
    world.barrier()
    if how == "objects":
        world.broadcast_object(1) if world.is_main else world.barrier()
    world.all_reduce(torch.ones(1)) if world.is_main else world.broadcast([torch.ones(1)])


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("objects", "rank 0 calls broadcast_object in .*call_different_collectives, rank 1 calls barrier in"),
        ("tensors", r"rank 1 .* waited in broadcast .*rank 0 in sum .* for \d+ s while starting and was killed"),
    ],
)
def test_ranks_in_different_collectives_are_named(how: str, said: str) -> None:
    """Otherwise they would wait for each other for ever."""
    options: dict[str, Any] = {"spec": "2xcpu", "engine": "torch", "console": Console(), "threads": 1}
    with pytest.raises(TrainingFailed, match=said):
        run_on_devices(call_different_collectives, (how,), **options)


# --- restarts ---------------------------------------------------------------------------------------------------------


def die_on_each_rank_once(console: Console, folder: Path) -> tuple[int, str]:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    step(attempt)
    if attempt == int(os.environ[RANK]):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < 2:
        wait_for_the_others()
    return attempt, os.environ["WORLD_SIZE"]


def test_ranks_are_restarted_together(tmp_path: Path) -> None:
    shown = io.StringIO()
    options: dict[str, Any] = {"names": TWO, "threads": 1, "console": Console(shown), "restarts": 2}
    assert spawn(die_on_each_rank_once, (tmp_path,), **options) == (2, "2")
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        said = rf"rank {rank} \(cpu, process \d+\) was killed by SIGKILL in epoch 1, step {rank}"
        assert re.fullmatch(rf"{said}: restart {rank + 1} of 2 from the newest checkpoint", line)


def refuse_once(console: Console, folder: Path) -> None:
    (folder / f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    raise InputError("not this")


def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not this"):
        run(refuse_once, tmp_path, names=["cpu"], restarts=3)
    assert [path.name for path in tmp_path.glob("attempt-*")] == ["attempt-0"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_full_temporary_folder_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(TrainingFailed, match=r"temporary folder cannot be written: File too large; .*TMPDIR"):
            run(describe, Path("nowhere"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def die_while_reporting(console: Console) -> None:
    Path.replace = lambda self, target: os._exit(9)  # pyright: ignore[reportAttributeAccessIssue]
    os.replace = Path.replace  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rank_that_dies_while_it_writes_its_outcome_is_named() -> None:
    with pytest.raises(TrainingFailed, match=r"rank 0 .* ended with exit code 9"):
        run(die_while_reporting, names=["cpu"])


def start_grandchild(console: Console) -> int:
    if is_main():
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
    return 0


def test_what_a_rank_has_started_ends_with_it() -> None:
    pid = run(start_grandchild)
    assert eventually(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the launcher -----------------------------------------------------------------------------------------------------


def stay(console: Console, folder: Path) -> None:
    stop = []
    signal.signal(signal.SIGINT, lambda number, frame: stop.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))
    while not stop:
        step(1)
        time.sleep(0.05)
    (folder / f"stopped-{os.environ[RANK]}").touch()
    raise Stopped(stop[0])


def start_launcher(folder: Path, function: Callable[..., None] = stay) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a launcher whose ranks stay; return it and their processes."""
    command = f"""
        from pathlib import Path
        from tests.system import test_launch
        test_launch.run(test_launch.{function.__name__}, Path({str(folder)!r}))
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(command)], stderr=subprocess.PIPE, text=True)
    files = [folder / f"pid-{rank}" for rank in (0, 1)]
    assert eventually(lambda: all(f.exists() and f.read_text() for f in files), START_SECONDS)
    return launcher, [int(f.read_text()) for f in files]


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path)
    # A stopped rank cannot see for itself that the launcher is gone.
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.communicate()
    assert eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "Stopped: 2"), (signal.SIGTERM, "Stopped: 15")])
def test_a_signal_reaches_all_ranks_and_they_end_by_themselves(number: int, error: str, tmp_path: Path) -> None:
    launcher, _ = start_launcher(tmp_path)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=END_SECONDS)
    assert said.splitlines()[-1] == f"flatout.errors.{error}"
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}


def wait_for_each_other(console: Console, folder: Path) -> None:
    # As in a collective of torch's, where Python handles no signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))
    step(1)
    wait_for_the_others()


def test_sigterm_ends_ranks_that_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_TIMEOUT_SCALE", "0.3")
    launcher, pids = start_launcher(tmp_path, wait_for_each_other)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=END_SECONDS)
    assert said.splitlines()[-1] == "flatout.errors.Stopped: 15"
    assert not any(map(is_alive, pids))


def ignore_signals(console: Console, folder: Path) -> None:
    signal.signal(signal.SIGINT, lambda number, frame: (folder / f"heard-{os.environ[RANK]}").touch())
    (folder / f"pid-{os.environ[RANK]}").write_text(str(os.getpid()))
    while True:
        step(1)
        time.sleep(0.05)


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, ignore_signals)
    launcher.send_signal(signal.SIGINT)
    assert eventually(lambda: len(list(tmp_path.glob("heard-*"))) == 2)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=END_SECONDS)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert not any(map(is_alive, pids))


# --- several hosts ----------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def host(rank: int, port: int, **changes: Any) -> Hosts:
    return Hosts(**{"nodes": "2", "node_rank": rank, "rendezvous": f"127.0.0.1:{port}", "timeout": 30.0} | changes)


def run_hosts(function: Callable[..., Any], hosts: list[Hosts], sizes: list[int], *args: Any) -> list[Any]:
    """Run hosts side by side, each in a thread; return their answers or errors."""
    answers: list[Any] = [None] * len(hosts)

    def go(number: int) -> None:
        try:
            answers[number] = run(function, *args, names=["cpu"] * sizes[number], hosts=hosts[number])
        except Exception as error:
            answers[number] = error

    threads = [threading.Thread(target=go, args=(number,)) for number in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_SECONDS + END_SECONDS)
    return answers


def count(console: Console) -> tuple[int, int, int]:
    total, listening = meet(console)
    assert set(listening) <= {"127.0.0.1"}
    return total, int(os.environ[RANK]), int(os.environ["LOCAL_RANK"])


def test_two_hosts_of_different_size_are_one_run() -> None:
    port = free_port()
    assert run_hosts(count, [host(0, port), host(1, port)], [2, 1]) == [(6, 0, 0), (6, 2, 0)]


def die_on_the_second_host(console: Console, how: str) -> None:
    step(3)
    if not is_main():
        if how == "hang":
            time.sleep(1000)
        os._exit(7)
    wait_for_the_others()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("exit", "ended with exit code 7"), ("hang", "kept all others waiting")])
def test_a_rank_lost_on_another_host_is_named_on_both(how: str, said: str) -> None:
    port = free_port()
    here, there = run_hosts(die_on_the_second_host, [host(0, port), host(1, port)], [1, 1], how)
    assert isinstance(there, TrainingFailed)
    assert re.match(rf"rank 1 .*{said}.* in epoch 1, step 3", str(there))
    assert isinstance(here, TrainingFailed)
    assert re.match(rf"node 1: rank 1 .*{said}.* in epoch 1, step 3", str(here))


def test_hosts_that_do_not_meet_say_who_is_missing() -> None:
    port = free_port()
    with pytest.raises(InputError, match=rf"--rendezvous 127.0.0.1:{port}: no answer in 1 s .*--node-rank 0"):
        run(count, hosts=host(1, port, timeout=1.0))
    with pytest.raises(InputError, match=rf"--rendezvous 127.0.0.1:{port}: node 1 did not come in 1 s"):
        run(count, hosts=host(0, port, timeout=1.0))
    with pytest.raises(InputError, match=r"--rendezvous 192.0.2.1:\d+: this host cannot listen there"):
        run(count, hosts=host(0, port, rendezvous=f"192.0.2.1:{port}"))


def test_hosts_that_disagree_about_their_number_are_told() -> None:
    port = free_port()
    errors = run_hosts(count, [host(0, port, nodes="3"), host(1, port)], [1, 1])
    assert all(isinstance(error, InputError) and "hosts disagree" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": "0"}, "--nodes 0"),
        ({"nodes": "two"}, "--nodes two: must be a number of hosts or MIN:MAX"),
        ({"nodes": "3:2"}, "--nodes 3:2"),
        ({"nodes": "1:2:3"}, "--nodes 1:2:3"),
        ({"nodes": "2", "node_rank": 2, "rendezvous": "a:1"}, "--node-rank 2: must be from 0 to 1"),
        ({"nodes": "2"}, "--nodes 2: needs --rendezvous HOST:PORT"),
        ({"nodes": "2", "rendezvous": "a"}, "--rendezvous a: must be HOST:PORT"),
        ({"nodes": "2", "rendezvous": "a:0"}, "--rendezvous a:0"),
        ({"nodes": "2", "rendezvous": ":1"}, "--rendezvous :1"),
        ({"nodes": "2", "rendezvous": "a:1", "timeout": 0.0}, "--rendezvous-timeout 0"),
    ],
)
def test_hosts_refuse_what_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        Hosts(**values)


# --- plain torchrun: ranks that only have each other ------------------------------------------------------------------

ALONE = """
    import os, signal, sys, time
    from pathlib import Path
    from flatout.dist import heartbeat

    folder, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if rank == 0:
        board = heartbeat.create(2)
        (folder / "path.new").write_text(board.path)
        (folder / "path.new").rename(folder / "path")
    while not (folder / "path").exists():
        time.sleep(0.05)
    life = heartbeat.attach((folder / "path").read_text(), rank, "cpu")
    life.watch(os.getppid())
    life.report_step(0, 5)
    if rank == 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and how == "hang":
        time.sleep(1000)
    if rank == 1 and how == "die":
        # Not before the other has seen it.
        time.sleep(3)
        os._exit(1)
    with life.waiting("all_reduce"):
        time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop", r"did not answer for \d+ s,"),
        ("hang", r"kept all others waiting for \d+ s,"),
        ("die", "is gone, last seen"),
    ],
)
def test_ranks_without_a_launcher_of_ours_end_together(how: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ALONE), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), how],
            env={**os.environ, "FLATOUT_TIMEOUT_SCALE": "0.3"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in (0, 1)
    ]
    try:
        assert eventually(lambda: all(rank.poll() is not None for rank in ranks), START_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
        errors = [rank.communicate()[1] for rank in ranks]
    assert re.search(rf"rank 1 \(cpu, process {ranks[1].pid}\) {said} in epoch 1, step 5", errors[0])
