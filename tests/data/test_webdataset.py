"""WebDataset shards."""

from pathlib import Path

import pytest

from flatout.cli import main
from flatout.data.detect import recognise
from flatout.data.shards import expand_braces
from flatout.errors import InputError
from tests.data import containers as c
from tests.data.small_sets import png, read, shard


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


def test_a_damaged_shard_is_named(tmp_path: Path):
    c.webdataset("cls")(tmp_path)
    c.write(tmp_path / "test-000000.tar", b"damaged")
    with pytest.raises(InputError, match=r"test-000000\.tar: is damaged or no tar archive"):
        read(tmp_path)


def test_a_tar_file_beside_class_folders_is_no_shard(tmp_path: Path):
    folder = c.class_folders(tmp_path)
    c.write(folder / "backup.tar", b"damaged")
    assert recognise(folder).kind == "class folders"


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


def test_a_list_of_labels_in_a_dictionary(tmp_path: Path):
    members = {
        f"{i}.{suffix}": png() if suffix == "png" else b'{"labels": %s}' % labels
        for i, labels in enumerate((b'["cat"]', b'["dog", "cat"]', b"[]"))
        for suffix in ("png", "json")
    }
    source = read(shard(tmp_path / "a.tar", members))
    assert (source.task, source.classes) == ("multi-label", ("cat", "dog"))
    assert source.labels.tolist() == [[1, 0], [1, 1], [0, 0]]


def test_concatenated_tar_files_are_read_to_the_end(tmp_path: Path):
    first, second = (shard(tmp_path / f"{i}", {f"{i}.png": png(), f"{i}.cls": b"%d" % i}) for i in range(2))
    c.write(tmp_path / "both.tar", first.read_bytes() + second.read_bytes())
    assert len(read(tmp_path / "both.tar")) == 2
