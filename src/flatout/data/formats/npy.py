"""Images and labels as arrays: `.npz` and `.npy` files, arrays and tensors in Python, scikit-learn's digits."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats.folders import visible
from flatout.data.labels import find_class_list, flat_labels, index_labels, read_class_list
from flatout.data.parts import join_images, ordered, spans, split_within, words_of
from flatout.data.pixels import channels_last, range_of, to_uint8
from flatout.data.source import SPLITS, Found, Source
from flatout.errors import InputError

KIND = "NumPy arrays"
_IMAGE_WORDS = {"x", "image", "images", "img", "imgs", "data", "pixels"}
_LABEL_WORDS = {"y", "label", "labels", "target", "targets"}
_NAMES = "x_train, y_train, x_test, y_test, or images and labels"
_LOAD_ERRORS = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


def find_npz(path: Path, classes: str) -> Found | None:
    """Return the arrays of an `.npz` file, by its name, or None."""
    if path.suffix.lower() != ".npz":
        return None
    class_list = find_class_list(classes, path.parent)
    inputs = (path, class_list) if class_list else (path,)
    return Found(kind=KIND, path=path, inputs=inputs, read=lambda: _read_npz(path, class_list))


def _read_npz(path: Path, class_list: Path | None) -> Source:
    # Opened here, as np.load leaves a file open that turns out to be damaged.
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except _LOAD_ERRORS as error:
            raise _load_error(str(path), error) from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: is one array, not an .npz archive; name it .npy")
        with archive:
            keys = _roles(archive.files, path)
            parts = {split: (_member(archive, x, path), _member(archive, y, path)) for split, (x, y) in keys.items()}
            unused = [key for key in archive.files if key not in {key for pair in keys.values() for key in pair}]
    notes = (f"ignored the arrays {', '.join(unused)}",) if unused else ()
    return _source(parts, KIND, path, class_list, notes)


def _member(archive: Any, key: str, path: Path) -> np.ndarray:
    try:
        return archive[key]
    except _LOAD_ERRORS as error:
        raise _load_error(f"{path}: {key}", error) from None


def _roles(names: list[str], where: Path) -> dict[str, tuple[str, str]]:
    """Return split -> (name of the images, name of the labels); names without a split word are training data."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        words = set(words_of(name))
        role = "images" if words & _IMAGE_WORDS else "labels" if words & _LABEL_WORDS else None
        if words & _LABEL_WORDS:  # "image_labels" are labels
            role = "labels"
        if role is None:
            continue
        key = (split_within(name) or "train", role)
        if key in found:
            raise InputError(f"{where}: both {found[key]} and {name} could be the {' '.join(key)}; rename one")
        found[key] = name
    if not found:
        raise InputError(f"{where}: holds {', '.join(names) or 'nothing'}; name the arrays {_NAMES}")
    for split in {split for split, _ in found}:
        for role in ("images", "labels"):
            if (split, role) not in found:
                raise InputError(
                    f"{where}: has no {role} for {split} among {', '.join(names)}; name the arrays {_NAMES}"
                )
    return {split: (found[split, "images"], found[split, "labels"]) for split in SPLITS if (split, "images") in found}


def find_npy(path: Path, classes: str) -> Found | None:
    """Return the `.npy` files of a folder, or one `.npy` file and the labels beside it, or None."""
    if path.is_dir():
        folder = path
        files = {file.stem: file for file in _npy_files(path)}
        pairs = {split: (files[x], files[y]) for split, (x, y) in _roles(list(files), path).items()} if files else {}
    elif path.suffix.lower() == ".npy":
        folder = path.parent
        pairs = {"train": (path, _labels_beside(path))}
    else:
        return None
    if not pairs:
        return None
    class_list = find_class_list(classes, folder)
    inputs = tuple(file for pair in pairs.values() for file in pair) + ((class_list,) if class_list else ())

    def read() -> Source:
        parts = {split: (_load(x), _load(y)) for split, (x, y) in pairs.items()}
        return _source(parts, KIND, path, class_list)

    return Found(kind=KIND, path=path, inputs=inputs, read=read)


def _npy_files(folder: Path) -> list[Path]:
    return [Path(e.path) for e in visible(folder) if e.name.lower().endswith(".npy") and e.is_file()]


def _labels_beside(path: Path) -> Path:
    """Return the file with the same name but for the words that mean images or labels."""

    def rest(file: Path) -> list[str]:
        return [word for word in words_of(file.stem) if word not in _IMAGE_WORDS | _LABEL_WORDS]

    beside = [
        file
        for file in _npy_files(path.parent)
        if file.name != path.name and set(words_of(file.stem)) & _LABEL_WORDS and rest(file) == rest(path)
    ]
    if len(beside) != 1:
        names = " and ".join(file.name for file in beside) or "no file"
        raise InputError(f"{path}: {names} beside it could be its labels; name one file {path.stem}_labels.npy")
    return beside[0]


