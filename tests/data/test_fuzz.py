"""Damaged files of every format: data, one InputError, or a bad image, in little memory.

`FLATOUT_FUZZ_EXAMPLES=10000 pytest -n 0 tests/data/test_fuzz.py` reads so many new damaged files of each format.
"""

import gzip
import io
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from PIL import Image

from flatout.data.build import build_pack
from flatout.data.decode import decode_image, read_header
from flatout.data.detect import recognise
from flatout.data.pixels import BadImage
from flatout.utils.errors import InputError
from tests.data import containers as c
from tests.data.packs import Silent, settings

MAX_GROWTH_BYTES = 1 << 30
# What texts and headers trip over: quotes, ends, other encodings, numbers out of range, depth, paths that lead out.
PIECES = (
    *(b'"', b"'", b"\0", b"\r", b"\n", b"\xff", b"\xef\xbb\xbf", b",", b";", b"\t", b" ", b"|", b"\\", b"{", b"}"),
    *(b"nan", b"-inf", b"1e999", b"-1", b"0.5", b"9" * 30, b"9" * 5000, b"[" * 3000, b"(" * 300, b'{"a":' * 1500),
    *(b"../", b"/dev/zero", b"null", b"true", b"[]", b'""', b"a" * 300, b"x/" * 200, b"\xf0\x9f\x90\x88"),
)


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw changes of bytes and of 32-bit numbers, pieces put in, parts left out or repeated, and an end cut off."""
    changed = bytearray(content)
    # Most of what a format says is at its beginning and end.
    places = st.integers(0, len(content) - 1) | st.integers(0, 600) | st.integers(len(content) - 600, len(content) - 1)
    for _ in range(draw(st.integers(1, 4))):
        place = min(max(draw(places), 0), len(changed) - 1)
        numbers = st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(content)])
        number, piece = struct.pack(draw(st.sampled_from(["<I", ">I"])), draw(numbers)), draw(st.sampled_from(PIECES))
        repeated = changed[place : place + draw(st.sampled_from([1, 30, 512]))]
        left_out = draw(st.sampled_from([1, 4, min(512, len(changed) // 2)]))
        byte, rest = bytes([draw(st.integers(0, 255))]), len(changed)
        # The number of bytes that go, and what takes their place.
        kinds = [(1, byte), (4, number), (0, piece), (len(piece), piece), (rest, b""), (0, repeated), (left_out, b"")]
        length, new = draw(st.sampled_from(kinds))
        changed[place : place + length] = new
    return bytes(changed)


def read_damaged(examples: int, content: bytes, read: Callable[[bytes], None]) -> None:
    """Call `read` with damaged contents, the same in every run unless their number is given; it takes little memory."""
    more = int(os.environ.get("FLATOUT_FUZZ_EXAMPLES", "0"))

    @of_hypothesis(max_examples=more or examples, database=None, derandomize=not more)
    @given(damage(content))
    def run(content: bytes) -> None:
        read(content)

    read(content)
    before = peak_bytes(reset=True)
    run()
    assert peak_bytes() - before < MAX_GROWTH_BYTES


def peak_bytes(*, reset: bool = False) -> int:
    """Return the most memory that this process has held, from now on if it is reset; 0 where it cannot be."""
    if sys.platform != "linux":
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kibibytes)


LABELS = [sample.label for sample in c.BY_SPLIT["train"]]


def several_labels(folder: Path) -> Path:
    named = c.images(folder, "{split}{i}.png")["train"]
    rows = (f"{name};cat|dog" if i % 3 else f"{name};dog" for i, (name, _) in enumerate(named))
    c.write(folder / "several.csv", "\n".join(["image;tags", *rows]))
    return folder / "several.csv"


def triples(folder: Path) -> Path:
    pair = [np.arange(6 * 16).reshape(6, 16).tolist(), LABELS]
    c.write(folder / "set.json.gz", gzip.compress(json.dumps([pair, pair, pair]).encode()))
    return folder / "set.json.gz"


def pack(folder: Path) -> Path:
    build_pack(recognise(c.npz(folder)), settings(size=c.SIZE), folder / "pack", Silent())
    return folder / "pack"


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
    features = {"image/encoded": c.SAMPLES[0].data, "image/class/label": 1, "image/class/text": b"cat"}
    c.write(folder / "a.tfrecord", c.example(features))
    return folder / "a.tfrecord"


# What writes a data set, the file to damage, and what makes its checksums right.
SETS: dict[str, tuple[Callable[[Path], Path], str, Callable[[bytes], bytes]]] = {
    "CSV": (c.csv_files, "train.csv", bytes),
    "CSV, several labels": (several_labels, "several.csv", bytes),
    "class list": (c.npy, "classes.txt", bytes),
    "JSON lines": (c.metadata("metadata.jsonl"), "train/metadata.jsonl", bytes),
    "PaddleClas": (c.paddle_lists, "train_list.txt", bytes),
    "IDX": (c.idx, "train-images-idx4-ubyte.gz", bytes),
    "npy": (c.npy, "x_train.npy", bytes),
    "npy, labels": (c.npy, "y_train.npy", bytes),
    "npz": (c.npz, "set.npz", bytes),
    "JSON triples": (triples, "set.json.gz", bytes),
    "CIFAR": (c.cifar10, "data_batch_1.bin", bytes),
    "pack": (pack, "pack/pack.json", bytes),
    "pack, labels": (pack, "pack/labels.npy", bytes),
    "pack, images": (pack, "pack/images.npy", bytes),
    "tar": (c.in_tar("w"), "set.tar", with_tar_checksums),
    "tar.gz": (c.in_tar("w:gz"), "set.tar.gz", bytes),
    "WebDataset": (c.fixture("webdataset-json"), "photos/train-000000.tar", with_tar_checksums),
    "zip": (c.in_zip(zipfile.ZIP_DEFLATED), "set.zip", bytes),
    "TFRecord": (c.fixture("tfrecord"), "photos/train-00000-of-00001", bytes),
    "tf.train.Example": (one_example, "a.tfrecord", c.tf_record),
    "Parquet": (c.fixture("parquet"), "photos/train-00000-of-00001.parquet", bytes),
    "saved data set": (c.fixture("saved-dataset"), "photos/train/data-00000-of-00001.arrow", bytes),
}


@pytest.mark.parametrize("name", SETS)
def test_damaged_files(name: str, tmp_path: Path):
    """A bad image raises OSError, everything else InputError of one line."""
    build, file, repair = SETS[name]
    data = build(tmp_path)
    content = (tmp_path / file).read_bytes()

    def read(content: bytes) -> None:
        (tmp_path / file).write_bytes(repair(content))
        try:
            source = recognise(data).read()
        except InputError as error:
            assert str(tmp_path) in str(error)
            assert "\n" not in str(error)
            return
        for image in source.files or ():
            try:
                image.read_bytes()
            except OSError as error:
                assert error.strerror

    read_damaged(20, content, read)


def image_of(name: str) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 16, 5 if "bands" in name else 3), np.uint8)
    if "bands" in name:
        tifffile.imwrite(stream, noise, photometric="minisblack", planarconfig="contig")
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(noise).save(stream, name, **({} if name in ("BMP", "GIF", "PPM") else {"exif": exif}))
    return stream.getvalue()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "TIFF, bands", "BMP", "PPM"])
def test_damaged_images(name: str):
    """The header is read before, as the packing of class folders does."""

    def decode(content: bytes) -> None:
        for channels in (1, 3, 5):
            try:
                found = read_header(content)
                assert found.width > 0
                decode_image(content, size=(8, 8), channels=channels, resize="crop", bits=found.bits)
            except BadImage as error:
                assert str(error)

    read_damaged(40, image_of(name), decode)


@pytest.mark.parametrize(
    ("name", "tag", "was", "value", "reason"),
    [
        # The header was taken, and its shape divides by zero.
        ("TIFF, bands", 256, 16, 0, "has 0 x 24 pixels"),
        # 1,304 bytes took 3 GB of memory, and the missing pixels were black.
        ("TIFF", 257, 24, 8_323_076, "some of its pixels are not there"),
    ],
)
def test_tiff_headers_that_damage_once_made(name: str, tag: int, was: int, value: int, reason: str) -> None:
    before, after = (struct.pack("<HHII", tag, 4, 1, number) for number in (was, value))
    content = image_of(name)
    assert content.count(before) == 1
    with pytest.raises(BadImage, match=reason):
        read_header(content.replace(before, after))
