"""Training while images are decoded, against decoding first: time to step 10 and of two epochs; prints JSON.

    python benchmarks/during.py [--images 200000] [--size 64] [--devices cpu] [--folder FOLDER]

A linear model is trained on generated JPEG files in class folders for two epochs, with data.decode = before and with
during, each from an empty cache; then with during once more, where the cache has the pack. The weights of both runs
with during must be the same bytes.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from about import about
from large import MODEL

CLASSES = 10
LOGGED_STEP = 10
RECIPE = """\
model = "any"
image_size = {size}
channels = 3
epochs = 2
batch_size = 256
precision = "fp32"
log_every = {step}

[optimizer]
name = "momentum"
lr = 0.01
"""


def write_images(folder: Path, count: int, size: int) -> None:
    """Write JPEG files of coarse random patterns, in a folder for each class."""
    random = np.random.default_rng(1)
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir(parents=True)
    for number in range(count):
        coarse = random.integers(0, 256, (8, 8, 3), np.uint8)
        image = np.ascontiguousarray(coarse.repeat(size // 8, axis=0).repeat(size // 8, axis=1))
        name = folder / f"class-{number % CLASSES}" / f"{number:07}.jpg"
        name.write_bytes(simplejpeg.encode_jpeg(image, quality=85))


def train(command: list[str], cache: Path, out: Path) -> dict[str, Any]:
    """Run `flatout train`; return its times, memory and a digest of the weights."""
    began, first = time.perf_counter(), None
    environment = {**os.environ, "FLATOUT_CACHE": str(cache), "FLATOUT_CACHE_LIMIT": "1T"}
    arguments = [sys.executable, "-m", "flatout", "train", *command, "--out", str(out)]
    lines = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as p:
        for line in p.stdout or ():
            lines.append(line)
            if first is None and f"step {LOGGED_STEP}: loss" in line:
                first = time.perf_counter() - began
    if p.returncode or first is None:
        sys.exit(f"{' '.join(arguments)}\nended with {p.returncode}:\n{''.join(lines[-20:])}")
    seconds = time.perf_counter() - began
    summary = json.loads((out / "summary.json").read_text())
    epochs = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    result = {
        "seconds_to_step_10": first,
        "wall_seconds": seconds,
        "epoch_seconds": epochs,
        "input_wait_fraction": summary["input_wait_fraction"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "weights_digest": hashlib.blake2b((out / "weights.safetensors").read_bytes(), digest_size=8).hexdigest(),
    }
    print(f"{out.name}: step 10 after {first:.1f} s, all after {seconds:.1f} s", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument(
        "--size", type=int, default=64, help="height and width of the images in pixels, a multiple of 8"
    )
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--folder", type=Path, help="where temporary files go: the decoded images twice")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-during-", dir=args.folder) as name:
        folder = Path(name)
        write_images(folder / "photos", args.images, args.size)
        (folder / "model.py").write_text(MODEL)
        (folder / "recipe.toml").write_text(RECIPE.format(size=args.size, step=LOGGED_STEP))
        command = [str(folder / "recipe.toml"), "--data", str(folder / "photos"), "--devices", args.devices]
        command += ["--model", f"{folder / 'model.py'}:linear"]
        runs = {
            name: train([*command, "--set", f"data.decode={value}"], folder / f"cache-{value}", folder / name)
            for name, value in {"before": "before", "during": "during", "during, cached": "during"}.items()
        }
    if runs["during"]["weights_digest"] != runs["during, cached"]["weights_digest"]:
        sys.exit("the weights depend on whether the pack was cached")

    result = {
        **about("flatout", "torch", "numpy"),
        "images": args.images,
        "image_size": args.size,
        "devices": args.devices,
        "runs": runs,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
