"""30 epochs of a head on cached features against one forward pass over the images by hand, in turn; prints JSON.

    python benchmarks/head.py --data D/cats-dogs [--model resnet18] [--size 128] [--epochs 30] [--repeats 3]

FOLDER has class folders in training_set/ and test_set/. The network has random weights, which take the same time. The
forward pass runs over images that are decoded already, in fp32 or under autocast, as flatout chose.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch

from flatout.engine.devices import machine
from plain_resnet18 import decode, normalise

NO_AUGMENTATION = ("augment.flip=false", "augment.shift=0", "augment.zoom=0")


def train_head(args: argparse.Namespace) -> dict[str, Any]:
    """Train the head alone with flatout, and return figures of its run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "flatout", "train", str(args.data), "--model", f"timm:{args.model}"]
        command += ["--no-pretrained", "--epochs", str(args.epochs), "--out", str(out)]
        for setting in (f"image_size={args.size}", "freeze=all-but-last-0", *NO_AUGMENTATION):
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = json.loads((out / "summary.json").read_text())
        precision = tomllib.loads((out / "recipe.toml").read_text())["precision"]
    keys = ("train_seconds", "world_size", "train_images", "epochs")
    return {"precision": precision, **{key: summary[key] for key in keys}}


def forward_seconds(args: argparse.Namespace, images: torch.Tensor, precision: str) -> float:
    """Return the seconds of one forward pass over `images` [N, 3, H, W] by hand, on all cores."""
    net = timm.create_model(args.model, num_classes=2).eval().to(memory_format=torch.channels_last)
    began = time.perf_counter()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for batch in images.split(64):
            net(normalise(batch))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="resnet18", help="a model of timm")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "head.json")
    args = parser.parse_args()
    images, _ = decode(args.data / "training_set", args.size)
    rounds = []
    for _ in range(args.repeats):
        one = train_head(args)
        one["forward_seconds"] = forward_seconds(args, images, one["precision"])
        rounds.append(one | {"train_over_forward": one["train_seconds"] / one["forward_seconds"]})
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: version(name) for name in ("flatout", "torch", "timm")},
        "rounds": rounds,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
