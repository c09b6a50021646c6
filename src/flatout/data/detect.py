"""Detect the format of a path or a Python value."""

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flatout.config import Data
from flatout.config.settings import nearest_path
from flatout.data.cache import Progress
from flatout.data.fetch import download, is_remote
from flatout.data.formats import arrays, datasets, folders, shards, tables
from flatout.data.formats.shards import expand_braces
from flatout.data.pack import DESCRIPTION, open_pack
from flatout.data.source import DataSource, ImageDataset, ReadOptions
from flatout.data.splits import split_of
from flatout.data.unpack import is_archive, unpack
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.files import printable

# In the order of detection: each takes a path and options, and returns the data if the path has its format.
FORMATS: tuple[Callable[[Path, ReadOptions], DataSource | None], ...] = (
    folders.recognise_names,
    arrays.recognise_idx,
    arrays.recognise_numpy,
    arrays.recognise_cifar,
    arrays.recognise_json,
    shards.recognise_webdataset,
    shards.recognise_tfrecord,
    datasets.recognise_saved,
    datasets.recognise_parquet,
    tables.recognise_paddle,
    tables.recognise,
    folders.recognise,
)

DIGITS = "sklearn:digits"
_EXPECTED = (
    "holds nothing that flatout recognises. It reads a folder for each class (or train/, valid/ and test/ with such "
    "folders in each), lists of file,label rows (CSV, JSON lines, PaddleClas), IDX and CIFAR files, a .json or "
    ".json.gz of three [images, labels] pairs, .npz and .npy arrays, WebDataset shards, TFRecord and Parquet files, "
    "saved Hugging Face data sets, a .zip or .tar archive of one of these, given itself, and packs"
)
_NO_CLASSES = (
    "holds images but nothing that names their classes; sort them into a folder for each class, or list them in a CSV "
    "file with rows of file,label"
)
_DOCUMENT = re.compile(r"(readme|licen[cs]e|citation|copying|notice|changelog)\b", re.IGNORECASE)
# Recipe keys that affect what is read from given files.
_OPTIONS = ("images", "file_column", "label_column", "group_column", "label_pattern")


def find(
    data: object, options: Data | None = None, task: str = "auto", *, console: Console | None = None
) -> DataSource | ImageDataset:
    """Recognise a path, download and recognise a URL, or read arrays or torch data sets given in Python."""
    if is_remote(data):
        console = console or Console()
        path, descriptor = download(data, console)
        console.finish()
        try:
            found = recognise(path, options, task, console)
        except InputError:
            os.close(descriptor)
            raise
        # Keeps the cache from removing the data to make room while it may be read.
        weakref.finalize(found, os.close, descriptor)
        return found
    return recognise(Path(data), options, task, console) if isinstance(data, str | Path) else from_python(data, task)


def recognise(
    path: Path, options: Data | None = None, task: str = "auto", report: Progress | None = None
) -> DataSource:
    """Recognise the data at a path, or `sklearn:digits`, without reading the images.

    `report` shows the progress of unpacking an archive, when its images are read.
    """
    options = ReadOptions(**vars(options or Data()), task=task)
    if str(path) == DIGITS:
        return DataSource(kind="scikit-learn digits", path=path, read=arrays.load_digits_source)
    if printable(path) != str(path):
        raise InputError(f"{printable(path)}: the path is not UTF-8; rename it")
    for file in expand_braces(path):
        if not file.exists():
            raise InputError(f"{file}: there is no such file or folder; {nearest_path(file) or 'check the path'}")
    if (path / DESCRIPTION).is_file():
        return DataSource(kind="pack", path=path, read=lambda: _read_pack(path))
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{path}: is an empty file")
    options = options.with_class_list(path)
    found = _recognise_format(path, options)
    if found is None and is_archive(path):
        if not options.classes:
            options = replace(options, class_list=None)  # one beside the archive is not of its content
        read = partial(_read_archive, path, options, report)
        found = DataSource(kind="archive", path=path, inputs=(path,), read=read)
    if found is None:
        is_photos = folders.has_images(path) if path.is_dir() else folders.is_image_name(path.name)
        raise InputError(f"{path}: {_NO_CLASSES if is_photos else _EXPECTED}")
    if not found.inputs:
        return replace(found, task=task)
    given = {key: value for key in _OPTIONS if (value := getattr(options, key))}
    class_list = found.class_list or options.class_list
    inputs = (*found.inputs, class_list) if class_list else found.inputs
    return replace(found, task=task, inputs=inputs, options=repr(given))


def _recognise_format(path: Path, options: ReadOptions) -> DataSource | None:
    for recognise in FORMATS:
        if found := recognise(path, options):
            if options.images and recognise not in (tables.recognise_paddle, tables.recognise):
                raise InputError(f"data.images = {options.images!r}: {path} is not a list of images; remove it")
            return found
    return None


def _read_archive(path: Path, options: ReadOptions, report: Progress | None) -> ImageDataset:
    """Unpack an archive and read its content in any format; messages name the archive."""
    unpacked = unpack(path, report)
    root, folder = unpacked.folder, str(unpacked.folder)
    # Many archives contain a single folder; others are one compressed file.
    while root.is_dir():
        content = [entry for entry in folders.visible(root) if not _DOCUMENT.match(entry.name)]
        if len(content) != 1 or split_of(content[0].name):
            break
        root = Path(content[0])
    if options.images:
        options = replace(options, images=str(root / options.images))
    if (root / DESCRIPTION).is_file():
        raise InputError(f"{path}: holds a pack; unpack it, and give its folder")
    try:
        found = _recognise_format(root, options.with_class_list(root))
        if found is None:
            raise InputError(f"{root}: {_EXPECTED}")
        source = found.read()
    except InputError as error:
        raise InputError(str(error).replace(folder, str(path)), error.details) from None
    notes = tuple(note.replace(folder, str(path)) for note in source.notes)
    inside = source.folder if options.images else unpacked.folder
    kind = f"{source.kind} in an archive"
    return replace(source, path=path, kind=kind, notes=notes, folder=inside, unpacked=unpacked)


def from_python(data: object, task: str = "auto") -> ImageDataset:
    """Read arrays or torch data sets: one, a tuple, or a dict by split."""
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else ()
    if arrays.is_pair(data) or any(map(arrays.is_pair, parts)):
        return arrays.from_arrays(data, task)
    return datasets.from_dataset(data, task)


def _read_pack(path: Path) -> ImageDataset:
    pack = open_pack(path)
    return replace(pack, kind="pack", groups=None if pack.groups is None else pack.groups.astype(str))
