"""Damaged files of every format: data, one InputError, or a bad image, soon and in little memory.

`FLATOUT_FUZZ_SECONDS=600 pytest -n 0 -s tests/data/test_fuzz.py` reads new damaged files for 600 seconds of CPU time in
each format and prints their number.
"""

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatout.data.build import build_pack
from flatout.data.decode import decode_image, read_header
from flatout.data.detect import recognise
from flatout.data.pack import PackSettings
from flatout.data.pixels import BadImage
from flatout.utils.errors import InputError
from tests.data import containers as c
from tests.data.containers import write
from tests.data.damage import read_damaged
from tests.data.packs import Silent

SIDE, CLASSES = 4, ("cat", "dog")
PIXELS = np.random.default_rng(0).integers(0, 256, (8, SIDE, SIDE), np.uint8)
LABELS = np.arange(8) % 2


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(stream, "PNG")
    return stream.getvalue()


def pictures(folder: Path) -> None:
    for i in range(8):
        write(folder / "images" / f"{i}.png", png(i))


def csv(folder: Path, rows: list[str]) -> Path:
    pictures(folder)
    write(folder / "list.csv", "\n".join(rows))
    return folder / "list.csv"


def csv_of_classes(folder: Path) -> Path:
    splits = ("train", "train", "valid", "test")
    rows = (f"images/{i}.png,{CLASSES[i % 2]},{splits[i // 2]}" for i in range(8))
    return csv(folder, ["file,label,split", *rows])


def csv_of_several(folder: Path) -> Path:
    return csv(folder, ["image;tags", *(f'{i};"{("cat", "cat|dog", "dog")[i % 3]}"' for i in range(8))])


def json_lines(folder: Path) -> Path:
    pictures(folder)
    rows = ({"file_name": f"images/{i}.png", "label": list(CLASSES[: i % 3])} for i in range(8))
    write(folder / "metadata.jsonl", "\n".join(map(json.dumps, rows)))
    return folder / "metadata.jsonl"


def lists(folder: Path) -> Path:
    pictures(folder)
    write(folder / "label_list.txt", "0 cat\n1 dog\n")
    write(folder / "test_list.txt", "images/6.png 0\nimages/7.png 1\n")
    write(folder / "train_list.txt", "".join(f"images/{i}.png {i % 2}\n" for i in range(6)))
    return folder / "train_list.txt"


def class_list(folder: Path) -> Path:
    csv_of_classes(folder)
    write(folder / "classes.txt", "cat\ndog\n")
    return folder / "classes.txt"


def idx(folder: Path, compress: Callable[[bytes], bytes] = bytes) -> Path:
    suffix = ".gz" if compress is not bytes else ""
    for role, array in (("labels", LABELS.astype(np.uint8)), ("images", PIXELS)):
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        write(folder / f"train-{role}-idx{array.ndim}-ubyte{suffix}", compress(header + array.tobytes()))
    return folder / f"train-images-idx3-ubyte{suffix}"


def npy(folder: Path) -> Path:
    np.save(folder / "y.npy", LABELS)
    np.save(folder / "x.npy", PIXELS)
    return folder / "x.npy"


def npy_labels(folder: Path) -> Path:
    npy(folder)
    np.save(folder / "y.npy", np.array(CLASSES)[LABELS])
    return folder / "y.npy"


def npz(folder: Path, save: Callable[..., None] = np.savez) -> Path:
    save(folder / "set.npz", x_train=PIXELS, y_train=LABELS)
    return folder / "set.npz"


def triples(folder: Path, compress: Callable[[bytes], bytes] = bytes) -> Path:
    pair = [(PIXELS.reshape(8, -1) / 255).round(2).tolist(), LABELS.tolist()]
    file = folder / ("set.json" if compress is bytes else "set.json.gz")
    write(file, compress(json.dumps([pair, pair, pair]).encode()))
    return file


def cifar(folder: Path) -> Path:
    record = bytes(3 * 32 * 32)
    write(folder / "batches.meta.txt", "cat\ndog\n")
    write(folder / "test_batch.bin", b"\0" + record + b"\1" + record)
    write(folder / "data_batch_1.bin", b"\0" + record + b"\1" + record)
    return folder / "data_batch_1.bin"


def pack(folder: Path, file: str) -> Path:
    settings = PackSettings(size=SIDE, channels=1, resize="squash", on_bad_image="stop", max_bad_share=0.0)
    npy(folder)
    build_pack(recognise(folder), settings, folder / "pack", Silent())
    return folder / "pack" / file


@dataclass(frozen=True)
class Set:
    """A data set: `build` returns the file to damage; the data is its folder, or itself."""

    build: Callable[[Path], Path]
    is_file: bool = True


