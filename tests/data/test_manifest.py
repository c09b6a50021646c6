"""CSV manifests: dialects, splits and files; `test_manifest_labels` has their labels."""

import csv
import io
import random
import string
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.data.detect import recognise
from flatout.errors import InputError
from tests.data.manifests import read, with_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_images(tmp_path)


def pairs(source) -> list[tuple[str, str]]:
    return [(path.name, source.classes[label]) for path, label in zip(source.files, source.labels, strict=True)]


EXPECTED = [("0.png", "cat"), ("1.png", "dog"), ("2.png", "cat")]


@pytest.mark.parametrize(
    "text",
    [
        "images/0.png,cat\nimages/1.png,dog\nimages/2.png,cat\n",
        "file,label\nimages/0.png,cat\nimages/1.png,dog\nimages/2.png,cat",
        "\ufefffile,label\r\nimages/0.png,cat\r\nimages/1.png,dog\r\nimages/2.png,cat\r\n",
        "\ufeffimages/0.png,cat\r\n\r\nimages/1.png,dog\r\nimages/2.png,cat\r\n",
        "class;path\ncat;images/0.png\ndog;images/1.png\ncat;images/2.png\n",
        "images/0.png\tcat\nimages/1.png\tdog\nimages/2.png\tcat\n",
        'cat,"images/0.png"\n"dog", images/1.png \ncat,images/2.png\n',
        "images\\0.png,cat\nimages\\1.png,dog\nimages\\2.png,cat\n",
        "images/../images/0.png,cat\n./images/1.png,dog\nimages/2.png,cat\n",
        "id,File Name,width,Class Name\n7,images/0.png,9,cat\n8,images/1.png,9,dog\n9,images/2.png,9,cat\n",
        "images/0.png,cat\rimages/1.png,dog\rimages/2.png,cat\r",
        "file|label\nimages/0.png|cat\nimages/1.png|dog\nimages/2.png|cat\n",
        ",file,label\n7,images/0.png,cat\n8,images/1.png,dog\n9,images/2.png,cat\n",
        'sep=|\r\nfile|label\r\nimages/0.png| "cat"\r\nimages/1.png|dog\r\nimages/2.png|cat\r\n',
        "images/0.PNG,cat\n1.png,dog\n2,cat\n",
    ],
)
def test_dialects(folder: Path, text: str):
    assert pairs(read(folder, text)) == EXPECTED


def test_absolute_path_inside_the_folder(folder: Path):
    text = f"{folder}/images/0.png,cat\nimages/1.png,dog\nimages/2.png,cat\n"
    assert pairs(read(folder, text)) == EXPECTED


def test_label_numbers_are_their_own_names(folder: Path):
    source = read(folder, "images/0.png,10\nimages/1.png,9\nimages/2.png,2\n")
    assert source.classes == ("2", "9", "10")
    source = read(folder, "images/0.png,2\nimages/1.png,0\nimages/2.png,1.0\n")
    assert (source.classes, source.labels.tolist()) == (("0", "1", "2"), [2, 0, 1])
    source = read(folder, "images/0.png,01\nimages/1.png,02\n")
    assert source.classes == ("01", "02")


def test_class_list_with_numbers_and_with_names(folder: Path):
    (folder / "classes.txt").write_text("dog\ncat\nunused\n")
    for cat, dog in (("1", "0"), ("cat", "dog")):
        source = read(folder, f"images/0.png,{cat}\nimages/1.png,{dog}\n")
        assert source.classes == ("dog", "cat", "unused")
        assert source.labels.tolist() == [1, 0]
    other = folder / "other.txt"
    other.write_bytes("\ufeffx\r\ny\r\n".encode())
    assert read(folder, "images/0.png,1\nimages/1.png,0\n", classes=str(other)).classes == ("x", "y")


@pytest.mark.parametrize("header", ["file,split,label\n", ""])
def test_split_column(folder: Path, header: str):
    rows = "images/0.png,test,cat\nimages/1.png,train,dog\nimages/2.png,Training,cat\nimages/3.png,val,dog\n"
    source = read(folder, header + rows)
    assert source.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
    assert pairs(source) == [("1.png", "dog"), ("2.png", "cat"), ("3.png", "dog"), ("0.png", "cat")]


@pytest.mark.parametrize("names", [("desc_train", "desc_valid", "desc_test"), ("train", "val", "test")])
def test_set_of_files(folder: Path, names: tuple[str, ...]):
    for name, rows in zip(
        names, ("images/0.png,a\nimages/1.png,b\n", "images/2.png,a\n", "images/3.png,b\n"), strict=True
    ):
        (folder / f"{name}.csv").write_text(rows)
    source = recognise(folder).read()
    assert source.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
    assert source.labels.tolist() == [0, 1, 0, 1]


