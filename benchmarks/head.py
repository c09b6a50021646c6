"""30 epochs of a head on cached features against one forward pass over the images by hand, in turn; prints JSON.

    python benchmarks/head.py --data D/cats-dogs [--model resnet18] [--size 128] [--epochs 30] [--repeats 3]

FOLDER has class folders in training_set/ and test_set/. The network has random weights, which take the same time. The
forward pass runs over images that are decoded already, in fp32 or under autocast, as flatout chose.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import timm
import torch

from common import about, make_parser, settings, train, write
from plain_resnet18 import decode, normalise

NO_AUGMENTATION = {"augment.flip": "false", "augment.shift": 0, "augment.zoom": 0}


def train_head(args: argparse.Namespace) -> dict[str, Any]:
    """Train the head alone with flatout, and return figures of its run."""
    changes = {"image_size": args.size, "freeze": "all-but-last-0", **NO_AUGMENTATION}
    words = (args.data, "--model", f"timm:{args.model}", "--no-pretrained", "--epochs", args.epochs)
    run = train(*words, *settings(changes))
    keys = ("train_seconds", "world_size", "train_images", "epochs")
    return {"precision": run.recipe["precision"], **{key: run.summary[key] for key in keys}}


def forward_seconds(args: argparse.Namespace, images: torch.Tensor, precision: str) -> float:
    """Return the seconds of one forward pass over `images` [N, 3, H, W] by hand, on all cores."""
    net = timm.create_model(args.model, num_classes=2).eval().to(memory_format=torch.channels_last)
    began = time.perf_counter()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for batch in images.split(64):
            net(normalise(batch))
    return time.perf_counter() - began


def main() -> None:
    parser = make_parser(__doc__, "head")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="resnet18", help="a model of timm")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    images, _ = decode(args.data / "training_set", args.size)
    rounds = []
    for _ in range(args.repeats):
        one = train_head(args)
        one["forward_seconds"] = forward_seconds(args, images, one["precision"])
        rounds.append(one | {"train_over_forward": one["train_seconds"] / one["forward_seconds"]})
    result = {**about("flatout", "torch", "timm"), "rounds": rounds}
    write(result, args.out)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
