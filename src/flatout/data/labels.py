"""Labels of every kind (numbers, names, one-hot rows) as class names and indices into them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import InputError

LISTED = 10
CLASS_LIST_NAME = "classes.txt"
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,17}))(?:\.0+)?", re.ASCII)
_ID_AND_NAME = re.compile(r"([^\s:]+)(?::|\s)\s*(\S.*)")
_DECIMAL = re.compile(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", re.ASCII)
# Below this many, different labels are taken for classes, whatever they look like.
_FEW = 20


def first_few(items: Iterable[str], limit: int = LISTED) -> str:
    """Return the items joined for a message; beyond the limit, their number."""
    items = list(items)
    rest = f"; and {len(items) - limit:,} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + rest


def find_class_list(given: str, folder: Path) -> Path | None:
    """Return the file of class names: the one given, else `classes.txt` in the folder if present.

    Raises:
        InputError: the given file does not exist.
    """
    path = Path(given).expanduser() if given else folder / CLASS_LIST_NAME
    if path.is_file():
        return path
    if given:
        raise InputError(f"{given}: no such class list; give a text file with one class name per line")
    return None


def find_class_list_beside(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first file of these names in a folder, or None."""
    return next((path for name in names if (path := folder / name).is_file()), None)


def read_class_list(path: Path) -> tuple[str, ...]:
    """Return the class names of a text file, one per line; the first is class 0.

    Raises:
        InputError: the file cannot be read, is empty, or has a blank line or the same name twice.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a class list: {error}") from None
    names: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name:
            raise InputError(f"{path}: line {number} is blank; every line names a class")
        if name in names:
            raise InputError(f"{path}: line {number}: class {name!r} is already on line {names[name]}")
        names[name] = number
    if not names:
        raise InputError(f"{path}: names no classes; write one class name per line")
    return tuple(names)


def split_ids(lines: tuple[str, ...], used: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the data calls the classes of a class list, and their names.

    Both are the lines, unless every line is an id and a name (`n01440764 tench`, `0:daisy`) and the labels in use are
    ids. Two classes of one name get their ids too.
    """
    matches = [match for line in lines if (match := _ID_AND_NAME.fullmatch(line))]
    ids = tuple(match[1] for match in matches)
    if len(set(ids)) < len(lines) or set(lines).issuperset(used) or not set(ids).issuperset(used):
        return lines, lines
    counts = Counter(match[2] for match in matches)
    return ids, tuple(match[2] if counts[match[2]] == 1 else f"{match[2]} ({match[1]})" for match in matches)


def flat_labels(labels: Any, where: object) -> np.ndarray:
    """Return labels as one int64 or text array [N], from [N], [N, 1] or one-hot [N, K] rows.

    Raises:
        InputError: the labels have another shape or type, or are not whole numbers.
    """
    try:
        labels = np.asarray(labels)
    except ValueError:
        raise InputError(f"{where}: the labels differ in shape; give one number or text per image") from None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8")
    if labels.dtype.kind == "U" and labels.ndim == 1:
        return labels
    if labels.dtype.kind not in "biuf":
        raise InputError(f"{where}: labels of type {labels.dtype}; give numbers or text")
    if labels.ndim == 2:
        if not np.isin(labels, (0, 1)).all():
            raise InputError(f"{where}: labels of shape {labels.shape} are not one-hot rows; give one label per image")
        if not (labels.sum(axis=1) == 1).all():
            raise InputError(
                f"{where}: rows of labels of shape {labels.shape} are not one-hot: they have several classes or none; "
                "multi-label data is not supported, give one label per image"
            )
        return labels.argmax(axis=1).astype(np.int64)
    if labels.ndim != 1:
        raise InputError(f"{where}: labels of shape {labels.shape}; give one label per image")
    whole = labels.astype(np.int64) if np.isfinite(labels).all() else None
    if whole is None or not np.array_equal(whole, labels):
        raise InputError(f"{where}: labels must be whole numbers or names; regression is not supported")
    return whole


