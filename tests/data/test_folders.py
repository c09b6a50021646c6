"""Trees of class folders."""

import os
from pathlib import Path

import pytest

from flatout.data.detect import recognise
from flatout.errors import InputError
from flatout.recipe import Data


def grow(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return root


def listed(root: Path) -> dict[str, list[tuple[str, str]]]:
    source = recognise(root).read()
    assert source.files is not None
    pairs = [
        (str(path).removeprefix(f"{root}/"), source.classes[label])
        for path, label in zip(source.files, source.labels, strict=True)
    ]
    return {split: pairs[start:stop] for split, (start, stop) in source.splits.items()}


def test_flat_tree_with_nested_files_in_order(tmp_path: Path):
    grow(tmp_path, "dogs/z.JPG", "cats/b.png", "cats/a.jpeg", "cats/old/c.webp")
    assert listed(tmp_path) == {
        "train": [
            ("cats/a.jpeg", "cats"),
            ("cats/b.png", "cats"),
            ("cats/old/c.webp", "cats"),
            ("dogs/z.JPG", "dogs"),
        ]
    }


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("train", "valid", "test"),
        ("Training", "Validation", "Testing"),
        ("TRAIN", "val", "TEST"),
        ("training_set", "validation_set", "test_set"),
        ("trainset", "valset", "testset"),
        ("train2017", "val-2017", "images_test2017"),
    ],
)
def test_split_names(tmp_path: Path, train: str, valid: str, test: str):
    for split in (train, valid, test):
        grow(tmp_path, f"{split}/a/1.png", f"{split}/b/2.png")
    assert {split: len(files) for split, files in listed(tmp_path).items()} == {"train": 2, "valid": 2, "test": 2}


def test_class_index_is_shared_by_the_splits(tmp_path: Path):
    grow(tmp_path, "train/a/1.png", "train/b/2.png", "train/c/3.png", "test/c/4.png")
    source = recognise(tmp_path).read()
    assert source.classes == ("a", "b", "c")
    assert source.labels.tolist() == [0, 1, 2, 2]


def test_what_systems_leave_behind_is_ignored_and_others_are_counted(tmp_path: Path):
    grow(tmp_path, "a/1.png", "b/2.png", "a/Thumbs.db", "a/.DS_Store", "__MACOSX/a/1.png", ".git/x.png")
    assert recognise(tmp_path).read().notes == ()
    grow(tmp_path, "a/readme.TXT", "b/deep/notes.txt", "LICENSE", "docs/page.html")
    source = recognise(tmp_path).read()
    assert source.classes == ("a", "b")
    assert source.notes == (
        f"not taken as classes, since they hold no images: docs in {tmp_path}",
        "ignored files that are no images: 4 (.txt 2, LICENSE 1, .html 1)",
    )


def test_a_class_may_be_called_train(tmp_path: Path):
    grow(tmp_path, "train/1.png", "bus/2.png", "car/3.png")
    assert recognise(tmp_path).read().classes == ("bus", "car", "train")


def test_images_outside_the_class_folders_are_noted(tmp_path: Path):
    grow(tmp_path, "train/a/1.png", "train/b/2.png", "train/stray.png")
    notes = recognise(tmp_path).read().notes
    assert notes == (f"ignored images outside the class folders in {tmp_path / 'train'}: 1",)


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    grow(tmp_path / "elsewhere", "1.png")
    root = grow(tmp_path / "data", "b/2.png")
    (root / "a").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "circle").symlink_to(root / "b")
    assert [name for name, _ in listed(root)["train"]] == ["a/1.png", "b/2.png"]


def test_class_list_orders_the_classes(tmp_path: Path):
    root = grow(tmp_path / "data", "a/1.png", "b/2.png")
    names = tmp_path / "names.txt"
    names.write_text("b\nunused\na\n")
    source = recognise(root, Data(classes=str(names))).read()
    assert source.classes == ("b", "unused", "a")
    assert source.labels.tolist() == [2, 0]
    names.write_text("b\n")
    with pytest.raises(InputError, match=r"not in .*names\.txt: a$"):
        recognise(root, Data(classes=str(names))).read()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/1.png"], "all images are of one class"),
        (["train/a/1.png", "train/b/2.png", "test/c/3.png"], "class 'c' is in test but has no training images"),
        (["train/a/1.png", "train/b/2.png", "test/"], "the test split holds no images"),
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
    with pytest.raises(InputError, match=message) as caught:
        recognise(tmp_path).read()
    assert str(tmp_path) in str(caught.value)


def test_links_in_circles_and_to_nothing_are_no_obstacle(tmp_path: Path):
    root = grow(tmp_path, "a/1.png", "b/2.png")
    (root / "circle").symlink_to("circle")
    (root / "gone").symlink_to("nowhere")
    (root / "a" / "circle").symlink_to("circle")
    (root / "a" / "first").symlink_to("second")
    (root / "a" / "second").symlink_to("first")
    assert [name for name, _ in listed(root)["train"]] == ["a/1.png", "b/2.png"]
    assert recognise(root).read().notes == (
        "ignored files that are no images: 5 (circle 2, gone 1, first 1, second 1)",
    )


@pytest.mark.parametrize("above", ["", "train"])
def test_a_class_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path, above: str):
    grow(tmp_path / above, "a/1.png", "b/2.png")
    folder = Path(os.fsdecode(os.fsencode(tmp_path / above) + b"/caf\xe9"))
    grow(folder, "3.png")
    with pytest.raises(InputError, match=r"the name of the folder caf\\xe9 is not UTF-8; rename it"):
        recognise(tmp_path).read()


def test_files_with_names_that_are_not_utf8_can_be_reported(tmp_path: Path):
    from flatout.data.check import check

    grow(tmp_path, "a/1.png", "b/2.png")
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/caf\xe9.png")).touch()
    lines = check(recognise(tmp_path).read()).lines()
    assert "  a/caf\\xe9.png: is empty" in lines
    "\n".join(lines).encode()


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    grow(root, "a/1.png", "b/2.png")
    with pytest.raises(InputError, match=r"caf\\xe9: the path is not UTF-8"):
        recognise(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folder_that_may_not_be_read(tmp_path: Path):
    grow(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "b").chmod(0)
    try:
        with pytest.raises(InputError, match="b: cannot be read"):
            recognise(tmp_path).read()
    finally:
        (tmp_path / "b").chmod(0o700)


def test_many_files(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(1000):
            (tmp_path / name / f"{i}.png").touch()
    assert len(recognise(tmp_path).read()) == 2000
