"""Lists of files and labels (CSV, JSON lines, PaddleClas), and what labels mean."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flatout.cli.main import main
from flatout.config import Data
from flatout.data.detect import recognise
from flatout.data.source import ImageDataset
from tests.data.small_sets import grow, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images/0.png to images/9.png, which are never opened."""
    return grow(tmp_path, *(f"images/{i}.png" for i in range(10)))


def read(folder: Path, text: str | bytes, name: str = "list.csv", task: str = "auto", **settings) -> ImageDataset:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return recognise(folder / name, Data(**settings), task).read()


def pairs(source: ImageDataset) -> list[tuple[str, str]]:
    return [(path.name, source.classes[label]) for path, label in zip(source.files or (), source.labels, strict=True)]  # type: ignore[attr-defined]


EXPECTED = [("0.png", "cat"), ("1.png", "dog"), ("2.png", "cat")]


# Dialects, columns, splits


@pytest.mark.parametrize(
    "text",
    [
        "images/0.png,cat\nimages/1.png,dog\nimages/2.png,cat\n",
        "\ufefffile,label\r\nimages/0.png,cat\r\n\r\nimages/1.png,dog\r\n,\r\nimages/2.png,cat",
        "class;path\ncat;images/0.png\ndog;images/1.png\ncat;images/2.png\n",
        'cat\t"images/0.png"\n"dog"\t images/1.png \n  \ncat\timages/2.png\n',
        "images\\0.png,cat\n./images/1.png,dog\nimages/../images/2.png,cat\n",
        "id,File Name,width,Class Name\n7,images/0.png,9,cat\n8,images/1.png,9,dog\n9,images/2.png,9,cat\n",
        "images/0.png,cat\rimages/1.png,dog\rimages/2.png,cat\r",
        ",file,label\n7,images/0.png,cat\n8,images/1.png,dog\n9,images/2.png,cat\n",
        "file|label\r\nimages/0.png| cat\r\nimages/1.png|dog\r\nimages/2.png|cat\r\n",
        "images/0.png,cat\n1.png,dog\n2,cat\n",
        'note,file,label\n"a, ""b""\nc",0,cat\n,1,dog\n,2,cat\n',
    ],
)
def test_dialects(folder: Path, text: str):
    assert pairs(read(folder, text)) == EXPECTED


def test_columns_of_splits_and_of_flags_as_fastai_has_it(folder: Path):
    rows = "images/0.png,test,cat\nimages/1.png,train,dog\nimages/2.png,Training,cat\nimages/3.png,val,dog\n"
    source = read(folder, "file,split,label\n" + rows)
    assert source.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
    assert pairs(source) == [("1.png", "dog"), ("2.png", "cat"), ("3.png", "dog"), ("0.png", "cat")]
    source = read(folder, "fname,label,is_valid\n0.png,cat,False\n1.png,dog,False\n2.png,cat,True\n")
    assert source.splits == {"train": (0, 2), "valid": (2, 3)}
    # Also of a folder's only list.
    (folder / "list.csv").rename(folder / "train.csv")
    assert recognise(folder).read().splits == {"train": (0, 2), "valid": (2, 3)}


def test_a_file_for_each_split(folder: Path):
    texts = {"desc_train": "images/0.png,a\nimages/1.png,b\n", "val": "images/2.png,a\n", "test": "images/3.png,b\n"}
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    source = recognise(folder).read()
    assert source.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
    assert source.labels.tolist() == [0, 1, 0, 1]
    (folder / "train_labels.csv").touch()
    refused(r"both desc_train\.csv and train_labels\.csv mean train", recognise, folder)


def test_kaggle(folder: Path):
    """Ids without suffixes, folders named after splits, and a list of test images without classes."""
    (folder / "images").rename(folder / "train_images")
    (folder / "train.csv").write_text("id_code,diagnosis\n0,cat\n1,dog\n2,cat\n")
    (folder / "test.csv").write_text("id_code\n0\n")
    (folder / "sample_submission.csv").write_text("id_code,diagnosis\n0,cat\n")
    source = recognise(folder).read()
    assert pairs(source) == EXPECTED
    assert source.notes[0].startswith("there is no test split: ")
    named = recognise(folder, Data(label_column="diagnosis")).read()
    assert (pairs(named), named.notes[0][:24]) == (EXPECTED, "there is no test split: ")


