"""What image size, mirrored images and fine-tuning gain on photos: the table behind `flatout.train.photo_plan`.

    python benchmarks/gains.py --data caltech101=D/caltech101 [--networks tf_efficientnet_lite0] [--seeds 1,2]

Each row is a run of `flatout train` in a process of its own, with the weights that the machine has. A row is written
when its run has ended, and rows in the file are not run again.
"""

import itertools
import json
from typing import Any

from common import about, make_parser, settings, train, write
from flatout.train.photo_plan import averaging, fine_tuning_of

BATCH = 32


def run(data: str, network: str, size: int, mirrored: bool, epochs: int, decay: float, seed: int) -> dict[str, Any]:
    """Train once; return accuracies and seconds."""
    changes = {"image_size": size, "tta": str(mirrored).lower(), "epochs": epochs}
    changes |= {"seed": seed, "precision": "fp32", "pretrained": "true", "batch_size": BATCH}
    if epochs:
        changes["ema"] = decay
        changes["freeze"], changes["norm"], changes["optimizer.lr"] = fine_tuning_of(f"timm:{network}")
    summary = train(data, "--model", f"timm:{network}", *settings(changes)).summary
    keys = ("train_images", "valid_accuracy", "test_accuracy", "test_count", "wall_seconds", "kept_epoch")
    return {key: summary[key] for key in keys}


def main() -> None:
    parser = make_parser(__doc__, "gains")
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=PATH")
    parser.add_argument("--networks", default="tf_efficientnet_lite0", help="comma-separated names of timm's")
    parser.add_argument("--sizes", default="128,160,192,224", help="comma-separated pixels; the last one is published")
    parser.add_argument("--epochs", default="0,2,4,8", help="comma-separated; other than 0 at the published size alone")
    parser.add_argument("--seeds", default="1", help="comma-separated; of the validation images and the order")
    args = parser.parse_args()
    sizes, lengths, seeds = ([int(part) for part in text.split(",")] for text in (args.sizes, args.epochs, args.seeds))
    found = {**about("flatout", "torch", "timm"), "rows": []}
    if args.out.is_file():
        found = json.loads(args.out.read_text())
    for pair in args.data:
        name, _, path = pair.partition("=")
        for network in args.networks.split(","):
            wanted = [(size, False, 0) for size in sizes] + [(sizes[-1], True, epochs) for epochs in lengths]
            for seed, (size, mirrored, epochs) in itertools.product(seeds, wanted):
                # Their number is known from the first runs, which train no epochs.
                images = next((old["train_images"] for old in found["rows"] if old["data"] == name), 0)
                decay = averaging(epochs * -(-images // BATCH)) if epochs else 0.0
                row = {"data": name, "network": network, "size": size, "mirrored": mirrored, "epochs": epochs}
                row |= {"averaging": decay, "seed": seed}
                if any(row.items() <= other.items() for other in found["rows"]):
                    continue
                found["rows"].append({**row, **run(path, network, size, mirrored, epochs, decay, seed)})
                write(found, args.out)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
