"""PaddleClas lists: `train_list.txt`, `val_list.txt` and `test_list.txt` with lines of image file, space and class."""

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
        "`train_list.txt`, `val_list.txt`, `test_list.txt`: lines of image file, space, class",
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
            stem, marker, _ = entry.name.lower().rpartition("_list.txt")
            split = split_of(stem) if marker and entry.is_file() else None
            if split in files:
                raise InputError(f"{path}: both {files[split].name} and {entry.name} mean {split}; move one away")
            if split:
                files[split] = entry.path
        files = in_order(files, path) if files else {}
    elif path.is_file() and path.suffix.lower() == ".txt" and _names_image_first(path):
        files = {"": path}
    if not files:
        return None
    folder = path if path.is_dir() else path.parent
    names = class_list or find_class_list_beside(folder, _CLASS_LISTS)
    return DataRef(kind=KIND, path=path, read=lambda: manifest.read(path, files, names, options, KIND))


def _names_image_first(path: Path) -> bool:
    return any(is_image_name(cells[0]) for _, cells in islice(rows_of(path), 1))
