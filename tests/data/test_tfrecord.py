"""TFRecord files."""

import struct
from pathlib import Path

import pytest

from flatout.data.source import Source
from flatout.errors import InputError
from tests.data import containers as c
from tests.data.small_sets import png, read


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
