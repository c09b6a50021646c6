"""Ranks that die, hang or fail in the middle of a real run: it ends soon, says who and where, and leaves nothing."""

import os
import re
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

# What a run may take to end once something is wrong with it; and everything before that on a busy machine.
END_SECONDS, TIMEOUT = 15, 150
MARK = "FLATOUT_TEST_RUN"

# A user's own model. In the tenth training step (seven are an epoch), one rank has a mishap.
MODEL = """
import os, pathlib, signal, time
import torch

def stop(number, pid):
    os.kill(pid, number)
    time.sleep(1000)

def fail(error):
    raise error

MISHAPS = {
    "kill": lambda: stop(signal.SIGKILL, os.getpid()),
    "stop": lambda: stop(signal.SIGSTOP, os.getpid()),
    "kill launcher": lambda: stop(signal.SIGKILL, os.getppid()),
    "exception": lambda: fail(ZeroDivisionError("of all things")),
    "memory": lambda: fail(MemoryError("Unable to allocate 7 TiB")),
    "device memory": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 TiB")),
    "sleep": lambda: time.sleep(1000),
    "exit": lambda: os._exit(137),
}

class Net(torch.nn.Sequential):
    steps = 0

    def forward(self, x):
        # Smaller batches only try the model out.
        self.steps += self.training and len(x) > 50
        if self.steps == 10 and os.environ.get("RANK", "") == os.environ.get("MISHAP_RANK"):
            pathlib.Path(os.environ["MISHAP_FILE"]).write_text(os.environ["MASTER_PORT"])
            MISHAPS[os.environ["MISHAP"]]()
        return super().forward(x)

def make(num_classes):
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""
LENGTH = ("--epochs", "3", "--batch-size", "200")
TRAIN = ("train", "--model", "faulty:make")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code.
        said: its standard error.
        seconds: from the mishap to the end of every process.
        out: the run folder.
    """

    code: int
    said: str
    seconds: float
    out: Path


def environment(folder: Path, mark: str = "") -> dict[str, str]:
    (folder / "faulty.py").write_text(MODEL)
    return {**os.environ, "PYTHONPATH": str(folder), MARK: mark}


def train(folder: Path, mishap: str, rank: int, devices: str = "2xcpu") -> Ended:
    """Run until the mishap, and to the end; check that nothing is left."""
    temporary, file, out, mark = folder / "tmp", folder / "mishap", folder / "run", str(uuid.uuid4())
    temporary.mkdir()
    variables = {"MISHAP": mishap, "MISHAP_RANK": str(rank), "MISHAP_FILE": str(file), "TMPDIR": str(temporary)}
    shared_before = shared_files()
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *TRAIN, "digits", *LENGTH, "--devices", devices, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(folder, mark) | variables,
        check=False,
    )
    assert file.exists(), done.stderr
    deadline = file.stat().st_mtime + END_SECONDS
    while (left := marked(mark)) and time.time() < deadline:
        time.sleep(0.05)
    seconds = time.time() - file.stat().st_mtime
    for process in left:
        process.kill()
    assert left == []
    assert list(temporary.iterdir()) == []
    assert shared_files() <= shared_before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(file.read_text()))) != 0
    return Ended(code=done.returncode, said=done.stderr, seconds=seconds, out=out)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of one run, whoever their parents are by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def shared_files() -> set[str]:
    """Return what of ours is in the shared memory's file system."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "flatout" in path.name} if folder.is_dir() else set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "rank", "said"),
    [
        ("kill", 0, "was killed by SIGKILL in epoch 2, step 2; the other ranks were ended"),
        ("kill", 1, "was killed by SIGKILL in epoch 2, step 2; the other ranks were ended"),
        ("stop", 0, r"did not answer for \d+ s in epoch 2, step 2 and was killed"),
        ("stop", 1, r"did not answer for \d+ s in epoch 2, step 2 and was killed"),
        ("sleep", 1, r"kept all others waiting for \d+ s in epoch 2, step 2 and was killed"),
        ("exception", 1, "failed in epoch 2, step 2: ZeroDivisionError: of all things"),
        (
            "memory",
            1,
            "ran out of memory in epoch 2, step 2.*smaller batch_size.*MemoryError: Unable to allocate 7 TiB",
        ),
        ("device memory", 0, "ran out of memory in epoch 2, step 2.*smaller batch_size.*Tried to allocate 7 TiB"),
        ("exit", 1, "ended with exit code 137 in epoch 2, step 2"),
    ],
)
def test_a_lost_rank_ends_the_run(mishap: str, rank: int, said: str, tmp_path: Path) -> None:
    ended = train(tmp_path, mishap, rank)
    assert ended.code == 1
    assert re.search(rf"rank {rank} \(cpu, process \d+\) {said}", ended.said)
    assert re.search(rf"The last lines of \S*rank-{rank}\.log:\n", ended.said)
    # The last lines: what it said about training, or where the user's code raised the error.
    is_error = mishap in ("exception", "memory", "device memory")
    assert ('faulty.py", line' if is_error else f"rank {rank} (cpu)  epoch 1/3") in ended.said
    assert ended.seconds < END_SECONDS


@pytest.mark.slow
def test_nothing_outlives_the_launcher(tmp_path: Path) -> None:
    ended = train(tmp_path, "kill launcher", 1)
    assert ended.code == -9
    assert ended.seconds < END_SECONDS


@pytest.mark.slow
def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """On three ranks, so that two of them wait; on one device afterwards."""
    ended = train(tmp_path, "kill", 2, devices="3xcpu")
    assert re.search(r"rank 2 .* was killed by SIGKILL in epoch 2, step 2", ended.said)
    command = [sys.executable, "-m", "flatout", *TRAIN, "--devices", "cpu", "--out", str(ended.out), "--resume"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resumed after epoch 1, step 0" in done.stdout
    assert len((ended.out / "metrics.jsonl").read_text().splitlines()) == 3
