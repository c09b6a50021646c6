"""Images and labels as arrays: `.npz` and `.npy` files, arrays and tensors in Python, scikit-learn's digits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats.folders import visible
from flatout.data.pixels import channels_last, range_of, to_pixels
from flatout.data.source import DataRef, ReadOptions, Source, assemble
from flatout.data.splits import SPLITS, in_order, split_within, words_of
from flatout.data.unpack import refuse_bomb
from flatout.errors import InputError, first_line, one_line

KIND = "NumPy arrays"
ABOUT = {
    KIND: ("an `.npz`, an `.npy`, or a folder of `.npy`", "words in the names of arrays or files"),
}
_IMAGE_WORDS = {"x", "image", "images", "img", "imgs", "data", "pixels"}
_LABEL_WORDS = {"y", "label", "labels", "target", "targets"}
_NAMES = "x_train, y_train, x_test, y_test, or images and labels"


def recognise(path: Path, class_list: Path | None, options: ReadOptions) -> DataRef | None:
    """Return the `.npy` files of a folder, one `.npy` file with the labels beside it, an `.npz` file, or None.

    Raises:
        InputError: labels are missing, or two files could be the same.
    """
    suffix = "" if path.is_dir() else path.suffix.lower()
    pairs: dict[str, tuple[Path, Path]] = {}
    files = {file.stem: file for file in _npy_files(path)} if path.is_dir() else {}
    if files and not (_has_list(path) and not any(set(words_of(name)) & _IMAGE_WORDS for name in files)):
        pairs = {split: (files[x], files[y]) for split, (x, y) in _roles(list(files), path).items()}
    elif suffix == ".npy":
        pairs = {"train": (path, _labels_beside(path))}
    elif suffix != ".npz":
        return None
    inputs = tuple(file for pair in pairs.values() for file in pair) or (path,)
    return DataRef(
        kind=KIND,
        path=path,
        inputs=inputs,
        read=lambda: read(path, pairs, class_list, options) if pairs else read_npz(path, class_list, options),
    )


def read(path: Path, pairs: dict[str, tuple[Path, Path]], class_list: Path | None, options: ReadOptions) -> Source:
    """Return the source of split -> (file of images, file of labels)."""

    def load(file: Path) -> np.ndarray:
        return _loaded(str(file), lambda: np.lib.format.open_memmap(file, mode="r"))

    splits = {split: (load(x), load(y)) for split, (x, y) in pairs.items()}
    return _source(splits, KIND, path, class_list, task=options.task)


def read_npz(path: Path, class_list: Path | None, options: ReadOptions) -> Source:
    """Return the source of an `.npz` file."""
    # Opened here, as np.load leaves a file open that turns out to be damaged.
    with _loaded(str(path), lambda: path.open("rb")) as file:
        archive = _loaded(str(path), lambda: np.load(file, allow_pickle=False))
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: is one array, not an .npz archive; name it .npy")
        with archive:
            roles = _roles(archive.files, path)
            member = {key: _array_of(archive, key, path) for pair in roles.values() for key in pair}
            unused = [key for key in archive.files if key not in member]
    notes = (f"ignored the arrays {_listed(unused)}",) if unused else ()
    splits = {split: (member[x], member[y]) for split, (x, y) in roles.items()}
    return _source(splits, KIND, path, class_list, notes, options.task)


def _array_of(archive: Any, key: str, path: Path) -> np.ndarray:
    info = next(info for info in archive.zip.infolist() if info.filename in (key, f"{key}.npy"))
    where = f"{path}: {one_line(key)}"
    refuse_bomb(where, info.compress_size, info.file_size)
    return _loaded(where, lambda: archive[key])


def _listed(names: list[str]) -> str:
    """Return the names of arrays in one line, whatever a file calls them."""
    return one_line(", ".join(names))


def _roles(names: list[str], where: Path) -> dict[str, tuple[str, str]]:
    """Return split -> (name of the images, name of the labels); names without a split word are training data."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        words = set(words_of(name))
        if not words & (_IMAGE_WORDS | _LABEL_WORDS):
            continue
        # "image_labels" are labels.
        key = (split_within(name) or "train", "labels" if words & _LABEL_WORDS else "images")
        if key in found:
            both = f"{one_line(found[key])} and {one_line(name)}"
            raise InputError(f"{where}: both {both} could be the {' '.join(key)}; rename one")
        found[key] = name
    if not found:
        raise InputError(f"{where}: holds {_listed(names) or 'nothing'}; name the arrays {_NAMES}")
    for split, role in [(split, role) for split, _ in found for role in ("images", "labels")]:
        if (split, role) not in found:
            raise InputError(f"{where}: has no {role} for {split} among {_listed(names)}; name the arrays {_NAMES}")
    return {split: (found[split, "images"], found[split, "labels"]) for split in SPLITS if (split, "images") in found}


def _npy_files(folder: Path) -> list[Path]:
    return [e.path for e in visible(folder) if e.name.lower().endswith(".npy") and e.is_file()]


def _has_list(folder: Path) -> bool:
    """Whether there is a CSV file, which may list `.npy` files of one image each."""
    return any(e.name.lower().endswith((".csv", ".tsv")) for e in visible(folder))


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


def _loaded(where: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # NumPy raises nearly every built-in error on a damaged header
        if "allow_pickle" in str(error) or "Python objects" in str(error):
            what = "holds Python objects, which could run code when read; save plain numbers or text"
        else:
            reason = getattr(error, "strerror", None) or first_line(error)
            what = f"is damaged or no NumPy file ({reason}); get or save it again"
        raise InputError(f"{where}: {what}") from None


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
    return is_array(images) and len(images.shape) >= 2 and (is_array(labels) or isinstance(labels, (list, tuple)))


def from_arrays(data: object, task: str = "auto") -> Source:
    """Return the source of a pair (images, labels), or a tuple (train[, valid], test) or dict by split of such pairs.

    Images are [N, H, W], [N, H, W, C] or [N, C, H, W], of uint8 or uint16, or numbers in 0..1 or 0..255; labels are
    numbers or text [N] or [N, 1], or rows of 0 and 1, [N, K]; those with fractions are numbers to predict.
    """
    splits = {name: tuple(map(_as_array, pair)) for name, pair in by_split(data, is_pair, "(images, labels)").items()}
    return _source(splits, "arrays", None, None, task=task)


def by_split(data: object, is_part: Callable[[Any], bool], part_name: str) -> dict[str, Any]:
    """Return split -> part for a single part (the training data), a tuple of two or three, or a dict."""
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
    return in_order(parts, "data")


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:3])})"
    return f"a {type(value).__name__}"


def _as_array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, maybe on another device
        value = value.detach().cpu()
    return np.asarray(value)


def _source(
    splits: Mapping[str, tuple[Any, ...]],
    kind: str,
    path: Path | None,
    class_list: Path | None,
    notes: tuple[str, ...] = (),
    task: str = "auto",
) -> Source:
    """Return the source of pairs of arrays; the training images decide the range of pixels."""
    scale, converted = None, {}
    for name, (pixels, labels) in in_order(splits, path or "data").items():
        where = f"{path or 'data'}: {name}"
        pixels = channels_last(pixels, where)
        scale = scale or range_of(pixels, where)
        converted[name] = (to_pixels(pixels, scale, where), np.atleast_1d(labels))
        if pixels.shape[3] not in (1, 3):
            height, width, channels = pixels.shape[1:]
            notes = (*notes, f"{name}: the arrays are taken for images of {height} x {width}, {channels} channels")
    return assemble(kind, path, converted, class_list=class_list, notes=notes, task=task)
