"""`benchmarks/gpu.py`, the first minutes on a GPU, rehearsed with the CUDA runtime that stands in for one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda_mock import device
from tests.cuda_mock.build import ROOT
from tests.data.test_arrays import write_idx


def measure(out: Path, environment: dict[str, str], *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Run the benchmark; return what it prints and the lines of its results."""
    command = [sys.executable, "benchmarks/gpu.py", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return done.stdout, [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("mock")
def test_each_part_writes_its_figures(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    random = np.random.default_rng(1)
    for before, count in {"train-": 2048, "t10k-": 256}.items():
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(data, images, (np.arange(count) % 10).astype(np.uint8), before)
    printed, lines = measure(out, device.environment(), "--rehearse", "--data", f"fashion-mnist={data}")
    ended = [line["part"] for line in lines if line["name"] == "part"]
    assert ended == ["machine", "tests", "command", "fashion-step", "resnet50", "fast-cnn", "recovery"]
    wrong = [line for line in lines if "error" in line]
    assert not wrong, (out / "log.txt").read_text()[-4000:]
    steps = [line for line in lines if line["part"] == "resnet50" and "graph" in line["name"]]
    assert steps and all(line["is_recorded"] for line in steps)
    (command,) = (line for line in lines if line["name"] == "flatout train")
    assert command["process_seconds"] > 0
    assert "images_per_second" in printed


@pytest.mark.slow
def test_parts_that_fail_are_recorded_and_end_the_rest_where_no_recorded_step_is_right(tmp_path: Path) -> None:
    _, lines = measure(tmp_path, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "--parts", "1,2,6")
    ended = {line["part"]: line for line in lines if line["name"] == "part"}
    assert "error" in ended["machine"] and "error" in ended["tests"]
    assert ended["fast-cnn"]["skipped"] == "no recorded step equalled the eager one in part 2"
    assert any("torch" in line for line in lines if line["name"] == "versions")


@pytest.mark.usefixtures("mock")
def test_a_run_on_a_gpu_does_not_import_the_compiler(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch._dynamo' in sys.modules));"
        "from flatout.cli.main import main; main()"
    )
    arguments = ["train", "digits", "--epochs", "1", "--devices", "cuda", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=device.environment(), capture_output=True, text=True, timeout=300)
    assert "precision = tf32" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
