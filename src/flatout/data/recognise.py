"""Decide, by looking, which format a path or a Python value has."""

from dataclasses import replace
from pathlib import Path

from flatout.data.formats import folders, idx, json_triples, manifest, npy
from flatout.data.labels import find_class_list
from flatout.data.source import DataRef, ReadOptions, Source
from flatout.errors import InputError
from flatout.files import printable
from flatout.recipe import Data
from flatout.settings import nearest_path

# In the order in which they are tried. Each module has `recognise(path, class_list, options)`, which returns a DataRef
# or None, and `read(...)`, which returns a Source.
FORMATS = (idx, npy, json_triples, manifest, folders)

DIGITS = "sklearn:digits"
_EXPECTED = (
    "flatout reads a folder for each class (or train/, valid/ and test/ with such folders in each), CSV files of "
    "file,label rows, IDX files, a .json or .json.gz of three [images, labels] pairs, .npz and .npy arrays, and packs"
)
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")


def is_pack(path: Path) -> bool:
    """Whether a path is a pack, a folder of decoded images."""
    return (path / "pack.json").is_file()


def recognise(path: Path, options: Data | None = None, task: str = "auto") -> DataRef:
    """Return what a path or `sklearn:digits` holds, without reading the images.

    Raises:
        InputError: there is nothing at the path, or nothing recognisable.
    """
    options = ReadOptions(**vars(options or Data()), task=task)
    if str(path) == DIGITS:
        return DataRef(kind="scikit-learn digits", path=path, read=npy.load_digits_source)
    if printable(path) != str(path):
        raise InputError(f"{printable(path)}: the path is not UTF-8; rename it")
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder; {nearest_path(path) or 'check the path'}")
    if is_pack(path):
        return DataRef(kind="pack", path=path, read=lambda: _read_pack(path))
    if path.is_dir() and not folders.visible(path):
        raise InputError(f"{path}: is an empty folder")
    if not path.is_dir() and path.stat().st_size == 0:
        raise InputError(f"{path}: is an empty file")
    class_list = find_class_list(options.classes, path if path.is_dir() else path.parent)
    found = (ref for format in FORMATS if (ref := format.recognise(path, class_list, options)))
    ref = next(found, None)
    if ref is None:
        raise InputError(f"{path}: {_what_it_is(path)}")
    inputs = (*ref.inputs, class_list) if ref.inputs and class_list else ref.inputs
    return replace(ref, inputs=inputs, task=task)


def from_python(data: object, task: str = "auto") -> Source:
    """Return the source of arrays or of torch map-style data sets, alone, in a tuple, or in a dict by split."""
    from flatout.data.formats import torch_dataset

    parts = data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else ()
    if npy.is_pair(data) or any(map(npy.is_pair, parts)):
        return npy.from_arrays(data, task)
    return torch_dataset.from_dataset(data, task)


def _read_pack(path: Path) -> Source:
    from flatout.data.pack import open_pack

    pack = open_pack(path)
    return Source(
        kind="pack",
        path=path,
        task=pack.task,
        classes=pack.classes,
        labels=pack.labels,
        splits=pack.splits,
        images=pack.images,
        notes=pack.notes,
    )


def _what_it_is(path: Path) -> str:
    if path.name.lower().endswith(_ARCHIVES):
        return "is an archive; unpack it and give the folder"
    if folders.is_image_name(path.name) and path.is_file():
        return "is a single image; give a folder with a folder of images for each class"
    if path.is_dir():
        names = [entry.name for entry in folders.visible(path)]
        if archives := [name for name in names if name.lower().endswith(_ARCHIVES)]:
            return f"holds the archive {archives[0]}; unpack it and give the folder that comes out"
        if folders.has_images(path):
            return (
                "holds images but nothing that names their classes; sort them into a folder for each class, or list "
                "them in a CSV file with rows of file,label"
            )
    return f"holds nothing recognisable; {_EXPECTED}"
