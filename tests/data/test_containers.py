"""What single formats accept and refuse, each refusal with one message that names the place and the fix."""

import io
import json
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.cli import main
from flatout.data.recognise import recognise
from flatout.data.shards import expand_braces
from flatout.data.source import Source
from flatout.errors import InputError
from flatout.recipe import Data
from tests.data import containers as c


def png(value: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4), value).save(stream, "PNG")
    return stream.getvalue()


def read(path: Path, **options: Any) -> Source:
    return recognise(path, Data(**options)).read()


# Class lists


def folders_of_ids(folder: Path) -> Path:
    for name in ("n01", "n02", "n03"):
        c.write(folder / "set" / name / "a.png", png())
    return folder / "set"


def test_ids_get_their_names_and_classes_of_one_name_keep_their_ids(tmp_path: Path):
    c.write(tmp_path / "names.txt", "n03 tench, Tinca tinca\nn01 crane\nn02 crane\n")
    source = read(folders_of_ids(tmp_path), classes=str(tmp_path / "names.txt"))
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


# File names


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


# Command line


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


# Shards


def test_braces_stand_for_ranges_and_alternatives():
    assert list(map(str, expand_braces(Path("a/{x,y}-{08..10}.tar")))) == [
        *("a/x-08.tar", "a/x-09.tar", "a/x-10.tar"),
        *("a/y-08.tar", "a/y-09.tar", "a/y-10.tar"),
    ]
    names = ["x1a", "x1b", "x0a", "x0b", "x", "ya", "yb", "yya"]
    assert list(map(str, expand_braces(Path("{x{1..0}{a,b},x,y{a,b,{y}a}}")))) == names
    assert expand_braces(Path("a{b,c.tar")) == [Path("a{b,c.tar")]
    with pytest.raises(InputError, match="more than 100,000 files"):
        expand_braces(Path("{0..999999999}{0..999999999}.tar"))


def test_a_missing_shard_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    c.webdataset("cls")(tmp_path)
    assert main(["train", str(tmp_path / "train-{000000..000002}.tar"), "--out", str(tmp_path / "run")]) == 2
    assert "train-000002.tar: there is no such file" in capsys.readouterr().err


# WebDataset


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            c.add_member(archive, name, content)
    return path


GOOD = {"0.png": png(), "0.cls": b"cat", "1.png": png(), "1.cls": b"dog"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"2.png": png()}, r"sample 2: has the members png; one image and a \.cls or \.json member are needed"),
        ({"2.png": png(), "2.jpg": png(), "2.cls": b"cat"}, "sample 2: has the members cls, jpg, png"),
        ({"2.png": png(), "2.cls": b"\xff"}, r"member 2\.cls: cannot be read as a label"),
        ({"2.png": png(), "2.json": b"{"}, r"member 2\.json: cannot be read as a label"),
        ({"2.png": png(), "2.json": b'{"label": {}}'}, r"member 2\.json: has no label \(a number, a text or a list"),
        ({"2.png": png(), "2.cls": b""}, r"train-0\.tar: member 2\.cls: empty label"),
    ],
)
def test_samples_of_a_shard_must_be_whole(tmp_path: Path, more: dict[str, bytes], message: str):
    path = shard(tmp_path / "train-0.tar", GOOD | more)
    with pytest.raises(InputError, match=message):
        read(path)


def test_the_images_of_a_sample_may_be_several(tmp_path: Path):
    path = shard(tmp_path / "train-0.tar", GOOD | {"1.seg.png": b"a mask", "1.depth.webp": b"a map"})
    assert [file.read_bytes() for file in read(path).files or ()] == [png(), png()]
    path = shard(tmp_path / "train-0.tar", {f"{i}.{k}": b"%d" % i for i in range(2) for k in ("png", "jpg", "cls")})
    assert [str(file)[-5:] for file in read(path, file_column="jpg").files or ()] == ["0.jpg", "1.jpg"]


def test_a_key_of_the_dictionary_may_be_named(tmp_path: Path):
    members = {
        f"{i}.{suffix}": png() if suffix == "png" else b'{"label": 5, "breed": "%d"}' % i
        for i in range(2)
        for suffix in ("png", "json")
    }
    assert read(shard(tmp_path / "a.tar", members), label_column="breed").classes == ("0", "1")


def test_concatenated_tar_files_are_read_to_the_end(tmp_path: Path):
    first, second = (shard(tmp_path / f"{i}", {f"{i}.png": png(), f"{i}.cls": b"%d" % i}) for i in range(2))
    c.write(tmp_path / "both.tar", first.read_bytes() + second.read_bytes())
    assert len(read(tmp_path / "both.tar")) == 2


# TFRecord


def records(path: Path, *examples: dict[str, bytes | int]) -> Path:
    c.write(path, b"".join(c.tf_record(c.example(features)) for features in examples))
    return path