def test_several_files_without_split_names(folder: Path):
    (folder / "a.csv").write_text("images/0.png,a\n")
    (folder / "b.csv").write_text("images/0.png,a\n")
    (folder / "images").rename(folder / "train")  # and no class folders either
    with pytest.raises(InputError, match=r"several CSV files .a\.csv; b\.csv"):
        recognise(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is an empty file"),
        ("file,label\n", "lists no images"),
        ("\n\n", "lists no images"),
        ("images/0.png\n", "line 1 has one column"),
        ("images/0.png,a\nimages/1.png,b\nimages/2.png\n", "2 columns are expected, but line 3 has 1"),
        ("images/0.png,a\nimages/1,5.png,b\n", "line 2 has 3; quote"),
        ("images/0.png,a\nimages/1.png,\n", "line 2: empty label"),
        ("images/0.png,a\n,b\n", r"missing files, 1 .*line 2: \(empty\)"),
        ("images/0.png,0\nimages/1.png,-1\n", "line 2: negative label -1"),
        ("file,width,height\nimages/0.png,1,2\n", "has the columns file, width, height; name the columns"),
        ("images/0.png,1,2,3\n", "has 4 columns and no header"),
        ("file,label,split\nimages/0.png,a,test2\n", "line 2: unknown split 'test2'"),
        ("file,label,split\nimages/0.png,a,test\n", "no training split"),
        ("images/0.png,a\nimages/1.png,a\n", "all images are of one class"),
        ("images/0.png,a\nimages/1.png,\x1b[31mb\n", r"the class '\\x1b\[31mb' has control characters"),
        ("file,cat,dog\nimages/0.png,0,0\n", "no image has a class"),
        ('images/0.png,a\n"images/1.png,b\nimages/2.png,a\n', "line 2: is no CSV: a quotation mark is not closed"),
        ("caf\xe9.png,a\n".encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_refused(folder: Path, text: str | bytes, message: str):
    with pytest.raises(InputError, match=message) as caught:
        read(folder, text)
    assert "list.csv" in str(caught.value)


def test_missing_files_are_listed_in_one_go(folder: Path):
    rows = ["images/0.png,a", *(f"images/gone{i}.png,b" for i in range(12)), "nowhere/x.png,a", "images,a"]
    with pytest.raises(InputError) as caught:
        read(folder, "\n".join(rows))
    message = str(caught.value)
    assert "missing files, 14 " in message
    assert f"{folder / 'list.csv'}: line 2: images/gone0.png" in message
    assert "line 11" in message
    assert "line 12" not in message
    assert message.endswith("and 4 more")
    with pytest.raises(InputError, match=r"line 3: gone\\n\.png$"):
        read(folder, 'images/0.png,a\n"gone\n.png",b\n')


def test_labels_outside_the_class_list(folder: Path):
    (folder / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match=r"line 2: label not in the class list: cow; .*line 3: .* pig"):
        read(folder, "images/0.png,cat\nimages/1.png,cow\nimages/2.png,pig\n")
    with pytest.raises(InputError, match=r"line 2: label outside the class list .0 to 1, counted from 0.: 2"):
        read(folder, "images/0.png,1\nimages/1.png,2\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n\nb\n", "line 2 is blank"),
        ("a\nb\na\n", "line 3: class 'a' is already on line 1"),
        (" \n", "names no classes"),
    ],
)
def test_bad_class_lists(folder: Path, content: str, message: str):
    (folder / "classes.txt").write_text(content)
    with pytest.raises(InputError, match=message):
        read(folder, "images/0.png,a\nimages/1.png,b\n")


def test_paths_that_lead_out(folder: Path):
    inner = folder / "inner"
    (inner / "own").mkdir(parents=True)
    (inner / "own" / "ok.png").touch()
    (inner / "linked-folder").symlink_to(folder / "images")
    (inner / "linked.png").symlink_to(folder / "images" / "0.png")
    (inner / "fine.png").symlink_to(inner / "own" / "ok.png")
    rows = [
        "own/ok.png,a",
        "fine.png,b",
        "../images/0.png,a",
        f"{folder}/images/0.png,a",
        "linked-folder/0.png,a",
        "linked.png,b",
        "../../../../../../../../etc/passwd,b",
    ]
    with pytest.raises(
        InputError, match=r"paths that lead out of .*, 5: .*: line 3: \.\./images/0\.png.*line 7"
    ) as caught:
        read(inner, "\n".join(rows))
    assert "line 2" not in str(caught.value)
    assert pairs(read(inner, "\n".join(rows[:2]))) == [("ok.png", "a"), ("fine.png", "b")]


def test_set_must_name_each_split_once(folder: Path):
    for name in ("train", "train_labels"):
        (folder / f"{name}.csv").write_text("images/0.png,a\nimages/1.png,b\n")
    with pytest.raises(InputError, match=r"both train\.csv and train_labels\.csv mean train"):
        recognise(folder)