def _load(path: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except _LOAD_ERRORS as error:
        raise _load_error(str(path), error) from None


def _load_error(where: str, error: Exception) -> InputError:
    if "allow_pickle" in str(error) or "Python objects" in str(error):
        return InputError(f"{where}: holds Python objects, which could run code when read; save plain numbers or text")
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{where}: is damaged or no NumPy file ({reason}); get or save it again")


def load_digits_source() -> Source:
    """Return scikit-learn's digits: 1,797 handwritten digits, 8x8 pixels, grey values 0 to 16 scaled to 0 to 255.

    From the UCI optical recognition of handwritten digits data set (Alpaydin and Kaynak, 1998).
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return _source({"train": (images, digits.target)}, "scikit-learn digits", None, None)


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array, a torch tensor or the like, rather than a data set."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_pair(value: object) -> bool:
    """Whether a value is (images, labels) as arrays; labels may be a plain list."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    images, labels = value
    if not is_array(images) or len(images.shape) < 2:
        return False
    return is_array(labels) or isinstance(labels, (list, tuple))


def from_arrays(data: object) -> Source:
    """Return the source of arrays given in Python.

    Args:
        data: a pair (images, labels), or a tuple (train, test) or (train, valid, test) or a dict by split of such
            pairs. Images are [N, H, W], [N, H, W, C] or [N, C, H, W] with C 1 or 3, of uint8, or numbers in 0..1 or
            0..255; labels are numbers or text [N], [N, 1], or one-hot [N, K].

    Raises:
        InputError: the data is none of these.
    """
    parts = {name: tuple(map(_as_array, pair)) for name, pair in by_split(data, is_pair, "(images, labels)").items()}
    return _source(parts, "arrays", None, None)


def by_split(data: object, is_part: Any, part_name: str) -> dict[str, Any]:
    """Return split -> part for a single part (the training data), a tuple of two or three, or a dict.

    Raises:
        InputError: the data is none of these.
    """
    if is_part(data):
        return {"train": data}
    if isinstance(data, Mapping):
        parts = {}
        for key, part in data.items():
            name = split_within(str(key))
            if name is None or name in parts:
                raise InputError(f"data: key {key!r}; the keys are train, valid and test, each once")
            parts[name] = part
    elif isinstance(data, tuple) and len(data) in (2, 3):
        parts = dict(zip(("train", "test") if len(data) == 2 else SPLITS, data, strict=True))
    else:
        raise InputError(f"data: is {_kind(data)}; give {part_name}, or a dict of those for train, valid and test")
    for name, part in parts.items():
        if not is_part(part):
            raise InputError(f"data: the {name} part is {_kind(part)}; give {part_name}")
    return ordered(parts, "data")


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:3])})"
    return f"a {type(value).__name__}"


def _as_array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, maybe on another device
        value = value.detach().cpu()
    return np.asarray(value)


def _source(
    parts: Mapping[str, tuple[Any, ...]],
    kind: str,
    path: Path | None,
    class_list: Path | None,
    notes: tuple[str, ...] = (),
) -> Source:
    """Return the source of pairs of arrays, after bringing images and labels into the common form."""
    where = str(path) if path is not None else "data"
    parts = ordered(parts, where)
    images: dict[str, np.ndarray] = {}
    labels: list[np.ndarray] = []
    scale = None
    for name, (pixels, part_labels) in parts.items():
        part = f"{where}: {name}"
        if pixels.ndim == 0 or part_labels.ndim == 0 or len(pixels) != len(part_labels):
            counts = [len(a) if a.ndim else 0 for a in (pixels, part_labels)]
            raise InputError(f"{part} has {counts[0]:,} images but {counts[1]:,} labels; make them equal")
        pixels = channels_last(pixels, part)
        scale = scale or range_of(pixels, part)
        images[name] = to_uint8(pixels, scale, part)
        labels.append(flat_labels(part_labels, part))
    splits = spans({name: len(part) for name, part in images.items()}, where)
    if len({part.dtype.kind for part in labels}) > 1:
        raise InputError(f"{where}: labels are numbers in one part and text in another; make them the same")

    def locate(i: int) -> str:
        name = next(name for name, (_, stop) in splits.items() if i < stop)
        return f"{where}: {name}: label {i - splits[name][0]}"

    names = read_class_list(class_list) if class_list else None
    labelling = index_labels(np.concatenate(labels), names, locate)
    return Source(
        kind=kind,
        path=path,
        classes=labelling.classes,
        labels=labelling.labels,
        splits=splits,
        images=join_images(images, where),
        notes=notes + ((f"class names from {class_list}",) if class_list else ()) + labelling.notes,
    )