def test_records_are_checked(tmp_path: Path):
    path = records(tmp_path / "a.tfrecord", *({"image": png(i), "label": i} for i in range(3)))
    content = path.read_bytes()
    c.write(path, content.replace(png(1), png(1)[::-1]))
    with pytest.raises(InputError, match=r"a\.tfrecord: record 1: is damaged: its checksum is wrong"):
        read(path)
    c.write(path, content[:-1])
    with pytest.raises(InputError, match=r"a\.tfrecord: record 2: is cut off"):
        read(path)
    c.write(path, c.tf_record(b"\xff" * 9))
    with pytest.raises(InputError, match=r"a\.tfrecord: record 0: is no tf\.train\.Example"):
        read(path)


def test_missing_features_are_named_with_those_that_are_there(tmp_path: Path):
    path = records(tmp_path / "a.tfrecord", {"photo": png(0), "kind": 4}, {"photo": png(1), "kind": 7})
    with pytest.raises(InputError, match=r"record 0: has the features kind, photo; .*data\.file_column=KEY"):
        read(path)
    source = read(path, file_column="photo", label_column="kind")
    assert (source.classes, source.labels.tolist()) == (("4", "7"), [0, 1])


def test_a_test_split_without_classes_is_left_out(tmp_path: Path):
    records(tmp_path / "train01.tfrec", *({"image": png(i), "class": i} for i in range(2)))
    records(tmp_path / "test01.tfrec", {"image": png(), "id": 7})
    source = read(tmp_path)
    assert list(source.splits) == ["train"]
    assert source.notes[0].startswith(
        f"there is no test split: {tmp_path}/test01.tfrec: record 0: has the features id, image"
    )


def test_two_classes_of_one_name_stay_two(tmp_path: Path):
    """As the cranes of ImageNet, a bird and a machine."""
    rows = ((135, b"crane"), (518, b"crane"), (1, b"tench"))
    examples = [{"image/encoded": png(), "image/class/label": n, "image/class/text": text} for n, text in rows]
    assert read(records(tmp_path / "a.tfrecord", *examples)).classes == ("tench", "crane (135)", "crane (518)")


def test_raw_images_must_have_one_size(tmp_path: Path):
    examples = [{"image_raw": bytes(h * 4), "height": h, "width": 4, "depth": 1, "label": h} for h in (3, 4)]
    with pytest.raises(InputError, match="raw images must be of one size"):
        read(records(tmp_path / "a.tfrecord", *examples))


def test_negative_and_packed_numbers_are_understood(tmp_path: Path):
    unpacked = c.field(1, c.field(1, c.field(1, b"label") + c.field(2, c.field(3, b"\x08" + c.varint(3)))))
    first = c.example({"image": png()}) + unpacked
    second = c.example({"image": png(), "label": -1})
    c.write(tmp_path / "a.tfrecord", c.tf_record(first) + c.tf_record(second))
    with pytest.raises(InputError, match="record 1: negative label -1"):
        read(tmp_path / "a.tfrecord")


# Several labels and numbers in containers

