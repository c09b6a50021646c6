"""Data sets in several files: a folder of them, folders named after splits, one file, or a pattern with braces."""

import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from pathlib import Path

from flatout.data.archive import Member
from flatout.data.formats.folders import visible
from flatout.data.source import DataRef, Source
from flatout.data.splits import SPLITS, in_order, split_of, split_within
from flatout.errors import InputError

_MAX_PATHS = 100_000
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def expand_braces(path: Path) -> list[Path]:
    """Return the paths that a shell makes of `{000..127}` and `{train,val}`; of other paths, and of files, the path.

    Raises:
        InputError: there are too many.
    """
    if "{" not in str(path) or path.exists():
        return [path]
    names = _expanded(str(path))
    if len(names) > _MAX_PATHS:
        raise InputError(f"{path}: stands for more than {_MAX_PATHS:,} files; give their folder")
    return list(map(Path, names))


def _expanded(text: str) -> list[str]:
    """Return what the first braces, those in them, and those behind them stand for; one more than the limit at most."""
    marks, depth = [text.find("{")], 0
    for place in range(marks[0], len(text)) if "{" in text else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0 or (depth == 1 and text[place] == ","):
            marks.append(place)
        if depth == 0:
            break
    else:  # without braces, or without the last one
        return [text]
    start, end = marks[0], marks[-1]
    inside = (choice for a, b in pairwise(marks) for choice in _expanded(text[a + 1 : b]))
    choices = _range(text[start + 1 : end]) or inside
    rests = _expanded(text[end + 1 :])
    return [text[:start] + choice + rest for choice, rest in islice(product(choices, rests), _MAX_PATHS + 1)]


def _range(text: str) -> list[str]:
    if not (match := _RANGE.fullmatch(text)):
        return []
    first, last = int(match[1]), int(match[2])
    step = 1 if first <= last else -1
    return [f"{number:0{len(match[1])}}" for number in islice(range(first, last + step, step), _MAX_PATHS + 1)]


def shards(path: Path, is_shard: Callable[[str], bool]) -> dict[str, list[Path]]:
    """Return split -> shards by name, which must be files; empty if there are none, or the path is in an archive.

    The split is that of the folder, or of a word of the name; shards without one are training data.
    """
    if isinstance(path, Member):
        return {}
    found: dict[str, list[Path]] = {}
    for split, file in _files(path) if path.is_dir() else ((None, file) for file in expand_braces(path)):
        if is_shard(file.name) and file.is_file():
            found.setdefault(split or split_within(file.name) or "train", []).append(file)
    return {split: found[split] for split in SPLITS if split in found}


def reference(
    kind: str,
    path: Path,
    splits: dict[str, list[Path]],
    read: Callable[[dict[str, list[Path]]], Source],
    beside: tuple[Path, ...] = (),
) -> DataRef | None:
    """Return the data in split -> shards, which `read` takes in order; `beside` are other files that determine it.

    Returns None without shards.

    Raises:
        InputError: there are no training shards.
    """
    if not splits:
        return None
    splits = in_order(splits, path)
    files = (file for some in splits.values() for file in some)
    return DataRef(kind=kind, path=path, inputs=(*files, *beside), read=lambda: read(splits))


def _files(folder: Path) -> Iterator[tuple[str | None, Path]]:
    for entry in visible(folder):
        if not entry.is_dir():
            yield None, entry.path
        elif entry.name.lower() == "data" or split_of(entry.name):
            yield from ((split_of(entry.name), inner.path) for inner in visible(entry.path))
