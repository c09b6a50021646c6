"""Labels of every kind (numbers, names, one-hot rows) to class names and indices into them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.errors import InputError

LISTED = 10
CLASS_LIST_NAME = "classes.txt"
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,17}))(?:\.0+)?", re.ASCII)


def first_few(items: Iterable[str], limit: int = LISTED) -> str:
    """Return the items joined for a message, cut with a count."""
    items = list(items)
    rest = f"; and {len(items) - limit:,} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + rest


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelling:
    """Class names, labels as indices into them (int64 [N]), and what a person should know about it."""

    classes: tuple[str, ...]
    labels: np.ndarray
    notes: tuple[str, ...] = ()


def find_class_list(given: str, folder: Path) -> Path | None:
    """Return the file of class names: the one given, else `classes.txt` in the folder if there.

    Raises:
        InputError: the given file does not exist.
    """
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise InputError(f"{given}: no such class list; give a text file with one class name per line")
        return path
    path = folder / CLASS_LIST_NAME
    return path if path.is_file() else None


def read_class_list(path: Path) -> tuple[str, ...]:
    """Return the class names of a text file, one per line; the first is class 0.

    Raises:
        InputError: the file cannot be read, is empty, or has a blank line or the same name twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a class list: {error}") from None
    names: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name:
            raise InputError(f"{path}: line {number} is blank; every line names a class")
        if name in names:
            raise InputError(f"{path}: line {number}: class {name!r} is on line {names[name]} already")
        names[name] = number
    if not names:
        raise InputError(f"{path}: names no classes; write one class name per line")
    return tuple(names)


def flat_labels(labels: np.ndarray, where: object) -> np.ndarray:
    """Return labels as one int64 or text array [N], from [N], [N, 1] or one-hot [N, K] rows.

    Raises:
        InputError: the labels have another shape or type, or are not whole numbers.
    """
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8")
    if labels.dtype.kind == "U" and labels.ndim == 1:
        return labels
    if labels.dtype.kind not in "biuf":
        raise InputError(f"{where}: labels of type {labels.dtype}; give numbers or text")
    if labels.ndim == 2:
        if not (np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()):
            raise InputError(f"{where}: labels of shape {labels.shape} are not one-hot rows; give one label per image")
        return labels.argmax(axis=1).astype(np.int64)
    if labels.ndim != 1:
        raise InputError(f"{where}: labels of shape {labels.shape}; give one label per image")
    whole = labels.astype(np.int64) if np.isfinite(labels).all() else None
    if whole is None or not np.array_equal(whole, labels):
        raise InputError(f"{where}: labels must be whole numbers or names")
    return whole


def index_labels(labels: np.ndarray, names: tuple[str, ...] | None, locate: Callable[[int], str]) -> Labelling:
    """Return class names and indices for int64 or text labels [N].

    With a class list, a text is one of its names or else, like a number, a position in it, counted from 0. Without
    one, names are sorted; a number stays its own index as long as the numbers run from 0 without more gaps than
    classes, so that output k of a model is label k; other numbers (from 1, say) are sorted.

    Args:
        labels: int64 or text [N].
        names: the class list, if there is one.
        locate: says where label i stands, to start a message with ("labels.csv: line 7").

    Raises:
        InputError: a label is not in the class list, negative or empty; up to ten are listed.
    """
    if labels.dtype.kind == "U":
        texts, inverse = np.unique(labels, return_inverse=True)
        listed = {name: index for index, name in enumerate(names or ())}
        numbers = [_NUMBER.fullmatch(text) for text in texts.tolist()]
        all_listed = all(text in listed for text in texts.tolist())
        if all_listed or not all(numbers):
            _refuse(locate, labels, labels == "", "empty label")
            if names is None:
                return Labelling(classes=tuple(texts.tolist()), labels=inverse.astype(np.int64))
            unknown = [text for text in texts.tolist() if text not in listed]
            _refuse(locate, labels, np.isin(labels, unknown), "label not in the class list:")
            table = np.array([listed[text] for text in texts.tolist()], dtype=np.int64)
            return Labelling(classes=names, labels=table[inverse])
        labels = np.array([int(match[1]) for match in numbers if match], dtype=np.int64)[inverse]
    _refuse(locate, labels, labels < 0, "negative label")
    if names is not None:
        need = f"label outside the class list (0 to {len(names) - 1}, counted from 0):"
        _refuse(locate, labels, labels >= len(names), need)
        return Labelling(classes=names, labels=labels)
    return _index_numbers(labels)


def _index_numbers(labels: np.ndarray) -> Labelling:
    used, inverse = np.unique(labels, return_inverse=True)
    if len(used) == 0 or (used[0] == 0 and used[-1] < 2 * len(used)):
        width = int(used[-1]) + 1 if len(used) else 0
        gaps = sorted(set(range(width)) - set(used.tolist()))
        notes = (f"no image has label {', '.join(map(str, gaps))}",) if gaps else ()
        return Labelling(classes=tuple(map(str, range(width))), labels=labels, notes=notes)
    return Labelling(
        classes=tuple(map(str, used.tolist())),
        labels=inverse.astype(np.int64),
        notes=("the labels do not count up from 0; classes are the different numbers, sorted",),
    )


def _refuse(locate: Callable[[int], str], labels: np.ndarray, wrong: np.ndarray, what: str) -> None:
    places = np.flatnonzero(wrong).tolist()
    if places:
        few = [f"{locate(i)}: {what} {str(labels[i]) if labels[i] != '' else ''}".rstrip() for i in places[:LISTED]]
        rest = f"; and {len(places) - LISTED:,} more" if len(places) > LISTED else ""
        raise InputError("; ".join(few) + rest)
