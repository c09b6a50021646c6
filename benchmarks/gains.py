"""What image size, mirrored images and fine-tuning gain on photos: the table behind `flatout.train.photo_plan`.

    python benchmarks/gains.py --data caltech101=D/caltech101 [--networks tf_efficientnet_lite0] [--epochs 0,2,4,8]

Each row is a run of `flatout train` in a process of its own, with the weights that the machine has. A row is written
when its run has ended, and rows in the file are not run again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from about import about
from flatout.train.photo_plan import averaging, fine_tuning_of

HERE = Path(__file__).resolve().parent
BATCH = 32


def run(data: str, network: str, size: int, mirrored: bool, epochs: int, decay: float) -> dict[str, Any]:
    """Train once; return accuracies and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "flatout", "train", data, "--model", f"timm:{network}", "--out", str(out)]
        settings = {"image_size": size, "tta": str(mirrored).lower(), "epochs": epochs}
        settings |= {"precision": "fp32", "pretrained": "true", "batch_size": BATCH}
        if epochs:
            settings["ema"] = decay
            settings["freeze"], settings["norm"], settings["optimizer.lr"] = fine_tuning_of(f"timm:{network}")
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = json.loads((out / "summary.json").read_text())
    keys = ("train_images", "valid_accuracy", "test_accuracy", "test_count", "wall_seconds", "kept_epoch")
    return {key: summary[key] for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=PATH")
    parser.add_argument("--networks", default="tf_efficientnet_lite0", help="comma-separated names of timm's")
    parser.add_argument("--sizes", default="128,160,192,224", help="comma-separated pixels; the last one is published")
    parser.add_argument("--epochs", default="0,2,4,8", help="comma-separated; other than 0 at the published size alone")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gains.json")
    args = parser.parse_args()
    sizes, lengths = ([int(part) for part in text.split(",")] for text in (args.sizes, args.epochs))
    found = (
        json.loads(args.out.read_text()) if args.out.is_file() else {**about("flatout", "torch", "timm"), "rows": []}
    )
    for pair in args.data:
        name, _, path = pair.partition("=")
        for network in args.networks.split(","):
            wanted = [(size, False, 0) for size in sizes] + [(sizes[-1], True, epochs) for epochs in lengths]
            for size, mirrored, epochs in wanted:
                # Their number is known from the first runs, which train no epochs.
                images = next((old["train_images"] for old in found["rows"] if old["data"] == name), 0)
                decay = averaging(epochs * -(-images // BATCH)) if epochs else 0.0
                row = {"data": name, "network": network, "size": size, "mirrored": mirrored, "epochs": epochs}
                row["averaging"] = decay
                if any(row.items() <= other.items() for other in found["rows"]):
                    continue
                found["rows"].append({**row, **run(path, network, size, mirrored, epochs, decay)})
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
