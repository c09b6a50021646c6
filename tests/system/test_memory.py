"""Training from a pack on disk takes the same memory for several times the images."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.system.rank_functions import FLATOUT

# Fewer images than FEW would not fill the buffers.
FEW, MANY = 4_500, 15_000
SHAPE = (64, 64, 3)
# What takes memory is reading the images, so the model takes hardly any time. It writes the most memory that was held
# until each training step: after training, OpenVINO holds 100 to 300 MB, now more and now less.
MODEL = """
import os
from pathlib import Path
from torch import nn
from flatout.utils.host import peak_rss_bytes

class Net(nn.Sequential):
    def forward(self, x):
        if self.training and len(x) > 2:  # smaller batches only try the model out
            Path(os.environ["PEAK"]).write_text(str(peak_rss_bytes()))
        return super().forward(x)

def make(num_classes):
    return Net(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, num_classes))
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
    """Train one epoch in a process of its own, and return the most memory that it held until its last step."""
    (folder / "pooled.py").write_text(MODEL)
    model, peak = f"{folder / 'pooled.py'}:make", folder / f"peak-{data.name}"
    command = [*FLATOUT, "train", str(data), "--model", model, "--epochs", "1"]
    changes = ["--set", "data.placement=disk", "--set", "data.order=blocks", "--batch-size", "32"]
    where, env = ["--devices", "cpu", "--out", str(folder / f"run-{data.name}")], os.environ | {"PEAK": str(peak)}
    result = subprocess.run([*command, *changes, *where], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(peak.read_text())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    few, many = (peak_bytes(write_images(tmp_path / str(count), count), tmp_path) for count in (FEW, MANY))
    more_images = (MANY - FEW) * int(np.prod(SHAPE))
    assert many - few < 0.2 * more_images
