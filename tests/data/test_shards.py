"""WebDataset shards and TFRecord files."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from flatout.data.formats.shards import expand_braces
from flatout.data.source import ImageDataset
from tests.data import containers as c
from tests.data.small_sets import grow, png, read, refused, shard, table

GOOD = {"0.png": png(), "0.cls": b"cat", "1.png": png(), "1.cls": b"dog"}

# --- files ---


def test_braces_stand_for_ranges_and_alternatives():
    assert list(map(str, expand_braces(Path("a/{x,y}-{08..10}.tar")))) == [
        *("a/x-08.tar", "a/x-09.tar", "a/x-10.tar"),
        *("a/y-08.tar", "a/y-09.tar", "a/y-10.tar"),
    ]
    assert expand_braces(Path("a{b,c.tar")) == [Path("a{b,c.tar")]
    refused("more than 100,000 files", expand_braces, Path("{0..999999999}{0..999999999}.tar"))
    refused(r"stands for no files; write ranges as \{0\.\.9\}", expand_braces, Path("{9..0}.tar"))


def test_a_pattern_of_shards(tmp_path: Path):
    folder = c.fixture("webdataset-cls")(tmp_path)
    (folder / "test-000000.tar").rename(folder / "val-000001.tar")
    refused(r"val-000000\.tar: there is no such file", read, folder / "{train,val}-{000000..000001}.tar")
    source = read(folder / "{train-000000,train-000001,val-000001}.tar")
    assert source.splits == {"train": (0, 6), "valid": (6, 10)}
    assert [file.read_bytes() for file in source.files or ()] == [sample.data for sample in c.SAMPLES]


def test_the_folders_of_a_pattern_may_be_splits(tmp_path: Path):
    folder = c.fixture("webdataset-cls")(tmp_path)
    for split, name in (("train", "train-000000.tar"), ("val", "test-000000.tar")):
        (folder / split).mkdir()
        (folder / name).rename(folder / split / "000000.tar")
    assert read(folder / "{train,val}" / "{000000..000000}.tar").splits.keys() == {"train", "valid"}


@pytest.mark.usefixtures("cache")
def test_compressed_shards_are_refused(tmp_path: Path):
    for i in range(2):
        c.write(tmp_path / f"{i}.tar.gz", gzip.compress(b""))
    refused(r"1\}\.tar\.gz: holds nothing that flatout recognises", read, tmp_path / "{0..1}.tar.gz")
    c.write(tmp_path / "a.tfrecord.gz", gzip.compress(c.tf_record(c.example({"image": png(), "label": 1}))))
    refused(r"a\.tfrecord\.gz: is compressed; unpack it first", read, tmp_path / "a.tfrecord.gz")


def test_concatenated_tar_files_are_read_to_the_end(tmp_path: Path) -> None:
    first, second = (shard(tmp_path / f"{i}", {f"{i}.png": png(), f"{i}.cls": b"%d" % i}) for i in range(2))
    c.write(tmp_path / "both.tar", first.read_bytes() + second.read_bytes())
    assert len(read(tmp_path / "both.tar")) == 2


# --- labels ---

LABELS = [["cat", "dog"], ["dog"], [], ["cat"]]
ROWS = [[1, 1], [0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["parquet", "JSON lines", "WebDataset"])
def test_lists_of_labels_and_numbers(tmp_path: Path, kind: str):
    def with_labels(labels: list[Any]) -> ImageDataset:
        if kind == "parquet":
            return read(table(tmp_path / "a.parquet", image=[png()] * 4, label=labels))
        rows = [json.dumps({"file_name": f"{i}.png", "label": label}) for i, label in enumerate(labels)]
        if kind == "WebDataset":
            images = {f"{i}.png": png() for i in range(4)}
            members = images | {f"{i}.json": row.encode() for i, row in enumerate(rows)}
            return read(shard(tmp_path / "a.tar", dict(sorted(members.items()))))
        grow(tmp_path, "metadata.jsonl", content="\n".join(rows))
        return read(grow(tmp_path, *(f"{i}.png" for i in range(4))))

    for labels in (LABELS, ROWS):
        source = with_labels(labels)
        assert (source.task, source.labels.tolist()) == ("multi-label", ROWS)
        assert source.classes == (("cat", "dog") if labels is LABELS else ("0", "1"))
    source = with_labels([0.5, 1.25, -3.0, 2.75])
    assert (source.task, source.labels.tolist()) == ("regression", [0.5, 1.25, -3.0, 2.75])
    refused(r"(row 2|line 3|2\.png): not a (finite )?number: (nan|NaN)", with_labels, [0.5, 1.25, float("nan"), 2.75])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"2.png": png()}, r"sample 2: has the members png; one image and a \.cls or \.json member are needed"),
        ({"2.png": png(), "2.jpg": png(), "2.cls": b"cat"}, "sample 2: has the members cls, jpg, png"),
        ({"2.png": png(), "2.json": b"{"}, r"member 2\.json: cannot be read as a label"),
        ({"2.png": png(), "2.json": b'{"label": {}}'}, r"member 2\.json: has no label \(a number, a text or a list"),
        ({"2.png": png(), "2.cls": b""}, r"train-0\.tar: member 2\.png: empty label"),
    ],
)
def test_samples_of_a_shard_must_be_whole(tmp_path: Path, more: dict[str, bytes], message: str):
    refused(message, read, shard(tmp_path / "train-0.tar", GOOD | more))


def test_members_that_are_neither_image_nor_label(tmp_path: Path):
    path = shard(tmp_path / "train-0.tar", GOOD | {"1.seg.png": b"a mask", "1.depth.webp": b"a map", ".x/.y.png": b""})
    assert [file.read_bytes() for file in read(path).files or ()] == [png(), png()]
    path = shard(tmp_path / "train-0.tar", {f"{i}.{k}": b"%d" % i for i in range(2) for k in ("png", "jpg", "cls")})
    assert [str(file)[-5:] for file in read(path, file_column="jpg").files or ()] == ["0.jpg", "1.jpg"]


def test_a_key_of_the_dictionary_may_be_named(tmp_path: Path):
    table = b'{"label": 5, "breed": "%s"}'
    members = {"0.png": png(), "0.json": table % b"a", "1.png": png(), "1.json": table % b"b"}
    assert read(shard(tmp_path / "a.tar", members), label_column="breed").classes == ("a", "b")


# --- TFRecord ---


def records(path: Path, *examples: dict[str, bytes | int]) -> Path:
    c.write(path, b"".join(c.tf_record(c.example(features)) for features in examples))
    return path


def test_missing_features_are_named_with_those_that_are_there(tmp_path: Path):
    path = records(tmp_path / "a.tfrecord", {"photo": png(0), "kind": 4}, {"photo": png(1), "kind": 7})
    refused(r"record 0: has the features kind, photo; .*data\.file_column=KEY", read, path)
    source = read(path, file_column="photo", label_column="kind")
    assert (source.classes, source.labels.tolist()) == (("4", "7"), [0, 1])


def test_a_test_split_without_classes_is_left_out(tmp_path: Path):
    records(tmp_path / "train01.tfrec", *({"image": png(i), "class": i} for i in range(2)))
    records(tmp_path / "test01.tfrec", {"image": png(), "id": 7})
    source = read(tmp_path)
    assert list(source.splits) == ["train"]
    assert source.notes[0].startswith(f"there is no test split: {tmp_path}/test01.tfrec: record 0: has the features")


def test_values_of_every_kind(tmp_path: Path):
    def with_labels(*labels: bytes) -> ImageDataset:
        """Return the source of records with a feature of these bytes."""
        every = [
            c.example({"image": png()}) + c.field(1, c.field(1, c.field(1, b"label") + c.field(2, v))) for v in labels
        ]
        c.write(tmp_path / "a.tfrecord", b"".join(map(c.tf_record, every)))
        return read(tmp_path / "a.tfrecord")

    several = c.field(1, c.field(1, b"cat") + c.field(1, b"dog")), c.field(1, c.field(1, b"dog"))
    flags = (c.field(3, c.field(1, bytes(row))) for row in ([1, 1], [0, 1]))
    numbers = (c.field(2, c.field(1, struct.pack("<f", value))) for value in (0.5, -2.25))
    for values, task, classes, labels in (
        (several, "multi-label", ("cat", "dog"), [[1, 1], [0, 1]]),
        (flags, "multi-label", ("0", "1"), [[1, 1], [0, 1]]),
        (numbers, "regression", (), [0.5, -2.25]),
    ):
        source = with_labels(*values)
        assert (source.task, source.classes, source.labels.tolist()) == (task, classes, labels)
    positive, negative = c.field(3, b"\x08" + c.varint(3)), c.field(3, c.field(1, c.varint(-1)))
    refused("record 1: negative label -1", with_labels, positive, negative)
