"""Training from a pack on disk takes the same memory for several times the images."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.system.rank_functions import FLATOUT

# Fewer images than FEW would not fill the buffers.
FEW, MANY = 4_500, 15_000
SHAPE = (64, 64, 3)
# What takes memory is reading the images, so the model takes hardly any time.
MODEL = """
from torch import nn

def make(num_classes):
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, num_classes))
"""


def write_images(folder: Path, count: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (count, *SHAPE))
    for start in range(0, count, 500):
        images[start : start + 500] = rng.integers(0, 256, (500, *SHAPE), dtype=np.uint8)
    images.flush()
    np.save(folder / "labels.npy", np.arange(count) % 3)
    return folder


def peak_bytes(data: Path, folder: Path) -> int:
    """Train one epoch in a process of its own, and return the most memory that it held."""
    (folder / "pooled.py").write_text(MODEL)
    model, out = f"{folder / 'pooled.py'}:make", folder / f"run-{data.name}"
    command = [*FLATOUT, "train", str(data), "--model", model, "--epochs", "1"]
    changes = ["--set", "data.placement=disk", "--set", "data.order=blocks", "--batch-size", "32"]
    where = ["--devices", "cpu", "--out", str(out)]
    result = subprocess.run([*command, *changes, *where], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads((out / "summary.json").read_text())["peak_rss_bytes"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    few, many = (peak_bytes(write_images(tmp_path / str(count), count), tmp_path) for count in (FEW, MANY))
    more_images = (MANY - FEW) * int(np.prod(SHAPE))
    assert many - few < 0.2 * more_images
