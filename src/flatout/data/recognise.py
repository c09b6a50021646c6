"""Decide, by looking, what kind of data a path or a Python value is."""

from pathlib import Path

from flatout.data.formats import folders, idx, json_triples, manifest
from flatout.data.formats import npy as arrays
from flatout.data.labels import find_class_list
from flatout.data.source import Found, Source
from flatout.errors import InputError
from flatout.settings import nearest_path

DIGITS = "sklearn:digits"
_EXPECTED = (
    "flatout reads a folder for each class (or train/, valid/ and test/ with such folders in each), CSV files of "
    "file,label rows, IDX files, a .json or .json.gz of three [images, labels] pairs, .npz and .npy arrays, and packs"
)


def is_pack(path: Path) -> bool:
    """Whether a path is a folder of decoded images that flatout wrote."""
    return (path / "pack.json").is_file()


def recognise(path: Path, *, classes: str = "") -> Found:
    """Return what a path holds, without reading the images.

    Args:
        path: a file or folder, or `sklearn:digits`. A pack is only recognised: it has no `Source` to read.
        classes: a text file of class names, one per line; `classes.txt` beside the data is used without being named,
            except for class folders, which have their names already.

    Raises:
        InputError: there is nothing at the path, or nothing recognisable.
    """
    if str(path) == DIGITS:
        return Found(kind="scikit-learn digits", path=path, inputs=(), read=arrays.load_digits_source)
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder; {nearest_path(path) or 'check the path'}")
    if is_pack(path):
        return Found(kind="pack", path=path, inputs=(), read=lambda: _no_source(path))
    found = _in_folder(path, classes) if path.is_dir() else _in_file(path, classes)
    if found is None:
        raise InputError(f"{path}: holds nothing recognisable; {_EXPECTED}")
    return found


def from_python(data: object) -> Source:
    """Return the source of arrays or of torch map-style data sets, alone, in a tuple, or in a dict by split.

    Raises:
        InputError: the data is neither, or its images or labels are wrong.
    """
    from flatout.data.formats import torch_dataset as datasets

    parts = list(data.values()) if isinstance(data, dict) else list(data) if isinstance(data, tuple) else [data]
    if arrays.is_pair(data) or any(arrays.is_pair(part) for part in parts):
        return arrays.from_arrays(data)
    return datasets.from_dataset(data)


def _no_source(path: Path) -> Source:
    raise AssertionError(f"{path} is a pack, which is opened as it is")


def _in_file(path: Path, classes: str) -> Found | None:
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is an empty file")
    if idx.is_idx_name(path.name):
        raise InputError(f"{path}: is one file of an IDX set; give its folder, {path.parent}")
    return (
        manifest.find_single(path, find_class_list(classes, path.parent))
        or json_triples.find(path, classes)
        or arrays.find_npz(path, classes)
        or arrays.find_npy(path, classes)
    )


def _in_folder(path: Path, classes: str) -> Found | None:
    if not folders.visible(path):
        raise InputError(f"{path}: is an empty folder")
    class_list = find_class_list(classes, path)
    found = idx.find(path, classes) or arrays.find_npy(path, classes) or manifest.find_set(path, class_list)
    if found is None and not manifest.lists_images(path):
        # Many a tree of class folders has a CSV file of something else beside it.
        found = folders.find(path, Path(classes).expanduser() if classes else None)
    return found or manifest.find_single(path, class_list)
