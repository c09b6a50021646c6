"""`flatout check DATA --labels`: wrong labels, found by out-of-fold predictions.

The images are divided into folds. For each fold a network is trained briefly on the others; all trainings together take
about as long as one. If the recipe starts from published weights, only the head is trained, on cached features.

The method is confident learning, after Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in
Dataset Labels" (JAIR 70, 2021, arXiv 1911.00068): how often images of other classes get a label is estimated together
with which labels these are. The paper counts errors by thresholds on probabilities, which after a short training
reports many confusions as errors. Here probabilities are calibrated with a bias for each class, and Bayes' rule gives
the probability that a label is wrong (see `probability_wrong`).

Shape letters: N images, K classes, E errors.
"""

import csv
import dataclasses
import io
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.analysis.images import label_of, name_of, thumbnails, tile
from flatout.analysis.output import check_free, make_folder
from flatout.config import Recipe
from flatout.data.source import DataSource, ImageDataset
from flatout.engine.devices import parse_devices
from flatout.engine.factory import speeds_on
from flatout.inference.calibration import bias_corrected
from flatout.report.html import write_page
from flatout.train.recipes import resolve
from flatout.train.request import Options, TrainRequest
from flatout.train.run import train
from flatout.utils import run_files
from flatout.utils.console import Console, counted
from flatout.utils.errors import InputError
from flatout.utils.files import printable, write_atomically

PAGE, SUGGESTIONS = "label-errors.html", "label-errors.csv"
COLUMNS = ("file", "split", "row", "given", "suggested", "confidence")
# Three trainings on two thirds of the images, each 0.6 times as long as one, take 1.2 times as long together.
FOLDS, SHARE_OF_EPOCHS, COST_OF_FOLDS = 3, 0.6, 1.2
# A label is listed if it is wrong with this probability, since looking at an image costs less than a missed error; it
# is changed only if it is more likely wrong than right.
LISTED_FROM, APPLIED_FROM = 0.15, 0.5
# Initial share of wrong labels, maximum iterations, and the tolerance in images.
START, MAX_STEPS, MIN_CHANGE = 0.1, 500, 0.01
# Errors with pictures on the page, pairs of classes there, and lines on the screen.
MAX_SHOWN, MAX_PAIRS, MAX_LISTED = 200, 20, 20
# Below this agreement of networks and labels, most suggestions are wrong.
MIN_AGREEMENT = 0.9


# --- confident learning -----------------------------------------------------------------------------------------------


class LabelError(NamedTuple):
    """A label that is likely wrong.

    Attributes:
        index: the index of the image.
        given, suggested: classes; in multi-label tasks `given` is the class whose presence is wrong, and `suggested` 1
            where it should be added, 0 where removed.
        confidence: the probability that the label is wrong.
    """

    index: int
    given: int
    suggested: int
    confidence: float


