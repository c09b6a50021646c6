"""Ranks of several hosts, and ranks that another launcher started."""

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.distributed.environment import Hosts
from flatout.errors import InputError, TrainingFailed
from tests.system import rank_functions as ranks
from tests.system.conftest import END_SECONDS, START_SECONDS, eventually
from tests.system.rank_functions import run

pytestmark = pytest.mark.usefixtures("nothing_left")


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


def test_two_hosts_of_different_size_are_one_run() -> None:
    port = free_port()
    first, second = run_hosts(ranks.describe_place, [host(0, port), host(1, port)], [2, 1])
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"]) == ("0", "0", "3")
    assert (second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("2", "0", "3")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.slow
def test_ranks_of_two_hosts_add_up() -> None:
    port = free_port()
    assert run_hosts(ranks.count, [host(0, port), host(1, port)], [2, 1]) == [6, 6]


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(("how", "said"), [("exit", "ended with exit code 7"), ("hang", "kept all others waiting")])
def test_a_rank_lost_on_another_host_is_named_on_both(how: str, said: str) -> None:
    port = free_port()
    here, there = run_hosts(ranks.die_on_the_second_host, [host(0, port), host(1, port)], [1, 1], how)
    assert isinstance(there, TrainingFailed)
    assert re.match(rf"rank 1 .*{said}.* in epoch 1, step 3", str(there))
    assert isinstance(here, TrainingFailed)
    assert re.match(rf"node 1: rank 1 .*{said}.* in epoch 1, step 3", str(here))


def test_hosts_that_do_not_meet_say_who_is_missing() -> None:
    port = free_port()
    with pytest.raises(InputError, match=rf"--rendezvous 127.0.0.1:{port}: no answer in 1 s .*--node-rank 0"):
        run(ranks.do_nothing, hosts=host(1, port, timeout=1.0))
    with pytest.raises(InputError, match=rf"--rendezvous 127.0.0.1:{port}: node 1 did not come in 1 s"):
        run(ranks.do_nothing, hosts=host(0, port, timeout=1.0))
    with pytest.raises(InputError, match=r"--rendezvous 192.0.2.1:\d+: this host cannot listen there"):
        run(ranks.do_nothing, hosts=host(0, port, rendezvous=f"192.0.2.1:{port}"))


def test_hosts_that_disagree_about_their_number_are_told() -> None:
    port = free_port()
    errors = run_hosts(ranks.do_nothing, [host(0, port, nodes="3"), host(1, port)], [1, 1])
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
