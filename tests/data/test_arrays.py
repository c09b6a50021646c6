"""NumPy files, and arrays and tensors given in Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.data.detect import recognise
from flatout.data.formats.arrays import from_arrays
from flatout.errors import InputError

IMAGES = np.arange(6 * 5 * 4, dtype=np.uint8).reshape(6, 5, 4) * 2
LABELS = np.array([0, 1, 2, 0, 1, 2])


def test_keras_archive(tmp_path: Path):
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:3], y_test=LABELS[:3])
    found = recognise(path)
    assert (found.kind, found.inputs) == ("NumPy arrays", (path,))
    source = found.read()
    assert source.images is not None
    np.testing.assert_array_equal(source.images[..., 0], np.concatenate([IMAGES, IMAGES[:3]]))
    assert source.splits == {"train": (0, 6), "test": (6, 9)}
    assert source.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("images", "labels"), [("images", "labels"), ("X", "y"), ("data", "target"), ("x_train", "y_train")]
)
def test_names_of_one_pair(tmp_path: Path, images: str, labels: str):
    arrays: dict[str, Any] = {images: IMAGES, labels: LABELS, "mean": np.zeros(1)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    source = recognise(tmp_path / "a.npz").read()
    assert source.splits == {"train": (0, 6)}
    assert source.notes == ("ignored the arrays mean",)


def test_three_splits_by_the_other_usual_names(tmp_path: Path):
    parts: dict[str, Any] = {f"{split}_{role}": array for split in ("train", "val", "test") for role, array in
             (("images", IMAGES), ("labels", LABELS[:, None]))}  # fmt: skip
    np.savez(tmp_path / "a.npz", **parts)
    assert recognise(tmp_path / "a.npz").read().splits == {"train": (0, 6), "valid": (6, 12), "test": (12, 18)}


def test_folder_of_npy(tmp_path: Path):
    np.save(tmp_path / "X_train.npy", IMAGES)
    np.save(tmp_path / "y_train.npy", LABELS)
    np.save(tmp_path / "X_valid.npy", IMAGES[:2])
    np.save(tmp_path / "y_valid.npy", LABELS[:2])
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    found = recognise(tmp_path)
    assert {path.name for path in found.inputs} == {path.name for path in tmp_path.iterdir()}
    source = found.read()
    assert source.splits == {"train": (0, 6), "valid": (6, 8)}
    assert source.classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("images", "labels"), [("images", "labels"), ("flowers", "flowers_labels"), ("x_test", "y_test")]
)
def test_npy_with_its_labels_beside(tmp_path: Path, images: str, labels: str):
    np.save(tmp_path / f"{images}.npy", IMAGES)
    np.save(tmp_path / f"{labels}.npy", LABELS)
    np.save(tmp_path / "other_labels.npy", LABELS[:2])
    found = recognise(tmp_path / f"{images}.npy")
    assert found.inputs == (tmp_path / f"{images}.npy", tmp_path / f"{labels}.npy")
    assert len(found.read()) == 6


def test_npy_without_labels(tmp_path: Path):
    np.save(tmp_path / "images.npy", IMAGES)
    with pytest.raises(InputError, match=r"images\.npy: no file beside it could be its labels; name one file"):
        recognise(tmp_path / "images.npy")
    with pytest.raises(InputError, match="has no labels for train among images"):
        recognise(tmp_path)


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        LABELS[:, None],
        np.eye(3)[LABELS],
        np.eye(3, dtype=bool)[LABELS],
        LABELS.astype(np.float32),
        LABELS.astype(np.uint8),
        LABELS.astype(np.str_),
    ],
)
def test_kinds_of_labels(labels: np.ndarray):
    source = from_arrays((IMAGES, labels))
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == LABELS.tolist()
    assert source.classes == ("0", "1", "2")


def test_label_names():
    names = np.array(["cat", "ant", "cat", "dog", "dog", "ant"])
    for labels in (names, names.astype(np.bytes_), names.tolist()):
        source = from_arrays((IMAGES, labels))
        assert source.classes == ("ant", "cat", "dog")
        assert source.labels.tolist() == [1, 0, 1, 2, 2, 0]


def test_numbers_with_gaps_and_not_from_zero():
    source = from_arrays((IMAGES, [0, 3, 1, 0, 3, 1]))
    assert source.classes == ("0", "1", "2", "3")
    assert source.labels.tolist() == [0, 3, 1, 0, 3, 1]
    assert source.notes == ("no image has label 2",)
    source = from_arrays((IMAGES, [10, 500, 10, 500, 7, 7]))
    assert source.classes == ("7", "10", "500")
    assert source.labels.tolist() == [1, 2, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "images",
    [
        IMAGES[..., None],
        IMAGES[:, None],
        IMAGES / 255,
        (IMAGES / 255).astype(np.float32),
        (IMAGES / 255).astype(np.float16),
        IMAGES.astype(np.float64),
        IMAGES.astype(np.int64),
    ],
)
def test_kinds_of_grey_images(images: np.ndarray):
    source = from_arrays((images, LABELS))
    assert source.images is not None
    assert source.images.dtype == np.uint8
    np.testing.assert_array_equal(source.images[..., 0], IMAGES)


def test_colour_first_or_last():
    colour = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    for images in (colour, colour.transpose(0, 3, 1, 2)):
        source = from_arrays((images, LABELS))
        assert source.images is not None
        np.testing.assert_array_equal(source.images, colour)


def test_tensors():
    import torch

    pixels = torch.rand(6, 3, 5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    source = from_arrays((pixels, torch.tensor(LABELS)))
    assert source.images is not None
    expected = np.rint(pixels.detach().numpy().transpose(0, 2, 3, 1) * np.float32(255))
    np.testing.assert_array_equal(source.images, expected)


def test_dict_and_tuple_of_pairs():
    pair, few = (IMAGES, LABELS), (IMAGES[:2], LABELS[:2])
    for data in ({"test": few, "val": few, "train": pair}, (pair, few, few)):
        assert from_arrays(data).splits == {"train": (0, 6), "valid": (6, 8), "test": (8, 10)}
    # The training part decides the scale: the test images are all dark.
    source = from_arrays(((IMAGES.astype(float), LABELS), (np.ones((1, 5, 4)), [0])))
    assert source.images is not None
    assert source.images[-1].max() == 1


BAD = np.zeros((6, 5, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGES, LABELS[:5]), "train has 6 images but 5 labels"),
        ((IMAGES[:0], LABELS[:0]), "the train split holds no images"),
        ((IMAGES.reshape(6, 20), LABELS), r"images of shape \(6, 20\); give \[N, H, W\]"),
        ((np.zeros((6, 3, 5, 3), np.uint8), LABELS), "channels may be first or last"),
        ((np.zeros((6, 5, 5, 5), np.uint8), LABELS), "channels may be first or last"),
        ((BAD + np.nan, LABELS), "not finite"),
        ((BAD + np.inf, LABELS), "not finite"),
        ((BAD - 0.5, LABELS), "pixels run from -0.5 to -0.5; scale them to 0..1 or 0..255"),
        ((BAD + 1.5, LABELS), "must be whole numbers"),
        ((BAD + 256, LABELS), "scale them"),
        ((BAD.astype(np.int32) - 1, LABELS), "scale them"),
        ((BAD.astype(np.complex64), LABELS), "images of type complex64"),
        ((IMAGES, LABELS - 1), "label 0: negative label -1; .*label 3: negative"),
        ((IMAGES, LABELS * np.nan), "label 0: not a finite number: nan"),
        ((IMAGES, (LABELS + 0.5) * np.inf), "label 0: not a finite number: inf"),
        ((IMAGES, np.full(6, 0.5)), "all training images have the label 0.5"),
        ((IMAGES, np.full((6, 2), 0.5)), r"labels of shape \(6, 2\) are not rows of 0 and 1"),
        ((IMAGES, np.eye(2, dtype=int)[[0] * 6] + np.eye(2, dtype=int)[[0] * 6]), "are not rows of 0 and 1"),
        ({"train": (IMAGES, np.ones((6, 2))), "test": (IMAGES, np.ones((6, 3)))}, "rows of other lengths in another"),
        ((IMAGES, np.ones((6, 2, 2))), r"labels of shape \(6, 2, 2\)"),
        ((IMAGES, np.array([None] * 6)), "labels of type object"),
        ((IMAGES, LABELS * 0), "all images are of one class"),
        ({"train": (IMAGES, LABELS), "test": (IMAGES[:, :4], LABELS)}, "train 5x4x1, test 4x4x1"),
        ({"train": (IMAGES, LABELS), "test": (IMAGES[:1], ["a"])}, "numbers in one split and text in another"),
        ({"train": (IMAGES, LABELS), "test": (IMAGES[:0], LABELS[:0])}, "the test split holds no images"),
        ({"train": (IMAGES, LABELS * 0), "test": (IMAGES, LABELS)}, "class '1' is in test but has no training images"),
        ({"test": (IMAGES, LABELS)}, "no training split"),
        ({"training": (IMAGES, LABELS), "other": (IMAGES, LABELS)}, "key 'other'; the keys are train"),
    ],
)
def test_refused(data, message: str):
    with pytest.raises(InputError, match=message):
        from_arrays(data)


def test_rows_of_0_and_1_and_fractions():
    rows = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1]])
    source = from_arrays((IMAGES, rows.astype(float)))
    assert (source.task, source.classes, source.labels.dtype) == ("multi-label", ("0", "1", "2"), np.uint8)
    assert source.labels.tolist() == rows.tolist()
    source = from_arrays({"train": (IMAGES, LABELS + 0.5), "test": (IMAGES, LABELS)})  # whole numbers in one split
    assert (source.task, source.labels.dtype, source.labels.tolist()) == (
        "regression",
        np.float32,
        [*(LABELS + 0.5).tolist(), *LABELS.tolist()],
    )
    assert from_arrays((IMAGES, np.eye(6)[[0, 1, 2, 3, 4, 5]]), "multi-label").labels.tolist() == np.eye(6).tolist()
    with pytest.raises(InputError, match="label 0: has several classes or none; --set task=multi-label"):
        from_arrays((IMAGES, rows), "single-label")
    with pytest.raises(InputError, match=r"must be whole numbers or names; .*--set task=regression"):
        from_arrays((IMAGES, LABELS + 0.5), "single-label")


def test_refused_files(tmp_path: Path):
    path = tmp_path / "a.npz"

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            recognise(path).read()
        assert str(path) in str(caught.value)

    np.savez(path, images=IMAGES, labels=np.array([{}] * 6, dtype=object))
    refused("labels: holds Python objects")
    np.savez(path, weights=IMAGES)
    refused("holds weights; name the arrays x_train")
    np.savez(path, x=IMAGES, images=IMAGES, y=LABELS)
    refused("both x and images could be the train images")
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES)
    refused("has no labels for test")
    np.savez(path, images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:-50])
    refused("damaged or no NumPy file")
    path.write_bytes(b"PK\3\4")
    refused("damaged or no NumPy file")
    path.write_bytes(b"hello")
    refused("holds Python objects|damaged or no NumPy file")


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.data.members._EXPANSION_SLACK_BYTES", 1 << 16)
    np.savez_compressed(tmp_path / "set.npz", x=np.zeros((1 << 12, 64, 64), np.uint8), y=np.arange(1 << 12) % 2)
    with pytest.raises(InputError, match=r"set\.npz: x: expands from \d\d,\d{3} to 16,777,\d{3} bytes"):
        recognise(tmp_path / "set.npz").read()


def test_headers_that_numpy_cannot_parse(tmp_path: Path):
    """On these, NumPy raises errors of Python's own parsers."""
    np.save(tmp_path / "x.npy", np.zeros((4, 4, 4), np.uint8))
    np.save(tmp_path / "y.npy", np.arange(4) % 2)
    content = (tmp_path / "x.npy").read_bytes()
    for damaged in (content.replace(b"{", b"\0"), content.replace(b"'descr'", b"{{{[]:0")):
        (tmp_path / "x.npy").write_bytes(damaged)
        with pytest.raises(InputError, match=r"x\.npy: is damaged or no NumPy file"):
            recognise(tmp_path).read()