def probability_wrong(own_N: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the probability that each label is wrong, float64 [N].

    An image is labelled k with probability p = c (1 - s) + (1 - c) r: c is the probability of class k, s the share of
    wrong labels, and r the rate at which images of other classes are labelled k. The label k is wrong with probability
    (1 - c) r / p. Their mean is the next s, until it converges. All classes have the same share: with a weak network,
    shares of single classes would grow until all labels of a class are wrong.

    Args:
        own_N: p for the given label, calibrated on the labels as they are.
        labels_N: int64 [N].
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


def find_errors(probabilities: np.ndarray, labels: np.ndarray) -> list[LabelError]:
    """Return the labels that are likely wrong, the most certain first; multi-label classes are judged separately.

    Only images whose most probable class is another one are errors; it is the suggestion.

    Args:
        probabilities: float [N, K], of a model that was not trained on the image.
        labels: int64 [N], or uint8 [N, K].
    """
    if labels.ndim == 1:
        found = _find_errors(probabilities, labels)
    else:
        found = []
        for k, labels_N in enumerate(labels.T.astype(np.int64)):
            present_N = probabilities[:, k]
            errors = _find_errors(np.stack([1 - present_N, present_N], axis=1), labels_N)
            found += [error._replace(given=k) for error in errors]
    return sorted(found, key=lambda error: -error.confidence)


def _find_errors(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> list[LabelError]:
    # Images for which a network returned NaN are not judged.
    calibrated_NK = bias_corrected(np.log(np.maximum(np.nan_to_num(probabilities_NK), 1e-7)), labels_N)
    wrong_N = probability_wrong(calibrated_NK[np.arange(len(labels_N)), labels_N], labels_N)
    best_N = calibrated_NK.argmax(axis=1)
    index = np.flatnonzero((wrong_N >= LISTED_FROM) & (best_N != labels_N))
    columns = (index, labels_N[index], best_N[index], wrong_N[index])
    return list(map(LabelError._make, zip(*(column.tolist() for column in columns), strict=True)))


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelErrors:
    """Wrong labels of a data set, without its unreadable images.

    `probabilities`, float32 [N, K], are those of networks that `recipe` trained on other images.
    """

    source: ImageDataset
    errors: list[LabelError]
    probabilities: np.ndarray
    recipe: Recipe

    @property
    def agreement(self) -> float:
        """The share of labels that the networks also predict; in multi-label tasks, the F1 score over all labels."""
        if self.source.task == "multi-label":
            given, predicted = self.source.labels > 0, self.probabilities >= 0.5
            return float(2 * (given & predicted).sum() / max(1, given.sum() + predicted.sum()))
        return float((self.probabilities.argmax(axis=1) == self.source.labels).mean())

    def remarks(self) -> list[str]:
        """Return a warning if the suggestions are unreliable."""
        if self.agreement >= MIN_AGREEMENT:
            return []
        return [
            f"The networks agree with only {100 * self.agreement:.0f} % of the labels, so many suggestions are their "
            "mistakes: start from published weights, or train for more epochs."
        ]


def recipe_of_folds(recipe: Recipe) -> Recipe:
    """Shorten a recipe so that all folds take about as long as one training, with published weights frozen."""
    changes: dict[str, Any] = {
        "epochs": max(1, int(SHARE_OF_EPOCHS * recipe.epochs)),
        "data.folds": FOLDS if recipe.epochs > 1 else 2,
        "data.fold": 0,
        "keep": "last",
        "early_stopping": 0,
        "tta": False,
    }
    if recipe.pretrained:
        # The features are computed once per image; the heads are fitted to them.
        changes |= {"freeze": "all-but-last-0", "linear_probe": recipe.task in ("auto", "single-label")}
        changes |= {f"augment.{key}": value for key, value in dataclasses.asdict(type(recipe.augment)()).items()}
    return recipe.override(changes)


def find_label_errors(
    recipe: Recipe, data: DataSource | ImageDataset, options: Options, console: Console
) -> LabelErrors:
    """Train on folds of the data and return the labels that are likely wrong.

    Images of a test split are judged by the networks of all folds, which have not seen them. The recipe of the folds is
    derived from that of one training; run folders are temporary.

    Raises:
        InputError: the labels are numbers, or training is impossible with this data and recipe.
        TrainingFailed: training cannot continue.
    """
    source = data.read() if isinstance(data, DataSource) else data
    if source.task == "regression":
        raise InputError(f"{source.path or 'data'}: labels that are numbers have no classes to confuse; drop --labels")
    recipe = recipe_of_folds(recipe)
    with tempfile.TemporaryDirectory(prefix="flatout-labels-") as folder:
        options = dataclasses.replace(options, out=Path(folder) / "folds", report=False)
        out = train(TrainRequest(recipe=recipe, data=data, options=options), console)
        with np.load(out / run_files.PREDICTIONS) as arrays:
            predictions = dict(arrays)
        skipped = run_files.read_summary(out, {})["skipped_images"]
    if skipped and source.files is not None:
        names = {printable(file): i for i, file in enumerate(source.files)}
        source = source.without({names[name]: reason for name, reason in skipped.items()})
    probabilities = np.empty((len(source), predictions["probabilities"].shape[1]), np.float32)
    probabilities[predictions["row"]] = predictions["probabilities"]
    if "test" in source.splits:
        start, stop = source.splits["test"]
        probabilities[start:stop] = predictions["test_probabilities"]
    errors = find_errors(probabilities.astype(np.float64), source.labels)
    return LabelErrors(source=source, errors=errors, probabilities=probabilities, recipe=recipe)


# --- the command ------------------------------------------------------------------------------------------------------


def check_labels(
    job: str | Path | None,
    data: Any,
    changes: Mapping[str, Any],
    *,
    out: Path | None,
    apply: Path | None,
    suggestions: Path | None,
    minutes: float | None,
    devices: str,
    engine: str,
    allow_code: bool,
    console: Console,
) -> tuple[dict[str, Any], list[str]]:
    """Find wrong labels, or apply suggestions that were found before; return the result, and lines to print.

    Args:
        apply: a new CSV file for all labels, corrected; or, for arrays, a new .npz file with the images; None for none.
        suggestions: a label-errors.csv of an earlier call, in place of training.
        minutes: the time budget of a generated recipe, including all folds.

    Raises:
        InputError, TrainingFailed: see `find_label_errors`; or a file exists already, or does not fit the data.
    """
    _check_target(apply)
    check_free(out)
    if suggestions is not None:
        if apply is None:
            raise InputError("--suggestions needs --apply OUT.csv, the file to write")
        # Nothing is trained, so the reasons for a generated recipe are not shown.
        _, found = resolve(job, data, changes, accelerated=False, console=Console(), fetch=False)
        source = _read_for(apply, found)
        count = apply_file(source, suggestions, apply)
        line = f"{count:,} labels corrected: {apply}{_how_to_train(source, apply)}"
        return {"applied": count, "corrected": str(apply)}, [line]
    if minutes is not None and (job is not None or not minutes > 0):
        raise InputError(f"--minutes {minutes:g}: must be greater than 0, and needs a generated recipe: remove --job")
    accelerated, speeds = parse_devices(devices, engine).is_accelerated, speeds_on(devices, engine)
    seconds = None if minutes is None else 60 * minutes / COST_OF_FOLDS
    recipe, found = resolve(
        job, data, changes, accelerated=accelerated, console=console, seconds=seconds, speeds=speeds
    )
    if apply is not None and apply.suffix == ".npz":
        _read_for(apply, found)
    if not recipe.pretrained:
        console.note(f"finding wrong labels takes about {COST_OF_FOLDS} times as long as training once")
    options = Options(devices=devices, engine=engine, allow_code=allow_code)
    errors = find_label_errors(recipe, found, options, console)
    return write_errors(errors, make_folder(out, f"labels-{recipe.job}"), apply)


def _check_target(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix not in (".csv", ".npz"):
        raise InputError(f"--apply {path}: must be a new file that ends in .csv, or for arrays in .npz")
    if path.exists():
        raise InputError(f"--apply {path}: exists; nothing is overwritten: choose another name")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--apply {path}: there is no folder {path.absolute().parent}; make it first")


def _read_for(apply: Path, data: DataSource | ImageDataset) -> ImageDataset:
    """Read the data; raise InputError if images that are files are to be written as arrays."""
    source = data.read() if isinstance(data, DataSource) else data
    if apply.suffix == ".npz" and source.images is None:
        raise InputError(f"--apply {apply}: these images are files; end the name in .csv")
    return source


def write_errors(found: LabelErrors, out: Path, apply: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write page and suggestions into a folder, and corrected labels into `apply`; return the result, and lines."""
    rows = _suggestions(found, LISTED_FROM)
    columns = [name for name in COLUMNS if name != "file" or found.source.files is not None]
    write_csv(out / SUGGESTIONS, columns, ([row[name] for name in columns] for row in rows))
    write_page(out / PAGE, "labels.html.j2", _content(found, rows))
    share = len(rows) / len(found.source)
    lines = [f"{len(rows):,} of {len(found.source):,} labels are likely wrong ({100 * share:.1f} %)"]
    lines += found.remarks()
    for row in rows[:MAX_LISTED]:
        lines.append(f"  {row['name']}: {row['given']} → {row['suggested'] or 'none'} ({row['confidence']:.3f})")
    lines += [f"  and {len(rows) - MAX_LISTED:,} more"] * (len(rows) > MAX_LISTED)
    lines += [f"page: {out / PAGE}", f"suggestions: {out / SUGGESTIONS}"]
    result = {"images": len(found.source), "errors": [{k: row[k] for k in columns} for row in rows]}
    result |= {"agreement": found.agreement, "out": str(out), "corrected": None}
    if apply is not None:
        changes = {row["index"]: row["suggested"] for row in _suggestions(found, APPLIED_FROM)}
        write_corrected(found.source, changes, apply)
        result |= {"corrected": str(apply), "applied": len(changes)}
        how = f"{counted(len(changes), 'label')} with a confidence of {APPLIED_FROM:g} or more"
        lines.append(f"corrected {how}: {apply}{_how_to_train(found.source, apply)}")
    return result, lines


def _suggestions(found: LabelErrors, confidence_from: float) -> list[dict[str, Any]]:
    """Return the columns of label-errors.csv for each image with errors of a confidence, with its index and name."""
    source = found.source
    rows: dict[int, dict[str, Any]] = {}
    labels: dict[int, np.ndarray] = {}
    for index, given, suggested, confidence in found.errors:
        if confidence < confidence_from:
            continue
        if index not in rows:
            split, name = source.split_of(index), name_of(source, index)
            rows[index] = {
                "index": index,
                "name": name,
                "file": "" if source.files is None else name,
                "split": split,
                "row": index - source.splits[split][0],
                "given": label_of(source, index),
                "confidence": round(confidence, 4),
            }
        if source.task == "multi-label":
            labels.setdefault(index, source.labels[index].copy())[given] = suggested
            rows[index]["suggested"] = "|".join(source.classes[k] for k in labels[index].nonzero()[0])
        else:
            rows[index]["suggested"] = source.classes[suggested]
    return list(rows.values())


def _content(found: LabelErrors, rows: list[dict[str, Any]]) -> dict[str, Any]:
    source, shown = found.source, rows[:MAX_SHOWN]
    pairs = Counter((row["given"], row["suggested"] or "none") for row in rows)
    images = thumbnails(source, [row["index"] for row in shown])
    return {
        "name": (source.path.name if source.path else "") or source.kind,
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "count": len(rows),
        "remarks": found.remarks(),
        "facts": [
            ("images", f"{len(source):,}"),
            ("share of images", f"{100 * len(rows) / len(source):.1f} %"),
            ("median confidence", f"{np.median([row['confidence'] for row in rows]):.2f}" if rows else "—"),
            ("networks agree with", f"{100 * found.agreement:.1f} %"),
            ("model", found.recipe.model),
            ("folds × epochs", f"{found.recipe.data.folds} × {found.recipe.epochs}"),
        ],
        "tiles": [
            {
                **tile(image),
                **{key: row[key] for key in ("name", "given", "confidence")},
                "suggested": row["suggested"] or "none",
            }
            for row, image in zip(shown, images, strict=True)
        ],
        "pairs": [(given, suggested, times) for (given, suggested), times in pairs.most_common(MAX_PAIRS)],
        "suggestions": SUGGESTIONS,
    }


# --- corrected labels -------------------------------------------------------------------------------------------------


def apply_file(source: ImageDataset, path: Path, apply: Path) -> int:
    """Write corrected labels by the rows of a label-errors.csv that the user has kept, and return their number.

    Raises:
        InputError: the file cannot be read, or a row does not fit the data.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--suggestions {path}: cannot be read: {error}") from None
    changes: dict[int, str] = {}
    for number, row in enumerate(rows, start=2):
        if missing := {"split", "row", "given", "suggested"} - row.keys():
            raise InputError(f"{path}: has no column {min(missing)!r}; give the label-errors.csv of `check --labels`")
        start, stop = source.splits.get(row["split"], (0, 0))
        index = start + int(row["row"]) if (row["row"] or "").isdecimal() else stop
        is_same = index < stop and label_of(source, index) == row["given"]
        if is_same and row.get("file"):
            is_same = name_of(source, index) == row["file"]
        if not is_same:
            raise InputError(f"{path}: line {number}: is not of this data: {row.get('file') or row['row']}")
        labels = row["suggested"].split("|") if source.task == "multi-label" else [row["suggested"]]
        if unknown := [label for label in labels if label and label not in source.classes]:
            raise InputError(f"{path}: line {number}: there is no class {unknown[0]!r} in the data")
        changes[index] = row["suggested"]
    write_corrected(source, changes, apply)
    return len(changes)


def write_corrected(source: ImageDataset, changes: Mapping[int, str], path: Path) -> None:
    """Write a CSV file of all images with their labels, some of them changed, for `flatout train`.

    It has the columns file, below the folder of the data, label and split; for arrays, whose images have no files,
    split, row and label. An .npz file has the images of arrays too.
    """
    if path.suffix == ".npz":
        _write_arrays(source, changes, path)
        return
    rows = []
    for split, (start, stop) in source.splits.items():
        for index in range(start, stop):
            label = changes.get(index, label_of(source, index, empty=""))
            is_file = source.files is not None
            rows.append([name_of(source, index), label, split] if is_file else [split, index - start, label])
    write_csv(path, ["split", "row", "label"] if source.files is None else ["file", "label", "split"], rows)


def _write_arrays(source: ImageDataset, changes: Mapping[int, str], path: Path) -> None:
    assert source.images is not None
    labels = source.labels.copy()
    for index, text in changes.items():
        if source.task == "multi-label":
            labels[index] = [name in text.split("|") for name in source.classes]
        else:
            labels[index] = source.classes.index(text)
    if source.task == "single-label":
        # Numeric names are in numeric order.
        are_numbers = all(name.isdecimal() and str(int(name)) == name for name in source.classes)
        labels = np.array([int(name) if are_numbers else name for name in source.classes])[labels]
    arrays: dict[str, Any] = {}
    for split, (start, stop) in source.splits.items():
        arrays |= {f"{split}_images": source.images[start:stop], f"{split}_labels": labels[start:stop]}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomically(path, save)


def _how_to_train(source: ImageDataset, path: Path) -> str:
    if path.suffix == ".npz":
        return f" ({shlex.join(['flatout', 'train', str(path)])})"
    if source.files is None or source.path is None:
        return "; a list for you: arrays are trained from --apply OUT.npz, which has images and labels"
    folder = source.path if source.path.is_dir() else source.path.parent
    return f" ({shlex.join(['flatout', 'train', str(path), '--images', str(folder)])})"


def write_csv(path: Path, columns: list[str], rows: Iterable[list[Any]]) -> None:
    """Write a CSV file with a line of names, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomically(path, buffer.getvalue().encode("utf-8", "backslashreplace"))
