"""Peak memory of training from a pack on disk, with N and with ten times as many images; prints JSON.

    python benchmarks/memory.py [--images 5000] [--size 64] [--folder FOLDER]

Synthetic images are written as .npy, packed and trained for one epoch with data.placement=disk, each step a process of
its own. Nothing in the training process may grow with the number of images, so the ratio should be close to 1.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from common import about, make_parser

CLASSES = 10
WRITTEN_AT_ONCE = 1000

RECIPE = """\
model = "fashion-cnn"
image_size = {size}
channels = 3
epochs = 1
batch_size = 256

[data]
path = "pack"
mean = [0.5, 0.5, 0.5]
std = [0.29, 0.29, 0.29]
placement = "disk"
"""


def write_images(folder: Path, count: int, size: int) -> None:
    """Write uint8 [count, size, size, 3] and its labels, a little at a time, as this process must stay small.

    A child process begins with the peak memory of its parent on its own account.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    images = np.lib.format.open_memmap(folder / "images.npy", mode="w+", dtype=np.uint8, shape=(count, size, size, 3))
    header = images.offset
    del images
    with (folder / "images.npy").open("r+b") as file:
        file.seek(header)
        for start in range(0, count, WRITTEN_AT_ONCE):
            file.write(random.bytes(min(WRITTEN_AT_ONCE, count - start) * size * size * 3))
    np.save(folder / "labels.npy", np.arange(count) % CLASSES)


def peak_rss_of(command: list[str]) -> int:
    """Run a command of flatout and return the most memory it held, in bytes, as the system saw it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "flatout", *command], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"flatout {' '.join(command)}\nended with {process.returncode}:\n{log.read()[-2000:]}")
    return usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024


def measure(folder: Path, count: int, size: int) -> dict[str, Any]:
    write_images(folder / "arrays", count, size)
    pack, run, recipe = folder / "pack", folder / "run", folder / "recipe.toml"
    packing = peak_rss_of(["pack", str(folder / "arrays"), "--size", str(size), "--out", str(pack)])
    recipe.write_text(RECIPE.format(size=size))
    peak_rss_of(["train", str(recipe), "--devices", "cpu", "--out", str(run)])
    summary = json.loads((run / "summary.json").read_text())
    result = {
        "images": count,
        "images_bytes": count * size * size * 3,
        "train_peak_rss_bytes": summary["peak_rss_bytes"],
        "pack_peak_rss_bytes": packing,
        "images_per_second": summary["images_per_second"],
        "input_wait_fraction": summary["input_wait_fraction"],
    }
    print(f"{count:,} images: training held {summary['peak_rss_bytes'] / 2**20:,.0f} MiB at most", file=sys.stderr)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=5000, help="N; the second run has ten times as many")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images in pixels")
    parser.add_argument("--folder", type=Path, help="where temporary files go: the N images 20 times over")
    args = parser.parse_args()
    runs = []
    for count in (args.images, 10 * args.images):
        with tempfile.TemporaryDirectory(prefix="flatout-memory-", dir=args.folder) as folder:
            runs.append(measure(Path(folder), count, args.size))
    few, many = runs

    result = {
        **about("flatout", "torch", "numpy"),  # only now: what this process holds would count as its children's
        "image_size": args.size,
        "runs": runs,
        "train_peak_rss_ratio": many["train_peak_rss_bytes"] / few["train_peak_rss_bytes"],
        "pack_peak_rss_ratio": many["pack_peak_rss_bytes"] / few["pack_peak_rss_bytes"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
