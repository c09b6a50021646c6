"""Which reader a file is for: told by its first bytes, or its last."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from flatout.convert import keras_files, paddle, tensorflow, torch_files
from flatout.convert.foreign import Foreign
from flatout.convert.table import MAGIC
from flatout.errors import InputError, one_line

_IN_A_FOLDER = (
    *("weights.safetensors", "model.safetensors", "pytorch_model.bin"),
    *("variables/variables.index", "model.weights.h5"),
)
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# How torch's files begin that are no zip files: a pickle of this number.
_TORCH_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")


def find_file(path: Path) -> Path:
    """Return a file of weights: the one named, in a folder, or of a checkpoint's prefix.

    Raises:
        InputError: there is none; the path is named as --weights was given.
    """
    if path.is_file():
        data = path.name.partition(".data-")
        return path.with_name(f"{data[0]}.index") if data[1] and data[2] else path
    index = path.with_name(f"{path.name}.index")
    if index.is_file():
        return index
    if not path.is_dir():
        raise InputError(f"--weights {path}: there is no such file or folder")
    for name in _IN_A_FOLDER:
        if (path / name).is_file():
            return path / name
    return _newest_checkpoint(path)


def _newest_checkpoint(folder: Path) -> Path:
    """Return the `.index` of the checkpoint that TensorFlow's file `checkpoint` names, or of the only one."""
    found = sorted(folder.glob("*.index"))
    state = folder / "checkpoint"
    if state.is_file():
        lines = state.read_text(encoding="utf-8", errors="replace")[:100_000].splitlines()
        named = [line.partition(":")[2].strip(' "') for line in lines if line.startswith("model_checkpoint_path")]
        # Its folder may be one of another machine.
        found = [folder / f"{Path(name).name}.index" for name in named] or found
    if len(found) == 1 and found[0].is_file():
        return found[0]
    if found:
        one = one_line(found[0])
        raise InputError(f"{folder}: holds {len(found)} checkpoints; name one of them, such as {one}")
    raise InputError(f"{folder}: the folder holds none of {', '.join(_IN_A_FOLDER)}, and no checkpoint; name the file")


def read_foreign(path: Path) -> Foreign:
    """Return the weights of a file in any format but safetensors.

    Raises:
        InputError: it cannot be read, or is damaged.
    """
    return _reader(path)(path)


def _reader(path: Path) -> Callable[[Path], Foreign]:
    try:
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(max(0, file.seek(0, 2) - 8))
            end = file.read(8)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix in (".pdiparams", ".pdmodel"):
        raise InputError(f"{path}: is part of a program for inference; save paddle's model.state_dict() as .pdparams")
    if path.suffix == ".index" or end == MAGIC:
        return tensorflow.read
    if start.startswith(_HDF5) or path.suffix in (".h5", ".hdf5"):
        return keras_files.read
    if path.suffix == ".keras" or (start.startswith(b"PK") and _has_weights_of_keras(path)):
        return keras_files.read
    is_pickle = start[:1] == b"\x80" and _TORCH_MAGIC not in start
    if path.suffix == ".pdparams" or (is_pickle and path.suffix not in _TORCH_SUFFIXES):
        return paddle.read
    return torch_files.read


def _has_weights_of_keras(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return "model.weights.h5" in archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return False
