"""A run that is stopped is usable, and a resumed run is the run that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flatout.cli import main
from flatout.models.weights import read_weights

EPOCHS = 12
SLOW = ["train", "digits", "--epochs", str(EPOCHS), "--devices", "cpu", "--batch-size", "8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*SLOW, "--out", str(out)]) == 0
    return out


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flatout", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_epochs(out: Path, process: subprocess.Popen[str], epochs: int) -> None:
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < epochs:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_same(first: Path, second: Path) -> None:
    tensors = [read_weights(run / "weights.safetensors")[0] for run in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    figures = [summary(run) for run in (first, second)]
    for key in ("test_correct", "test_loss", "valid_loss", "best_epoch", "images_trained", "train_loss"):
        assert figures[0][key] == figures[1][key], key
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    for a, b in zip(*lines, strict=True):
        assert (a["epoch"], a["train_loss"], a["valid_loss"]) == (b["epoch"], b["train_loss"], b["valid_loss"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_is_usable_and_resumes_bit_for_bit(
    number: signal.Signals, code: int, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start([*SLOW, "--out", str(out)])
    wait_for_epochs(out, process, 2)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output
    figures = summary(out)
    assert number.name in figures["stopped"]
    assert 2 <= figures["epochs_trained"] < EPOCHS
    assert (out / "report.html").is_file()
    assert (figures["test_accuracy"] is None) == (number == signal.SIGTERM)
    assert main(["predict", str(out), str(out / "curves.png")]) == 0
    assert main(["train", "--resume", "--out", str(out), "--devices", "cpu"]) == 0
    assert summary(out)["stopped"] is None
    assert_same(whole, out)


def test_a_killed_run_resumes_from_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start([*SLOW, "--out", str(out)])
    wait_for_epochs(out, process, 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert main(["train", "--resume", "--out", str(out), "--devices", "cpu"]) == 0
    assert_same(whole, out)


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    process = start([*SLOW, "--out", str(out)])
    wait_for_epochs(out, process, 3)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=120)
    older, newest = sorted((out / "checkpoints").iterdir())
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert main(["train", "--resume", "--out", str(out), "--devices", "cpu"]) == 0
    said = capsys.readouterr().out
    assert newest.name in said
    assert "damaged" in said
    assert_same(whole, out)
    assert older.name


def test_nothing_to_resume_is_said(tmp_path: Path, capsys) -> None:
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    (tmp_path / "recipe.toml").write_text("")
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 2


def test_a_finished_run_can_be_resumed_for_more_epochs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "digits", "--devices", "cpu", "--set", "schedule.name=constant"]
    assert main([*arguments, "--epochs", "2", "--out", str(out)]) == 0
    assert main(["train", "--resume", "--out", str(out), "--devices", "cpu", "--epochs", "4"]) == 0
    assert summary(out)["epochs_trained"] == 4
    assert main([*arguments, "--epochs", "4", "--out", str(tmp_path / "whole")]) == 0
    assert_same(tmp_path / "whole", out)
