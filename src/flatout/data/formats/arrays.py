"""Images and labels as arrays: NumPy, IDX and CIFAR files, JSON triples, values in Python, scikit-learn's digits.

Shape letters: N images, H height, W width, C channels.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.formats.folders import files_in
from flatout.data.pixels import channels_last, range_of, to_pixels, value_range
from flatout.data.source import DataSource, ImageDataset, ReadOptions, assemble
from flatout.data.splits import SPLITS, in_order, split_within, words_of
from flatout.data.unpack import LimitedStream, open_decompressed, reading, refuse_bomb
from flatout.utils.errors import InputError, first_line, one_line

NUMPY_KIND, IDX_KIND, CIFAR_KIND, JSON_KIND = "NumPy arrays", "IDX files", "CIFAR binaries", "JSON triples"


def _assemble(
    kind: str,
    path: Path | None,
    splits: Mapping[str, tuple[Any, ...]],
    options: ReadOptions,
    notes: tuple[str, ...] = (),
    locate: Callable[[str, int], str] | None = None,
    scale: tuple[float, float] | None = None,
) -> ImageDataset:
    """Assemble split -> (images, labels) as arrays; by default, `scale` is the range of the training images."""
    converted = {}
    for name, (pixels, labels) in in_order(splits, path or "data").items():
        where = f"{path or 'data'}: {name}"
        pixels = channels_last(pixels, where)
        scale = scale or range_of(pixels, where)
        labels = labels if isinstance(labels, list) else np.atleast_1d(labels)
        converted[name] = (to_pixels(pixels, scale, where), labels)
        if pixels.shape[3] not in (1, 3):
            height, width, channels = pixels.shape[1:]
            notes = (*notes, f"{name}: the arrays are taken for images of {height} x {width}, {channels} channels")
    return assemble(kind, path, converted, options, notes=notes, locate=locate)


# NumPy

_IMAGE_WORDS = {"x", "image", "images", "img", "imgs", "data", "pixels"}
_LABEL_WORDS = {"y", "label", "labels", "target", "targets"}
_NAMES = "name the arrays x_train, y_train, x_test, y_test, or images and labels"


def recognise_numpy(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the `.npy` files of a folder, one `.npy` file with labels next to it, or an `.npz` file."""
    suffix = "" if path.is_dir() else path.suffix.lower()
    if suffix == ".npz":
        return DataSource(kind=NUMPY_KIND, path=path, inputs=(path,), read=lambda: _read_npz(path, options))
    if suffix == ".npy":
        labels = path.with_name(f"{path.stem}_labels.npy")
        if not labels.is_file():
            raise InputError(f"{path}: its labels, {labels.name}, are not next to it; or give the folder of both")
        return _of_pairs(NUMPY_KIND, path, {"train": (path, labels)}, options)
    files = {file.stem: file for file in files_in(path, lambda name: name.lower().endswith(".npy"))}
    # The `.npy` files may be images that a CSV file lists.
    lists = files_in(path, lambda name: name.lower().endswith((".csv", ".tsv")))
    if not files or (lists and not any(set(words_of(name)) & _IMAGE_WORDS for name in files)):
        return None
    pairs = {split: (files[x], files[y]) for split, (x, y) in _roles(files, path).items()}
    return _of_pairs(NUMPY_KIND, path, pairs, options)


def _of_pairs(kind: str, path: Path, pairs: dict[str, tuple[Path, Path]], options: ReadOptions) -> DataSource:
    def read() -> ImageDataset:
        read_file = read_idx if kind == IDX_KIND else _read_npy
        splits = {split: (read_file(images), read_file(labels)) for split, (images, labels) in pairs.items()}
        return _assemble(kind, path, splits, options, locate=lambda split, i: f"{pairs[split][1]}: label {i}")

    inputs = tuple(file for pair in pairs.values() for file in pair)
    return DataSource(kind=kind, path=path, inputs=inputs, read=read)


