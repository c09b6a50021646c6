"""`benchmarks/gpu.py`, the first minutes on a GPU, rehearsed with the CUDA runtime that stands in for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_mock import device
from tests.cuda_mock.build import ROOT
from tests.data.test_arrays import write_idx

# The first part has a process of its own, as all have on a GPU; the others share one, which imports torch once.
REHEARSE = """
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
import gpu

def run_part(part, out, options, limit, run_alone=gpu.run_part):
    if part.name == "machine":
        return run_alone(part, out, options, limit)
    gpu.measure(part.name, out, data=Path(options[1].partition("=")[2]), rehearse=True)
    return {}

gpu.run_part = run_part
gpu.main()
"""

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("mock")
def test_each_part_writes_its_figures(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    random = np.random.default_rng(1)
    for before, count in {"train-": 512, "t10k-": 256}.items():
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(data, images, (np.arange(count) % 10).astype(np.uint8), before)
    command = [sys.executable, "-c", REHEARSE, "--out", str(out), "--data", f"fashion-mnist={data}", "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, env=device.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    ended = [line["part"] for line in lines if line["name"] == "part"]
    assert ended == ["machine", "tests", "command", "fashion-step", "resnet50", "fast-cnn", "recovery"]
    assert not [line for line in lines if "error" in line]
    steps = [line for line in lines if line["part"] == "resnet50" and "graph" in line["name"]]
    assert steps and all(line["is_recorded"] for line in steps)
    (trained,) = (line for line in lines if line["name"] == "flatout train")
    assert trained["process_seconds"] > 0
    assert "images_per_second" in done.stdout


def test_parts_that_fail_are_recorded_and_end_the_rest_where_no_recorded_step_is_right(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--out", str(tmp_path), "--parts", "1,2,6"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=600)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = {line["part"]: line for line in lines if line["name"] == "part"}
    assert "error" in ended["machine"]
    assert any("torch" in line for line in lines if line["name"] == "versions")
    assert ended["tests"]["error"].startswith("failed: fashion-cnn, recorded and eager")
    assert ended["fast-cnn"]["skipped"] == "no recorded step equalled the eager one in part 2"
    # What is measured after a failure is written, too.
    assert [line["run"] for line in lines if line["name"] == "tests"] > [0]
