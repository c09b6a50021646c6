"""Trees of class folders, and classes in the names of files."""

import os
from pathlib import Path

import numpy as np
import pytest

from flatout.analysis.check import check, format_check
from flatout.config import Data
from flatout.data.detect import recognise
from flatout.utils.console import Console
from tests.conftest import Command
from tests.data.small_sets import grow, read, refused


def listed(root: Path) -> dict[str, list[tuple[str, str]]]:
    source = recognise(root).read()
    named = zip(source.files or (), source.labels, strict=True)
    pairs = [(str(path).removeprefix(f"{root}/"), source.classes[label]) for path, label in named]
    return {split: pairs[start:stop] for split, (start, stop) in source.splits.items()}


def test_flat_tree_with_nested_files_in_order(tmp_path: Path):
    grow(tmp_path, "dogs/z.JPG", "cats/b.png", "cats/a.jpeg", "cats/old/c.webp", "10/1.png", "9/1.png")
    names = ["10/1.png", "9/1.png", "cats/a.jpeg", "cats/b.png", "cats/old/c.webp", "dogs/z.JPG"]
    assert listed(tmp_path) == {"train": [(name, name.partition("/")[0]) for name in names]}


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("train", "valid", "test"),
        ("training_set", "validation_set", "test_set"),
        ("train2017", "val-2017", "images_test2017"),
    ],
)
def test_split_folders(tmp_path: Path, train: str, valid: str, test: str):
    grow(tmp_path, f"{train}/a/1.png", f"{train}/b/2.png", f"{train}/c/3.png", f"{valid}/c/4.png", f"{test}/b/5.png")
    source = recognise(tmp_path).read()
    assert source.splits == {"train": (0, 3), "valid": (3, 4), "test": (4, 5)}
    assert (source.classes, source.labels.tolist()) == (("a", "b", "c"), [0, 1, 2, 2, 1])


def test_what_is_no_image_is_ignored_and_counted(tmp_path: Path):
    grow(tmp_path, "a/1.png", "b/2.png", "a/Thumbs.db", "a/.DS_Store", "__MACOSX/a/1.png", ".git/x.png")
    assert recognise(tmp_path).read().notes == ()
    grow(tmp_path, "a/readme.TXT", "b/deep/notes.txt", "LICENSE", "docs/page.html", "a/1.npy", "0.png")
    source = recognise(tmp_path).read()
    assert (source.classes, len(source)) == (("a", "b"), 2)
    assert source.notes == (
        f"not taken as classes, since they hold no images: docs in {tmp_path}",
        f"ignored images outside the class folders in {tmp_path}: 1",
        "ignored files that are not images: 5 (.txt 2, LICENSE 1, .npy 1, .html 1)",
    )


def test_a_class_may_be_called_train(tmp_path: Path):
    grow(tmp_path, "train/1.png", "bus/2.png", "car/3.png")
    assert recognise(tmp_path).read().classes == ("bus", "car", "train")


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    grow(tmp_path / "elsewhere", "1.png")
    root = grow(tmp_path / "data", "b/2.png")
    for link, target in (("a", tmp_path / "elsewhere"), ("b/circle", root / "b"), ("circle", "circle"),
                         ("gone", "nowhere"), ("a/first", "second"), ("a/second", "first")):  # fmt: skip
        (root / link).symlink_to(target)
    assert [name for name, _ in listed(root)["train"]] == ["a/1.png", "b/2.png"]
    (note,) = recognise(root).read().notes
    assert note.startswith("ignored files that are not images: 4 (")


def test_class_list_orders_the_classes(tmp_path: Path):
    root, names = grow(tmp_path / "data", "a/1.png", "b/2.png"), tmp_path / "names.txt"
    for text, classes in (("b\nunused\na\n", ("b", "unused", "a")), ("b bird\na cat\n", ("bird", "cat"))):
        names.write_text(text)
        source = recognise(root, Data(classes=str(names))).read()
        assert source.classes == classes
        assert [classes[label] for label in source.labels] == [classes[-1], classes[0]]
    names.write_text("b\n")
    refused(r"data/a: label not in the class list: a$", read, root, classes=str(names))


def test_the_task_of_the_recipe_counts(tmp_path: Path):
    """Folders named by numbers were classes, whatever the recipe said."""
    grow(tmp_path, "train/10/1.png", "train/9.5/2.png", "test/9.5/3.png")
    source = recognise(tmp_path, task="regression").read()
    assert (source.task, source.classes, source.labels.dtype) == ("regression", (), np.float32)
    assert source.labels.tolist() == [10, 9.5, 9.5]
    assert recognise(tmp_path, task="multi-label").read().labels.tolist() == [[1, 0], [0, 1], [0, 1]]
    grow(tmp_path, "train/high/4.png")
    refused("train/high: not a number: high", read, tmp_path, task="regression")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/1.png"], "all images are of one class"),
        (["train/a/1.png", "train/b/2.png", "test/c/3.png"], "class 'c' is in test but has no training images"),
        (["train/a/1.png", "train/b/2.png", "test/a/"], "the test split holds no images"),
        (["train/", "test/a/1.png"], "the train split holds no images"),
        (["test/a/1.png", "test/b/1.png"], "no training split"),
        (["train/a/1.png", "train/b/2.png", "test/3.png"], "test: holds images but no class folders"),
        (["val/a/1.png", "valid/a/1.png", "train/a/1.png"], "both val and valid mean valid"),
        (["a/1.png", "b/2.png", "test/3.png"], "has test beside class folders"),
        (["PetImages/a/1.png", "PetImages/b/2.png"], "give .*PetImages"),
    ],
)
def test_refused(tmp_path: Path, names: list[str], message: str):
    grow(tmp_path, *names)
    assert str(tmp_path) in refused(message, read, tmp_path)


def test_names_that_are_not_utf8(tmp_path: Path):
    grow(tmp_path, "a/1.png", "b/2.png")
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/caf\xe9.png")).touch()
    lines = format_check(check(recognise(tmp_path).read(), Console()))
    assert "  a/caf\\xe9.png: is empty" in lines
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    grow(folder, "a/3.png", "b/4.png")
    refused(r"the name of the folder caf\\xe9 is not UTF-8; rename it", read, tmp_path)
    refused(r"caf\\xe9: the path is not UTF-8", recognise, folder)


def test_classes_in_file_names(tmp_path: Path, command: Command):
    grow(tmp_path, "cat.1.png", "cat.2.png", "dog.1.png")
    for pattern in (r"^(\w+)\.", r"^(?P<label>c|d)(at|og)"):
        source = recognise(tmp_path, Data(label_pattern=pattern)).read()
        assert source.labels.tolist() == [0, 0, 1]
    assert source.classes == ("c", "d")
    shown = command("check", tmp_path, "--set", r"data.label_pattern=^(\w+)\.")
    assert "images with classes in their names: train 3 images" in shown
    grow(tmp_path, "other.png")
    message = r"label_pattern = .* finds no class in 1 names: .*other\.png"
    refused(message, read, tmp_path, label_pattern=r"^(\w+)\.\d")
    for pattern in ("(", "no group", "(a)(b)"):
        refused(r"data\.label_pattern = .*: must be a regular expression with one group", Data, label_pattern=pattern)