LABELS = [["cat", "dog"], ["dog"], [], ["cat"]]
ROWS = [[1, 1], [0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["parquet", "JSON lines", "WebDataset"])
def test_lists_of_labels_and_numbers(tmp_path: Path, kind: str):
    def with_labels(labels: list[Any]) -> Source:
        if kind == "parquet":
            return read(table(tmp_path / "a.parquet", image=[png()] * 4, label=labels))
        if kind == "WebDataset":
            members = {f"{i}.json": json.dumps({"label": label}).encode() for i, label in enumerate(labels)}
            members |= {f"{i}.png": png() for i in range(4)}
            return read(shard(tmp_path / "a.tar", dict(sorted(members.items()))))
        for i in range(4):
            c.write(tmp_path / f"{i}.png", png())
        rows = (json.dumps({"file_name": f"{i}.png", "label": label}) for i, label in enumerate(labels))
        c.write(tmp_path / "metadata.jsonl", "\n".join(rows).encode())
        return read(tmp_path)

    for labels in (LABELS, ROWS):
        source = with_labels(labels)
        assert (source.task, source.labels.tolist()) == ("multi-label", ROWS)
        assert source.classes == (("cat", "dog") if labels is LABELS else ("0", "1"))
    source = with_labels([0.5, 1.25, -3.0, 2.75])
    assert (source.task, source.labels.tolist()) == ("regression", [0.5, 1.25, -3.0, 2.75])
    with pytest.raises(InputError, match=r"(row 2|line 3|2\.json): not a (finite )?number: (nan|NaN)"):
        with_labels([0.5, 1.25, float("nan"), 2.75])


def test_records_with_several_labels_and_numbers(tmp_path: Path):
    def with_labels(*labels: bytes) -> Source:
        """Return the source of records with a feature of these bytes."""
        every = [
            c.example({"image": png()}) + c.field(1, c.field(1, c.field(1, b"label") + c.field(2, v))) for v in labels
        ]
        c.write(tmp_path / "a.tfrecord", b"".join(map(c.tf_record, every)))
        return read(tmp_path / "a.tfrecord")

    source = with_labels(c.field(1, c.field(1, b"cat") + c.field(1, b"dog")), c.field(1, c.field(1, b"dog")))
    assert (source.task, source.classes, source.labels.tolist()) == ("multi-label", ("cat", "dog"), [[1, 1], [0, 1]])
    source = with_labels(*(c.field(3, c.field(1, bytes(row))) for row in ([1, 1], [0, 1])))
    assert (source.task, source.labels.tolist()) == ("multi-label", [[1, 1], [0, 1]])
    source = with_labels(*(c.field(2, c.field(1, struct.pack("<f", value))) for value in (0.5, -2.25)))
    assert (source.task, source.labels.tolist()) == ("regression", [0.5, -2.25])


# Parquet and Hugging Face


def table(path: Path, **columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
    return path


def test_columns_that_are_unclear_are_named(tmp_path: Path):
    images = [png(0), png(1)]
    path = table(tmp_path / "a.parquet", left=images, right=images, kind=[3, 4], other=[1, 1])
    with pytest.raises(InputError, match="has the columns left, right, kind, other; name those of images"):
        read(path)
    source = read(path, file_column="right", label_column="kind")
    assert source.classes == ("3", "4")
    assert source.files is not None
    assert source.files[1].read_bytes() == images[1]


def test_images_may_be_lists_of_bytes(tmp_path: Path):
    import pyarrow

    images = pyarrow.array([list(png(i)) for i in range(2)], pyarrow.list_(pyarrow.uint8()))
    source = read(table(tmp_path / "a.parquet", image=images, label=[0, 1]))
    assert [file.read_bytes() for file in source.files or ()] == [png(0), png(1)]


def test_rows_without_labels_or_images_are_named(tmp_path: Path):
    path = table(tmp_path / "a.parquet", image=[png(), png(), png()], label=["a", None, "b"])
    with pytest.raises(InputError, match=r"rows without a label: .*a\.parquet: row 1"):
        read(path)
    path = table(tmp_path / "b.parquet", image=[png(), None], label=["a", "b"])
    files = read(path).files
    assert files is not None
    with pytest.raises(OSError, match="the row holds no bytes"):
        files[1].read_bytes()


def test_a_split_of_unknown_labels_is_left_out(tmp_path: Path):
    import pyarrow.parquet

    names = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}
    for split, labels in (("train", [0, 1]), ("test", [-1, -1])):
        content = pyarrow.table({"image": [png(), png()], "label": labels})
        content = content.replace_schema_metadata({"huggingface": json.dumps(names)})
        pyarrow.parquet.write_table(content, tmp_path / f"{split}.parquet")
    source = read(tmp_path)
    assert list(source.splits) == ["train"]
    assert source.notes == ("there is no test split: its labels are all -1, which means unknown",)


def test_small_tables_that_expand_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages that are nothing but zeros, or a row that is repeated, and a label of megabytes."""
    import pyarrow.parquet

    def written(name: str, images: list[bytes], label: str) -> Path:
        columns = pyarrow.table({"image": images, "label": [label, "other"] * (len(images) // 2)})
        pyarrow.parquet.write_table(columns, tmp_path / name, compression="zstd")
        return tmp_path / name

    monkeypatch.setattr("flatout.data.members._EXPANSION_SLACK_BYTES", 1 << 16)
    with pytest.raises(InputError, match=r"pages\.parquet: row group 0: expands from [\d,]+ to 2,\d{3},\d{3} bytes"):
        read(written("pages.parquet", [bytes(1 << 20), bytes(1 << 20) + b"1"], "cat"))
    monkeypatch.undo()
    monkeypatch.setattr("flatout.data.formats.parquet._FEW_ROWS", 1000)
    with pytest.raises(InputError, match=r"rows\.parquet: has 20,000 rows in [\d,]+ bytes"):
        read(written("rows.parquet", [b"x"] * 20_000, "cat"))
    with pytest.raises(InputError, match=r"label\.parquet: row 0: the label 'xxx.* has 100,000 characters"):
        read(written("label.parquet", [png(0)] * 4, "x" * 100_000))


@pytest.mark.parametrize(("name", "damaged"), [(b"image", b"\xffmage"), (b"path", b"\0ath")])
def test_names_of_columns_that_are_damaged(name: bytes, damaged: bytes, tmp_path: Path):
    """Everywhere, or in the last row group alone."""
    cells = [{"bytes": png(i), "path": f"{i}.png"} for i in range(2)]
    file = table(tmp_path / "a.parquet", image=cells, label=[0, 1])
    content = file.read_bytes()
    start, end = content[: content.rindex(name)], content[content.rindex(name) :]
    file.write_bytes((start if name == b"path" else start.replace(name, damaged)) + end.replace(name, damaged))
    with pytest.raises(InputError, match=r"a\.parquet: is damaged or cannot be read"):
        read(file)


def test_a_row_group_of_repeated_and_other_images(tmp_path: Path):
    """The writer gives up its dictionary in the middle."""
    import pyarrow.parquet

    random = np.random.default_rng(0)
    content = [png(i % 3) if i % 2 else random.bytes(1000) for i in range(4000)]
    columns = pyarrow.table({"image": content, "label": [i % 2 for i in range(4000)]})
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet", row_group_size=4000)
    source = read(tmp_path / "a.parquet")
    assert source.files is not None
    assert [file.read_bytes() for file in source.files] == content


@pytest.mark.parametrize("limit", [None, 0])
def test_row_groups_in_memory_are_few(limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of all files, or as many as take little memory: threads that decode are in several, each read once."""
    import pyarrow.parquet

    if limit is not None:
        monkeypatch.setattr("flatout.data.formats.parquet._KEPT_BYTES", limit)
    images = [png(i) for i in range(20)]
    for i in range(2):
        half = images[10 * i : 10 * i + 10]
        columns = pyarrow.table({"image": half, "label": [i % 2 for i in range(10)]})
        pyarrow.parquet.write_table(columns, tmp_path / f"train-{i}.parquet", row_group_size=2)
    reads: list[int] = []
    read_row_group = pyarrow.parquet.ParquetFile.read_row_group

    def counted(self, number: int, **how):
        reads.append(number)
        return read_row_group(self, number, **how)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    source = read(tmp_path)
    assert source.files is not None
    order = np.random.default_rng(0).permutation(20)
    assert [source.files[i].read_bytes() for i in order] == [images[i] for i in order]
    assert (len(reads) == 10) == (limit is None)
    (kept,) = {id(file.table._kept): file.table._kept for file in source.files}.values()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(kept._groups) == (10 if limit is None else 2)


@pytest.mark.parametrize(
    ("library", "write", "extra"),
    [("pyarrow", c.parquet, "parquet"), ("google_crc32c", c.tf_records(c.tf_encoded), "tfrecord")],
)
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, write, extra: str):
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"pip install 'flatout\[{extra}\]'"):
        read(path)


