"""`benchmarks/gpu.py`, the first minutes on a GPU, rehearsed with the CUDA runtime that stands in for one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_mock import device
from tests.cuda_mock.build import ROOT, CannotBuild


@pytest.mark.slow
def test_each_part_writes_its_figures(tmp_path: Path) -> None:
    try:
        environment = device.environment()
    except CannotBuild as error:
        pytest.skip(f"the stand-in for a GPU {error}")
    command = [sys.executable, "benchmarks/gpu.py", "--out", str(tmp_path), "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = [line["part"] for line in lines if line["name"] == "part"]
    assert ended == ["machine", "tests", "command", "fashion-step", "resnet50", "fast-cnn", "recovery"]
    wrong = [line for line in lines if "error" in line]
    assert not wrong, (tmp_path / "log.txt").read_text()[-4000:]
    steps = [line for line in lines if line["part"] == "resnet50" and "graph" in line["name"]]
    assert steps and all(line["is_recorded"] for line in steps)
    assert "images_per_second" in done.stdout
