"""NumPy, IDX, CIFAR and JSON files, and arrays and tensors given in Python."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data.detect import recognise
from flatout.data.formats.arrays import from_arrays
from flatout.data.source import ImageDataset
from tests.data import containers as c
from tests.data.small_sets import read, refused

IMAGES = np.arange(6 * 5 * 4, dtype=np.uint8).reshape(6, 5, 4) * 2
LABELS = np.array([0, 1, 2, 0, 1, 2])


def pixels(source: ImageDataset) -> np.ndarray:
    assert source.images is not None
    return source.images


# In Python


def test_kinds_of_labels():
    number, text = LABELS.astype(np.float32), LABELS.astype(np.bytes_)
    for labels in (LABELS, LABELS[:, None], np.eye(3)[LABELS], number, text, LABELS.tolist()):
        source = from_arrays((IMAGES, labels))
        assert (source.labels.dtype, source.labels.tolist()) == (np.int64, LABELS.tolist())
        assert source.classes == ("0", "1", "2")


def test_names_gaps_and_fractions():
    names = ["cat", "ant", "cat", "dog", "dog", "ant"]
    for labels in (names, np.array(names, object)):
        source = from_arrays((IMAGES, labels))
        assert (source.classes, source.labels.tolist()) == (("ant", "cat", "dog"), [1, 0, 1, 2, 2, 0])
    source = from_arrays((IMAGES, [0, 3, 1, 0, 3, 1]))
    assert (source.classes, source.notes) == (("0", "1", "2", "3"), ("no image has label 2",))
    rows = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1]])
    source = from_arrays((IMAGES, rows.astype(float)))
    assert (source.task, source.classes, source.labels.tolist()) == ("multi-label", ("0", "1", "2"), rows.tolist())
    source = from_arrays((IMAGES, [["a", "b"], [], ["b"], ["c"], ["a"], ["a", "b", "c"]]))
    assert (source.task, source.classes, source.labels.tolist()) == ("multi-label", ("a", "b", "c"), rows.tolist())
    assert from_arrays((IMAGES, np.eye(6)), "multi-label").labels.tolist() == np.eye(6).tolist()
    source = from_arrays({"train": (IMAGES, LABELS + 0.5), "test": (IMAGES, LABELS)})  # whole numbers in one split
    assert (source.task, source.labels.dtype) == ("regression", np.float32)
    assert source.labels.tolist() == [*(LABELS + 0.5).tolist(), *LABELS.tolist()]
    refused("label 0: has several classes or none; --set task=multi-label", from_arrays, (IMAGES, rows), "single-label")
    need = "must be whole numbers or names; .*--set task=regression"
    refused(need, from_arrays, (IMAGES, LABELS + 0.5), "single-label")


def test_kinds_of_images():
    tensor = torch.tensor(IMAGES / 255, requires_grad=True)
    bytes_ = torch.tensor(IMAGES, dtype=torch.bfloat16)
    for images in (IMAGES[..., None], IMAGES[:, None], IMAGES / 255, tensor, bytes_, IMAGES.astype(np.int64)):
        found = pixels(from_arrays((images, LABELS)))
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found[..., 0], IMAGES)
    for shape, expected in (((4, 24, 40), (24, 40, 4)), ((24, 40, 4), (24, 40, 4)), ((3, 24, 40), (24, 40, 3))):
        assert pixels(from_arrays((np.zeros((6, *shape), np.uint8), LABELS))).shape[1:] == expected


def test_splits():
    pair, few = (IMAGES, LABELS), (IMAGES[:2], LABELS[:2])
    for data in ({"test": few, "val": few, "train": pair}, (pair, few, few)):
        assert from_arrays(data).splits == {"train": (0, 6), "valid": (6, 8), "test": (8, 10)}
    # The training part decides the scale: the test images are all dark.
    assert pixels(from_arrays(((IMAGES.astype(float), LABELS), (np.ones((1, 5, 4)), [0]))))[-1].max() == 1


BAD = np.zeros((6, 5, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGES, LABELS[:5]), "train has 6 images but 5 labels"),
        ((IMAGES.reshape(6, 20), LABELS), r"images of shape \(6, 20\); give \[N, H, W\]"),
        ((np.zeros((6, 3, 5, 3), np.uint8), LABELS), "channels may be first or last"),
        ((BAD + np.nan, LABELS), "pixels run from nan to nan"),
        ((BAD - 0.5, LABELS), "pixels run from -0.5 to -0.5; scale them to 0..1 or 0..255"),
        ((BAD + 1.5, LABELS), "must be whole numbers"),
        ((BAD.astype(np.complex64), LABELS), "images of type complex64"),
        ((IMAGES, LABELS - 1), "label 0: negative label -1; .*label 3: negative"),
        ((IMAGES, (LABELS + 0.5) * np.inf), "label 0: not a finite number: inf"),
        ((IMAGES, np.full((6, 2), 0.5)), r"labels of type float64 and shape \(6, 2\); give one number"),
        ((IMAGES, np.array([None] * 6)), "labels of type object and shape"),
        ({"train": (IMAGES, np.ones((6, 2))), "test": (IMAGES, np.ones((6, 3)))}, "rows of other lengths in another"),
        ({"train": (IMAGES, LABELS), "test": (IMAGES[:, :4], LABELS)}, "train 5x4x1, test 4x4x1"),
        ({"train": (IMAGES, LABELS), "test": (IMAGES[:1], ["a"])}, "numbers in one split and text in another"),
        ({"training": (IMAGES, LABELS), "other": (IMAGES, LABELS)}, "key 'other'; the keys are train"),
    ],
)
def test_refused(data, message: str):
    refused(message, from_arrays, data)


# NumPy files


def test_names_in_an_npz(tmp_path: Path):
    valid = {"val_images": IMAGES, "val_labels": LABELS}
    np.savez_compressed(tmp_path / "a.npz", X=IMAGES, y=LABELS[:, None], mean=BAD, **valid)
    source = recognise(tmp_path / "a.npz").read()
    assert (source.splits, source.notes) == ({"train": (0, 6), "valid": (6, 12)}, ("ignored the arrays mean",))


def test_npy(tmp_path: Path):
    np.save(tmp_path / "shoes.npy", IMAGES)
    np.save(tmp_path / "shoes_labels.npy", LABELS)
    found = recognise(tmp_path / "shoes.npy")
    assert found.inputs == (tmp_path / "shoes.npy", tmp_path / "shoes_labels.npy")
    (tmp_path / "shoes_labels.npy").unlink()
    refused(r"shoes\.npy: its labels, shoes_labels\.npy, are not next to it", recognise, tmp_path / "shoes.npy")
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "X_train.npy", IMAGES)
    refused("has no labels for train among X_train", recognise, folder)
    np.save(folder / "y_train.npy", LABELS)
    (folder / "classes.txt").write_text("a\nb\nc\n")
    found = recognise(folder)
    source = found.read()
    assert {path.name for path in found.inputs} == {path.name for path in folder.iterdir()}
    assert source.classes == ("a", "b", "c")
    assert not pixels(source).flags.writeable, "mapped, not loaded"


OBJECTS = np.array([{}] * 6, dtype=object)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES, "labels": OBJECTS}, "labels: holds Python objects"),
        ({"weights": IMAGES}, "holds weights; name the arrays x_train"),
        ({"x": IMAGES, "images": IMAGES, "y": LABELS}, "both x and images could be the train images"),
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES}, "has no labels for test"),
        ({"x\ntrain": OBJECTS, "y": OBJECTS}, r"x\\ntrain: holds Python objects"),
    ],
)
def test_refused_npz(tmp_path: Path, arrays: dict[str, Any], message: str):
    np.savez(tmp_path / "a.npz", **arrays)
    assert "\n" not in refused(message, read, tmp_path / "a.npz")


# IDX


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, before: str = "train-") -> None:
    c.write(folder / f"{before}images-idx3-ubyte", c.idx_bytes(images))
    c.write(folder / f"{before}labels-idx1-ubyte", c.idx_bytes(labels))


BYTES = LABELS.astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], r"is shorter than its header says \(shape \[6, 5, 4\], 120 bytes\)"),
        (lambda b: b + b"x", "is longer than its header says"),
        (lambda b: b"PK\3\4" + b[4:], "is not an IDX file .it starts with 50 4b 03 04"),
        (lambda b: gzip.compress(b)[:-9], "is damaged or cut off"),
        (lambda _: c.idx_bytes(np.zeros((5, 3, 4), np.uint8)), "train has 5 images but 6 labels"),
    ],
)
def test_damaged_idx(tmp_path: Path, change, message: str):
    write_idx(tmp_path, IMAGES, BYTES)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    assert str(tmp_path) in refused(message, read, tmp_path)


def test_idx_labels_and_missing_files(tmp_path: Path):
    write_idx(tmp_path, IMAGES, np.array([0, 1, 0, -1, 1, 0], np.int8))
    refused("train-labels-idx1-ubyte: label 3: negative label -1", read, tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    refused("has no images for train among train-labels-idx1-ubyte; name the files", recognise, tmp_path)


# JSON triples

RANGES = {"-1..1": lambda x: x / 127.5 - 1, "0..1": lambda x: x / 255, "0..255": lambda x: x * 1.0}
GOOD = [[0.0], [1.0]]


def read_json(folder: Path, data: Any, name: str = "data.json"):
    text = data if isinstance(data, str) else json.dumps(data)
    (folder / name).write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
    return recognise(folder / name).read()


@pytest.mark.parametrize("scale", RANGES)
def test_ranges_of_json(tmp_path: Path, scale: str):
    images = np.array([[0, 255, 7, 8], [1, 2, 3, 254]], np.uint8)  # the training images show the range
    scaled = RANGES[scale](images.astype(float)).tolist()
    source = read_json(tmp_path, [[scaled, [0, 1]], [scaled[:1], [0]], [scaled[1:], [1]]])
    assert source.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
    np.testing.assert_array_equal(pixels(source), np.concatenate([images, images]).reshape(4, 2, 2, 1))
    assert source.labels.tolist() == [0, 1, 0, 1]


def test_json_longer_than_a_chunk_with_names(tmp_path: Path):
    """Brackets and quotation marks in names do not count as nesting."""
    images = np.random.default_rng(0).integers(0, 256, (1203, 784)).tolist()
    names = ['a "[[" \\', "[{" * 60]
    source = read_json(tmp_path, [[images, [names[i % 2] for i in range(1203)]]] * 3, "data.json.gz")
    assert (tmp_path / "data.json.gz").stat().st_size > 1 << 20
    np.testing.assert_array_equal(pixels(source)[1203:2406].reshape(1203, 784), images)
    assert source.classes == tuple(sorted(names))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[GOOD, [0, 1]]] * 2, "holds 2 pairs"),
        ([[GOOD, [0, 1]]] * 4, "holds 4 pairs"),
        ([[[], [1]], *[[GOOD, [0, 1]]] * 3], "holds 4 pairs, 3 with images"),
        ([[[[0.0, 0.0, 0.0]], [0]]] * 3, "pair 1: image 0: must be a list of numbers, for all images the same square"),
        ([[GOOD, [0, 1]], [[[9.0]], [0]], [GOOD, [0, 1]]], "valid: pixels run from 9 to 9 .* where 0..1 is expected"),
        ([[GOOD, [0, None]]] * 3, "holds None where an image or a label is expected"),
        ("[[[[0.0],[1.0]],[0,1]],[[[0.0", "the file ends in the middle"),
        ('[["' + "]" * 99_999 + '"],' + '{"a":' * 60_000, "is nested too deeply"),
        ('[["' + "a" * (1 << 22), "is nested too deeply, or has a text that is too long"),
    ],
)
def test_refused_json(tmp_path: Path, data: Any, message: str):
    assert str(tmp_path / "data.json") in refused(message, read_json, tmp_path, data)


# Of all


def test_decompression_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.data.unpack._EXPANSION_SLACK_BYTES", 1 << 16)
    np.savez_compressed(tmp_path / "set.npz", x=np.zeros((1 << 12, 64, 64), np.uint8), y=np.arange(1 << 12) % 2)
    (tmp_path / "set.json.gz").write_bytes(gzip.compress(b"[[[" + b"[0,1,0,1]," * (1 << 20)))
    write_idx(tmp_path / "idx", np.zeros((1 << 12, 64, 64), np.uint8), np.zeros(1 << 12, np.uint8))
    for file in (tmp_path / "idx").iterdir():
        file.write_bytes(gzip.compress(file.read_bytes()))
    for name in ("set.npz", "set.json.gz", "idx"):
        refused(rf"{name}.*: expands from \d\d,\d{{3}} to \d*,?\d{{3}},\d{{3}} bytes", read, tmp_path / name)


def test_labels_of_files_may_be_numbers_to_predict(tmp_path: Path):
    write_idx(tmp_path, IMAGES, BYTES)
    read_json(tmp_path, [[GOOD, [3, 7]]] * 3)
    for path, numbers in ((tmp_path, {0, 1, 2}), (tmp_path / "data.json", {3, 7}), (c.cifar10(tmp_path / "c"), {0, 1})):
        source = read(path, "regression")
        assert (source.task, source.classes, set(source.labels.tolist())) == ("regression", (), numbers)
