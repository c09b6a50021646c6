"""Writers of every format from the images of `fixtures/`, each a second implementation of what the readers parse."""

import gzip
import io
import json
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.data.decode import decode_image

FIXTURES = Path(__file__).resolve().parent / "fixtures"
CLASSES = ("cat", "dog")
SIZE = 32


@dataclass(frozen=True)
class Sample:
    """One image: its split, class, file name and encoded bytes."""

    split: str
    label: int
    name: str
    data: bytes

    @property
    def class_name(self) -> str:
        return CLASSES[self.label]

    @property
    def pixels(self) -> np.ndarray:
        return decode_image(self.data, size=SIZE, channels=3, resize="stretch")


SAMPLES = [
    Sample(split, label, file.name, file.read_bytes())
    for split in ("train", "test")
    for label, name in enumerate(CLASSES)
    for file in sorted((FIXTURES / "class-folders" / split / name).iterdir())
]
BY_SPLIT = {split: [sample for sample in SAMPLES if sample.split == split] for split in ("train", "test")}


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def fixture(name: str) -> Callable[[Path], Path]:
    """A copy of what TensorFlow, webdataset or datasets has written (`fixtures/make_fixtures.py`)."""
    return lambda folder: shutil.copytree(FIXTURES / name, folder / "photos")


class_folders = fixture("class-folders")


def images(folder: Path, pattern: str) -> dict[str, list[tuple[str, Sample]]]:
    """Write the images of each split; return split -> (name after a pattern of {split}, {i} and {of}, sample)."""
    named = {
        split: [(pattern.format(split=split, i=i, of=sample), sample) for i, sample in enumerate(samples)]
        for split, samples in BY_SPLIT.items()
    }
    for name, sample in chain.from_iterable(named.values()):
        write(folder / name, sample.data)
    return named


def class_ids(folder: Path) -> Path:
    """Class folders named by ids, with a class list of ids and names."""
    images(folder / "photos", "{split}/n{of.label:04}/{of.name}")
    lines = [f"n{label:04} {name}" for label, name in enumerate(CLASSES)]
    write(folder / "names.txt", "\n".join(lines))
    return folder / "photos"


def in_tar(mode: str, write_inside: Callable[[Path], Path] = class_folders) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        inside = write_inside(folder / "inside")
        path = folder / ("set.tar" + mode.replace("w:", ".").replace("w", ""))
        with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            archive.add(inside, "set" if inside.is_dir() else inside.name)
        return path

    return build


def in_zip(method: int, write_inside: Callable[[Path], Path] = class_folders) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        inside = write_inside(folder / "inside")
        with zipfile.ZipFile(folder / "set.zip", "w", method) as archive:
            for file in sorted(inside.rglob("*")) if inside.is_dir() else [inside]:
                archive.write(file, file.relative_to(inside.parent))
        return folder / "set.zip"

    return build


def csv_files(folder: Path) -> Path:
    for split, named in images(folder, "pictures/{split}{i:03}-{of.name}").items():
        rows = [f"{i};me;{sample.class_name};{name}" for i, (name, sample) in enumerate(named)]
        write(folder / f"{split}.csv", "\n".join(["id;who;class;file", *rows]).replace("/", "\\"))
    return folder


def metadata(name: str) -> Callable[[Path], Path]:
    """Hugging Face image folders."""

    def build(folder: Path) -> Path:
        for split, named in images(folder, "{split}/{i:03}-{of.name}").items():
            rows = [{"file_name": file.partition("/")[2], "label": sample.class_name} for file, sample in named]
            if name == "metadata.jsonl":
                lines = list(map(json.dumps, rows))
            else:
                lines = ["file_name,label", *(",".join(row.values()) for row in rows)]
            write(folder / split / name, "\n".join(lines))
        return folder

    return build


def paddle_lists(folder: Path) -> Path:
    for split, named in images(folder, "jpg/{split}/{i:03} {of.name}").items():
        write(folder / f"{split}_list.txt", "".join(f"{name} {sample.label}\n" for name, sample in named))
    write(folder / "label_list.txt", "".join(f"{label} {name}\n" for label, name in enumerate(CLASSES)))
    return folder


def named_files(folder: Path) -> Path:
    images(folder, "{split}/{of.class_name}.{i:03}.{of.name}")
    return folder


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


# TFRecord: https://www.tensorflow.org/tutorials/load_data/tfrecord


def tf_record(data: bytes) -> bytes:
    """Return a record without its checksums, which are not compared."""
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    content = b""
    while number > 0x7F:
        content += bytes([number & 0x7F | 0x80])
        number >>= 7
    return content + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, bytes | int]) -> bytes:
    """Return a serialised tf.train.Example."""
    entries = b""
    for name, value in features.items():
        kind, values = (1, field(1, value)) if isinstance(value, bytes) else (3, field(1, varint(value)))
        entries += field(1, field(1, name.encode()) + field(2, field(kind, values)))
    return field(1, entries)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Write the class list; return the images and labels of each split."""
    write(folder / "classes.txt", "\n".join(CLASSES))
    found = {}
    for split, samples in BY_SPLIT.items():
        found[f"x_{split}"] = np.stack([sample.pixels for sample in samples])
        found[f"y_{split}"] = np.array([sample.label for sample in samples])
    return found


def npz(folder: Path) -> Path:
    np.savez_compressed(folder / "set.npz", **arrays(folder))  # pyright: ignore[reportArgumentType]
    return folder / "set.npz"


def npy(folder: Path) -> Path:
    for name, array in arrays(folder).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"u": 8, "i": 9}[array.dtype.kind]
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def idx(folder: Path) -> Path:
    for name, array in arrays(folder).items():
        role = "images" if name[0] == "x" else "labels"
        content = gzip.compress(idx_bytes(array.astype(np.uint8)))
        write(folder / f"{name[2:]}-{role}-idx{array.ndim}-ubyte.gz", content)
    return folder


def cifar(before: bytes, names: dict[str, list[str]], class_list: str) -> Callable[[Path], Path]:
    """Records of `before`, the label and the pixels."""

    def build(folder: Path) -> Path:
        for split, files in names.items():
            records = [before + bytes([s.label]) + s.pixels.transpose(2, 0, 1).tobytes() for s in BY_SPLIT[split]]
            size = -(-len(records) // len(files))
            for i, file in enumerate(files):
                write(folder / file, b"".join(records[i * size : (i + 1) * size]))
        write(folder / class_list, "\n".join(CLASSES) + "\n\n")
        return folder

    return build


cifar10 = cifar(
    b"", {"train": ["data_batch_1.bin", "data_batch_2.bin"], "test": ["test_batch.bin"]}, "batches.meta.txt"
)
cifar100 = cifar(b"\x09", {"train": ["train.bin"], "test": ["test.bin"]}, "fine_label_names.txt")
