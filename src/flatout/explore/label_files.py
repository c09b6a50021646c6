"""What `flatout check --labels` writes: a page with pictures, a CSV file with suggestions, and corrected labels."""

import csv
import io
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from flatout.console import Console
from flatout.data.check import label_of, name_of
from flatout.data.source import DataRef, Source
from flatout.engine.devices import parse_devices
from flatout.engine.factory import speeds_on
from flatout.errors import InputError
from flatout.explore.images import thumbnails
from flatout.explore.label_errors import LabelErrors, find_label_errors
from flatout.files import write_atomically
from flatout.report.html import SMOOTH_FROM_PIXELS, thumbnail, write_page
from flatout.scale.scale import check_free, make_folder
from flatout.train.recipes import resolve
from flatout.train.request import Options

PAGE, SUGGESTIONS = "label-errors.html", "label-errors.csv"
COLUMNS = ("file", "split", "row", "given", "suggested", "confidence")
# Errors with pictures on the page, and lines on the screen.
SHOWN, LISTED = 200, 20
# Below this share of labels that the networks agree with, most of what they suggest is wrong.
LEAST_AGREEMENT = 0.9


def check_labels(
    job: str | Path | None,
    data: Any,
    changes: Mapping[str, Any],
    *,
    out: Path | None,
    apply: Path | None,
    suggestions: Path | None,
    devices: str,
    engine: str,
    allow_code: bool,
    console: Console,
) -> tuple[dict[str, Any], list[str]]:
    """Find wrong labels, or apply suggestions that were found before; return what the command prints.

    Args:
        job, data, changes: as `resolve` takes them.
        out: a new or empty folder; None for a new one under `runs/`.
        apply: a new CSV file for all labels, corrected; or, for arrays, a new .npz file with the images; None for none.
        suggestions: a label-errors.csv of an earlier call, in place of training.
        devices, engine, allow_code: as in `Options`.

    Raises:
        InputError, TrainingFailed: as `find_label_errors`; or a file is there already, or does not fit the data.
    """
    _check_target(apply)
    check_free(out)
    if suggestions:
        if apply is None:
            raise InputError("--suggestions needs --apply OUT.csv, the file to write")
        # Nothing is trained: how a generated recipe came about is of no interest.
        _, found = resolve(job, data, changes, accelerated=False, console=Console(), fetch=False)
        source = found.read() if isinstance(found, DataRef) else found
        _check_kind(apply, source)
        count = apply_file(source, suggestions, apply)
        return {"applied": count, "corrected": str(apply)}, [
            f"{count:,} labels corrected: {apply}{_how_to_train(source, apply)}"
        ]
    accelerated, speeds = parse_devices(devices, engine).is_accelerated, speeds_on(devices, engine)
    recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console, speeds=speeds)
    if apply and apply.suffix == ".npz":
        _check_kind(apply, found.read() if isinstance(found, DataRef) else found)
    options = Options(devices=devices, engine=engine, allow_code=allow_code)
    errors = find_label_errors(recipe, found, options, console)
    return write(errors, make_folder(out, f"labels-{recipe.job}"), apply)


def _check_target(path: Path | None) -> None:
    """Raise InputError where the file for corrected labels exists or has another ending."""
    if path is None:
        return
    if path.suffix not in (".csv", ".npz"):
        raise InputError(f"--apply {path}: must be a new file that ends in .csv, or for arrays in .npz")
    if path.exists():
        raise InputError(f"--apply {path}: exists; nothing is overwritten: choose another name")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--apply {path}: there is no folder {path.absolute().parent}; make it first")


def _check_kind(path: Path, source: Source) -> None:
    """Raise InputError where arrays are to be written of images that are files."""
    if path.suffix == ".npz" and source.images is None:
        raise InputError(f"--apply {path}: these images are files; end the name in .csv")


def suggestions(found: LabelErrors) -> list[dict[str, Any]]:
    """Return the columns of label-errors.csv for each error; several errors of one image are one suggestion."""
    source, errors = found.source, found.errors
    rows: dict[int, dict[str, Any]] = {}
    for index, given, suggested, confidence in zip(
        errors.index.tolist(), errors.given.tolist(), errors.suggested.tolist(), errors.confidence.tolist(), strict=True
    ):
        split = source.split_of(index)
        row = rows.setdefault(
            index,
            {
                "file": "" if source.files is None else name_of(source, index, split),
                "split": split,
                "row": index - source.splits[split][0],
                "given": label_of(source, index),
                "suggested": source.labels[index].copy() if source.task == "multi-label" else source.classes[suggested],
                "confidence": round(confidence, 4),
                "index": index,
            },
        )
        if source.task == "multi-label":
            row["suggested"][given] = suggested
    for row in rows.values():
        if source.task == "multi-label":
            row["suggested"] = "|".join(source.classes[k] for k in row["suggested"].nonzero()[0])
    return list(rows.values())


def remarks(found: LabelErrors) -> list[str]:
    """Return a sentence about how far the suggestions can be believed, where that is not far."""
    if found.agreement >= LEAST_AGREEMENT:
        return []
    return [
        f"The networks agree with {100 * found.agreement:.0f} % of the labels only, so that many suggestions are "
        "mistakes of theirs: start from published weights, or train for more epochs."
    ]


