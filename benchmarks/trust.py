"""How far to trust a run: its prediction sets over 20 random halves, and its scores of unknown images; prints JSON.

    python benchmarks/trust.py RUN [--unknown DATA] [--halves 20]

RUN is a finished run of one class for each image, with validation images. Half of its test images calibrate the sets
and the other half is tested, time after time. DATA holds images of other classes; the test images of RUN are known.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

import flatout
from common import about, make_parser, run_process, settings
from flatout.inference import calibration

COVERAGES = (0.9, 0.95, 0.99)


def coverage_of_sets(run: flatout.Run, halves: int) -> dict[str, Any]:
    """Return the share of images whose set holds the right class, and the classes in a set, for each coverage."""
    with np.load(run.path / "predictions.npz") as found:
        logits, labels = np.log(np.maximum(found["probabilities"].astype(np.float64), 1e-30)), found["labels"]
    rows, middle = [], len(labels) // 2
    for seed in range(halves):
        order = np.random.default_rng(seed).permutation(len(labels))
        ours, theirs = order[:middle], order[middle:]
        thresholds = calibration.set_thresholds(logits[ours], labels[ours])
        strange = calibration.nonconformity(logits[theirs])
        for coverage in COVERAGES:
            threshold = calibration.set_threshold(thresholds, coverage)
            assert threshold is not None, "too few test images"
            inside = strange <= threshold
            held = inside[np.arange(len(theirs)), labels[theirs]]
            rows.append((coverage, float(held.mean()), float(inside.sum(axis=1).mean())))
    return {
        f"{coverage:.0%}": {
            "coverage": float(np.mean(held := [row[1] for row in rows if row[0] == coverage])),
            "least_and_most": [min(held), max(held)],
            "classes_in_a_set": float(np.mean([row[2] for row in rows if row[0] == coverage])),
        }
        for coverage in COVERAGES
    }


def unknown_images(run: flatout.Run, data: str) -> dict[str, Any]:
    """Return how well the score tells the images of other classes from the test images of the run."""
    threshold = run.unknown_threshold
    assert threshold is not None, "the run has no validation images"
    with np.load(run.path / "predictions.npz") as found:
        known = found["unknown"]
    height, width = run.recipe.stored_sides
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "flatout",
            "pack",
            data,
            "--size",
            f"{height}x{width}",
            "--out",
            f"{folder}/pack",
        ]
        command += ["--channels", str(run.recipe.channels), *settings({"data.resize": run.recipe.data.resize})]
        run_process(command)
        outputs = run.outputs(np.load(f"{folder}/pack/images.npy"))
    other = outputs.unknown_score
    assert other is not None
    scores = np.nan_to_num(np.concatenate([known, other]), posinf=np.finfo(np.float64).max)
    return {
        "data": Path(data).name,
        "images": len(other),
        "auroc": float(roc_auc_score(np.arange(len(scores)) >= len(known), scores)),
        "unknown_found": float((other > threshold).mean()),
        "known_flagged": float((known > threshold).mean()),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--unknown", metavar="DATA", help="images of other classes")
    parser.add_argument("--halves", type=int, default=20)
    args = parser.parse_args()
    run = flatout.load(args.run)
    result = {
        **about("flatout", "torch", "scikit-learn"),
        "job": run.recipe.job,
        "model": run.recipe.model,
        "test_accuracy": run.summary["test_accuracy"],
        "test_images": run.summary["test_count"],
        "prediction_sets": coverage_of_sets(run, args.halves),
        **({"unknown": unknown_images(run, args.unknown)} if args.unknown else {}),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
