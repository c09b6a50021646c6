"""Labels of every kind (numbers, names, rows of 0 and 1) as those of a task.

| task | labels |
|---|---|
| single-label | int64 [N], indices into the class names |
| multi-label | uint8 [N, K], 1 where a class is present |
| regression | float32 [N] |
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import InputError

LISTED = 10
CLASS_LIST_NAME = "classes.txt"
MAX_LABEL_LENGTH = 4096
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,17}))(?:\.0+)?", re.ASCII)
_ID_AND_NAME = re.compile(r"([^\s:]+)(?::|\s)\s*(\S.*)")
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
# Below this many, different labels are taken for classes, whatever they look like.
_FEW = 20
# What separates several labels in one text, in the order in which they are tried. Lists of labels become lines.
_LINE = "\n"
_MARKS = f"{_LINE}|;, "
# Code points from U+D800 to U+DFFF, which are no characters, divided by 2048.
_SURROGATES = 0xD800 >> 11
# Sentences that end messages about labels that could be of several tasks.
_ARE_CLASSES = "if these are classes, list them in a file, one per line: --set data.classes=FILE"
_ARE_NUMBERS = "if they are numbers to predict: --set task=regression"

Locate = Callable[[int], str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Labels as a pack has them: a task, its class names (none in regression), values, and notes for the user."""

    task: str
    classes: tuple[str, ...]
    values: np.ndarray
    notes: tuple[str, ...] = ()


