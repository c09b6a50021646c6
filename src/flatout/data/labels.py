"""Convert labels of every kind (numbers, names, rows of 0 and 1) to those of a task.

Labels are interpreted as their distinct values, which are few. Shape letters: N images, D distinct labels, K classes.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flatout.utils.errors import InputError

MAX_LABEL_LENGTH = 4096
# Separates the labels of one image in a text; the other separators are tried in this order.
_LINE = "\n"
_SEPARATORS = f"{_LINE}|;, "
_WHOLE_NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,17}))(?:\.0+)?", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_ID_AND_NAME = re.compile(r"([^\s:]+)(?::|\s)\s*(\S.*)")
# Up to this many distinct labels are classes, even if they are numbers.
_FEW = 20
_IF_CLASSES = "if these are classes, list them in a file, one per line: --set data.classes=FILE"

Locate = Callable[[int], str]


class NoLabels(InputError):
    """A list or a record has images, but nothing that could be their labels."""


class Labels(NamedTuple):
    """Labels in the form of a pack."""

    task: str
    classes: tuple[str, ...]  # none in regression
    # single-label: int64 [N], indices into the classes; multi-label: uint8 [N, K], 1 where a class is present;
    # regression: float32 [N]
    values: np.ndarray
    notes: tuple[str, ...] = ()


def count_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """Count the images of each class, int64 [classes], for labels of any task."""
    if labels.ndim == 2:
        return labels.sum(axis=0, dtype=np.int64)
    return np.bincount(labels, minlength=classes) if labels.dtype.kind == "i" else np.zeros(classes, np.int64)


def first_few(items: Iterable[str], limit: int = 10) -> str:
    """Join items in one line for a message; items beyond the limit are counted."""
    items = list(items)
    rest = f"; and {len(items) - limit:,} more" if len(items) > limit else ""
    return ("; ".join(items[:limit]) + rest).replace("\r", "\\r").replace("\n", "\\n")


# Class lists


def read_class_list(path: Path) -> tuple[str, ...]:
    """Read the class names of a text file, one per line; the first is class 0."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a class list: {error}") from None
    names: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or names.setdefault(line.strip(), number) != number:
            raise InputError(f"{path}: line {number} is blank or repeats a class; every line names another class")
    if not names:
        raise InputError(f"{path}: names no classes; write one class name per line")
    return tuple(names)


