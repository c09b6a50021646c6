"""PaddleClas lists: `train_list.txt`, `val_list.txt` and `test_list.txt` with lines of image file, space and class."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

from flatout.data.formats import manifest
from flatout.data.formats.folders import is_image_name, visible
from flatout.data.labels import find_class_list_beside
from flatout.data.source import DataRef, ReadOptions
from flatout.data.splits import in_order, split_of
from flatout.data.tables import rows_of
from flatout.errors import InputError

KIND = "PaddleClas lists"
ABOUT = {
    KIND: (
        "the folder or a list",
        "`train_list.txt`, `val_list.txt`, `test_list.txt`, or without `_list`: lines of image file, space, class",
    ),
}
_CLASS_LISTS = ("label_list.txt", "labels.txt")


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return the lists of a folder, one list, or None.

    Raises:
        InputError: two lists mean the same split, or there is none of training images.
    """
    files: dict[str, Path] = {}
    if path.is_dir():
        for entry in visible(path):
            name = entry.name.lower()
            split = split_of(name.removesuffix(".txt").removesuffix("_list")) if name.endswith(".txt") else None
            if not split or not entry.is_file() or not (name.endswith("_list.txt") or _names_image_first(entry.path)):
                continue
            if split in files:
                raise InputError(f"{path}: both {files[split].name} and {entry.name} mean {split}; move one away")
            files[split] = entry.path
        # A text file of that name beside class folders may hold anything.
        are_lists = "train" in files or any(file.name.lower().endswith("_list.txt") for file in files.values())
        files = in_order(files, path) if are_lists else {}
    elif path.is_file() and path.suffix.lower() == ".txt" and _names_image_first(path):
        files = {"": path}
    if not files:
        return None
    folder = path if path.is_dir() else path.parent
    names = class_list or find_class_list_beside(folder, _CLASS_LISTS)
    return DataRef(kind=KIND, path=path, read=lambda: manifest.read(path, files, names, options, KIND))


def _names_image_first(path: Path) -> bool:
    with suppress(InputError):
        return any(len(cells) == 2 and is_image_name(cells[0]) for _, cells in islice(rows_of(path), 1))
    return False
