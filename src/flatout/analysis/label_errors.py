"""`flatout check DATA --labels`: wrong labels, found by predictions of networks that were trained on other images.

The method is confident learning (Northcutt, Jiang and Chuang, JAIR 70, 2021, arXiv 1911.00068), with Bayes' rule on
calibrated probabilities in place of thresholds, which report many confusions after a short training.
Shape letters: N images, K classes.
"""

import csv
import dataclasses
import io
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.analysis.check import label_of, name_of
from flatout.analysis.look import thumbnails, tile
from flatout.config import Recipe
from flatout.data.build import load
from flatout.data.source import DataSource, ImageDataset
from flatout.inference.calibration import bias_corrected
from flatout.report.page import write_page
from flatout.train.request import Options, TrainRequest
from flatout.train.run import train
from flatout.utils import run_files
from flatout.utils.console import Console, counted
from flatout.utils.errors import InputError
from flatout.utils.files import write_atomically
from flatout.utils.run_files import JsonObject

PAGE, SUGGESTIONS, CORRECTED = "label-errors.html", "label-errors.csv", "corrected.csv"
COLUMNS = ("file", "split", "row", "given", "suggested", "confidence")
# Three trainings on two thirds of the images, each 0.6 times as long as one, take 1.2 times as long together.
FOLDS, SHARE_OF_EPOCHS, COST_OF_FOLDS = 3, 0.6, 1.2
# A label is listed if it is wrong with this probability, since looking at an image costs less than a missed error; it
# is changed only if it is more likely wrong than right.
LISTED_FROM, CORRECTED_FROM = 0.15, 0.5
# Initial share of wrong labels, maximum iterations, and the tolerance in images.
START, MAX_STEPS, MIN_CHANGE = 0.1, 500, 0.01
# Errors with pictures on the page, pairs of classes there, and lines on the screen.
MAX_SHOWN, MAX_PAIRS, MAX_LISTED = 200, 20, 20
# Below this agreement of networks and labels, most suggestions are wrong.
MIN_AGREEMENT = 0.9


# --- confident learning -----------------------------------------------------------------------------------------------


class LabelError(NamedTuple):
    """A label that is likely wrong: the image's index, the classes, and the probability that the label is wrong."""

    index: int
    given: int
    suggested: int
    confidence: float