def write(found: LabelErrors, out: Path, apply: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write page and suggestions into a folder, and corrected labels into `apply`; return what the command prints."""
    rows = suggestions(found)
    columns = [name for name in COLUMNS if name != "file" or found.source.files is not None]
    write_csv(out / SUGGESTIONS, columns, ([row[name] for name in columns] for row in rows))
    write_page(out / PAGE, "labels.html.j2", _content(found, rows))
    share = len(rows) / len(found.source)
    lines = [f"{len(rows):,} of {len(found.source):,} labels are likely wrong ({100 * share:.1f} %)", *remarks(found)]
    for row in rows[:LISTED]:
        name = row["file"] or f"{row['split']}[{row['row']}]"
        lines.append(f"  {name}: {row['given']} → {row['suggested'] or 'none'} ({row['confidence']:.3f})")
    lines += [f"  and {len(rows) - LISTED:,} more"] * (len(rows) > LISTED)
    lines += [f"page: {out / PAGE}", f"suggestions: {out / SUGGESTIONS}"]
    if apply:
        write_corrected(found.source, {row["index"]: row["suggested"] for row in rows}, apply)
        lines.append(f"corrected labels: {apply}{_how_to_train(found.source, apply)}")
    result = {"images": len(found.source), "errors": [{k: row[k] for k in columns} for row in rows]}
    return {**result, "agreement": found.agreement, "out": str(out), "corrected": str(apply) if apply else None}, lines


def apply_file(source: Source, path: Path | str, apply: Path) -> int:
    """Write corrected labels by the rows of a label-errors.csv that the user has kept, and return their number.

    Raises:
        InputError: the file is none, or has a row that is not of this data.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
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
            is_same = name_of(source, index, row["split"]) == row["file"]
        if not is_same:
            raise InputError(f"{path}: line {number}: is not of this data: {row.get('file') or row['row']}")
        labels = row["suggested"].split("|") if source.task == "multi-label" else [row["suggested"]]
        if unknown := [label for label in labels if label and label not in source.classes]:
            raise InputError(f"{path}: line {number}: there is no class {unknown[0]!r} in the data")
        changes[index] = row["suggested"]
    write_corrected(source, changes, apply)
    return len(changes)


def write_corrected(source: Source, changes: Mapping[int, str], path: Path) -> None:
    """Write a CSV file of all images with their labels, some of them changed, for `flatout train`.

    It has the columns file, below the folder of the data, label and split; for arrays, whose images have no files,
    split, row and label. An .npz file has the images of arrays too.
    """
    if path.suffix == ".npz":
        _write_arrays(source, changes, path)
        return
    labels = (changes.get(i, "" if (text := label_of(source, i)) == "none" else text) for i in range(len(source)))
    places = ((split, i - start, i) for split, (start, stop) in source.splits.items() for i in range(start, stop))
    if source.files is None:
        columns, rows = (
            ["split", "row", "label"],
            ([s, r, label] for (s, r, _), label in zip(places, labels, strict=True)),
        )
    else:
        columns = ["file", "label", "split"]
        rows = ([name_of(source, i, s), label, s] for (s, _, i), label in zip(places, labels, strict=True))
    write_csv(path, columns, rows)


def _write_arrays(source: Source, changes: Mapping[int, str], path: Path) -> None:
    """Write images and labels of each split, some labels changed."""
    labels = source.labels.copy()
    for index, text in changes.items():
        if source.task == "multi-label":
            names = text.split("|") if text else []
            labels[index] = [name in names for name in source.classes]
        else:
            labels[index] = source.classes.index(text)
    if source.task == "single-label":
        # Names that are numbers keep their order as numbers.
        is_counted = all(name.isdecimal() and str(int(name)) == name for name in source.classes)
        labels = np.array([int(name) if is_counted else name for name in source.classes])[labels]
    arrays: dict[str, Any] = {}
    for split, (start, stop) in source.splits.items():
        assert source.images is not None
        arrays |= {f"{split}_images": source.images[start:stop], f"{split}_labels": labels[start:stop]}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomically(path, save)


def _how_to_train(source: Source, path: Path) -> str:
    """Return the command that trains with corrected labels, in brackets."""
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


def _content(found: LabelErrors, rows: list[dict[str, Any]]) -> dict[str, Any]:
    source, shown = found.source, rows[:SHOWN]
    images = thumbnails(source, [row["index"] for row in shown])
    pairs: dict[tuple[str, str], int] = {}
    for row in rows:
        pairs[row["given"], row["suggested"] or "none"] = pairs.get((row["given"], row["suggested"] or "none"), 0) + 1
    most = sorted(pairs.items(), key=lambda pair: -pair[1])[:20]
    confidences = np.array([row["confidence"] for row in rows])
    return {
        "name": (source.path.name if source.path else "") or source.kind,
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "count": len(rows),
        "remarks": remarks(found),
        "facts": [
            ("images", f"{len(source):,}"),
            ("share of images", f"{100 * len(rows) / len(source):.1f} %"),
            ("median confidence", f"{np.median(confidences):.2f}" if len(rows) else "—"),
            ("networks agree with", f"{100 * found.agreement:.1f} %"),
            ("model", found.recipe.model),
            ("folds × epochs", f"{found.recipe.data.folds} × {found.recipe.epochs}"),
        ],
        "tiles": [
            {
                "image": "" if image is None else thumbnail(image),
                "tiny": image is not None and max(image.shape[:2]) < SMOOTH_FROM_PIXELS,
                "name": row["file"] or f"{row['split']}[{row['row']}]",
                **{key: row[key] or "none" for key in ("given", "suggested")},
                "confidence": row["confidence"],
            }
            for row, image in zip(shown, images, strict=True)
        ],
        "pairs": [(given, suggested, times) for (given, suggested), times in most],
        "suggestions": SUGGESTIONS,
    }