# CIFAR


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch", "batches.meta"), ("train", "test", "meta")])
def test_pickles_are_refused(tmp_path: Path, names: tuple[str, ...]):
    for name in names:
        c.write(tmp_path / name, b"x")
    with pytest.raises(InputError, match=r"is the Python version of CIFAR, .*get the binary version"):
        read(tmp_path)


def test_a_truncated_batch_is_named(tmp_path: Path):
    c.cifar10(tmp_path)
    content = (tmp_path / "data_batch_2.bin").read_bytes()
    c.write(tmp_path / "data_batch_2.bin", content[:-1])
    with pytest.raises(InputError, match=r"data_batch_2\.bin: has [\d,]+ bytes, no multiple of 3,073"):
        read(tmp_path)


def test_names_of_classes_in_lists_as_older_versions_of_datasets_write_them(tmp_path: Path):
    import pyarrow.parquet

    about = {"info": {"features": {"label": [{"_type": "ClassLabel", "names": ["cat", "dog"]}]}}}
    content = pyarrow.table({"image": [png(), png()], "label": [[0], [0, 1]]})
    pyarrow.parquet.write_table(
        content.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "train.parquet"
    )
    assert read(tmp_path).classes == ("cat", "dog")


def test_files_that_name_other_classes_are_refused(tmp_path: Path):
    import pyarrow.parquet

    for split, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
        content = pyarrow.table({"image": [png(), png()], "label": [0, 1]})
        pyarrow.parquet.write_table(
            content.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / f"{split}.parquet"
        )
    with pytest.raises(InputError, match=r"test\.parquet: names other classes than .*train\.parquet"):
        read(tmp_path)


def test_a_tar_file_beside_class_folders_is_no_shard(tmp_path: Path):
    folder = c.class_folders(tmp_path)
    c.write(folder / "backup.tar", b"damaged")
    assert recognise(folder).kind == "class folders"


def test_a_damaged_shard_is_named(tmp_path: Path):
    c.webdataset("cls")(tmp_path)
    c.write(tmp_path / "test-000000.tar", b"damaged")
    with pytest.raises(InputError, match=r"test-000000\.tar: is damaged or no tar archive"):
        read(tmp_path)