def test_columns_and_the_folder_of_images_can_be_named(folder: Path):
    (folder / "lists").mkdir()
    text = f"a,what,photo,b\n1,cat,../images/0.png,x\n2,dog,{folder}/images/1.png,y\n3,cat,2.png,x\n"
    options = {"label_column": "what", "file_column": "photo", "images": str(folder / "images")}
    assert pairs(read(folder / "lists", text, **options)) == EXPECTED
    refused(r"not below .*lists, 3 \(--set data\.images=DIR", read, folder / "lists", text, **{**options, "images": ""})
    message = r"has no column 'x', which data\.file_column names; its columns are a, what"
    refused(message, read, folder / "lists", text, file_column="x")
    refused(r"data\.images = 'nowhere': there is no such folder", read, folder / "lists", text, images="nowhere")
    (folder / "lists" / "b.csv").write_text("0.png,cat\n1.png,dog\n")
    assert main(["check", str(folder / "lists" / "b.csv"), "--images", str(folder / "images")]) == 0
    for label in ("cat", "dog"):
        grow(folder / "classes", f"{label}/a.png")
    message = r"data\.images = 'pictures': .*classes is not a list of images"
    refused(message, recognise, folder / "classes", Data(images="pictures"))


def test_paths_that_lead_out_and_missing_files_are_listed_in_one_go(folder: Path):
    inner = grow(folder / "inner", "own/ok.png")
    (inner / "linked-folder").symlink_to(folder / "images")
    (inner / "linked.png").symlink_to(folder / "images" / "0.png")
    (inner / "fine.png").symlink_to(inner / "own" / "ok.png")
    (inner / "circle").symlink_to("circle")
    inside = ["own/ok.png,a", "fine.png,b"]
    outside = ["../images/0.png,a", f"{folder}/images/0.png,a", "linked-folder/0.png,a", "linked.png,b"]
    outside.append("/etc/passwd,b")
    missing = [*(f"own/gone{i}.png,b" for i in range(8)), "own,a", "circle/0.png,b", f"{300 * 'x'}/0.png,b"]
    missing.append('"gone\n.png",b')
    assert pairs(read(inner, "\n".join(inside))) == [("ok.png", "a"), ("fine.png", "b")]
    message = refused(f"not below {inner}, 17 ", read, inner, "\n".join([*inside, *outside, *missing]))
    assert all(f"list.csv: line {i + 3}: {row.split(',')[0]};" in message for i, row in enumerate(outside))
    assert message.endswith("line 12: own/gone4.png; and 7 more")
    refused(r"line 2: gone\\n\.png$", read, inner, "\n".join([inside[0], missing[-1]]))


def test_ids_of_two_files_are_missing_and_repeated_rows_are_noted(folder: Path):
    (folder / "images" / "0.jpg").touch()
    refused(r"missing or not below .*, 1 .*line 4: images/0$", read, folder, 'file,label\n\n"images/1",b\nimages/0,a\n')
    (note,) = read(folder, "images/0.png,cat\nimages/1.png,dog\nimages/1.png,cat\n./images/0.png,cat\n").notes
    assert f"earlier row: 2 (such as {folder / 'list.csv'}: line 3); several labels" in note


def test_groups(folder: Path):
    source = read(folder, "file,who,label\n0,x,a\n1,y,b\n2,x,b\n", group_column="who")
    assert source.groups is not None
    assert source.groups.tolist() == ["x", "y", "x"]
    refused("line 3: the group is empty", read, folder, "file,who,label\n0,x,a\n1,,b\n", group_column="who")


def test_json_lines(folder: Path):
    """Keys are columns, in any order and number; other values than text keep their form."""
    rows = [{"file_name": "0", "label": ["cat", "dog"]}, {"label": ["dog"], "x": {"y": 1}, "file_name": "1"}]
    text = "\n\n".join(map(json.dumps, rows))
    source = read(folder, text, "list.jsonl")
    assert (source.task, source.classes, source.labels.tolist()) == ("multi-label", ("cat", "dog"), [[1, 1], [0, 1]])
    dated = "\n".join(json.dumps({"file": i, "label": f"2020-01-0{i + 1}"}) for i in range(3))
    assert read(folder, dated, "list.jsonl").classes == ("2020-01-01", "2020-01-02", "2020-01-03")
    for name in ("a\0b/c", "\ud800/c"):
        refused("missing or not below", read, folder, json.dumps({"file": name, "label": "cat"}), "list.jsonl")
    for line in ("[1]", "{", "[" * 100_000):
        refused(r"list\.jsonl: line 4: is not a JSON object", read, folder, f"{text}\n{line}", "list.jsonl")


