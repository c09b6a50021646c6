"""Which column of a CSV file is which: files, labels, split, group."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.data.formats.folders import is_image_name
from flatout.data.formats.locator import Locator
from flatout.data.source import ReadOptions
from flatout.data.splits import split_of, words_of
from flatout.errors import InputError

_FILE_COLUMNS = (
    *("file", "path", "image", "img", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imageid"),
    *("imagename", "fname", "files", "images", "filenames", "idcode", "name", "id"),
)
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "classname", "labelname", "classid", "labelid", "y")
# Such as label1 and label2, which hold a class each.
_NUMBERED_LABEL = re.compile(rf"({'|'.join(_LABEL_COLUMNS)}|tag)\d+")
ZEROS = ("0", "0.0", "false", "False", "FALSE")
MINUS_ONES = ("-1", "-1.0")  # instead of 0, as in CelebA
ZERO_OR_ONE = {**dict.fromkeys((*ZEROS, *MINUS_ONES), 0), **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1)}
_SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset")
_FLAG_COLUMNS = {"isvalid": "valid", "istest": "test"}
_NAME_THEM = (
    "name the columns of files and classes 'file' and 'label', or give --set data.file_column=NAME and "
    "--set data.label_column=NAME"
)


class NoLabels(InputError):
    """A CSV file without a column of classes."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The numbers of the columns, the names of those of labels, and the split that true means in a column of flags."""

    file: int
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    split: int | None
    flag: str
    group: int | None


def layout(
    path: Path, head: list[tuple[int, list[str]]], locator: Locator, split: str, options: ReadOptions
) -> tuple[Columns, bool]:
    """Return which column is which, and whether the first row is a header, from the first two rows."""
    # Messages about columns are of one line.
    first = [" ".join(cell.splitlines()) for cell in head[0][1]] if head else []
    has_header = not any(is_image_name(cell) or (cell and locator.find(cell, split)) for cell in first)
    body = head[has_header:]
    return _columns(path, first if has_header else None, body[0][1] if body else [], options), has_header


def _columns(path: Path, header: Sequence[str] | None, first: list[str], options: ReadOptions) -> Columns:
    """Return which column is which: as the options name them, by the header's names, or by the first row's content."""
    width = len(header or first)
    if width < 2:
        raise NoLabels(f"{path}: line 1 has one column; rows of file,label are expected")
    keys = ["".join(words_of(name)) for name in header or ()]
    split = _first_of((*_SPLIT_COLUMNS, *_FLAG_COLUMNS), keys)
    if header is None and width == 3:
        split = next((i for i in range(3) if not is_image_name(first[i]) and split_of(first[i])), None)
    labels, files = (_given(path, header, key, options) for key in ("label_column", "file_column"))
    file = files[0] if files else None
    if file is None:
        file = _first_of(_FILE_COLUMNS, keys)
    if file is None:
        file = next((i for i, cell in enumerate(first[:width]) if is_image_name(cell)), 0)
    group = next(iter(_given(path, header, "group_column", options)), None)
    left = tuple(i for i in range(width) if i not in (file, split, group))
    if not labels and (found := _first_of(_LABEL_COLUMNS, keys)) is not None:
        labels = (found,)
    if not labels:
        labels = tuple(i for i in left if keys and _NUMBERED_LABEL.fullmatch(keys[i]))
    if not labels and (len(left) == 1 or (header and all(first[i] in ZERO_OR_ONE for i in left if i < len(first)))):
        labels = left
    if not labels:
        names = f"the columns {', '.join(header)}" if header else f"{width} columns and no header"
        raise (NoLabels if header else InputError)(f"{path}: has {names}; {_NAME_THEM}")
    used = [header[i] for i in (file, *labels, split, group) if header and i is not None]
    if twice := next((name for name in used if list(header or ()).count(name) > 1), None):
        raise InputError(f"{path}: line 1: has several columns {twice!r}; rename all but one")
    return Columns(
        file=file,
        labels=labels,
        label_names=tuple(repr(header[label]) if header else str(label + 1) for label in labels),
        split=split,
        flag=_FLAG_COLUMNS.get(keys[split], "") if split is not None and keys else "",
        group=group,
    )


def _given(path: Path, header: Sequence[str] | None, key: str, options: ReadOptions) -> tuple[int, ...]:
    """Return the column that an option names, or several, separated by commas; none if it is empty."""
    given, known = getattr(options, key), list(header or ())
    names = [given] if given and given in known else [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            columns = f"its columns are {', '.join(known)}" if header else "it has no header"
            raise InputError(f"{path}: has no column {name!r}, which data.{key} names; {columns}")
    return tuple(map(known.index, names))


def _first_of(wanted: Sequence[str], keys: list[str]) -> int | None:
    return next((keys.index(name) for name in wanted if name in keys), None)
