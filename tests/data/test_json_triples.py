"""JSON triples."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flatout.data.detect import recognise
from flatout.errors import InputError

RANGES = {"-1..1": lambda x: x / 127.5 - 1, "0..1": lambda x: x / 255, "0..255": lambda x: x * 1.0}


def triples(images: Any, labels: list[Any]) -> list[Any]:
    return [[images, labels]] * 3


def read(folder: Path, data: Any, name: str = "data.json"):
    text = data if isinstance(data, str) else json.dumps(data)
    (folder / name).write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
    return recognise(folder / name).read()


@settings(deadline=None)  # the machine may be busy
@given(
    bytes_NP=npst.arrays(np.uint8, st.tuples(st.integers(2, 5), st.sampled_from([1, 4, 9]))),
    scale=st.sampled_from(list(RANGES)),
    digits=st.sampled_from([4, 17]),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")]),
    name=st.sampled_from(["data.json", "data.json.gz"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, bytes_NP, scale, digits, separators, name):
    bytes_NP[0, 0], bytes_NP[1, 0] = 0, 255  # the training images show the range
    scaled = [[float(f"{value:.{digits}g}") for value in row] for row in RANGES[scale](bytes_NP.astype(float)).tolist()]
    labels = [i % 2 for i in range(len(scaled))]
    text = json.dumps([[scaled, labels], [scaled[:1], labels[:1]], [scaled[1:], labels[1:]]], separators=separators)
    source = read(tmp_path_factory.getbasetemp(), text, name)
    assert source.images is not None
    side = int(bytes_NP.shape[1] ** 0.5)
    n = len(bytes_NP)
    assert source.splits == {"train": (0, n), "valid": (n, n + 1), "test": (n + 1, 2 * n)}
    expected = np.concatenate([bytes_NP, bytes_NP[:1], bytes_NP[1:]]).reshape(-1, side, side, 1)
    np.testing.assert_array_equal(source.images, expected)
    assert source.labels.tolist() == labels + labels[:1] + labels[1:]


def test_files_longer_than_a_chunk(tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (1203, 784)).tolist()
    source = read(tmp_path, triples(images, [i % 10 for i in range(1203)]), "data.json.gz")
    assert (tmp_path / "data.json.gz").stat().st_size > 1 << 20
    assert source.images is not None
    np.testing.assert_array_equal(source.images[1203:2406].reshape(1203, 784), images)


def test_labels_may_be_names(tmp_path: Path):
    source = read(tmp_path, triples([[0.0], [1.0]], ["no", "yes"]))
    assert source.classes == ("no", "yes")


@pytest.mark.slow
def test_real_mnist_equals_the_idx_files(shared_data: Path):
    found = recognise(shared_data / "mnist.json.gz")
    assert found.inputs == (shared_data / "mnist.json.gz",)
    source = found.read()
    assert source.splits == {"train": (0, 50000), "valid": (50000, 60000), "test": (60000, 70000)}
    original = recognise(shared_data / "mnist").read()
    assert source.images is not None
    assert original.images is not None
    # The same 70,000 pictures, whatever their order.
    rows = [np.sort(images.reshape(-1, 784).copy().view("V784")[:, 0]) for images in (source.images, original.images)]
    assert rows[0].tobytes() == rows[1].tobytes()


GOOD = [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": []}, "holds 0 pairs with images; three pairs"),
        ([], "holds 0 pairs"),
        ([[GOOD, [0, 1]]], "holds 1 pairs"),
        ([[GOOD, [0, 1]]] * 2, "holds 2 pairs"),
        ([[GOOD, [0, 1]]] * 4, "goes on after the third pair"),
        (triples(GOOD, [0, 1])[0], "holds 0 pairs"),
        ([[GOOD]] * 3, "holds 1 pairs"),
        ([[[0, 1], GOOD]] * 3, "train: labels before the first image"),
        ([[GOOD, [0, 1], [0, 1]]] * 3, "train has 2 images but 4 labels"),
        (triples(GOOD, [0]), "train has 2 images but 1 labels"),
        (triples([[0.0, 0.0, 0.0]], [0]), "train image 0 has 3 numbers instead of a square number"),
        (triples([[0.0], [0.0] * 4], [0, 1]), "train image 1 has 4 numbers instead of the 1 of image 0"),
        (triples([[]], [0]), "train image 0 has 0 numbers"),
        (triples([], []), "holds 0 pairs"),
        ([[GOOD, [0, 1]], [[], []], [GOOD, [0, 1]]], "holds 2 pairs"),
        (triples([[0.0], ["x"]], [0, 1]), "train image 1 holds something other than numbers"),
        (triples([[0.0], [None]], [0, 1]), "not finite"),
        (triples([[0.0], [float("nan")]], [0, 1]), "is no JSON"),
        (triples([[0.0], [300.0]], [0, 1]), "pixels run from 0 to 300; scale them"),
        (triples([[0.5], [3.0]], [0, 1]), "must be whole numbers"),
        ([[GOOD, [0, 1]], [[[9.0]], [0]], [GOOD, [0, 1]]], "valid: pixels run from 9 to 9 .* where 0..1 is expected"),
        (triples(GOOD, [0, -1]), "train: label 1: negative label -1"),
        (triples(GOOD, [0, [1]]), "goes on after the third pair"),
        ("[[[[0.0],[1.0]],[0,1]],[[[0.0", "the file ends in the middle"),
        ("[[[[0.0],[1.0]],[0,1]]", "ends in the middle"),
        ("[[[[0.0],[1.0 2.0]],[0,1]]", "is no JSON"),
        (json.dumps(triples(GOOD, [0, 1])) + " 7", "is no JSON"),
        ("hello", "is no JSON"),
    ],
)
def test_refused(tmp_path: Path, data: Any, message: str):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, data)
    assert str(tmp_path / "data.json") in str(caught.value)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.data.members._EXPANSION_SLACK_BYTES", 1 << 16)
    (tmp_path / "set.json.gz").write_bytes(gzip.compress(b"[[[" + b"[0,1,0,1]," * (1 << 20)))
    with pytest.raises(InputError, match=r"set\.json\.gz: expands from \d\d,\d{3} to \d,\d{3},\d{3} bytes or more"):
        recognise(tmp_path / "set.json.gz").read()


def test_damaged_gzip(tmp_path: Path):
    packed = gzip.compress(json.dumps(triples(GOOD, [0, 1])).encode())
    (tmp_path / "data.json.gz").write_bytes(packed[:-9])
    with pytest.raises(InputError, match="damaged gzip"):
        recognise(tmp_path / "data.json.gz").read()
