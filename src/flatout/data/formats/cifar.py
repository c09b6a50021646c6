"""The binary version of CIFAR-10 and CIFAR-100: https://www.cs.toronto.edu/~kriz/cifar.html

Each record is one label byte (for CIFAR-100 two, of which the second is the fine label) and 3 x 32 x 32 bytes of
pixels: red, green, blue, each row by row.
"""

from pathlib import Path

import numpy as np

from flatout.data.formats.folders import visible
from flatout.data.source import DataRef, Source, assemble
from flatout.errors import InputError
from flatout.recipe import Data

KIND = "CIFAR binaries"
ABOUT = {
    KIND: (
        "the folder",
        "`data_batch_1.bin` and `test_batch.bin`; `train.bin`, `test.bin` and `fine_label_names.txt`",
    ),
}
_PIXELS = 3 * 32 * 32
_NAMES = ("batches.meta.txt", "fine_label_names.txt")
_PICKLES = (("data_batch_1", "test_batch"), ("train", "test", "meta"))


def recognise(path: Path, class_list: Path | None, options: Data) -> DataRef | None:
    """Return the CIFAR set in a folder, or None.

    Raises:
        InputError: it is the Python version, or files are missing.
    """
    if not path.is_dir():
        return None
    files = {entry.name: entry.path for entry in visible(path) if entry.is_file()}
    if any(all(name in files for name in names) for names in _PICKLES):
        raise InputError(
            f"{path}: is the Python version of CIFAR, pickle files that could run code when read; get the binary "
            "version (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
        )
    batches = [file for name, file in files.items() if name.startswith("data_batch_") and name.endswith(".bin")]
    if batches and "test_batch.bin" in files:
        splits, label_bytes = {"train": batches, "test": [files["test_batch.bin"]]}, 1
    elif {"train.bin", "test.bin", _NAMES[1]} <= files.keys():
        splits, label_bytes = {"train": [files["train.bin"]], "test": [files["test.bin"]]}, 2
    else:
        return None
    names = class_list or files.get(_NAMES[label_bytes - 1])
    inputs = (*(file for some in splits.values() for file in some), *([names] if names else ()))
    return DataRef(kind=KIND, path=path, inputs=inputs, read=lambda: read(path, splits, label_bytes, names))


def read(path: Path, splits: dict[str, list[Path]], label_bytes: int, class_list: Path | None) -> Source:
    """Return the source of split -> files."""
    parts = {}
    for split, files in splits.items():
        records = np.concatenate([_records(file, label_bytes + _PIXELS) for file in files])
        images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts[split] = np.ascontiguousarray(images), records[:, label_bytes - 1]
    return assemble(KIND, path, parts, class_list=class_list)


def _records(file: Path, size: int) -> np.ndarray:
    """Return the records of a file, uint8 [N, size]."""
    try:
        content = np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if not len(content) or len(content) % size:
        raise InputError(f"{file}: has {len(content):,} bytes, no multiple of {size:,}, a record; get it again")
    return content.reshape(-1, size)
