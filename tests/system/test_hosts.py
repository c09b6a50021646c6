"""Several hosts: launchers on one machine, whole runs in network namespaces joined by a cable, torchrun and Slurm."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.cli.main import main
from flatout.distributed.environment import Hosts, Launched, launched
from flatout.utils.errors import InputError, TrainingFailed
from tests.system import rank_functions as ranks
from tests.system.conftest import END_SECONDS, START_SECONDS, eventually
from tests.system.rank_functions import FLATOUT, run
from tests.system.run_files import free_port, metrics, summary, weights, write_digits


def host(port: int, nodes: str = "2", address: str = "127.0.0.1", timeout: float = 30.0) -> Hosts:
    return Hosts(nodes=nodes, rendezvous=f"{address}:{port}", timeout=timeout)


def run_hosts(function: Callable[..., Any], *args: Any, hosts: list[Hosts], sizes: tuple[int, ...]) -> list[Exception]:
    """Run hosts side by side, each in a thread, until they fail; return their errors."""

    def go(host: Hosts, size: int) -> Exception:
        with pytest.raises((InputError, TrainingFailed)) as raised:
            run(function, *args, names=["cpu"] * size, hosts=host)
        return raised.value

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(go, hosts, sizes, timeout=START_SECONDS + END_SECONDS))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.slow
def test_two_hosts_of_different_size_are_one_run_and_a_lost_rank_is_named_on_both(tmp_path: Path) -> None:
    errors = run_hosts(ranks.count_and_die, tmp_path, hosts=[host(free_port())] * 2, sizes=(2, 1))
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    # Either host may be the first.
    assert [answer.pop("LOCAL_RANK") for answer in answers] in (["0", "1", "0"], ["0", "0", "1"])
    assert {address for answer in answers for address in answer.pop("listening")} == {"127.0.0.1"}
    assert answers == [{"sum": 6, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}] * 3
    assert all(isinstance(error, TrainingFailed) for error in errors), errors
    said = r"rank 2 .*ended with exit code 7 in epoch 1, step 3"
    own, told = sorted(errors, key=lambda error: not str(error).startswith("rank 2"))
    assert re.match(said, str(own))
    assert re.match(rf"{re.escape(socket.gethostname())}: {said}", str(told))


@pytest.mark.usefixtures("nothing_left")
def test_hosts_that_do_not_meet_say_who_is_missing() -> None:
    port = free_port()
    with pytest.raises(InputError, match=rf"--rendezvous 192.0.2.1:{port}: no answer in 1 s"):
        run(ranks.do_nothing, hosts=host(port, address="192.0.2.1", timeout=1.0))
    with pytest.raises(InputError, match=rf"--rendezvous 127.0.0.1:{port}: only 1 of 2 hosts joined within 1 s"):
        run(ranks.do_nothing, hosts=host(port, timeout=1.0))
    errors = run_hosts(ranks.do_nothing, hosts=[host(port, nodes="3"), host(port)], sizes=(1, 1))
    assert all(isinstance(error, InputError) and "hosts disagree" in str(error) for error in errors), errors


SECOND_HOST = """
import sys
from pathlib import Path
from tests.system import rank_functions as ranks
from tests.system.test_hosts import host