def count_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the images of each class, int64 [classes], for labels of any task."""
    if labels.ndim == 2:
        return labels.sum(axis=0, dtype=np.int64)
    return np.bincount(labels, minlength=classes) if labels.dtype.kind == "i" else np.zeros(classes, np.int64)


def first_few(items: Iterable[str], limit: int = LISTED) -> str:
    """Return the items joined for a message of one line; beyond the limit, their number."""
    items = list(items)
    rest = f"; and {len(items) - limit:,} more" if len(items) > limit else ""
    return ("; ".join(items[:limit]) + rest).replace("\r", "\\r").replace("\n", "\\n")


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


def flat_labels(labels: Any, where: object, locate: Locate) -> np.ndarray:
    """Return labels as one array: int64, float64 or text [N], or rows of 0 and 1, uint8 [N, K]; from those or [N, 1].

    Lists of several labels become texts with a line for each. `where` begins messages about all labels, `locate(i)`
    one about a label.

    Raises:
        InputError: the labels have another shape or type, or are not finite.
    """
    if isinstance(labels, list):
        # An array would hold all texts in the length of the longest.
        long = next((i for i, label in enumerate(labels) if _length(label) > MAX_LABEL_LENGTH), None)
        if long is not None:
            what = f"the label {str(labels[long])[:40]!r}... has {_length(labels[long]):,} characters"
            raise InputError(f"{locate(long)}: {what}; shorten it to {MAX_LABEL_LENGTH:,}")
        labels = _with_lines(labels)
    try:
        labels = np.asarray(labels)
    except ValueError:
        lengths = [len(label) if isinstance(label, (list, tuple)) else 0 for label in labels]
        odd = next((i for i, length in enumerate(lengths) if length != lengths[0]), 0)
        raise InputError(
            f"{locate(odd)}: the labels differ in shape; give one number or text per image, or a list for each"
        ) from None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8", "surrogateescape")  # refused below
    if labels.dtype.kind == "U" and labels.ndim == 1:
        if bad := _not_text(labels):
            fix = "save it again, as UTF-8 or a number"
            raise InputError(
                first_few([f"{locate(i)}: the label has characters that do not exist; {fix}" for i in bad])
            )
        return labels
    if labels.dtype.kind not in "biuf":
        raise InputError(f"{where}: labels of type {labels.dtype}; give numbers or text")
    if labels.ndim == 2:
        if not np.isin(labels, (0, 1)).all():
            raise InputError(
                f"{where}: labels of shape {labels.shape} are not rows of 0 and 1; give one label per image, or a "
                "column for each class with 1 where it is present"
            )
        return labels.astype(np.uint8)
    if labels.ndim != 1:
        raise InputError(f"{where}: labels of shape {labels.shape}; give one label per image")
    if bad := np.flatnonzero(~np.isfinite(labels)).tolist():
        raise InputError(first_few([f"{locate(i)}: not a finite number: {labels[i]}" for i in bad]))
    whole = labels.astype(np.int64)
    return whole if np.array_equal(whole, labels) else labels.astype(np.float64)


def _length(label: Any) -> int:
    """Return the characters of a text, or of those in a list."""
    if isinstance(label, (list, tuple)):
        return sum(len(part) for part in label if isinstance(part, str))
    return len(label) if isinstance(label, str) else 0


def _with_lines(labels: list[Any]) -> list[Any]:
    """Return lists of names or numbers as texts with a line for each; rows of 0 and 1, and all else, as they are."""
    if not all(isinstance(label, (list, tuple)) for label in labels):
        return labels
    parts = [part for label in labels for part in label]
    is_even = len({len(label) for label in labels}) == 1
    if is_even and (len(parts) == len(labels) or all(part in (0, 1) for part in parts)):
        return labels
    if not all(isinstance(part, (str, int, np.integer)) for part in parts):
        return labels
    return [_LINE.join(map(str, label)) for label in labels]


def _not_text(labels: np.ndarray) -> list[int]:
    """Return which labels `<U` [N] are no text: NumPy takes any 32 bits for a character, where Python fails."""
    if not labels.dtype.itemsize:
        return []
    codes = np.ascontiguousarray(labels).view(f"{labels.dtype.byteorder}u4").reshape(len(labels), -1)
    return np.flatnonzero(((codes > sys.maxunicode) | (codes >> 11 == _SURROGATES)).any(axis=1)).tolist()


def interpret(labels: np.ndarray, names: tuple[str, ...] | None, locate: Locate, subject: str, task: str) -> Labels:
    """Return `flat_labels` of all splits as the labels of a task.

    Args:
        labels: all splits'.
        names: class names if they are known; a label is then one of them or a position among them, counted from 0.
        locate, subject: `locate(index)` ("labels.csv: line 7") and `subject` ("labels.csv: column 'price'") begin
            messages about one label and about all.
        task: a task's name; auto for the one that the labels show.

    Raises:
        InputError: a label is unknown, negative, empty or not of the task (ten are listed), or it is unclear what the
            labels are.
    """
    if task == "auto":
        task = _shown(labels, names, locate, subject)
    if task == "regression":
        return Labels(task=task, classes=(), values=_numbers(labels, locate, subject))
    if task == "multi-label":
        return _several(labels, names, locate)
    if labels.ndim == 2:
        if wrong := np.flatnonzero(labels.sum(axis=1) != 1).tolist():
            need = "has several classes or none; --set task=multi-label permits that"
            raise InputError(first_few([f"{locate(i)}: {need}" for i in wrong]))
        labels, names = labels.argmax(axis=1).astype(np.int64), names or tuple(map(str, range(labels.shape[1])))
    if labels.dtype.kind == "f":
        raise InputError(f"{subject}: labels of classes must be whole numbers or names; {_ARE_NUMBERS}")
    classes, indices, notes = index_labels(labels, names, locate)
    return Labels(task=task, classes=classes, values=indices, notes=notes)


def _shown(labels: np.ndarray, names: tuple[str, ...] | None, locate: Locate, subject: str) -> str:
    """Return the task that labels show.

    Raises:
        InputError: they could be of several.
    """
    if labels.ndim == 2:
        return "single-label" if (labels.sum(axis=1) == 1).all() else "multi-label"
    if labels.dtype.kind == "f":
        return "regression"
    texts = list(map(str, np.unique(labels).tolist()))
    if any(_LINE in text for text in texts):
        return "multi-label"
    if names is not None:
        several = [split_labels(text, _MARKS) for text in texts if text not in names]
        are_known = any(len(parts) > 1 and set(names).issuperset(parts) for parts in several)
        return "multi-label" if are_known else "single-label"
    count = len(labels)
    if len(texts) <= _FEW and 2 * len(texts) <= count and not any(mark in text for text in texts for mark in _MARKS):
        return "single-label"
    numbers = [float(text) for text in texts if _DECIMAL.fullmatch(text)]
    if 2 * len(numbers) > len(texts) and len(numbers) > 2 and (len(texts) > _FEW or 2 * len(texts) > count):
        if not all(value.is_integer() for value in numbers):  # infinity is none
            return "regression"  # a text among the numbers is refused there
        # Numbers of classes are dense, or have many images each.
        if len(texts) > _FEW and max(numbers) - min(numbers) > 2 * len(texts) and count < 10 * len(texts):
            raise InputError(
                f"{subject}: holds {len(texts):,} different numbers for {count:,} images, such as "
                f"{', '.join(texts[:3])}: measurements or classes? {_ARE_NUMBERS}; {_ARE_CLASSES}"
            )
    mark, is_sure = _separator(texts)
    if is_sure:
        return "multi-label"
    if mark:
        example = next(text for text in texts if mark in text)
        raise InputError(
            f"{subject}: has several labels in one, such as {example!r}, or names with {mark!r} in them: "
            f"--set task=multi-label or --set task=single-label decides; {_ARE_CLASSES}"
        )
    are_numbers = all(_DECIMAL.fullmatch(text.replace(",", ".")) for text in texts)
    has_commas = are_numbers and any("," in text for text in texts)
    if 2 * len(texts) > count and (len(texts) > _FEW or has_commas):
        point = ", and write decimals with a point, such as 1.5" if has_commas else ""
        fix = f"{_ARE_NUMBERS}{point}; {_ARE_CLASSES}" if are_numbers else _ARE_CLASSES
        raise InputError(f"{subject}: holds {len(texts):,} different labels for {count:,} images; {fix}")
    return "single-label"


def _numbers(labels: np.ndarray, locate: Locate, subject: str) -> np.ndarray:
    """Return measurements, float32 [N]."""
    if labels.ndim == 2:
        raise InputError(f"{subject}: several columns of labels; a regression takes one number for each image")
    if labels.dtype.kind == "U":
        is_number = {text: bool(_DECIMAL.fullmatch(text)) for text in np.unique(labels).tolist()}
        fix = "write decimals with a point, such as 1.5" if any("," in text for text in is_number) else ""
        _refuse(locate, labels, np.array([not is_number[text] for text in labels.tolist()]), "not a number:", fix)
        labels = labels.astype(np.float64)
    with np.errstate(over="ignore"):
        values = labels.astype(np.float32)
    _refuse(locate, labels, ~np.isfinite(values), "too large a number:")
    return values


def _several(labels: np.ndarray, names: tuple[str, ...] | None, locate: Locate) -> Labels:
    """Return labels of any number of classes for each image."""
    if labels.ndim == 2:
        if names is not None and len(names) != labels.shape[1]:
            raise InputError(f"{locate(0)}: has {labels.shape[1]} columns for {len(names)} classes; make them equal")
        classes = names or tuple(map(str, range(labels.shape[1])))
        return Labels(task="multi-label", classes=classes, values=labels)
    if labels.dtype.kind == "f":
        raise InputError(f"{locate(0)}: labels with fractions are not classes; {_ARE_NUMBERS}")
    texts = list(map(str, labels.tolist()))
    whole = set(names or ())
    marks = next((mark for mark in _MARKS if any(mark in text for text in texts if text not in whole)), "")
    rows = [[text] if text in whole else split_labels(text, marks) for text in texts]
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    flat = np.array([part for row in rows for part in row])
    if not len(flat):
        raise InputError(f"{locate(0)}: no image has a label")
    classes, indices, notes = index_labels(flat, names, lambda i: locate(int(owners[i])))
    values = np.zeros((len(rows), len(classes)), np.uint8)
    values[owners, indices] = 1
    return Labels(task="multi-label", classes=classes, values=values, notes=notes)


def split_labels(text: str, marks: str) -> list[str]:
    """Return the labels in one text, separated by the first of the marks that is in it; empty ones are left out."""
    mark = next((mark for mark in marks if mark in text), None)
    return [part.strip() for part in text.split(mark) if part.strip()] if mark else [text] if text else []


def index_labels(
    labels: np.ndarray, names: tuple[str, ...] | None, locate: Locate
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return class names, indices int64 [N] and notes for the user, for int64 or text labels [N].

    With class names, a label is one of them or a position among them, counted from 0. Without, texts are sorted;
    numbers that start at 0 with fewer gaps than classes stay as they are, so that output k of a model is label k; other
    numbers are sorted and renumbered from 0.

    Raises:
        InputError: a label is unknown, negative, empty, a name among numbers, or a number with a fraction among names
            (ten are listed).
    """
    if labels.dtype.kind == "U":
        texts, inverse = np.unique(labels, return_inverse=True)
        numbers = [_NUMBER.fullmatch(text) for text in texts.tolist()]
        unknown = [text for text in texts.tolist() if text not in set(names or ())]
        if not unknown or not all(numbers):
            _refuse(locate, labels, labels == "", "")
            if names is None:
                is_nan = np.array([text in ("nan", "NaN") for text in texts.tolist()])
                _refuse(locate, labels, is_nan[inverse], "a missing value, not a class:", _ARE_CLASSES)
                is_name = np.array([not _DECIMAL.fullmatch(text) for text in texts.tolist()])
                if 2 * np.count_nonzero(is_name) < len(texts):
                    _refuse(locate, labels, is_name[inverse], "a name among numbers:", _ARE_CLASSES)
                elif is_name.any():  # whole numbers may be classes, as digits among letters
                    pairs = zip(texts.tolist(), is_name.tolist(), strict=True)
                    has_fraction = np.array([not (named or float(text).is_integer()) for text, named in pairs])
                    _refuse(locate, labels, has_fraction[inverse], "a number among names:", _ARE_CLASSES)
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
    if used[0] == 0 and used[-1] < 2 * len(used):
        gaps = sorted(set(range(int(used[-1]) + 1)) - set(used.tolist()))
        notes = (f"no image has label {', '.join(map(str, gaps))}",) if gaps else ()
        return tuple(map(str, range(int(used[-1]) + 1))), labels, notes
    notes = ("the labels do not count up from 0; they are sorted and renumbered from 0",)
    return tuple(map(str, used.tolist())), inverse.astype(np.int64), notes


def _refuse(locate: Locate, labels: np.ndarray, wrong: np.ndarray, what: str, fix: str = "") -> None:
    if places := np.flatnonzero(wrong).tolist():
        found = [(locate(i), str(labels[i])) for i in places]
        lines = first_few([f"{place}: {f'{what} {label}' if label else 'empty label'}" for place, label in found])
        raise InputError(f"{lines}; {fix}" if fix else lines)


def _separator(texts: list[str]) -> tuple[str, bool]:
    """Return what separates several labels in one text, or "", and whether that is sure.

    Names may hold any of them, so it is a sign only where the parts of a text are labels themselves, where few parts
    make up many texts, or where texts with a bar have parts in common. Spaces and commas are a sure one only where few
    parts make up many texts.
    """
    known = set(texts)
    for mark in _MARKS:
        joined = [split_labels(text, mark) for text in texts if mark in text]
        parts = {part for text in joined for part in text}
        is_shared = len(joined) >= 3 and 2 * len(parts) < len(joined)
        are_labels = any(len(text) > 1 and known.issuperset(text) for text in joined)
        has_common = mark == "|" and len(parts) < sum(len(set(text)) for text in joined)
        if is_shared or are_labels or has_common:
            return mark, is_shared or mark in "|;"
    return "", False
