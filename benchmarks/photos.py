"""flatout against fastai: the same photos, network, image size and minutes, from random weights; prints JSON.

    python benchmarks/photos.py --data D/cats-dogs [--minutes 2] [--repeats 3] [--out FILE]

Runs alternate, each in a fresh process: `fastai_photos.py`, flatout with the same network, and flatout with the model
that it chooses. It needs `pip install fastai`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from about import about

HERE = Path(__file__).resolve().parent


def run_fastai(args: argparse.Namespace) -> dict[str, Any]:
    """Run fastai and return its figures."""
    command = [sys.executable, str(HERE / "fastai_photos.py"), "--data", str(args.data), "--minutes", str(args.minutes)]
    command += ["--model", args.model, "--size", str(args.size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_flatout(args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Run flatout and return its figures; without a cache, so that it decodes the images itself."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "flatout", "train", str(args.data), "--no-pretrained", "--no-cache"]
        command += ["--minutes", str(args.minutes), "--set", f"image_size={args.size}", "--out", str(out), *flags]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=sys.stderr)
        counted_seconds = time.perf_counter() - began
        summary = json.loads((out / "summary.json").read_text())
    keys = ("model", "epochs", "train_seconds", "test_accuracy")
    return {"counted_seconds": counted_seconds, **{key: summary[key] for key in keys}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="class folders in training_set/ and test_set/")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--model", default="resnet18", help="a network that torchvision and timm both have")
    parser.add_argument("--size", type=int, default=128, help="height and width of the images in pixels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "photos.json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        **about("flatout", "fastai", "torch", "torchvision", "timm"),
        "data": args.data.name,
        "minutes": args.minutes,
        "model": args.model,
        "image_size": args.size,
        "rounds": [
            {
                "fastai": run_fastai(args),
                "flatout, same network": run_flatout(args, "--model", f"timm:{args.model}"),
                "flatout": run_flatout(args),
            }
            for _ in range(args.repeats)
        ],
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
