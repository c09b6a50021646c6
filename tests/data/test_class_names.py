"""Classes by lists of ids and names, and by parts of file names."""

from pathlib import Path

import pytest

from flatout.cli import main
from flatout.errors import InputError
from flatout.recipe import Data
from tests.data import containers as c
from tests.data.small_sets import png, read


def test_ids_get_their_names_and_classes_of_one_name_keep_their_ids(tmp_path: Path):
    for name in ("n01", "n02", "n03"):
        c.write(tmp_path / "set" / name / "a.png", png())
    c.write(tmp_path / "names.txt", "n03 tench, Tinca tinca\nn01 crane\nn02 crane\n")
    source = read(tmp_path / "set", classes=str(tmp_path / "names.txt"))
    assert source.classes == ("tench, Tinca tinca", "crane (n01)", "crane (n02)")
    assert source.labels.tolist() == [1, 2, 0]


def test_names_of_two_words_are_no_ids(tmp_path: Path):
    for name in ("polar bear", "sea lion"):
        c.write(tmp_path / "set" / name / "a.png", png())
    c.write(tmp_path / "names.txt", "sea lion\npolar bear\n")
    assert read(tmp_path / "set", classes=str(tmp_path / "names.txt")).classes == ("sea lion", "polar bear")


def test_numbers_that_are_ids_are_no_positions(tmp_path: Path):
    c.write(tmp_path / "names.txt", "2 dog\n1 cat\n")
    c.write(tmp_path / "a.png", png())
    c.write(tmp_path / "b.png", png())
    c.write(tmp_path / "train.csv", "file,label\na.png,1\nb.png,2\n")
    source = read(tmp_path / "train.csv", classes=str(tmp_path / "names.txt"))
    assert [source.classes[label] for label in source.labels] == ["cat", "dog"]


def test_classes_are_found_in_file_names(tmp_path: Path):
    for name in ("cat.1.png", "cat.2.png", "dog.1.png"):
        c.write(tmp_path / name, png())
    for pattern in (r"^(\w+)\.", r"^(?P<label>c|d)(at|og)"):
        source = read(tmp_path, label_pattern=pattern)
        assert source.labels.tolist() == [0, 0, 1]
    assert source.classes == ("c", "d")


def test_files_without_a_class_are_named(tmp_path: Path):
    for name in ("cat.1.png", "dog.1.png", "other.png"):
        c.write(tmp_path / name, png())
    with pytest.raises(InputError, match=r"label_pattern = .* finds no class in 1 names: .*other\.png"):
        read(tmp_path, label_pattern=r"^(\w+)\.\d")


@pytest.mark.parametrize("pattern", ["(", "no group", "(a)(b)"])
def test_a_pattern_needs_one_group(pattern: str):
    with pytest.raises(InputError, match=r"data\.label_pattern = .*: must be a regular expression with one group"):
        Data(label_pattern=pattern)


def test_flags_name_the_folder_of_images_and_the_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("cat.1.png", "dog.1.png"):
        c.write(tmp_path / "elsewhere" / name, png())
    c.write(tmp_path / "list.csv", f"file,label\ncat.1.png,cat\n{tmp_path}/elsewhere/dog.1.png,dog\n")
    assert main(["check", str(tmp_path / "list.csv"), "--images", str(tmp_path / "elsewhere")]) == 0
    assert "CSV manifest: train 2 images of 2 classes" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "elsewhere"), "--set", r"data.label_pattern=^(\w+)\."]) == 0
    assert "images with classes in their names: train 2 images" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "elsewhere"), "--set", "epochs=3"]) == 2
    assert "check takes task and keys that start with data." in capsys.readouterr().err
