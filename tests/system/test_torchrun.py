"""Processes that another launcher starts: torchrun, and Slurm's srun by its variables."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.cli.main import main
from flatout.models.weights import read_weights

# 25 images a step: 13 and 12.
NET = ("--model", "fashion-cnn", "--set", "image_size=16", "--batch-size", "25", "--epochs", "1", "--set", "keep=last")
CONSTANT = ("--set", "schedule.name=constant", "--set", "optimizer.name=sgd", "--lr", "0.01")
SETTINGS = (*NET, *CONSTANT)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command that trains on images of three classes that differ in brightness."""
    labels = np.arange(200) % 3
    pixels = np.random.default_rng(0).integers(0, 40, (200, 16, 16)) + 90 * labels[:, None, None]
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, images=pixels.astype(np.uint8), labels=labels)
    return ("train", str(path), *SETTINGS)


@pytest.fixture(scope="module")
def alone(train: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.report.page.draw_all", lambda run: None)
        assert main([*train, "--devices", "cpu", "--out", str(out)]) == 0
    return out


def run_of(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_same_answer(run: Path, alone: Path) -> None:
    figures, expected = (json.loads((r / "summary.json").read_text()) for r in (run, alone))
    assert figures["world_size"] == 2
    for key in ("images_trained", "test_count", "test_correct"):
        assert figures[key] == expected[key], key
    weights, theirs = (read_weights(r / "weights.safetensors")[0] for r in (alone, run))
    for name, tensor in weights.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for rank in (0, 1):
        assert f"rank {rank} (cpu)" in (run / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.slow
def test_torchrun_gives_the_answer_of_one_process(train: tuple[str, ...], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = run_of([*torchrun, "-m", "flatout", *train, "--devices", "2xcpu", "--out", str(out)])
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert_same_answer(out, alone)
    # One rank speaks.
    assert said.count("epoch 1/1") == 1


@pytest.mark.slow
def test_slurm_tasks_give_the_answer_of_one_process(train: tuple[str, ...], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = ["-m", "flatout", *train, "--devices", "2xcpu", "--out", str(out)]
    tasks = [run_of(command, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(said)
    assert_same_answer(out, alone)
    assert said[1] == ""
