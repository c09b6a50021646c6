"""Labels of CSV manifests: one class, several classes or a number for each image."""

from pathlib import Path

import numpy as np
import pytest

from flatout.errors import InputError
from tests.data.manifests import read, with_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_images(tmp_path)


def several(header: str, cells: list[str]) -> str:
    return f"file,{header}\n" + "".join(f"images/{i}.png,{cell}\n" for i, cell in enumerate(cells))


def many(folder: Path, labels: list[str]) -> str:
    for i in range(len(labels)):
        (folder / "images" / f"{i}.png").touch()
    return several("price", labels)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([f"{100 + 7 * i}" for i in range(60)], "60 different numbers for 60 images, such as .*: measurements or"),
        ([f"{100 + 7 * (i % 30)}" for i in range(90)], "30 different numbers for 90 images"),
        ([f"a{i % 40}" for i in range(60)], "40 different labels for 60 images"),
        ([f"{i % 40}" for i in range(60)], "40 different labels for 60 images"),
        (["cat dog", "cat", "dog", "cat"], "several labels in one, such as 'cat dog'"),
        (['"cat, dog"', "cat", "dog", "cat"], "several labels in one, such as 'cat, dog'"),
    ],
)
def test_labels_that_could_be_of_several_tasks_are_refused(folder: Path, labels: list[str], message: str):
    text = many(folder, labels)
    with pytest.raises(InputError, match=message) as caught:
        read(folder, text)
    assert f"{folder / 'list.csv'}: column 'price'" in str(caught.value)
    assert "--set data.classes=FILE" in str(caught.value)
    (folder / "names.txt").write_text("\n".join(sorted({label.strip('"') for label in labels})))
    assert len(read(folder, text, classes=str(folder / "names.txt"))) == len(labels)


@pytest.mark.parametrize(
    "labels",
    [
        ["golden retriever", "golden eagle", "labrador retriever", "sea eagle"] * 3,
        ['"left, high"', '"left, low"', '"right, high"'] * 3,
        [f"{1000 + i % 30}" for i in range(90)],
        [f"{i % 30 * 50}" for i in range(600)],
        ["0.5", "1.0", "1.5"] * 3,
        [f"class {i % 30}" for i in range(90)],
    ],
)
def test_classes_of_unusual_names_are_accepted(folder: Path, labels: list[str]):
    assert len(read(folder, many(folder, labels)).classes) == len(set(labels))


SEVERAL = [["cat", "dog"], ["cat"], [], ["dog", "emu"], ["emu"], ["dog"]]


def rows_of(source) -> list[list[str]]:
    return [[source.classes[i] for i in row.nonzero()[0]] for row in source.labels]


@pytest.mark.parametrize(
    "text",
    [
        several("tags", ["cat|dog", "cat", "", "dog | emu", "emu", "dog"]),
        several("tags", ['"cat;dog"', "cat", "", '"dog;emu"', "emu", "dog"]),
        several("label1,label2", ["cat,dog", ",cat", ",", "emu,dog", "emu,", "dog,"]),
        several("cat,dog,emu", ["1,1,0", "1,0,0", "0,0,0", "0,1.0,1", "0,0,1", "0,1,0"]),
        several("cat,dog,emu", ["1,1,-1", "1,-1,-1", "-1,-1,-1", "-1,1,1", "-1,-1,1", "-1,1,-1"]),
        several("cat,dog,emu", [f"{'cat' in row},{'dog' in row},{'emu' in row}" for row in SEVERAL]),
        several("tags", [f'"{row}"' for row in SEVERAL]),
        several("tags", [f'"{row}"'.replace("'", '""') for row in SEVERAL]),
    ],
)
def test_several_labels(folder: Path, text: str):
    source = read(folder, text)
    assert (source.task, source.classes) == ("multi-label", ("cat", "dog", "emu"))
    assert source.labels.dtype == np.uint8
    assert rows_of(source) == SEVERAL


@pytest.mark.parametrize("mark", [" ", ","])
def test_spaces_and_commas_separate_labels_where_that_is_sure_or_asked_for(folder: Path, mark: str):
    every = [["a", "b", "c"], ["a", "b"], ["b", "c"], ["a", "c"], ["a", "b", "d"], ["c", "d"], ["a", "d"], ["b", "d"]]
    cells = [f'"{mark.join(row)}"' for row in [*every, ["a", "b", "c", "d"]]]
    assert rows_of(read(folder, several("tags", cells))) == [*every, ["a", "b", "c", "d"]]
    cells = [f'"{mark.join(row)}"' for row in SEVERAL]
    with pytest.raises(InputError, match="--set task=multi-label or --set task=single-label decides"):
        read(folder, several("tags", cells))
    assert rows_of(read(folder, several("tags", cells), task="multi-label")) == SEVERAL


def test_rows_of_0_and_1_in_a_cell_with_a_list_of_ids_and_names(folder: Path):
    (folder / "label_list.txt").write_text("0 cat\n1 dog\n2 emu\n")
    source = read(folder, "images/0.png\t1,1,0\nimages/1.png\t0,0,1\n", "train_list.txt")
    assert (source.task, source.classes, rows_of(source)) == (
        "multi-label",
        ("cat", "dog", "emu"),
        [["cat", "dog"], ["emu"]],
    )