def index_labels(
    labels: np.ndarray, names: tuple[str, ...] | None, locate: Callable[[int], str], subject: str
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return class names, indices int64 [N] and notes for the user, for int64 or text labels [N].

    With class names, a label is one of them or a position among them, counted from 0. Without, texts are sorted;
    numbers that start at 0 with fewer gaps than classes stay as they are, so that output k of a model is label k; other
    numbers are sorted and renumbered from 0. `locate(index)` ("labels.csv: line 7") and `subject` ("labels.csv: column
    'price'") begin messages about one label and about all.

    Raises:
        InputError: a label is unknown, negative or empty (ten are listed), or the labels are not classes.
    """
    if labels.dtype.kind == "U":
        texts, inverse = np.unique(labels, return_inverse=True)
        numbers = [_NUMBER.fullmatch(text) for text in texts.tolist()]
        unknown = [text for text in texts.tolist() if text not in set(names or ())]
        if not unknown or not all(numbers):
            _refuse(locate, labels, labels == "", "empty label")
            if names is None:
                _refuse_no_classes(texts.tolist(), len(labels), subject)
                return tuple(texts.tolist()), inverse.astype(np.int64), ()
            _refuse(locate, labels, np.isin(labels, unknown), "label not in the class list:")
            table = np.array([names.index(text) for text in texts.tolist()], dtype=np.int64)
            return names, table[inverse], ()
        labels = np.array([int(match[1]) for match in numbers if match], dtype=np.int64)[inverse]
    _refuse(locate, labels, labels < 0, "negative label")
    if names is not None:
        need = f"label outside the class list (0 to {len(names) - 1}, counted from 0):"
        _refuse(locate, labels, labels >= len(names), need)
        return names, labels, ()
    used, inverse = np.unique(labels, return_inverse=True)
    _refuse_no_classes(list(map(str, used.tolist())), len(labels), subject)
    if used[0] == 0 and used[-1] < 2 * len(used):
        gaps = sorted(set(range(int(used[-1]) + 1)) - set(used.tolist()))
        notes = (f"no image has label {', '.join(map(str, gaps))}",) if gaps else ()
        return tuple(map(str, range(int(used[-1]) + 1))), labels, notes
    notes = ("the labels do not count up from 0; they are sorted and renumbered from 0",)
    return tuple(map(str, used.tolist())), inverse.astype(np.int64), notes


def _refuse(locate: Callable[[int], str], labels: np.ndarray, wrong: np.ndarray, what: str) -> None:
    if places := np.flatnonzero(wrong).tolist():
        raise InputError(first_few([f"{locate(i)}: {what} {labels[i]}".rstrip() for i in places]))


def _refuse_no_classes(texts: list[str], count: int, subject: str) -> None:
    """Refuse measurements, several labels in one, and names of single images: they would train as classes."""
    if len(texts) <= _FEW and not any(mark in text for text in texts for mark in "|;, "):
        return
    way_out = "if these are classes, list them in a file, one per line: --set data.classes=FILE"
    if len(texts) > _FEW and all(_DECIMAL.fullmatch(text) for text in texts):
        values = [float(text) for text in texts]
        is_fraction = any(value != int(value) for value in values)
        # Numbers of classes are dense, or have many images each.
        if is_fraction or (max(values) - min(values) > 2 * len(texts) and count < 10 * len(texts)):
            raise InputError(
                f"{subject}: holds {len(texts):,} different numbers for {count:,} images, such as "
                f"{', '.join(texts[:3])}: measurements, not classes; regression is not supported; {way_out}"
            )
    if mark := _separator(texts):
        example = next(text for text in texts if mark in text)
        raise InputError(
            f"{subject}: has several labels in one, such as {example!r}; multi-label data is not supported, give one "
            f"label per image; {way_out}"
        )
    if len(texts) > _FEW and 2 * len(texts) > count:
        raise InputError(f"{subject}: holds {len(texts):,} different labels for {count:,} images; {way_out}")


def _separator(texts: list[str]) -> str | None:
    """Return what separates several labels in one text; names may hold spaces and commas, so that alone is no sign."""
    known = set(texts)
    for mark in "|;, ":
        joined = [[part.strip() for part in text.split(mark)] for text in texts if mark in text]
        parts = {part for text in joined for part in text}
        are_labels = sum(known.issuperset(text) for text in joined)
        if joined and (are_labels or (len(joined) >= 3 and 2 * len(parts) < len(joined))):
            return mark
    return None