def _split_ids(lines: tuple[str, ...], used: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a class list into the labels used by the data, and the class names.

    Both are the lines, unless every line is an id and a name (`n01440764 tench`) and the labels in use are ids.
    """
    pairs = {match[1]: match[2] for line in lines if (match := _ID_AND_NAME.fullmatch(line))}
    if len(pairs) < len(lines) or set(lines).issuperset(used) or not pairs.keys() >= set(used):
        return lines, lines
    return tuple(pairs), tuple(distinct_names(pairs).values())


def distinct_names(names: Mapping[Any, str]) -> dict[Any, str]:
    """Append their id to repeated names: two classes of ImageNet are called crane."""
    counts = Counter(names.values())
    return {key: name if counts[name] == 1 else f"{name} ({key})" for key, name in names.items()}


# Labels of any form as distinct values


class _Distinct(NamedTuple):
    """Labels as distinct values and their index for each image, int64 [N].

    The values are int64, float64 or text [D], or rows of 0 and 1, uint8 [D, K].
    """

    values: np.ndarray
    codes: np.ndarray

    @property
    def kind(self) -> str:
        """i, f or U for whole numbers, fractions and text, or rows."""
        return "rows" if self.values.ndim == 2 else self.values.dtype.kind


def read_labels(
    splits: Mapping[str, Any],
    where: str,
    *,
    locate: Callable[[str, int], str],
    names: tuple[str, ...] | None,
    class_list: Path | None,
    subject: str,
    task: str,
) -> Labels:
    """Interpret the labels of all splits, which follow each other in the result.

    `splits` are name -> labels: an array [N], [N, 1] or of rows of 0 and 1 [N, K], or a list of numbers, texts or lists
    of several labels. `where` and `subject` begin messages about all labels of a split, and of all splits;
    `locate(split, index)` about one. With `names`, or a file of them, a label is a name or an index.
    """
    bounds = np.cumsum([0, *map(len, splits.values())])

    def place(index: int) -> str:
        number = int(np.searchsorted(bounds, index, "right")) - 1
        return locate(list(splits)[number], index - int(bounds[number]))

    if all(isinstance(label, list) for label in chain.from_iterable(splits.values())):
        # In a small split, lists of several labels may be of one each, or look like rows of 0 and 1.
        parts = [_distinct([*chain.from_iterable(splits.values())], where, place)]
    else:
        parts = [_distinct(labels, f"{where}: {name}", partial(locate, name)) for name, labels in splits.items()]
    kinds = {(part.kind.replace("f", "i"), part.values.shape[1:]) for part in parts}
    if len(kinds) > 1:
        what = "text" if ("U", ()) in kinds else "rows of other lengths"
        raise InputError(f"{where}: labels are numbers in one split and {what} in another; make them the same")
    labels = _join(parts)
    ids, notes = names, ()
    if class_list is not None:
        used = range(labels.values.shape[1]) if labels.kind == "rows" else labels.values
        ids, names = _split_ids(read_class_list(class_list), set(map(str, used)))
        notes = (f"class names from {class_list}",)
        if ids != names and labels.kind != "rows":
            labels = _Distinct(labels.values.astype(str), labels.codes)
    found = _interpret(labels, ids, place, subject, task)
    classes = names if names and found.classes else found.classes
    return found._replace(classes=classes, notes=notes + found.notes)


def _join(parts: Sequence[_Distinct]) -> _Distinct:
    """Join the labels of all splits; values that are not rows are sorted and distinct."""
    starts = np.cumsum([0, *(len(part.values) for part in parts)])
    values = np.concatenate([part.values for part in parts])
    codes = np.concatenate([part.codes + start for part, start in zip(parts, starts, strict=False)])
    if values.ndim == 2:
        return _Distinct(values, codes)
    values, inverse = np.unique(values, return_inverse=True)
    return _Distinct(values, inverse[codes])


def _distinct(labels: Any, where: str, locate: Locate) -> _Distinct:
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "O":  # such as the texts in a column of pandas
        labels = labels.tolist()
    values, codes = labels, np.arange(len(labels))
    if isinstance(labels, list) and not any(isinstance(label, np.ndarray) for label in labels):
        values, codes = _count(labels)
        values = _with_lines(values)
        # A NumPy array would pad all texts to the longest.
        if long := next((text for text in values if isinstance(text, str) and len(text) > MAX_LABEL_LENGTH), ""):
            fix = f"shorten it to {MAX_LABEL_LENGTH:,}"
            raise InputError(f"{where}: the label {long[:40]!r}... has {len(long):,} characters; {fix}")
    need = "give one number or text per image, a list for each, or a column for each class with 1 where it is present"
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{where}: the labels differ in shape; {need}") from None
    shape, kind = (len(codes), *array.shape[1:]), array.dtype.kind
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    are_rows = array.ndim == 2 and kind in "biuf" and np.isin(array, (0, 1)).all()
    if kind not in "biufUS" or not (array.ndim == 1 or are_rows):
        raise InputError(f"{where}: labels of type {array.dtype} and shape {shape}; {need}")
    if are_rows:
        return _Distinct(array.astype(np.uint8), codes)
    if kind in "US":
        try:
            array = np.char.decode(array, "utf-8") if kind == "S" else array
            # NumPy takes any 32 bits for a character.
            array.astype(array.dtype.newbyteorder("<")).tobytes().decode("utf-32-le")
        except UnicodeDecodeError:
            what = "the labels have characters that do not exist; save them as UTF-8 or numbers"
            raise InputError(f"{where}: {what}") from None
    else:
        _refuse(_Distinct(array, codes), ~np.isfinite(array), locate, "not a finite number:")
        whole = array.astype(np.int64)
        array = whole if np.array_equal(whole, array) else array.astype(np.float64)
    return _Distinct(array, codes)


def _count(labels: list[Any]) -> tuple[list[Any], np.ndarray]:
    """Return the distinct labels, and the index of each label among them, int64 [N]."""
    found: dict[Any, int] = {}
    try:
        keys = (tuple(label) if isinstance(label, list) else label for label in labels)
        codes = [found.setdefault(key, len(found)) for key in keys]
    except TypeError:  # nested lists, which are refused
        return labels, np.arange(len(labels))
    return list(found), np.array(codes, np.int64)


def _with_lines(values: list[Any]) -> list[Any]:
    """Turn lists of names or integers into texts, one item per line; other labels, also rows of 0 and 1, stay."""
    if not all(isinstance(value, (list, tuple)) for value in values):
        return values
    parts = [part for value in values for part in value]
    is_even = len({len(value) for value in values}) == 1
    are_rows = is_even and (len(parts) == len(values) or all(part in (0, 1) for part in parts))
    if are_rows or not all(isinstance(part, (str, int, np.integer)) for part in parts):
        return values
    return [_LINE.join(map(str, value)) for value in values]


# Tasks


def _interpret(labels: _Distinct, names: tuple[str, ...] | None, locate: Locate, subject: str, task: str) -> Labels:
    if task == "auto":
        task = _find_task(labels, names, subject)
    if task == "regression":
        return Labels(task=task, classes=(), values=_numbers(labels, locate, subject))
    if labels.kind == "f":
        fix = "if they are numbers to predict: --set task=regression"
        raise InputError(f"{subject}: labels of classes must be whole numbers or names; {fix}")
    if task == "multi-label":
        return _several(labels, names, locate)
    if labels.kind == "rows":
        if wrong := np.flatnonzero((labels.values.sum(axis=1) != 1)[labels.codes]).tolist():
            need = "has several classes or none; --set task=multi-label permits that"
            raise InputError(first_few([f"{locate(i)}: {need}" for i in wrong]))
        columns = np.arange(labels.values.shape[1])
        names = names or tuple(map(str, columns))
        labels = _Distinct(columns, labels.values.argmax(axis=1)[labels.codes])
    classes, indices, notes = _index(labels, names, locate)
    return Labels(task=task, classes=classes, values=indices[labels.codes], notes=notes)


def _find_task(labels: _Distinct, names: tuple[str, ...] | None, subject: str) -> str:
    if labels.kind == "rows":
        return "single-label" if (labels.values.sum(axis=1) == 1).all() else "multi-label"
    if labels.kind == "f":
        return "regression"
    texts, count = list(map(str, labels.values)), len(labels.codes)
    if any(_LINE in text for text in texts):
        return "multi-label"
    if names is not None:
        known = set(names)
        several = (_split(text, _SEPARATORS) for text in texts if text not in known)
        return "multi-label" if any(len(parts) > 1 and known.issuperset(parts) for parts in several) else "single-label"
    are_many, are_mostly_different = len(texts) > _FEW, 2 * len(texts) > count
    numbers = [float(text) for text in texts if _DECIMAL.fullmatch(text)]
    are_spread = False
    if 2 * len(numbers) > len(texts) and len(numbers) > 2 and (are_many or are_mostly_different):
        if not all(value.is_integer() for value in numbers):
            return "regression"  # which refuses texts among the numbers
        # Class indices are dense, or have many images each.
        are_spread = are_many and max(numbers) - min(numbers) > 2 * len(texts) and count < 10 * len(texts)
    have_commas = any("," in text and _DECIMAL.fullmatch(text.replace(",", ".")) for text in texts)
    mark, is_sure = _find_separator(texts)
    if is_sure and not are_spread:
        return "multi-label"
    if mark and not are_spread:
        what = f"has several labels in one, or names with {mark!r} in them"
        texts = [text for text in texts if mark in text]
    elif are_spread or (are_mostly_different and (are_many or have_commas)):
        what = f"holds {len(texts):,} different labels for {count:,} images"
    else:
        return "single-label"
    raise InputError(
        f"{subject}: {what}, such as {', '.join(map(repr, texts[:3]))}; --set task=single-label, multi-label or "
        "regression decides, or a file that lists the classes, one per line: --set data.classes=FILE"
    )


def _find_separator(texts: list[str]) -> tuple[str, bool]:
    """Find the separator of several labels in one text, or "", and whether that is certain.

    Names may contain any separator. It indicates several labels if the parts of a text are labels themselves, if few
    parts make up many texts, or if texts with a bar have parts in common. Spaces and commas are certain only if few
    parts make up many texts.
    """
    known = set(texts)
    for mark in _SEPARATORS:
        joined = [_split(text, mark) for text in texts if mark in text]
        parts = set(chain.from_iterable(joined))
        is_shared = len(joined) >= 3 and 2 * len(parts) < len(joined)
        are_labels = any(len(text) > 1 and known.issuperset(text) for text in joined)
        if is_shared or are_labels or (mark == "|" and len(parts) < sum(map(len, map(set, joined)))):
            return mark, is_shared or mark in "|;"
    return "", False


def _split(text: str, marks: str) -> list[str]:
    """Split a text into labels at the first separator that occurs in it, without empty labels."""
    mark = next((mark for mark in marks if mark in text), None)
    return [part.strip() for part in text.split(mark) if part.strip()] if mark else [text] if text else []


def _numbers(labels: _Distinct, locate: Locate, subject: str) -> np.ndarray:
    if labels.kind == "rows":
        raise InputError(f"{subject}: several columns of labels; a regression takes one number for each image")
    numbers = labels.values
    if numbers.dtype.kind == "U":
        is_wrong = [not _DECIMAL.fullmatch(text) for text in numbers.tolist()]
        _refuse(labels, is_wrong, locate, "not a number:", "write numbers such as 1.5")
        numbers = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    _refuse(labels, ~np.isfinite(values), locate, "too large a number:")
    return values[labels.codes]


def _several(labels: _Distinct, names: tuple[str, ...] | None, locate: Locate) -> Labels:
    if labels.kind == "rows":
        columns = labels.values.shape[1]
        if names is not None and len(names) != columns:
            raise InputError(f"{locate(0)}: has {columns} columns for {len(names)} classes; make them equal")
        classes = names or tuple(map(str, range(columns)))
        return Labels(task="multi-label", classes=classes, values=labels.values[labels.codes])
    texts, whole = list(map(str, labels.values)), set(names or ())
    mark = next((mark for mark in _SEPARATORS if any(mark in text for text in texts if text not in whole)), "")
    rows = [[text] if text in whole else _split(text, mark) for text in texts]
    if not any(rows):
        raise InputError(f"{locate(0)}: no image has a label")
    parts, numbers = np.unique([part for row in rows for part in row], return_inverse=True)
    lengths = np.array(list(map(len, rows)))
    numbers_of_text = np.split(numbers, np.cumsum(lengths)[:-1])
    images = np.repeat(np.arange(len(labels.codes)), lengths[labels.codes])
    flat = _Distinct(parts, np.concatenate([numbers_of_text[code] for code in labels.codes]))
    classes, indices, notes = _index(flat, names, lambda i: locate(int(images[i])))
    values = np.zeros((len(labels.codes), len(classes)), np.uint8)
    values[images, indices[flat.codes]] = 1
    return Labels(task="multi-label", classes=classes, values=values, notes=notes)


def _index(
    labels: _Distinct, names: tuple[str, ...] | None, locate: Locate
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return class names, the class index of each distinct label, int64 [D], and notes for the user.

    With class names, a label is a name or a zero-based index. Without, texts are sorted; numbers that start at 0 with
    no more gaps than classes stay as they are, so that output k of a model is label k; other numbers are sorted and
    renumbered from 0.
    """
    values = labels.values
    refuse = partial(_refuse, labels, locate=locate)
    if values.dtype.kind == "U":
        texts = values.tolist()
        numbers = [_WHOLE_NUMBER.fullmatch(text) for text in texts]
        positions = {name: i for i, name in enumerate(names or ())}
        is_unknown = [text not in positions for text in texts]
        if not any(is_unknown) or not all(numbers):
            refuse(values == "", what="")
            if names is not None:
                refuse(is_unknown, what="label not in the class list:")
                return names, np.array([positions[text] for text in texts]), ()
            is_name = np.array([not _DECIMAL.fullmatch(text) for text in texts])
            is_odd = np.isin(values, ("nan", "NaN"))
            if 2 * is_name.sum() < len(texts):
                is_odd |= is_name
            else:  # integers may be class names, such as digits among letters
                is_odd |= [not (named or float(text).is_integer()) for named, text in zip(is_name, texts, strict=True)]
            refuse(is_odd, what="unlike the other labels:", fix=_IF_CLASSES)
            return tuple(texts), np.arange(len(texts)), ()
        values = np.array([int(match[1]) for match in numbers if match])
    refuse(values < 0, what="negative label")
    if names is not None:
        refuse(values >= len(names), what=f"label outside the class list (0 to {len(names) - 1}, counted from 0):")
        return names, values, ()
    used, inverse = np.unique(values, return_inverse=True)  # 1 and 1.0 are the same
    if used[0] == 0 and used[-1] < 2 * len(used):
        gaps = sorted(set(range(int(used[-1]) + 1)) - set(used.tolist()))
        notes = (f"no image has label {', '.join(map(str, gaps))}",) if gaps else ()
        return tuple(map(str, range(int(used[-1]) + 1))), values, notes
    notes = ("the labels do not count up from 0; they are sorted and renumbered from 0",)
    return tuple(map(str, used.tolist())), inverse, notes


def _refuse(labels: _Distinct, is_wrong: ArrayLike, locate: Locate, what: str, fix: str = "") -> None:
    """Raise InputError if distinct labels are wrong, bool [D]; the first images are listed."""
    images = np.flatnonzero(np.asarray(is_wrong, bool)[labels.codes]).tolist()
    if images:
        pairs = ((locate(i), str(labels.values[labels.codes[i]])) for i in images)
        found = dict.fromkeys(f"{place}: {f'{what} {label}' if label else 'empty label'}" for place, label in pairs)
        raise InputError(f"{first_few(found)}; {fix}" if fix else first_few(found))
