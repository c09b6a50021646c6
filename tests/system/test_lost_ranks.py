"""Ranks that die, hang or fail in the middle of a real run: it ends soon, says who and where, and leaves nothing."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from flatout.cli import main
from flatout.models.weights import read_weights

pytestmark = pytest.mark.slow

# What a run may take to end once something is wrong with it; and everything before that on a busy machine.
END_SECONDS, TIMEOUT = 15, 150
MARK = "FLATOUT_TEST_RUN"

# A user's own model. In the tenth training step after the start (seven are an epoch), one rank has a mishap.
# MISHAP_RANK names one for each attempt.
MODEL = """
import os, pathlib, signal, time
import torch

class Net(torch.nn.Sequential):
    steps = 0

    def forward(self, x):
        # Smaller batches only try the model out.
        self.steps += self.training and len(x) > 50
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        ranks = os.environ.get("MISHAP_RANK", "").split(",")
        if self.steps == 10 and ranks[attempt:] and ranks[attempt] == os.environ.get("RANK"):
            pathlib.Path(os.environ["MISHAP_FILE"]).touch()
            os.kill(os.getppid() if os.environ["MISHAP"] == "kill launcher" else os.getpid(), signal.SIGKILL)
            time.sleep(1000)
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


def digits(folder: Path) -> tuple[str, ...]:
    """Return the arguments for digits in a file: no process needs scikit-learn, which takes long to import."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", images=(images * 15).astype(np.uint8).reshape(-1, 8, 8), labels=labels)
    return ("digits", "--data", str(folder / "digits.npz"))


def train(folder: Path, mishap: str, ranks: str, *options: str, devices: str = "2xcpu") -> Ended:
    """Run until the mishaps, and to the end; check that nothing is left."""
    temporary, file, out, mark = folder / "tmp", folder / "mishap", folder / "run", str(uuid.uuid4())
    temporary.mkdir()
    variables = {"MISHAP": mishap, "MISHAP_RANK": ranks, "MISHAP_FILE": str(file), "TMPDIR": str(temporary)}
    shared_before = shared_files()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flatout", *TRAIN, *digits(folder), *LENGTH),
            *("--devices", devices, "--out", str(out), *options),
        ],
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


def test_nothing_outlives_the_launcher(tmp_path: Path) -> None:
    ended = train(tmp_path, "kill launcher", "1")
    assert ended.code == -9
    assert ended.seconds < END_SECONDS


def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On three ranks, so that two of them wait; on one device afterwards."""
    ended = train(tmp_path, "kill", "2", devices="3xcpu")
    assert ended.code == 1
    assert ended.seconds < END_SECONDS
    said = r"rank 2 \(cpu, process \d+\) was killed by SIGKILL in epoch 2, step 2; the other ranks were ended"
    assert re.search(said, ended.said)
    assert re.search(r"The last lines of \S*rank-2\.log:\n", ended.said)
    assert "rank 2 (cpu)  epoch 1/3" in ended.said
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*TRAIN, "--devices", "cpu", "--out", str(ended.out), "--resume"]) == 0
    assert "resumed after epoch 1, step 0" in capsys.readouterr().out
    assert len((ended.out / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_restarted_run_gives_the_result_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is lost."""
    ended = train(tmp_path, "kill", "0", "--restarts", "1")
    assert ended.code == 0, ended.said
    log = (ended.out / "logs" / "rank-0.log").read_text()
    assert log.count("resumed after epoch") == 1
    monkeypatch.syspath_prepend(tmp_path)
    uninterrupted = tmp_path / "uninterrupted"
    assert main([*TRAIN, *digits(tmp_path), *LENGTH, "--devices", "2xcpu", "--out", str(uninterrupted)]) == 0
    runs = (ended.out, uninterrupted)
    (weights, _), (expected, _) = (read_weights(run / "weights.safetensors") for run in runs)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    found, wanted = ((run / "metrics.jsonl").read_text().splitlines() for run in runs)
    losses = [[json.loads(line)["train_loss"] for line in lines] for lines in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