def _roles(names: Collection[str], where: Path, fix: str = _NAMES) -> dict[str, tuple[str, str]]:
    """Find split -> (name of the images, name of the labels); names without a split word are training data."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        words = set(words_of(name))
        if not words & (_IMAGE_WORDS | _LABEL_WORDS):
            continue
        # "image_labels" are labels.
        key = (split_within(name) or "train", "labels" if words & _LABEL_WORDS else "images")
        if key in found:
            both = one_line(f"{found[key]} and {name}")
            raise InputError(f"{where}: both {both} could be the {' '.join(key)}; rename one")
        found[key] = name
    if not found:
        raise InputError(f"{where}: holds {one_line(', '.join(names)) or 'nothing'}; {fix}")
    for split, role in product({split for split, _ in found}, ("images", "labels")):
        if (split, role) not in found:
            raise InputError(f"{where}: has no {role} for {split} among {one_line(', '.join(names))}; {fix}")
    return {split: (found[split, "images"], found[split, "labels"]) for split in SPLITS if (split, "images") in found}


def _read_npy(file: Path) -> np.ndarray:
    return _loaded(str(file), lambda: np.lib.format.open_memmap(file, mode="r"))


def _read_npz(path: Path, options: ReadOptions) -> ImageDataset:
    def load(archive: Any, key: str) -> np.ndarray:
        info = next(info for info in archive.zip.infolist() if info.filename in (key, f"{key}.npy"))
        where = f"{path}: {one_line(key)}"
        refuse_bomb(where, info.compress_size, info.file_size)
        return _loaded(where, lambda: archive[key])

    # Opened here, as np.load leaves a file open that turns out to be damaged.
    with _loaded(str(path), lambda: path.open("rb")) as file:
        archive = _loaded(str(path), lambda: np.load(file, allow_pickle=False))
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: is one array, not an .npz archive; name it .npy")
        with archive:
            roles = _roles(archive.files, path)
            splits = {split: (load(archive, x), load(archive, y)) for split, (x, y) in roles.items()}
            used = {key for pair in roles.values() for key in pair}
            unused = one_line(", ".join(key for key in archive.files if key not in used))
    return _assemble(NUMPY_KIND, path, splits, options, (f"ignored the arrays {unused}",) if unused else ())


def _loaded(where: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # NumPy raises nearly every built-in error on a damaged header
        if "allow_pickle" in str(error) or "Python objects" in str(error):
            what = "holds Python objects, which could run code when read; save plain numbers or text"
        else:
            reason = getattr(error, "strerror", None) or first_line(error)
            what = f"is damaged or not a NumPy file ({reason}); get or save it again"
        raise InputError(f"{where}: {what}") from None


# IDX, the format of MNIST: http://yann.lecun.com/exdb/mnist/ (the section on the file format)

_IDX_NAME = re.compile(r".*(images|labels)[-_.]idx\d-(ubyte|byte|short|int)(\.gz)?", re.I)
_IDX_NAMES = "name the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and so on"
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def recognise_idx(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise an IDX data set in a folder."""
    if not path.is_dir():
        if _IDX_NAME.fullmatch(path.name):
            raise InputError(f"{path}: is one file of an IDX set; give its folder, {path.parent}")
        return None
    # The same file compressed and not is common; the uncompressed one comes first, and is faster to read.
    found = files_in(path, _IDX_NAME.fullmatch)
    files = {file.name.removesuffix(".gz"): file for file in reversed(found)}
    if not files:
        return None
    pairs = {split: (files[x], files[y]) for split, (x, y) in _roles(files, path, _IDX_NAMES).items()}
    return _of_pairs(IDX_KIND, path, in_order(pairs, path), options)


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file, compressed with gzip or not, as an array in the machine's byte order."""
    with reading(path), open_decompressed(path) as file:
        stream = LimitedStream(file, path)
        # Two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number.
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES or magic[3] == 0:
            raise InputError(f"{path}: is not an IDX file (it starts with {magic.hex(' ') or 'nothing'})")
        header, dtype = stream.read(4 * magic[3]), np.dtype(_IDX_TYPES[magic[2]])
        shape = [int.from_bytes(header[i : i + 4]) for i in range(0, 4 * magic[3], 4)]
        size, content = math.prod(shape) * dtype.itemsize, bytearray()
        # In blocks, so that a wrong header cannot exhaust memory.
        while len(content) <= size and (block := stream.read(1 << 20)):
            content += block
    is_short = len(header) < 4 * magic[3] or len(content) < size
    if is_short or len(content) > size:
        what = f"is {'shorter' if is_short else 'longer'} than its header says"
        raise InputError(f"{path}: {what} (shape {shape}, {size:,} bytes); get it again")
    return np.frombuffer(content, dtype=dtype).astype(dtype.newbyteorder("="), copy=False).reshape(shape)