NAMES = st.text(st.sampled_from(string.ascii_letters + string.digits + " ,;\"'-_äß日"), min_size=1, max_size=12).filter(
    lambda name: name == name.strip()
)


@settings(max_examples=50, deadline=None)
@given(
    files=st.lists(NAMES, min_size=2, max_size=6, unique=True),
    labels=st.lists(NAMES.filter(lambda name: not name.isdigit()), min_size=2, max_size=2, unique=True),
    delimiter=st.sampled_from(",;\t"),
    newline=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
)
@example(files=["0", "1"], labels=["A", ";A"], delimiter=",", newline="\n", bom=False)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, files, labels, delimiter, newline, bom):
    folder = tmp_path_factory.mktemp("round-trip")
    rows = [(f"{name}.png", labels[i % 2]) for i, name in enumerate(files)]
    for name, _ in rows:
        (folder / name).touch()
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writerows([("file", "label"), *rows])
    source = read(folder, text.getvalue().encode("utf-8-sig" if bom else "utf-8"))
    assert pairs(source) == rows


def test_order_of_rows_is_kept(folder: Path):
    rows = [(f"{i}.png", str(i % 3)) for i in range(10)]
    random.Random(0).shuffle(rows)
    assert pairs(read(folder, "".join(f"images/{name},{label}\n" for name, label in rows))) == rows


# Where the files are


def test_columns_and_the_folder_of_images_can_be_named(folder: Path):
    (folder / "lists").mkdir()
    text = "a,what,image,b\n1,cat,0.png,x\n2,dog,1.png,y\n3,cat,2.png,x\n"
    options = {"label_column": "what", "images": str(folder / "images")}
    assert pairs(read(folder / "lists", text, **options)) == EXPECTED
    text = text.replace("image,", "photo,")
    assert pairs(read(folder / "lists", text, file_column="photo", **options)) == EXPECTED
    with pytest.raises(InputError, match=r"has no column 'x', which data\.file_column names; its columns are a, what"):
        read(folder / "lists", text, file_column="x")
    with pytest.raises(InputError, match=r"data\.images = 'nowhere': there is no such folder"):
        read(folder / "lists", text, images="nowhere")


def test_paths_outside_are_found_in_the_folder_that_is_named(folder: Path):
    (folder / "lists").mkdir()
    text = f"../images/0.png,cat\n{folder}/images/1.png,dog\n2.png,cat\n"
    with pytest.raises(InputError, match=r"paths that lead out of .*, 2: .*--set data\.images=DIR"):
        read(folder / "lists", text)
    assert pairs(read(folder / "lists", text, images=str(folder / "images"))) == EXPECTED


@pytest.mark.parametrize("name", ["train_images", "images", "train"])
def test_kaggle(folder: Path, name: str):
    (folder / "images").rename(folder / name)
    (folder / "test_images").mkdir()
    (folder / "test_images" / "0.png").touch()
    (folder / "train.csv").write_text("id_code,diagnosis\n0,cat\n1,dog\n2,cat\n")
    (folder / "test.csv").write_text("id_code\n0\n")
    (folder / "sample_submission.csv").write_text("id_code,diagnosis\n0,cat\n")
    source = recognise(folder).read()
    assert pairs(source) == EXPECTED
    assert source.splits == {"train": (0, 3)}
    assert source.notes[0].startswith("there is no test split: ")


def test_ids_that_could_be_two_files_are_missing(folder: Path):
    (folder / "images" / "0.jpg").touch()
    with pytest.raises(InputError, match=r"missing files, 1 .*line 2: images/0"):
        read(folder, "file,label\nimages/0,a\nimages/1,b\n")


def test_fastai(folder: Path):
    rows = "fname,label,is_valid\n0.png,cat,False\n1.png,dog,False\n2.png,cat,True\n"
    source = read(folder, rows)
    assert source.splits == {"train": (0, 2), "valid": (2, 3)}
    with pytest.raises(InputError, match="line 4: unknown split 'maybe'; write true or false"):
        read(folder, rows.replace("True", "maybe"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a.png,cat\nb.png,\xe9\n", "line 2: is not UTF-8"), (b"a.png,cat\n\n\0b.png,x\n", "line 3: holds a NUL")],
)
def test_a_csv_file_beside_class_folders_that_cannot_be_read_is_not_passed_over(
    folder: Path, content: bytes, message: str
):
    (folder / "more").mkdir()
    (folder / "more" / "0.png").touch()
    assert recognise(folder).kind == "class folders"
    (folder / "list.csv").write_bytes(content)
    with pytest.raises(InputError, match=rf"list\.csv: {message}"):
        recognise(folder)
