"""Wrong labels that `flatout check --labels` finds: 5 % of the labels are changed at random; prints JSON.

    python benchmarks/label_errors.py --data FOLDER [--job JOB] [--set KEY=VALUE ...] [--with-training]

The recipe is the one that `flatout train` makes, without weights that are not on this host, and changed by --set. Costs
are CPU seconds of this process. With --with-training, a whole training by the same recipe is measured too.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from common import about, make_parser, write
from flatout.analysis.label_errors import find_label_errors
from flatout.config.settings import parse_setting
from flatout.data.source import DataSource, ImageDataset
from flatout.train.recipes import resolve
from flatout.train.request import Options, TrainRequest
from flatout.train.run import train
from flatout.utils.console import Console

SHARE, SEED = 0.05, 0


def plant(source: ImageDataset) -> tuple[ImageDataset, np.ndarray]:
    """Return the data with a share of all labels replaced by another class, and where, bool [N]."""
    rng = np.random.default_rng(SEED)
    is_wrong = np.zeros(len(source), bool)
    is_wrong[rng.choice(len(source), round(SHARE * len(source)), replace=False)] = True
    moved = rng.integers(1, len(source.classes), len(source))
    labels = np.where(is_wrong, (source.labels + moved) % len(source.classes), source.labels)
    return dataclasses.replace(source, labels=labels), is_wrong


def some(source: ImageDataset, count: int) -> ImageDataset:
    """Return the first images of the training split, alone."""
    assert source.images is not None
    return dataclasses.replace(
        source, images=source.images[:count], labels=source.labels[:count], splits={"train": (0, count)}
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--job")
    parser.add_argument("--images", type=int)
    parser.add_argument("--with-training", action="store_true")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="an .npz file for the probabilities")
    args = parser.parse_args()
    console = Console(sys.stderr)
    changes = dict(map(parse_setting, args.set))
    recipe, found = resolve(args.job, args.data, changes, accelerated=False, console=console)
    source = found.read() if isinstance(found, DataSource) else found
    source, is_wrong = plant(some(source, args.images) if args.images else source)
    options = Options(devices=args.devices, cache=False)
    began, wall = time.process_time(), time.perf_counter()
    result = find_label_errors(recipe, source, options, console)
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    hits = int(is_wrong[[error.index for error in result.errors]].sum())
    labels = np.asarray(source.labels)
    figures: dict[str, Any] = {
        "data": Path(args.data).name,
        "images": len(source),
        "classes": len(source.classes),
        "planted": int(is_wrong.sum()),
        "listed": len(result.errors),
        "found": hits / int(is_wrong.sum()),
        "precision": hits / max(1, len(result.errors)),
        "agreement_on_other_images": float((result.probabilities.argmax(1) == labels)[~is_wrong].mean()),
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "recipe": {
            k: v for k, v in result.recipe.flat().items() if k in ("model", "image_size", "epochs", "data.folds")
        },
        "settings": args.set,
        **about("flatout", "torch"),
    }
    if args.keep:
        np.savez(args.keep, probabilities=result.probabilities, labels=labels, is_wrong=is_wrong)
    if args.with_training:
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            options = dataclasses.replace(options, out=Path(folder) / "run")
            train(TrainRequest(recipe=recipe, data=source, options=options), console)
        figures["training_cpu_seconds"] = time.process_time() - began
        figures["cost_in_trainings"] = seconds / figures["training_cpu_seconds"]
    print(json.dumps(figures, indent=2))
    if args.out:
        write(figures, args.out)


if __name__ == "__main__":
    main()