def test_paddle_lists_with_a_list_of_ids_and_names(folder: Path):
    (folder / "images" / "a b.png").touch()
    (folder / "label_list.txt").write_text("0 cat\n1 dog\n2 emu\n")
    (folder / "train_list.txt").write_text("images/0.png\t1,1,0\nimages/a b.png 0,0,1\n")
    source = recognise(folder).read()
    assert (source.classes, source.labels.tolist()) == (("cat", "dog", "emu"), [[1, 1, 0], [0, 0, 1]])
    (folder / "train_list.txt").write_text("images/0.png 1\nimages/1.png\n")
    refused(r"train_list\.txt: 2 columns are expected, but line 2 has 1", recognise(folder).read)


def test_a_text_file_named_after_a_split_may_be_next_to_class_folders(tmp_path: Path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    (tmp_path / "test.txt").write_text("x/0.png 0\n")
    assert recognise(tmp_path).kind == "class folders"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is an empty file"),
        ("file,label\n", "lists no images"),
        ("images/0.png\n", "has 1 columns and no header"),
        ("images/0.png,a\n\nimages/1.png,b\nimages/2.png\n", "2 columns are expected, but line 4 has 1"),
        ("images/0.png,a\n,b\n", r"missing .*line 2: \(empty\)"),
        ("file,width,height\nimages/0.png,1,2\n", "has the columns file, width, height; name the columns"),
        ("file,label,split\nimages/0.png,a,test2\n", "line 2: unknown split 'test2'"),
        ("fname,label,is_valid\n0,cat,False\n1,dog,maybe\n", "line 3: unknown split 'maybe'; write true or false"),
        ("file,cat,cat\n0,1,1\n", "line 1: has several columns 'cat'; rename all but one"),
        ("images/0.png,a\nimages/1.png,\x1b[31mb\n", r"the class '\\x1b\[31mb' has control characters"),
        ('images/0.png,a\n"images/1.png,b\nimages/2.png,a\n', "line 2: is not valid CSV: a quotation mark is not"),
        ("0.png,a\ncaf\xe9.png,a\n".encode("latin-1"), "line 2: is not UTF-8 text"),
    ],
)
def test_refused_lists(folder: Path, text: str | bytes, message: str):
    assert "list.csv" in refused(message, read, folder, text)


# Labels


def labelled(header: str, cells: list[str]) -> str:
    """Return a list of the ten images in turn, with these labels."""
    return f"file,{header}\n" + "".join(f"images/{i % 10}.png,{cell}\n" for i, cell in enumerate(cells))


@pytest.mark.parametrize(
    ("labels", "classes", "indices"),
    [
        (["10", "9", "2"], ("2", "9", "10"), [2, 1, 0]),  # sorted as numbers, renumbered
        (["2", "0", "1.0"], ("0", "1", "2"), [2, 0, 1]),
        (["01", "02"], ("01", "02"), [0, 1]),
        (["0", "3"], ("0", "1", "2", "3"), [0, 3]),  # as many gaps as classes
        (["a", "b", "7", "007", "a"], ("007", "7", "a", "b"), [2, 3, 1, 0, 2]),
    ],
)
def test_names_and_numbers_of_classes(folder: Path, labels, classes, indices):
    source = read(folder, labelled("label", labels))
    assert (source.task, source.classes, source.labels.tolist()) == ("single-label", classes, indices)


