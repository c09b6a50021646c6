"""Packs of many images: the time to make one and of two epochs, and peak memory, in full and block order; prints JSON.

    python benchmarks/large.py [--images 10000,100000,1280000] [--size 64] [--folder FOLDER]

Random images are written as .npy, packed, and train a linear model for two epochs: from the disk in both orders, and
from memory. Each step is a process of its own. The file cache of the system is warm, as only root can empty it, so the
times show what an order costs, not what it gains on a cold disk. Images that do not fit into the available memory are
not trained from there.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import about, make_parser
from flatout.utils.host import available_memory
from memory import peak_rss_of, write_images

MODEL = """\
from torch import nn

def linear(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, num_classes))
"""
RECIPE = """\
model = "any"
image_size = {size}
channels = 3
epochs = 2
batch_size = 256
precision = "fp32"

[data]
path = "{pack}"
"""
VARIANTS = {"disk, blocks": ("disk", "blocks"), "disk, full": ("disk", "full"), "memory": ("memory", "full")}
# The share of the available memory that images in memory may take; more is left out.
MEMORY_SHARE = 0.85


def measure(folder: Path, count: int, size: int) -> dict[str, Any]:
    """Pack `count` images and train on them."""
    write_images(folder / "arrays", count, size)
    pack, model, recipe = folder / "pack", folder / "model.py", folder / "recipe.toml"
    model.write_text(MODEL)
    recipe.write_text(RECIPE.format(size=size, pack=pack))
    began = time.perf_counter()
    packing = peak_rss_of(["pack", str(folder / "arrays"), "--size", str(size), "--out", str(pack)])
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {"images": count, "pack_seconds": seconds, "pack_peak_rss_bytes": packing}
    for name, (placement, order) in VARIANTS.items():
        if placement == "memory" and count * size * size * 3 > MEMORY_SHARE * available_memory():
            result[name] = None
            continue
        run = folder / order / placement
        changes = ["--set", f"data.placement={placement}", "--set", f"data.order={order}"]
        peak_rss_of(
            ["train", str(recipe), "--model", f"{model}:linear", "--devices", "cpu", *changes, "--out", str(run)]
        )
        summary = json.loads((run / "summary.json").read_text())
        epochs = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = summary["train_images"]
        result[name] = {
            "epoch_seconds": epochs,
            "microseconds_per_image": [1e6 * seconds / trained for seconds in epochs],
            "peak_rss_bytes": summary["peak_rss_bytes"],
            "input_wait_fraction": summary["input_wait_fraction"],
        }
        each = ", ".join(f"{1e6 * seconds / trained:.0f}" for seconds in epochs)
        peak = summary["peak_rss_bytes"] / 2**20
        print(f"{count:,} images, {name}: {each} us per image, at most {peak:,.0f} MiB", file=sys.stderr)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", default="10000,100000", help="numbers of images, separated by commas")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images in pixels")
    parser.add_argument("--folder", type=Path, help="where temporary files go: the images twice over")
    args = parser.parse_args()
    runs = []
    for count in map(int, args.images.split(",")):
        with tempfile.TemporaryDirectory(prefix="flatout-large-", dir=args.folder) as folder:
            runs.append(measure(Path(folder), count, args.size))

    result = {
        **about("flatout", "torch", "numpy"),  # only now: what this process holds would count as its children's
        "image_size": args.size,
        "runs": runs,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