def test_truncated_npy(tmp_path: Path):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    (tmp_path / "images.npy").write_bytes((tmp_path / "images.npy").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"images\.npy: is damaged or no NumPy file"):
        recognise(tmp_path).read()
    (tmp_path / "images.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match=r"images\.npy: is damaged or no NumPy file"):
        recognise(tmp_path).read()
    np.save(tmp_path / "images.npy", np.array([{}] * 6, dtype=object))
    with pytest.raises(InputError, match=r"images\.npy: holds Python objects"):
        recognise(tmp_path).read()
    with (tmp_path / "images.npy").open("wb") as file:
        np.savez(file, images=IMAGES)
    with pytest.raises(InputError, match=r"images\.npy: is damaged or no NumPy file"):
        recognise(tmp_path).read()


def test_array_called_npz(tmp_path: Path):
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, IMAGES)
    with pytest.raises(InputError, match=r"a\.npz: is one array"):
        recognise(tmp_path / "a.npz").read()


def test_file_is_left_alone(tmp_path: Path):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    source = recognise(tmp_path).read()
    assert source.images is not None
    assert not source.images.flags.writeable  # mapped from the file, not loaded


def test_names_with_line_breaks_stay_in_one_line(tmp_path: Path):
    for names in (["x\ntrain", "y"], ["x\ntrain", "x_train", "y"], ["a\nb"]):
        arrays: dict[str, Any] = {name: np.array([object()]) for name in names}
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(InputError) as caught:
            recognise(tmp_path / "a.npz").read()
        assert "\n" not in str(caught.value)
        assert "\\n" in str(caught.value)


@pytest.mark.parametrize("damage", ["no code point", "half of a pair", "no UTF-8", "other byte order"])
def test_texts_that_are_none_are_named(damage: str, tmp_path: Path):
    """Found by damaging `.npy` files: Python raised SystemError for a character that does not exist."""
    labels = np.array(["cat", "dög", "cat", "dög"])
    if damage == "no UTF-8":
        labels = np.char.encode(labels, "latin-1")
    else:
        labels.view(np.uint32)[3] = 0xD800 if damage == "half of a pair" else 0x20202020
    if damage == "other byte order":
        labels = labels.astype(labels.dtype)
        labels = labels.byteswap().view(labels.dtype.newbyteorder())
    np.save(tmp_path / "x.npy", np.zeros((4, 4, 4), np.uint8))
    np.save(tmp_path / "y.npy", labels)
    with pytest.raises(InputError, match="label 1: the label has characters that do not exist"):
        recognise(tmp_path).read()
