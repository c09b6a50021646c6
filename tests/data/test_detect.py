"""What a path or a Python value is taken for, and what is refused before anything is read."""

from pathlib import Path

import numpy as np
import pytest

from flatout.data.detect import from_python, recognise
from tests.data.small_sets import grow, refused


@pytest.mark.parametrize(
    ("name", "kind", "counts", "classes", "has_inputs"),
    [
        ("caltech101", "CSV manifest", {"train": 2848, "valid": 944, "test": 930}, 101, False),
        ("cats-dogs", "class folders", {"train": 1200, "test": 400}, 2, False),
        ("fashion-mnist", "IDX files", {"train": 60000, "test": 10000}, 10, True),
    ],
)
def test_real_data(shared_data: Path, name, kind, counts, classes, has_inputs):
    found = recognise(shared_data / name)
    source = found.read()
    assert (found.kind, source.kind, bool(found.inputs)) == (kind, kind, has_inputs)
    assert {split: stop - start for split, (start, stop) in source.splits.items()} == counts
    assert len(source.classes) == classes
    if name == "caltech101":
        # The files lie in folders named after the classes, which the reader does not look at.
        named = zip(source.files or (), source.labels, strict=True)
        assert all(Path(str(path)).parent.name == source.classes[label] for path, label in named)


def test_digits_need_no_file():
    source = recognise(Path("sklearn:digits")).read()
    assert source.images is not None
    assert (source.images.shape, source.images.min(), source.images.max()) == ((1797, 8, 8, 1), 0, 255)
    assert (source.splits, source.classes) == ({"train": (0, 1797)}, tuple("0123456789"))


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        ("a.png", "missing", "missing: there is no such file"),
        (".DS_Store", ".", "nothing that flatout recognises. It reads a folder for each class"),
        ("train/a.txt", ".", "nothing that flatout recognises"),
        ("train/a.png", ".", "holds images but nothing that names their classes; sort them"),
        ("a.png", "a.png", "holds images but nothing that names their classes; sort them"),
        ("a.rar", "a.rar", r"a\.rar: holds nothing that flatout recognises.*a \.zip or \.tar archive of one of these"),
        ("train-images-idx3-ubyte", "train-images-idx3-ubyte", "is one file of an IDX set; give its folder"),
        ("train/0.png a.csv b.csv", ".", r"several CSV files .a\.csv; b\.csv"),
    ],
)
def test_what_cannot_be_trained_on_is_named_with_the_way_out(tmp_path: Path, names: str, given: str, message: str):
    grow(tmp_path, *names.split())
    refused(message, recognise, tmp_path / given)


def test_lists_and_class_folders(tmp_path: Path):
    """A list beside one folder of images wins; beside class folders, only one that names an image."""
    grow(tmp_path, "images/a.png", "images/b.png")
    (tmp_path / "labels.csv").write_text("images/a.png,x\nimages/b.png,y\n")
    assert recognise(tmp_path).kind == "CSV manifest"
    grow(tmp_path, "more/c.png")
    assert recognise(tmp_path).kind == "CSV manifest"
    (tmp_path / "labels.csv").write_text("animal,kg\ncat,4\n")
    found = recognise(tmp_path)
    assert (found.kind, found.read().notes) == ("class folders", ("ignored files that are not images: 1 (.csv 1)",))
    (tmp_path / "labels.csv").write_bytes(b"images/a.png,x\nimages/b.png,\xe9\n")
    refused(r"labels\.csv: line 2: is not UTF-8", recognise, tmp_path)


@pytest.mark.parametrize("data", [3, None, "text", (1, 2), {}, {"train": 3}, np.zeros((2, 4, 4))])
def test_from_python_refuses_the_rest(data):
    refused("data", from_python, data)