@pytest.mark.parametrize(
    "labels",
    [
        ["golden retriever", "golden eagle", "labrador retriever", "sea eagle"] * 3,
        ['"left, high"', '"left, low"', '"right, high"'] * 3,
        [f"{i % 30 * 50}" for i in range(600)],
        ["0.5", "1.0", "1.5"] * 3,
    ],
)
def test_classes_of_unusual_names(folder: Path, labels: list[str]):
    assert len(read(folder, labelled("price", labels)).classes) == len(set(labels))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([f"{100 + 7 * i}" for i in range(60)], "60 different labels for 60 images, such as '100', '107', '114'"),
        ([f"a{i % 40}" for i in range(60)], "40 different labels for 60 images"),
        (["1,5", "2,5", "3,25", "4,0"], "4 different labels for 4 images"),
        (["cat dog", "cat", "dog", "cat"], "several labels in one, or names with ' ' in them, such as 'cat dog'"),
    ],
)
def test_labels_that_could_be_of_several_tasks_are_refused_without_a_class_list(folder: Path, labels, message: str):
    text = labelled("price", [f'"{label}"' for label in labels])
    message = refused(message, read, folder, text)
    assert f"{folder / 'list.csv'}: column 'price'" in message
    assert "--set task=single-label, multi-label or regression decides" in message
    (folder / "names.txt").write_text("\n".join(sorted(set(labels))))
    assert len(read(folder, text, classes=str(folder / "names.txt"))) == len(labels)


SEVERAL = [["cat", "dog"], ["cat"], [], ["dog", "emu"], ["emu"], ["dog"]]


def rows_of(source: ImageDataset) -> list[list[str]]:
    return [[source.classes[i] for i in row.nonzero()[0]] for row in source.labels]


@pytest.mark.parametrize(
    "text",
    [
        labelled("tags", ["cat|dog", "cat", "", "dog | emu", "emu", "dog"]),
        labelled("cat,dog,emu", ["1,1,0", "1,0,0", "0,0,0", "0,1.0,1", "0,0,1", "0,1,0"]),
        labelled("cat,dog,emu", [f"{'cat' in row},{'dog' in row},{'emu' in row}" for row in SEVERAL]),
        labelled("tags", [f'"{row}"' for row in SEVERAL]),
    ],
)
def test_several_labels(folder: Path, text: str):
    source = read(folder, text)
    assert (source.task, source.classes, source.labels.dtype) == ("multi-label", ("cat", "dog", "emu"), np.uint8)
    assert rows_of(source) == SEVERAL


@pytest.mark.parametrize("mark", [" ", ","])
def test_spaces_and_commas_separate_labels_where_that_is_sure_or_asked_for(folder: Path, mark: str):
    every = ["abc", "ab", "bc", "ac", "abd", "cd", "ad", "bd", "abcd"]
    assert rows_of(read(folder, labelled("tags", [f'"{mark.join(row)}"' for row in every]))) == list(map(list, every))
    cells = labelled("tags", [f'"{mark.join(row)}"' for row in SEVERAL])
    refused("several labels in one, or names with", read, folder, cells)
    assert rows_of(read(folder, cells, task="multi-label")) == SEVERAL


@pytest.mark.parametrize("labels", [["[0, 1]", "[2]", "[1]", "[0]"], ["0,1", "2", "1", "0,1"]])
def test_several_labels_look_like_others_in_a_small_split(folder: Path, labels: list[str]):
    rows = [f'{i}.png,{"test" if i == 3 else "train"},"{label}"' for i, label in enumerate(labels)]
    source = read(folder, "\n".join(["file,split,label", *rows]), task="multi-label")
    assert rows_of(source) == [re.findall(r"\d", label) for label in labels]


def test_columns_of_0_and_1(folder: Path):
    source = read(folder, labelled("cat,dog", ["1,0", "0,1", "1,0"]))
    assert (source.task, source.classes, source.labels.tolist()) == ("single-label", ("cat", "dog"), [0, 1, 0])
    text = labelled("width,cat,dog", ["9,1,1", "9,0,0", "9,0,1"])
    assert rows_of(read(folder, text, label_column="cat, dog")) == [["cat", "dog"], [], ["dog"]]


def test_numbers(folder: Path):
    values = [1.5, -2.25, 3e3, 4.0, 5.0]
    source = read(folder, labelled("price", [str(value) for value in values]))
    assert (source.task, source.classes, source.labels.dtype) == ("regression", (), np.float32)
    assert source.labels.tolist() == values
    whole = labelled("age", ["30", "40", "30", "50"])
    assert read(folder, whole).task == "single-label"
    assert read(folder, whole, task="regression").labels.tolist() == [30, 40, 30, 50]