# The binary version of CIFAR-10 and CIFAR-100: https://www.cs.toronto.edu/~kriz/cifar.html

_CIFAR_PIXELS = 3 * 32 * 32
_CIFAR_NAMES = ("batches.meta.txt", "fine_label_names.txt")


def recognise_cifar(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the binary version of a CIFAR data set in a folder."""
    files = {file.name: file for file in files_in(path, lambda name: name.endswith((".bin", ".txt")))}
    batches = [file for name, file in files.items() if name.startswith("data_batch_") and name.endswith(".bin")]
    if batches and "test_batch.bin" in files:
        splits, label_bytes = {"train": batches, "test": [files["test_batch.bin"]]}, 1
    elif {"train.bin", "test.bin", _CIFAR_NAMES[1]} <= files.keys():
        splits, label_bytes = {"train": [files["train.bin"]], "test": [files["test.bin"]]}, 2
    else:
        return None
    options = options.with_class_list(path, [_CIFAR_NAMES[label_bytes - 1]])

    def read() -> ImageDataset:
        parts, size = {}, label_bytes + _CIFAR_PIXELS
        for split, some in splits.items():
            # One label byte (for CIFAR-100 two, the second is the fine label), then red, green, blue, row by row.
            if odd := next((file for file in some if not file.stat().st_size or file.stat().st_size % size), None):
                raise InputError(f"{odd}: its size is not a multiple of {size:,} bytes, a record; get it again")
            with reading(path):
                records = np.concatenate([np.fromfile(file, np.uint8) for file in some]).reshape(-1, size)
            images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            parts[split] = np.ascontiguousarray(images), records[:, label_bytes - 1]
        return _assemble(CIFAR_KIND, path, parts, options)

    inputs = tuple(file for some in splits.values() for file in some)
    return DataSource(kind=CIFAR_KIND, path=path, inputs=inputs, class_list=options.class_list, read=read)


# JSON triples: a list of three [images, labels] pairs, each image a flat list of numbers

_JSON_LAYOUT = "three pairs [images, labels] for train, validation and test are expected"
_MAX_DEPTH = 1000
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_JSON_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def recognise_json(path: Path, options: ReadOptions) -> DataSource | None:
    """Recognise the JSON triples in a file, by its name."""
    if not path.name.lower().endswith((".json", ".json.gz")) or not path.is_file():
        return None
    return DataSource(kind=JSON_KIND, path=path, inputs=(path,), read=lambda: _read_json(path, options))


def _read_json(path: Path, options: ReadOptions) -> ImageDataset:
    """Parse a file as a stream: a whole data set of Python floats would take gigabytes."""
    import ijson

    # Of each pair: the pixels of its images, float32, and its labels.
    pixels, labels = [bytearray()], [list[int | float | str]()]
    length = 0
    with reading(path), open_decompressed(path) as file:
        stream = _Shallow(LimitedStream(file, path), path)
        try:
            # The third level holds lists (images) and plain values (labels) in turn; an image after labels begins the
            # next pair.
            for value in ijson.items(stream, "item.item.item", use_float=True, buf_size=1 << 20):
                if isinstance(value, list):
                    if labels[-1]:
                        pixels.append(bytearray())
                        labels.append([])
                    length = length or len(value)
                    try:
                        image = np.array(value, np.float32)
                        if image.shape != (math.isqrt(length) ** 2,) or not length:
                            raise ValueError
                    except (TypeError, ValueError):
                        where = f"{path}: pair {len(pixels)}: image {len(pixels[-1]) // max(1, 4 * length)}"
                        need = "a list of numbers, for all images the same square number, such as 784 for 28x28"
                        raise InputError(f"{where}: must be {need}") from None
                    pixels[-1] += image.tobytes()
                elif isinstance(value, (int, float, str)):
                    labels[-1].append(value)
                else:
                    raise InputError(f"{path}: holds {value!r} where an image or a label is expected; {_JSON_LAYOUT}")
        except (UnicodeDecodeError, ijson.JSONError) as error:
            what = f"the file ends in the middle or is not JSON: {first_line(error)}"
            raise InputError(f"{path}: {what}; {_JSON_LAYOUT}") from None
    if len(pixels) != len(SPLITS) or not all(pixels):
        fix = "a list of JSON objects is read from a .jsonl file, one on each line"
        what = f"holds {len(pixels)} pairs, {sum(map(bool, pixels))} with images"
        raise InputError(f"{path}: {what}; {_JSON_LAYOUT}; {fix}")
    side = math.isqrt(length)
    images = [np.frombuffer(content, np.float32).reshape(-1, side, side) for content in pixels]
    # The training images determine the scale: a few dark test images could suggest another.
    scale = value_range(float(images[0].min()), float(images[0].max()), path, signed=True)
    splits = {name: (own, of_own) for name, own, of_own in zip(SPLITS, images, labels, strict=True)}
    return _assemble(JSON_KIND, path, splits, options, scale=scale)


class _Shallow:
    """A JSON stream that refuses deep nesting: ijson keeps the path to each level, so memory is quadratic in depth."""

    def __init__(self, stream: LimitedStream, path: Path) -> None:
        self._stream, self._path, self._depth, self._begun = stream, path, 0, b""

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        text = self._begun + data
        if b'"' in text:  # brackets in texts do not count
            text, quote, begun = _JSON_TEXT.sub(b"", text).partition(b'"')
            self._begun = quote + begun
        for bracket in text.translate(None, _NO_BRACKETS):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > _MAX_DEPTH:
                break
        if self._depth > _MAX_DEPTH or len(self._begun) > 2 * size:
            raise InputError(f"{self._path}: is nested too deeply, or has a text that is too long; {_JSON_LAYOUT}")
        return data


# Values in Python


def load_digits_source() -> ImageDataset:
    """Load scikit-learn's digits: 1,797 handwritten digits, 8x8 pixels, grey values 0 to 16 scaled to 0 to 255.

    From the UCI optical recognition of handwritten digits data set (Alpaydin and Kaynak, 1998).
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return _assemble("scikit-learn digits", None, {"train": (images, digits.target)}, ReadOptions())


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array, a torch tensor or similar, rather than a data set."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_pair(value: object) -> bool:
    """Whether a value is (images, labels) as arrays; labels may be a plain list."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    images, labels = value
    return is_array(images) and len(images.shape) >= 2 and (is_array(labels) or isinstance(labels, (list, tuple)))


def from_arrays(data: object, task: str = "auto") -> ImageDataset:
    """Read a pair (images, labels), or a tuple (train[, valid], test) or dict by split of such pairs.

    Images are [N, H, W], [N, H, W, C] or [N, C, H, W], of uint8 or uint16, or numbers in 0..1 or 0..255; labels are
    numbers or text [N] or [N, 1], or rows of 0 and 1, [N, K], or a list of lists of names; those with fractions are
    numbers to predict.
    """
    parts = by_split(data, is_pair, "(images, labels)").items()
    splits = {
        name: (as_array(images), labels if isinstance(labels, list) else as_array(labels))
        for name, (images, labels) in parts
    }
    return _assemble("arrays", None, splits, ReadOptions(task=task))


def by_split(data: object, is_part: Callable[[Any], bool], part_name: str) -> dict[str, Any]:
    """Find split -> part in a single part (the training data), a tuple of two or three, or a dict."""
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
        raise InputError(
            f"data: is a {type(data).__name__}; give {part_name}, or a dict of those for train, valid and test"
        )
    for name, part in parts.items():
        if not is_part(part):
            raise InputError(f"data: the {name} part is a {type(part).__name__}; give {part_name}")
    return in_order(parts, "data")


def as_array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, possibly on another device
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
    return np.asarray(value)