SETS = {
    "CSV, classes": Set(csv_of_classes),
    "CSV, several classes": Set(csv_of_several),
    "class list": Set(class_list, is_file=False),
    "JSON lines": Set(json_lines),
    "PaddleClas": Set(lists, is_file=False),
    "IDX": Set(idx, is_file=False),
    "IDX, compressed": Set(lambda folder: idx(folder, gzip.compress), is_file=False),
    "npy": Set(npy, is_file=False),
    "npy, labels": Set(npy_labels, is_file=False),
    "npz": Set(npz),
    "npz, compressed": Set(lambda folder: npz(folder, np.savez_compressed)),
    "JSON triples": Set(triples),
    "JSON triples, compressed": Set(lambda folder: triples(folder, gzip.compress)),
    "CIFAR": Set(cifar, is_file=False),
    "pack": Set(lambda folder: pack(folder, "pack.json"), is_file=False),
    "pack, labels": Set(lambda folder: pack(folder, "labels.npy"), is_file=False),
    "pack, images": Set(lambda folder: pack(folder, "images.npy"), is_file=False),
}
IMAGES = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "TIFF, bands", "BMP", "PPM", "npy")


@pytest.mark.parametrize("name", SETS)
def test_damaged_files(name: str, tmp_path: Path):
    how = SETS[name]
    file = how.build(tmp_path)
    content, data = file.read_bytes(), file if how.is_file else file.parent

    def read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            recognise(data).read()
        except InputError as error:
            assert str(tmp_path) in str(error)
            assert "\n" not in str(error)

    read_damaged(name, 20, content, read)


def test_a_description_of_a_pack_that_is_nested_too_deeply(tmp_path: Path):
    pack(tmp_path, "pack.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"pack\.json: is damaged"):
        recognise(tmp_path / "pack").read()


def image_of(name: str) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 16, 5 if "bands" in name else 3), np.uint8)
    if name == "npy":
        np.save(stream, noise)
    elif "bands" in name:
        tifffile = pytest.importorskip("tifffile")
        tifffile.imwrite(stream, noise, photometric="minisblack", planarconfig="contig")
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(noise).save(stream, name, **({} if name in ("BMP", "GIF", "PPM") else {"exif": exif}))
    return stream.getvalue()


def decode(content: bytes) -> None:
    """Read the header and decode, as the packing of class folders does."""
    for channels in (1, 3, 5):
        try:
            found = read_header(content)
            assert found.width > 0
            decode_image(content, size=(8, 8), channels=channels, resize="crop", bits=found.bits)
        except BadImage as error:
            assert str(error)


@pytest.mark.parametrize("name", IMAGES)
def test_damaged_images(name: str):
    read_damaged(name, 40, image_of(name), decode)


def test_a_tiff_file_without_pixels() -> None:
    """Found by `test_damaged_images`: its header was taken, and its shape divides by zero."""
    width, nothing = (struct.pack("<HHII", 256, 4, 1, value) for value in (16, 0))
    content = image_of("TIFF, bands")
    assert content.count(width) == 1
    with pytest.raises(BadImage, match="has 0 x 24 pixels"):
        read_header(content.replace(width, nothing))


def test_a_tiff_file_that_lists_a_part_of_its_pixels() -> None:
    """Found by `test_damaged_images`: 1,304 bytes took 3 GB of memory, and the missing pixels were black."""
    height, more = (struct.pack("<HHII", 257, 4, 1, value) for value in (24, 8_323_076))
    content = image_of("TIFF")
    assert content.count(height) == 1
    with pytest.raises(BadImage, match="some of its pixels are not there"):
        read_header(content.replace(height, more))


# Containers


def with_tar_checksums(content: bytes) -> bytes:
    """Return the content with the right checksum in each header, so that what it says is read."""
    changed = bytearray(content)
    for start in range(0, len(content) - 511, 512):
        if content[start + 257 : start + 262] == b"ustar":
            header = changed[start : start + 512]
            changed[start + 148 : start + 156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(changed)


def one_example(folder: Path) -> Path:
    """Write a `tf.train.Example`; `c.tf_record` puts its checksums around it."""
    c.write(folder / "a.tfrecord", c.example(c.tf_encoded(c.SAMPLES[0])))
    return folder / "a.tfrecord"


# What writes a container, the file to damage, and what makes its checksums right.
CONTAINERS: dict[str, tuple[Callable[[Path], Path], str, Callable[[bytes], bytes]]] = {
    "tar": (c.in_tar("w"), "set.tar", bytes),
    "tar, right checksums": (c.in_tar("w"), "set.tar", with_tar_checksums),
    "tar.gz": (c.in_tar("w:gz"), "set.tar.gz", bytes),
    "WebDataset": (c.webdataset("json"), "train-000000.tar", with_tar_checksums),
    "zip": (c.in_zip(zipfile.ZIP_DEFLATED), "set.zip", bytes),
    "TFRecord": (c.tf_records, "train-00000-of-00002", bytes),
    "tf.train.Example": (one_example, "a.tfrecord", c.tf_record),
    "Parquet": (c.parquet, "data/train-00000-of-00001.parquet", bytes),
    "saved data set": (c.saved_dataset, "train/data-00000-of-00002.arrow", bytes),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_damaged_containers(name: str, tmp_path: Path):
    """A bad image raises OSError, everything else InputError."""
    build, file, repair = CONTAINERS[name]
    data = build(tmp_path)
    content = (tmp_path / file).read_bytes()

    def read(content: bytes) -> None:
        (tmp_path / file).write_bytes(repair(content))
        try:
            source = recognise(data).read()
        except InputError as error:
            assert str(tmp_path) in str(error)
            return
        for image in source.files or ():
            try:
                image.read_bytes()
            except OSError as error:
                assert error.strerror

    read_damaged(name, 40, content, read)