def probability_wrong(own_N: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the probability that each label is wrong, float64 [N], from calibrated probabilities of these labels.

    An image is labelled k with probability p = c (1 - s) + (1 - c) r: c is the probability of class k, s the share of
    wrong labels, and r the rate at which images of other classes are labelled k. The label k is wrong with probability
    (1 - c) r / p. Their mean is the next s, until it converges. All classes have the same share: with a weak network,
    shares of single classes would grow until all labels of a class are wrong.
    """
    count_K = np.bincount(labels_N)
    own_N, share = np.maximum(own_N, np.finfo(np.float64).tiny), START
    wrong_N = np.zeros(len(labels_N))
    for _ in range(MAX_STEPS):
        rate_N = np.minimum(1, share * count_K / np.maximum(1, len(labels_N) - count_K))[labels_N]
        clean_N = np.clip((own_N - rate_N) / np.maximum(1e-6, 1 - share - rate_N), 0, 1)
        wrong_N = np.where(own_N <= rate_N, 1.0, np.minimum(1, (1 - clean_N) * rate_N / own_N))
        before, share = share, wrong_N.mean()
        if abs(share - before) * len(labels_N) < MIN_CHANGE:
            break
    return wrong_N


def find_errors(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> list[LabelError]:
    """Return the labels that are likely wrong, the most certain first, from out-of-fold probabilities.

    Only images whose most probable class is another one are errors; it is the suggestion.
    """
    # Images for which a network returned NaN are not judged.
    calibrated_NK = bias_corrected(np.log(np.maximum(np.nan_to_num(probabilities_NK), 1e-7)), labels_N)
    wrong_N = probability_wrong(calibrated_NK[np.arange(len(labels_N)), labels_N], labels_N)
    best_N = calibrated_NK.argmax(axis=1)
    index = np.flatnonzero((wrong_N >= LISTED_FROM) & (best_N != labels_N))
    index = index[np.argsort(-wrong_N[index], kind="stable")]
    return [LabelError(i, int(labels_N[i]), int(best_N[i]), float(wrong_N[i])) for i in index.tolist()]


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelErrors:
    """Wrong labels of a data set's readable images."""

    source: ImageDataset
    errors: list[LabelError]
    probabilities: np.ndarray  # float32 [N, K], of networks that `recipe` trained on other images
    recipe: Recipe

    @property
    def agreement(self) -> float:
        """The share of labels that the networks also predict."""
        return float((self.probabilities.argmax(axis=1) == self.source.labels).mean())

    @property
    def remarks(self) -> list[str]:
        """A warning if the suggestions are unreliable."""
        warning = (
            f"The networks agree with only {100 * self.agreement:.0f} % of the labels, so many suggestions are their "
            "mistakes: start from published weights, or train for more epochs."
        )
        return [warning] * (self.agreement < MIN_AGREEMENT)

    @property
    def can_be_listed(self) -> bool:
        """Whether a CSV file can list the images: all are separate files in one folder."""
        files, folder = self.source.files, self.source.folder
        if files is None or folder is None:
            return False
        return all(isinstance(file, Path) and file.is_relative_to(folder) for file in files)


def recipe_of_folds(recipe: Recipe) -> Recipe:
    """Shorten a recipe so that all folds take about as long as one training; on published weights, only fit heads."""
    changes: dict[str, object] = {
        "epochs": max(1, int(SHARE_OF_EPOCHS * recipe.epochs)),
        "data.folds": FOLDS if recipe.epochs > 1 or recipe.pretrained else 2,
        "data.fold": 0,
        "keep": "last",
        "early_stopping": 0,
        "tta": False,
    }
    if recipe.schedule.name == "plateau":  # it needs a validation split
        changes["schedule.name"] = "constant"
    if recipe.pretrained:
        return recipe.override({**changes, "linear_probe": True}).without_fine_tuning()
    return recipe.override(changes)


def find_label_errors(
    recipe: Recipe, data: DataSource | ImageDataset, options: Options, console: Console
) -> LabelErrors:
    """Train on folds of the data and return the labels that are likely wrong; run folders are temporary.

    Images of a test split are judged by the networks of all folds, which have not seen them.
    """
    source = data.read()
    if source.task != "single-label":
        raise InputError(
            f"{source.path or 'data'}: --labels needs one class for each image; this data is {source.task}"
        )
    recipe = recipe_of_folds(recipe)
    with tempfile.TemporaryDirectory(prefix="flatout-labels-") as folder:
        options = dataclasses.replace(options, out=Path(folder) / "folds", report=False)
        out = train(TrainRequest(recipe=recipe, data=data, options=options), console)
        with np.load(out / run_files.PREDICTIONS) as arrays:
            predictions = dict(arrays)
        skipped = run_files.read_summary(out, {})["skipped_images"]
    if skipped and source.files is not None:
        # Their names may be those of another copy, from which the cached pack was made.
        source = source.without(load(data, recipe, cache=True, report=console).skipped_rows)
    probabilities = np.empty((len(source), predictions["probabilities"].shape[1]), np.float32)
    probabilities[predictions["row"]] = predictions["probabilities"]
    if "test" in source.splits:
        start, stop = source.splits["test"]
        probabilities[start:stop] = predictions["test_probabilities"]
    errors = find_errors(probabilities.astype(np.float64), source.labels)
    return LabelErrors(source=source, errors=errors, probabilities=probabilities, recipe=recipe)


# --- files ------------------------------------------------------------------------------------------------------------


def write_errors(found: LabelErrors, out: Path) -> tuple[JsonObject, list[str]]:
    """Write page, suggestions and, for separate files, a list of corrected labels; return the result, and lines."""
    source, rows = found.source, [_suggestion(found.source, error) for error in found.errors]
    columns = COLUMNS if source.files is not None else COLUMNS[1:]
    _write_csv(out / SUGGESTIONS, columns, ([row[name] for name in columns] for row in rows))
    write_page(out / PAGE, "labels.html.j2", _content(found, rows))
    share = 100 * len(rows) / len(source)
    lines = [f"{len(rows):,} of {len(source):,} labels are likely wrong ({share:.1f} %)", *found.remarks]
    shown = rows[:MAX_LISTED]
    lines += [f"  {row['name']}: {row['given']} → {row['suggested']} ({row['confidence']:.3f})" for row in shown]
    lines += [f"  and {len(rows) - MAX_LISTED:,} more"] * (len(rows) > MAX_LISTED)
    lines += [f"page: {out / PAGE}", f"suggestions: {out / SUGGESTIONS}"]
    result = {"images": len(source), "errors": [{k: row[k] for k in columns} for row in rows]}
    result |= {"agreement": found.agreement, "out": str(out), "corrected": None}
    if found.can_be_listed:
        changes = {e.index: source.classes[e.suggested] for e in found.errors if e.confidence >= CORRECTED_FROM}
        listed = []
        for i in range(len(source)):
            given = label_of(source, i)
            listed.append([name_of(source, i), changes.get(i, given), source.split_of(i), given * (i in changes)])
        # `given` is the label before; other labels have none.
        _write_csv(out / CORRECTED, ["file", "label", "split", "given"], listed)
        result |= {"corrected": str(out / CORRECTED), "applied": len(changes)}
        words = ["flatout", "train", str(out / CORRECTED), "--images", str(source.folder), "--set", "task=single-label"]
        line = f"{counted(len(changes), 'label')} with a confidence of at least {CORRECTED_FROM:g} corrected"
        lines.append(f"{line}; train on the result: {shlex.join(words)}" if changes else line)
    else:
        lines.append(f"{CORRECTED} is not written: the images are not separate files in one folder")
    return result, lines


def _suggestion(source: ImageDataset, error: LabelError) -> JsonObject:
    split, name = source.split_of(error.index), name_of(source, error.index)
    given, suggested = source.classes[error.given], source.classes[error.suggested]
    values = (name, split, error.index - source.splits[split][0], given, suggested, round(error.confidence, 4))
    return {"index": error.index, "name": name, **dict(zip(COLUMNS, values, strict=True))}


def _content(found: LabelErrors, rows: list[JsonObject]) -> JsonObject:
    source, shown = found.source, rows[:MAX_SHOWN]
    pairs = Counter((row["given"], row["suggested"]) for row in rows)
    images = thumbnails(source, [row["index"] for row in shown])
    epochs = found.recipe.epochs
    training = counted(epochs, "epoch") if epochs else "fitted heads"
    return {
        "name": (source.path.name if source.path else "") or source.kind,
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "count": len(rows),
        "remarks": found.remarks,
        "facts": [
            ("images", f"{len(source):,}"),
            ("share of images", f"{100 * len(rows) / len(source):.1f} %"),
            ("median confidence", f"{np.median([row['confidence'] for row in rows]):.2f}" if rows else "—"),
            ("labels also predicted", f"{100 * found.agreement:.1f} %"),
            ("model", found.recipe.model),
            ("folds", f"{found.recipe.data.folds}: {training}"),
        ],
        "tiles": [tile(image) | row for row, image in zip(shown, images, strict=True)],
        "pairs": [(given, suggested, times) for (given, suggested), times in pairs.most_common(MAX_PAIRS)],
        "suggestions": SUGGESTIONS,
        "corrected": CORRECTED if found.can_be_listed else "",
    }


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    write_atomically(path, buffer.getvalue().encode("utf-8", "backslashreplace"))