@pytest.mark.parametrize(
    ("text", "task", "message"),
    [
        (labelled("label", ["a", ""]), "auto", "line 3: empty label"),
        (labelled("label", ["0", "-1"]), "auto", "line 3: negative label -1"),
        (labelled("label", ["0", "1", "nan", "0", "1"]), "auto", "line 4: unlike the other labels: nan; if these"),
        (labelled("label", ["cat", "dog", "2.5", "cat"]), "auto", "line 4: unlike the other labels: 2.5"),
        (labelled("price", ["1.5", "2.5", "dear", "1e99"]), "auto", "line 4: not a number: dear"),
        (labelled("price", ["1.5", "2.5", "1e999", "1e99"]), "auto", "line 4: too large a number: 1e999; .*line 5"),
        (labelled("price", ['"1,5"', "2"]), "regression", "line 2: not a number: 1,5; write numbers such as 1.5"),
        (labelled("age", ["30", "30.0"]), "regression", "all training images have the label 30"),
        (labelled("a,b", ["1,0", "0,1"]), "regression", "several columns of labels; a regression takes one number"),
        (labelled("cat,dog", ["1,1", "1,0", "0,-1"]), "auto", "line 4: -1 in a column of 0 and 1; write 0 or 1"),
        (labelled("tags", ['"[1, 2]"', "2", '"[1]"']), "auto", "train: the labels differ in shape"),
        (labelled("tags", ['"1,0,1"', '"1,0"', '"1,1,1"']), "auto", "line 3: 1,0; elsewhere there are 3 numbers"),
        (labelled("tags", ["cat|cat", "cat", "cat"]), "auto", r"all images are of one class \(cat\)"),
    ],
)
def test_refused_labels(folder: Path, text: str, task: str, message: str):
    refused(message, read, folder, text, task=task)


# Class lists


def test_class_lists_name_numbers_ids_and_names(folder: Path):
    other = folder / "other.txt"
    for content, labels, classes, indices in (
        ("\ufeffdog\r\ncat\r\nunused\r\n", ["1", "0"], ("dog", "cat", "unused"), [1, 0]),
        ("dog\ncat\n", ["cat", "dog"], ("dog", "cat"), [1, 0]),
        ("2 dog\n1 cat\n", ["1", "2"], ("dog", "cat"), [1, 0]),  # ids, not positions
        ("n3 tench, Tinca\nn1 crane\nn2 crane\n", ["n1", "n2"], ("tench, Tinca", "crane (n1)", "crane (n2)"), [1, 2]),
        ("sea lion\npolar bear\n", ["polar bear", "sea lion"], ("sea lion", "polar bear"), [1, 0]),
    ):  # fmt: skip
        other.write_bytes(content.encode())
        source = read(folder, labelled("label", labels), classes=str(other))
        assert (source.classes, source.labels.tolist()) == (classes, indices)
    refused(r"gone\.txt: no such class list", read, folder, labelled("label", ["a", "b"]), classes="gone.txt")
    (folder / "classes.txt").write_text("hot dog\ndog\nunused\n")  # beside the list
    source = read(folder, labelled("tags", ["hot dog|dog", "dog", ""]))
    assert (source.classes, source.labels.tolist()) == (("hot dog", "dog", "unused"), [[1, 1, 0], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("content", "labels", "message"),
    [
        ("a\n\nb\n", ["a", "b"], "line 2 is blank or repeats a class"),
        (" \n", ["a", "b"], "names no classes"),
        ("cat\ndog\n", ["cat", "cow", "pig"], r"line 3: label not in the class list: cow; .*line 4: .* pig$"),
        ("cat\ndog\n", ["1", "2"], "line 3: label outside the class list .0 to 1, counted from 0.: 2$"),
        ("hot dog\ndog\n", ["hot dog|dog", "dog|hot dog", "dog|cow"], "line 4: label not in the class list: cow$"),
    ],
)
def test_refused_class_lists(folder: Path, content: str, labels: list[str], message: str):
    (folder / "classes.txt").write_text(content)
    refused(message, read, folder, labelled("label", labels))