ranks.run(ranks.wait_for_the_last, Path(sys.argv[1]), names=["cpu"], hosts=host(int(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_late_host_leaves_a_run_alone_and_a_host_that_does_not_return_ends_it(tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as thread:
        options: dict[str, Any] = {"names": ["cpu"], "hosts": host(port), "restarts": 1}
        first = thread.submit(run, ranks.wait_for_the_last, tmp_path, **options)
        second = start_process([sys.executable, "-c", SECOND_HOST, str(tmp_path), str(port)])
        try:
            assert eventually(lambda: len(list(tmp_path.glob("met-*"))) == 2, START_SECONDS)
            with pytest.raises(InputError, match="hosts disagree on --nodes: 2 and 3"):
                run(ranks.do_nothing, names=["cpu"], hosts=host(port, nodes="3"))
            assert not first.done()
        finally:
            second.kill()
            second.communicate()
        with pytest.raises(TrainingFailed, match="a host was lost, and did not return within 30 s"):
            first.result(START_SECONDS + END_SECONDS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": "0"}, "--nodes 0"),
        ({"nodes": "3:2"}, "--nodes 3:2"),
        (
            {"nodes": "2", "rendezvous": "a"},
            "HOST:PORT, an address of the first host and a port from 1 to 65535, not 'a'",
        ),
        ({"rendezvous": "a:1"}, "--rendezvous a:1: is for several hosts; give their number with --nodes"),
        ({"nodes": "2", "rendezvous": "a:1", "timeout": 0.0}, "--rendezvous-timeout 0"),
    ],
)
def test_hosts_refuse_what_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        Hosts(**values)


# --- whole runs, each host with packs and a working folder of its own ------------------------------------------------

PORT = 29500
# Batch normalisation, and 50 images a step: 17, 17 and 16 on three ranks.
NET = ("--model", "fashion-cnn", "--set", "image_size=16", "--batch-size", "50", "--epochs", "1", "--set", "keep=last")
CONSTANT = ("--set", "schedule.name=constant", "--set", "optimizer.name=sgd", "--lr", "0.01")
TRAIN = ("train", "digits", "--data", "digits.npz", *NET, *CONSTANT)


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace with one address, and the folder that a person on that host would work in."""

    namespace: str
    address: str
    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run flatout on this host; `ip netns exec` becomes the command, so the process is flatout's own."""
        environment = {**os.environ, "FLATOUT_CACHE": str(self.folder / "cache")}
        command = ["ip", "netns", "exec", self.namespace, *FLATOUT, *arguments]
        return start_process(command, cwd=self.folder, env=environment)

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a veth pair, which can reach nothing else."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("needs Linux and the ip command")
    first, second = (f"flatout-{os.getpid()}-{name}" for name in "ab")
    try:
        try:
            ip("netns", "add", first)
            ip("netns", "add", second)
            ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces: {error.stderr.strip()}")
        for namespace, address in ((first, "198.18.0.1/30"), (second, "198.18.0.2/30")):
            ip("-n", namespace, "addr", "add", address, "dev", "eth0")
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", "eth0", "up")
        yield first, second
    finally:
        for namespace in (first, second):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@pytest.fixture
def hosts(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The two hosts; whatever a test leaves running on them is ended, and the test has failed."""
    both = []
    for namespace, address in zip(namespaces, ("198.18.0.1", "198.18.0.2"), strict=True):
        folder = tmp_path / address
        folder.mkdir()
        write_digits(folder / "digits.npz")
        both.append(Host(namespace=namespace, address=address, folder=folder))
    yield both[0], both[1]
    left = [pid for host in both for pid in host.processes()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def start(hosts: tuple[Host, Host], rank: int, nodes: str, *arguments: str) -> subprocess.Popen[str]:
    return hosts[rank].start(*TRAIN, "--nodes", nodes, "--rendezvous", f"{hosts[0].address}:{PORT}", *arguments)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    deadline = time.monotonic() + 120
    return [process.communicate(timeout=deadline - time.monotonic())[0] for process in processes]


def losses(run: Path) -> list[float]:
    return [line["train_loss"] for line in metrics(run)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, no_pictures_in_module: None) -> Path:
    """The run in one process; its data is beside it."""
    folder = tmp_path_factory.mktemp("alone")
    data = ("--data", str(write_digits(folder / "digits.npz")))
    assert main([*TRAIN, *data, "--devices", "cpu", "--out", str(folder / "run")]) == 0
    return folder / "run"


def assert_same_answer(run: Path, alone: Path) -> None:
    figures, expected = summary(run), summary(alone)
    for key in ("images_trained", "test_count", "test_correct", "batch_size"):
        assert figures[key] == expected[key], key
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_hosts_give_the_answer_of_one_process(hosts: tuple[Host, Host], alone: Path) -> None:
    """On three ranks. Without --out, both hosts use the name that the first one chooses."""
    processes = [start(hosts, rank, "2", "--devices", spec) for rank, spec in enumerate(("2xcpu", "cpu"))]
    said = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    (together,), (other,) = (list((host.folder / "runs").iterdir()) for host in hosts)
    assert together.name == other.name
    assert summary(together)["world_size"] == 3
    assert_same_answer(together, alone)

    # Packs, logs and devices are local to each host; the run itself is written once, by rank 0.
    assert all(list((host.folder / "cache" / "packs").glob("*/images.npy")) for host in hosts)
    assert {log.name for log in (together / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    here = {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    assert here == {"logs/devices", "logs/rank-2.log"}


def wait_for_epochs(run: Path, processes: list[subprocess.Popen[str]], epochs: int) -> None:
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < epochs:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures_in_module")
def test_elastic_hosts_continue_without_a_lost_one_and_take_a_new_one(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    # A low rate, since differences of rounding grow with it, and a fast machine trains over a hundred epochs here.
    run, length = hosts[0].folder / "run", ("--epochs", "1000", "--batch-size", "200", "--lr", "0.003")
    elastic = ("1:2", "--devices", "cpu", *length, "--out", "run")
    processes = [start(hosts, rank, *elastic) for rank in (0, 1)]
    wait_for_epochs(run, processes, 2)
    processes[1].kill()
    log = run / "logs" / "rank-0.log"
    assert eventually(lambda: "resumed after" in log.read_text(), START_SECONDS), log.read_text()
    late = start(hosts, 1, *elastic)
    assert eventually(lambda: log.read_text().count("resumed after") == 2, START_SECONDS), log.read_text()
    wait_for_epochs(run, [processes[0], late], len(metrics(run)) + 2)
    processes[0].send_signal(signal.SIGINT)
    said = outputs([processes[0], late])
    processes[1].communicate()
    assert [processes[0].returncode, late.returncode] == [130, 130], "\n".join(said)
    assert "restart 1 of 1 from the newest checkpoint" in said[0]
    # On two hosts, on one, and on two again.
    ranks = [line.rpartition("  ")[2].split()[0] for line in log.read_text().splitlines() if " ranks; " in line]
    assert ranks == ["2", "2"]

    alone, epochs = tmp_path / "alone", [line["epoch"] for line in metrics(run)]
    assert epochs == list(range(1, len(epochs) + 1))
    data = ["--data", str(hosts[0].folder / "digits.npz")]
    short = ["--epochs", str(len(epochs)), "--devices", "cpu", "--out", str(alone)]
    assert main([*TRAIN, *data, *length, *short]) == 0
    assert losses(run) == pytest.approx(losses(alone), rel=2e-4)
    # Besides these epochs, at most the next one was trained, which was not evaluated.
    trained = summary(alone)["images_trained"]
    assert trained <= summary(run)["images_trained"] <= trained + trained // len(epochs)


# --- processes that another launcher starts ---------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_of_torchrun_give_the_answer_of_one_process(alone: Path, tmp_path: Path) -> None:
    train = [*TRAIN, "--data", str(alone.parent / "digits.npz"), "--devices", "2xcpu", "--out", str(tmp_path / "run")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    process = start_process([sys.executable, *torchrun, *FLATOUT, *train])
    (said,) = outputs([process])
    assert process.returncode == 0, said
    assert_same_answer(tmp_path / "run", alone)
    assert {log.name for log in (tmp_path / "run" / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    assert said.count("epoch 1/1") == 1, "one rank speaks"


@pytest.mark.parametrize("place", [{"SLURM_NTASKS_PER_NODE": "2"}, {"SLURM_NNODES": "2"}, {}])
def test_the_tasks_of_srun_are_ranks(place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    for name, value in {**task, **place, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    expected = Launched(rank=3, size=4, local_rank=1, local_size=2 if place else 4, address="10.0.0.1", port=29500)
    assert launched() == expected


@pytest.mark.slow
def test_hosts_with_different_data_are_told_apart(alone: Path, tmp_path: Path) -> None:
    """Tasks of srun, one on each host. Different recipes: `test_other_ranks_and_other_recipes_are_refused`."""
    with np.load(alone.parent / "digits.npz") as arrays:
        np.savez(tmp_path / "digits.npz", images=arrays["images"], labels=arrays["labels"][::-1])
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
    step |= {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    train = [*FLATOUT, *TRAIN, "--devices", "cpu", "--out", str(tmp_path / "run")]
    tasks = {"0": alone.parent, "1": tmp_path}
    processes = [start_process(train, cwd=folder, env=step | {"SLURM_PROCID": rank}) for rank, folder in tasks.items()]
    said = outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], "\n".join(said)
    assert "data images and labels" in said[0]
    assert not (tmp_path / "run").exists()
