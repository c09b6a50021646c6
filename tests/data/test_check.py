"""Looking a data set over."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatout.data.check import Sizes, check
from flatout.data.digests import digest_files
from flatout.data.formats.npy import from_arrays
from flatout.data.recognise import recognise

RNG = np.random.default_rng(0)


def photo(path: Path, width: int = 20, height: int = 10, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))
    noise.convert(mode).save(path)
    return path


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


@pytest.fixture
def flawed(tmp_path: Path) -> Path:
    """Return class folders with one of each flaw."""
    first = photo(tmp_path / "train" / "a" / "1.png")
    photo(tmp_path / "train" / "a" / "2.jpg", 40, 30, "L")
    photo(tmp_path / "train" / "b" / "3.jpg", 60, 20, "CMYK")
    copy(first, tmp_path / "train" / "a" / "again.png")
    second = photo(tmp_path / "train" / "b" / "4.png")
    copy(second, tmp_path / "test" / "b" / "leaked.png")
    third = photo(tmp_path / "train" / "b" / "5.png")
    copy(third, tmp_path / "train" / "a" / "other.png")
    whole = photo(tmp_path / "test" / "a" / "cut.jpg", 64, 64).read_bytes()
    (tmp_path / "test" / "a" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "test" / "a" / "page.jpg").write_text("<!DOCTYPE html><html></html>")
    (tmp_path / "test" / "a" / "void.png").touch()
    return tmp_path


def names(groups) -> set[frozenset[str]]:
    return {frozenset(sample.name for sample in group) for group in groups}


def test_every_flaw_is_found(flawed: Path):
    result = check(recognise(flawed).read())
    assert result.counts == {"train": {"a": 4, "b": 3}, "test": {"a": 3, "b": 1}}
    assert result.widths == Sizes(smallest=20, median=20, largest=60)
    assert result.heights == Sizes(smallest=10, median=10, largest=30)
    assert result.modes == {"RGB": 6, "L": 1, "CMYK": 1}
    assert [bad.name for bad in result.unreadable] == ["test/a/cut.jpg", "test/a/page.jpg", "test/a/void.png"]
    assert all(bad.reason for bad in result.unreadable)
    again = frozenset({"train/a/1.png", "train/a/again.png"})
    leaked = frozenset({"train/b/4.png", "test/b/leaked.png"})
    other = frozenset({"train/b/5.png", "train/a/other.png"})
    assert names(result.duplicates) == {again, leaked, other}
    assert names(result.across_splits) == {leaked}
    assert names(result.conflicts) == {other}


def test_file_that_is_gone_by_now(flawed: Path):
    source = recognise(flawed).read()
    (flawed / "train" / "a" / "2.jpg").unlink()
    bad = check(source).unreadable[0]
    assert bad.name == "train/a/2.jpg"
    assert "No such file" in bad.reason


def test_report_for_people_and_machines(flawed: Path):
    result = check(recognise(flawed).read())
    lines = result.lines()
    assert lines[0] == "class folders: train 7 images of 2 classes, test 4"
    assert "unreadable files: 3" in lines
    assert "identical images in more than one split: 1" in lines
    assert "  train/b/4.png (train, b) = test/b/leaked.png (test, b)" in lines or (
        "  test/b/leaked.png (test, b) = train/b/4.png (train, b)" in lines
    )
    table = json.loads(json.dumps(result.to_dict()))
    assert table["counts"]["train"] == {"a": 4, "b": 3}
    assert table["widths"] == {"smallest": 20, "median": 20, "largest": 60}
    assert table["unreadable"][0]["name"] == "test/a/cut.jpg"
    assert {sample["split"] for sample in table["across_splits"][0]} == {"train", "test"}


def test_what_is_no_regular_file_is_unreadable_and_read_by_nobody(flawed: Path):
    os.mkfifo(flawed / "train" / "a" / "fifo.png")
    (flawed / "train" / "a" / "zero.png").symlink_to("/dev/zero")
    (flawed / "train" / "a" / "circle.png").symlink_to("circle.png")
    source = recognise(flawed).read()
    reasons = {bad.name: bad.reason for bad in check(source).unreadable}
    assert reasons["train/a/fifo.png"] == reasons["train/a/zero.png"] == "is not a regular file"
    assert "Too many levels of symbolic links" in reasons["train/a/circle.png"]
    assert source.files is not None
    files = [file for file in source.files if isinstance(file, Path)]
    assert len(digest_files(files, memo=None)) == len(source)


def test_nothing_is_changed(flawed: Path):
    before = {path: path.read_bytes() for path in flawed.rglob("*") if path.is_file()}
    check(recognise(flawed).read())
    assert {path: path.read_bytes() for path in flawed.rglob("*") if path.is_file()} == before


def test_long_lists_are_cut(tmp_path: Path):
    images = np.zeros((100, 4, 4), np.uint8)
    images[:, 0, 0] = np.arange(100) // 2
    result = check(from_arrays((images, np.arange(100) // 2)))
    lines = result.lines()
    assert "and 30 more classes" in lines
    assert "groups of identical images: 50" in lines
    assert "  and 30 more" in lines
    assert len(result.to_dict()["duplicates"]) == 50


def test_arrays_by_their_pixels():
    images = RNG.integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    test = np.stack([images[3], images[4] ^ 1])
    result = check(from_arrays(((images, [0, 1, 0, 1, 0]), (test, [0, 0]))))
    assert names(result.duplicates) == names(result.across_splits) == names(result.conflicts)
    assert names(result.duplicates) == {frozenset({"train[3]", "test[0]"})}
    assert (result.widths, result.heights) == (
        Sizes(smallest=6, median=6, largest=6),
        Sizes(smallest=4, median=4, largest=4),
    )
    assert (result.modes, result.path, result.unreadable) == ({"RGB": 7}, None, ())


@pytest.mark.parametrize("name", ["oct", "cats-dogs"])
def test_real_files_are_sound(shared_data: Path, name: str):
    result = check(recognise(shared_data / name).read())
    assert result.unreadable == ()
    assert result.duplicates == ()
    assert result.widths is not None


def test_real_arrays_against_numpy(shared_data: Path):
    source = recognise(shared_data / "fashion-mnist").read()
    assert source.images is not None
    distinct = len(np.unique(source.images.reshape(70000, 784).copy().view("V784")[:, 0]))
    result = check(source)
    assert sum(len(group) - 1 for group in result.duplicates) == 70000 - distinct
    assert set(result.counts["test"].values()) == {1000}
