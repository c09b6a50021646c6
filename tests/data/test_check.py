"""Checking a data set."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.analysis.check import check, format_check
from flatout.data.cache import digest_files
from flatout.data.detect import recognise
from flatout.data.formats.arrays import from_arrays
from flatout.data.source import ImageDataset
from flatout.utils.console import Console
from tests.conftest import Command

RNG = np.random.default_rng(0)


def photo(path: Path, width: int = 20, height: int = 10, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))
    noise.convert(mode).save(path)
    return path


def checked(data: Path | ImageDataset) -> dict[str, Any]:
    return check(recognise(data).read() if isinstance(data, Path) else data, Console())


def names(groups: list[list[dict[str, str]]]) -> set[frozenset[str]]:
    return {frozenset(image["name"] for image in group) for group in groups}


@pytest.fixture
def flawed(tmp_path: Path) -> Path:
    """Return class folders with one of each flaw."""
    first = photo(tmp_path / "train" / "a" / "1.png")
    photo(tmp_path / "train" / "a" / "2.jpg", 40, 30, "L")
    photo(tmp_path / "train" / "b" / "3.jpg", 60, 20, "CMYK")
    second, third = (photo(tmp_path / "train" / "b" / name) for name in ("4.png", "5.png"))
    (tmp_path / "test" / "b").mkdir(parents=True)
    for source, target in ((first, "train/a/again.png"), (second, "test/b/leaked.png"), (third, "train/a/other.png")):
        shutil.copyfile(source, tmp_path / target)
    whole = photo(tmp_path / "test" / "a" / "cut.jpg", 64, 64).read_bytes()
    (tmp_path / "test" / "a" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "test" / "a" / "page.jpg").write_text("<!DOCTYPE html><html></html>")
    (tmp_path / "test" / "a" / "void.png").touch()
    return tmp_path


def test_every_flaw_is_found_and_reported(flawed: Path) -> None:
    before = {path: path.read_bytes() for path in flawed.rglob("*") if path.is_file()}
    result = json.loads(json.dumps(checked(flawed)))
    assert {path: path.read_bytes() for path in flawed.rglob("*") if path.is_file()} == before
    assert result["counts"] == {"train": {"a": 4, "b": 3}, "test": {"a": 3, "b": 1}}
    assert result["widths"] == {"smallest": 20, "median": 20, "largest": 60}
    assert result["heights"] == {"smallest": 10, "median": 10, "largest": 30}
    assert result["shapes"] == {"10x20": 6, "30x40": 1, "20x60": 1}
    assert result["modes"] == {"RGB": 6, "L": 1, "CMYK": 1}
    assert [bad["name"] for bad in result["unreadable"]] == ["test/a/cut.jpg", "test/a/page.jpg", "test/a/void.png"]
    again = frozenset({"train/a/1.png", "train/a/again.png"})
    leaked = frozenset({"train/b/4.png", "test/b/leaked.png"})
    other = frozenset({"train/b/5.png", "train/a/other.png"})
    assert names(result["duplicates"]) == {again, leaked, other}
    assert names(result["across_splits"]) == {leaked}
    assert {image["split"] for image in result["across_splits"][0]} == {"train", "test"}
    assert names(result["conflicts"]) == {other}
    lines = format_check(result)
    assert lines[0] == "class folders: train 7 images of 2 classes, test 4"
    assert "unreadable files: 3" in lines
    assert "identical images in more than one split: 1" in lines
    assert "  train/b/4.png (train, b) = test/b/leaked.png (test, b)" in lines
    assert "width:  20 to 60 pixels, median 20" in lines


def test_files_that_are_not_regular_or_gone_are_unreadable(flawed: Path) -> None:
    os.mkfifo(flawed / "train" / "a" / "fifo.png")
    (flawed / "train" / "a" / "zero.png").symlink_to("/dev/zero")
    (flawed / "train" / "a" / "circle.png").symlink_to("circle.png")
    source = recognise(flawed).read()
    (flawed / "train" / "a" / "2.jpg").unlink()
    reasons = {bad["name"]: bad["reason"] for bad in checked(source)["unreadable"]}
    assert reasons["train/a/fifo.png"] == reasons["train/a/zero.png"] == "is not a regular file"
    assert "Too many levels of symbolic links" in reasons["train/a/circle.png"]
    assert "No such file" in reasons["train/a/2.jpg"]
    assert source.files is not None
    files = [file for file in source.files if isinstance(file, Path)]
    assert len(list(digest_files(files, memo=flawed / "memo", report=Console()))) == len(source)


def test_arrays_by_their_pixels_and_long_lists_are_cut() -> None:
    images = RNG.integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    test = np.stack([images[3], images[4] ^ 1])
    result = checked(from_arrays(((images, [0, 1, 0, 1, 0]), (test, [0, 0]))))
    for key in ("duplicates", "across_splits", "conflicts"):
        assert names(result[key]) == {frozenset({"train[3]", "test[0]"})}
    assert result["widths"] == {"smallest": 6, "median": 6, "largest": 6}
    assert (result["modes"], result["path"], result["unreadable"]) == ({"RGB": 7}, None, [])
    images = np.zeros((100, 4, 4), np.uint8)
    images[:, 0, 0] = np.arange(100) // 2
    result = checked(from_arrays((images, np.arange(100) // 2)))
    assert len(result["duplicates"]) == 50
    assert {"and 30 more classes", "groups of identical images: 50", "  and 30 more"} <= set(format_check(result))


def test_groups_in_several_splits(tmp_path: Path, command: Command) -> None:
    rows = ["file,label,split,patient"]
    for i in range(12):
        photo(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{'ab'[i % 2]},{'test' if i < 4 else 'train'},p{i % 6 if i != 5 else 3}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    words = ["check", str(tmp_path / "list.csv"), "--set", "data.group_column=patient"]
    shared = {f"p{i}": {"train": 1 + (i == 3), "test": 1} for i in range(4)}
    assert json.loads(command(*words, "--json"))["divided_groups"] == shared
    text = command(*words)
    assert "groups in more than one split: 4\n  p0 (train 1, test 1)\n" in text
    assert "classes with fewer than 10 training images: 2\n  a (4)\n  b (4)\n" in text
    message = command(*words[:2], "--set", "data.group_column=ward", code=2)
    assert "has no column 'ward', which data.group_column names" in message


def test_extreme_and_blank_images(tmp_path: Path) -> None:
    for i in range(10):
        photo(tmp_path / "a" / f"{i}.png", 40, 30)
        photo(tmp_path / "b" / f"{i}.png", 30, 40)
    photo(tmp_path / "a" / "strip.png", 100, 20)
    photo(tmp_path / "b" / "icon.png", 8, 8)
    photo(tmp_path / "b" / "large.png", 160, 150)
    Image.new("RGB", (40, 30), "#fefefe").save(tmp_path / "a" / "blank.png")
    result = checked(tmp_path)
    assert result["blank"] == ["a/blank.png"]
    assert set(result["extreme"]) == {"a/strip.png (100x20)", "b/icon.png (8x8)", "b/large.png (160x150)"}
    assert result["small_classes"] == {}
