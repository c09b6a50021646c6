"""IDX files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flatout.data.detect import recognise
from flatout.data.formats.arrays import read_idx
from flatout.errors import InputError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_set(folder: Path, images: np.ndarray, labels: np.ndarray, split: str = "train", suffix: str = "") -> None:
    pack = gzip.compress if suffix == ".gz" else bytes
    (folder / f"{split}-images-idx{images.ndim}-ubyte{suffix}").write_bytes(pack(idx_bytes(images)))
    (folder / f"{split}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx_bytes(labels)))


def small(count: int = 6, shape: tuple[int, ...] = (3, 4)) -> tuple[np.ndarray, np.ndarray]:
    images = np.arange(count * np.prod(shape), dtype=np.uint8).reshape(count, *shape)
    return images, (np.arange(count) % 2).astype(np.uint8)


@settings(deadline=None)  # the machine may be busy
@given(
    array=npst.arrays(
        dtype=st.sampled_from([np.dtype(code) for code in CODES]),
        shape=npst.array_shapes(min_dims=1, max_dims=4, max_side=5),
        elements={"allow_nan": False},
    ),
    packed=st.booleans(),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, packed: bool):
    path = tmp_path_factory.getbasetemp() / "round-trip"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    read = read_idx(path)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_folder(tmp_path: Path, suffix: str):
    images, labels = small()
    write_set(tmp_path, images, labels, suffix=suffix)
    write_set(tmp_path, images[:2], labels[:2], "t10k", suffix=suffix)
    found = recognise(tmp_path)
    assert {path.name for path in found.inputs} == {path.name for path in tmp_path.iterdir()}
    source = found.read()
    assert source.images is not None
    np.testing.assert_array_equal(source.images[:6, ..., 0], images)
    np.testing.assert_array_equal(source.images[6:, ..., 0], images[:2])
    assert source.splits == {"train": (0, 6), "test": (6, 8)}


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5)])
def test_colour(tmp_path: Path, shape: tuple[int, ...]):
    images, labels = small(shape=shape)
    write_set(tmp_path, images, labels)
    source = recognise(tmp_path).read()
    assert source.images is not None
    np.testing.assert_array_equal(source.images, images if shape[2] == 3 else images.transpose(0, 2, 3, 1))


def test_names_in_use(tmp_path: Path):
    images, labels = small()
    (tmp_path / "emnist-letters-train-images.idx3-ubyte").write_bytes(idx_bytes(images))
    (tmp_path / "emnist-letters-train-labels.idx1-ubyte").write_bytes(idx_bytes(labels + 1))
    source = recognise(tmp_path).read()
    assert source.classes == ("1", "2")
    assert source.labels.tolist() == labels.tolist()


def test_class_names_beside(tmp_path: Path):
    write_set(tmp_path, *small())
    (tmp_path / "classes.txt").write_text("no\nyes\n")
    found = recognise(tmp_path)
    assert tmp_path / "classes.txt" in found.inputs
    assert found.read().classes == ("no", "yes")


def test_real_mnist_is_the_known_one(shared_data: Path):
    source = recognise(shared_data / "mnist").read()
    assert source.images is not None
    assert source.images.shape == (70000, 28, 28, 1)
    assert source.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    # The mean and deviation that every tutorial on MNIST states.
    train = source.images[:60000] / np.float32(255)
    assert (round(float(train.mean()), 4), round(float(train.std()), 4)) == (0.1307, 0.3081)


def broken(folder: Path, name: str, change) -> None:
    write_set(folder, *small())
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "is cut off: its header promises shape"),
        (lambda b: b[:9], "is cut off"),
        (lambda b: b[:4] + b"\xff" * 12 + b[16:], "is cut off"),
        (lambda b: b + b"x", "longer than its header says"),
        (lambda b: b"PK\3\4" + b[4:], "is no IDX file .it starts with 50 4b 03 04"),
        (lambda _: b"", "is no IDX file .it starts with nothing"),
        (lambda b: gzip.compress(b)[:-9], "damaged gzip"),
        (lambda b: gzip.compress(b)[:20] + b"\0" * 20, "damaged gzip"),
        (lambda _: idx_bytes(np.zeros((6, 3, 4), np.float32)), "not images of bytes"),
        (lambda _: idx_bytes(np.zeros((5, 3, 4), np.uint8)), "6 labels for 5 images"),
    ],
)
def test_damaged(tmp_path: Path, change, message: str):
    broken(tmp_path, "train-images-idx3-ubyte", change)
    with pytest.raises(InputError, match=message) as caught:
        recognise(tmp_path).read()
    assert "train-" in str(caught.value)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However much its header promises, it is not decompressed."""
    monkeypatch.setattr("flatout.data.members._EXPANSION_SLACK_BYTES", 1 << 16)
    monkeypatch.setattr("flatout.data.formats.arrays._BLOCK_BYTES", 1 << 16)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 1 << 12, 64, 64) + bytes(1 << 24)))
    with pytest.raises(InputError, match=r"idx3-ubyte\.gz: expands from \d\d,\d{3} to [34],\d{3},\d{3} bytes or more"):
        read_idx(path)


def test_missing_files(tmp_path: Path):
    write_set(tmp_path, *small(), "t10k")
    with pytest.raises(InputError, match="no training split"):
        recognise(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match="no IDX file of test labels"):
        recognise(tmp_path)


def test_sizes_that_differ_between_splits(tmp_path: Path):
    write_set(tmp_path, *small())
    write_set(tmp_path, *small(shape=(4, 4)), "t10k")
    with pytest.raises(InputError, match="train 3x4x1, test 4x4x1"):
        recognise(tmp_path).read()


def test_labels_outside_the_class_list_and_negative(tmp_path: Path):
    images, _ = small()
    write_set(tmp_path, images, np.array([0, 1, 2, 0, 1, 5], np.uint8))
    (tmp_path / "classes.txt").write_text("no\nyes\n")
    with pytest.raises(InputError, match=r"label 2: label outside the class list .* 2; .*label 5: .* 5$"):
        recognise(tmp_path).read()
    (tmp_path / "classes.txt").unlink()
    write_set(tmp_path, images, np.array([0, 1, 0, -1, 1, 0], np.int8))
    with pytest.raises(InputError, match="label 3: negative label -1"):
        recognise(tmp_path).read()