def test_rows_that_name_an_image_again_are_noted(folder: Path):
    (note,) = read(folder, several("tag", ["cat", "dog"]) + "images/1.png,cat\n./images/0.png,cat\n").notes
    assert f"earlier row: 2 (such as {folder / 'list.csv'}: line 4), 1 of them with another label; several" in note


def test_a_class_list_names_the_labels_in_a_cell(folder: Path):
    (folder / "classes.txt").write_text("hot dog\ndog\nunused\n")
    source = read(folder, several("tags", ["hot dog|dog", "dog", ""]))
    assert (source.classes, source.labels.tolist()) == (("hot dog", "dog", "unused"), [[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    with pytest.raises(InputError, match=r"line 2: label not in the class list: cat"):
        read(folder, several("tags", ["cat|dog", "dog", ""]), task="multi-label")
    with pytest.raises(InputError, match=r"list.csv: line 4: label not in the class list: cow$"):
        read(folder, several("tags", ["hot dog|dog", "dog|hot dog", "dog|cow"]))


def test_columns_of_0_and_1_with_one_class_each_are_single_labels(folder: Path):
    source = read(folder, several("cat,dog", ["1,0", "0,1", "1,0"]))
    assert (source.task, source.classes, source.labels.tolist()) == ("single-label", ("cat", "dog"), [0, 1, 0])


def test_columns_of_labels_can_be_named(folder: Path):
    text = several("width,cat,dog", ["9,1,1", "9,0,0", "9,0,1"])
    assert rows_of(read(folder, text, label_column="cat, dog")) == [["cat", "dog"], [], ["dog"]]
    with pytest.raises(
        InputError, match=r"no column 'cow', which data\.label_column names; its columns are file, width"
    ):
        read(folder, text, label_column="cat,cow")


def test_numbers(folder: Path):
    values = [1.5, -2.25, 3e3, 4.0, 5.0]
    source = read(folder, several("price", [str(value) for value in values]))
    assert (source.task, source.classes, source.labels.dtype) == ("regression", (), np.float32)
    assert source.labels.tolist() == values
    whole = several("age", ["30", "40", "30", "50"])
    assert read(folder, whole).task == "single-label"
    assert read(folder, whole, task="regression").labels.tolist() == [30, 40, 30, 50]
    with pytest.raises(InputError, match="several columns of labels; a regression takes one number"):
        read(folder, several("a,b", ["1,0", "0,1"]), task="regression")
    with pytest.raises(InputError, match="all training images have the label 30"):
        read(folder, several("age", ["30", "30.0"]), task="regression")


def test_whole_numbers_among_names_are_classes(folder: Path):
    """As digits among letters, or numbers with zeros in front among names."""
    source = read(folder, several("label", ["a", "b", "7", "007", "a"]))
    assert (source.task, source.classes) == ("single-label", ("007", "7", "a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (several("price", ["1.5", "2.5", "nan", "3.5", "4.5"]), "line 4: not a number: nan"),
        (several("price", ["1.5", "2.5", "", "3.5", "4.5"]), "line 4: empty label"),
        (several("price", ["1.5", "2.5", "dear", "1e99", "4.5"]), "line 4: not a number: dear"),
        (several("price", ["1.5", "2.5", "3.5", "1e99", "4.5"]), "line 5: too large a number: 1e.99"),
        (several("price", ["1e999", "2", "3", "4", "5"]), "line 2: too large a number: inf"),
        (several("cat,dog", ["1,1", "1,0", "0,2"]), "line 4: 2 in a column of 0 and 1"),
        (several("cat,dog", ["1,1", "1,0", "0,-1"]), "line 4: -1 in a column of 0 and 1"),
        (several("tags", ['"[1, 2]"', "2", '"[1]"']), "line 3: the labels differ in shape"),
        (several("cat,dog", ["1,1", "1,0", "0,"]), r"line 4: \(empty\) in a column of 0 and 1"),
        (several("label", ["0", "1", "nan", "0", "1"]), "line 4: a missing value, not a class: nan; if these"),
        (several("label", ["cat", "dog", "NaN", "cat", "dog"]), "line 4: a missing value, not a class: NaN; if these"),
        (several("label", ["cat", "dog", "2.5", "cat", "dog"]), "line 4: a number among names: 2.5; if these"),
        (several("label", ["1", "1", "2", "cat", "0"]), "line 5: a name among numbers: cat; if these"),
        (several("cat,cat", ["1,1", "1,0"]), "line 1: has several columns 'cat'; rename all but one"),
        ("sep=;\nfile;label\n0;cat\n1;\n2;dog\n", "line 4: empty label"),
        (several("tags", ['"1,0,1"', '"1,0"', '"1,1,1"']), "line 3: 1,0; elsewhere there are 3 numbers of 0 and 1"),
        (several("price", ['"1,5"', '"2,5"', '"3,25"', '"4,0"']), "write decimals with a point"),
        (several("tags", ["cat|cat", "cat", "cat"]), r"all images are of one class \(cat\)"),
    ],
)
def test_bad_labels_are_named(folder: Path, text: str, message: str):
    with pytest.raises(InputError, match=message):
        read(folder, text)
