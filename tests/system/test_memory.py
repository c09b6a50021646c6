"""Training from a pack on disk takes the same memory for several times the images."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Fewer images than FEW would not fill the buffers.
FEW, MANY = 4_500, 15_000
SHAPE = (64, 64, 3)
# What takes memory is reading the images, so the model takes hardly any time.
MODEL = """
from torch import nn

def make(num_classes):
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, num_classes))
"""


def peak_bytes(folder: Path, count: int, order: str) -> int:
    """Train one epoch on random images in a process of its own, and return the most memory that it held."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (count, *SHAPE))
    for start in range(0, count, 500):
        images[start : start + 500] = rng.integers(0, 256, (500, *SHAPE), dtype=np.uint8)
    images.flush()
    np.save(folder / "labels.npy", np.arange(count) % 3)
    model = folder.parent / "pooled.py"
    model.write_text(MODEL)
    command = [sys.executable, "-m", "flatout", "train", str(folder), "--model", f"{model}:make", "--epochs", "1"]
    changes = ["--set", "data.placement=disk", "--set", f"data.order={order}", "--batch-size", "32"]
    where = ["--devices", "cpu", "--out", str(folder / "run")]
    result = subprocess.run([*command, *changes, *where], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "run" / "summary.json").read_text())["peak_rss_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["full", "blocks"])
def test_memory_does_not_grow_with_the_images(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    few, many = peak_bytes(tmp_path / "few", FEW, order), peak_bytes(tmp_path / "many", MANY, order)
    more_images = (MANY - FEW) * int(np.prod(SHAPE))
    assert many - few < 0.2 * more_images
