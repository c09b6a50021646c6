"""Parquet files, and the tables of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import InputError
from tests.data.small_sets import png, read, table


def test_columns_that_are_unclear_are_named(tmp_path: Path):
    images = [png(0), png(1)]
    path = table(tmp_path / "a.parquet", left=images, right=images, kind=[3, 4], other=[1, 1])
    with pytest.raises(InputError, match="has the columns left, right, kind, other; name those of images"):
        read(path)
    source = read(path, file_column="right", label_column="kind")
    assert source.classes == ("3", "4")
    assert source.files is not None
    assert source.files[1].read_bytes() == images[1]


def test_names_of_columns_with_dots(tmp_path: Path):
    source = read(table(tmp_path / "a.parquet", **{"the.image": [png(0), png(1)], "image.label": ["a", "b"]}))
    assert source.files is not None
    assert (source.classes, source.files[1].read_bytes()) == (("a", "b"), png(1))


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


CAT_DOG = {"_type": "ClassLabel", "names": ["cat", "dog"]}


def with_features(path: Path, feature: Any, labels: list[Any]) -> None:
    """Write two images as Hugging Face's libraries do, with the kind of the labels in the metadata."""
    import pyarrow.parquet

    about = {"info": {"features": {"label": feature}}}
    content = pyarrow.table({"image": [png(), png()], "label": labels})
    pyarrow.parquet.write_table(content.replace_schema_metadata({"huggingface": json.dumps(about)}), path)


def test_a_split_of_unknown_labels_is_left_out(tmp_path: Path):
    with_features(tmp_path / "train.parquet", CAT_DOG, [0, 1])
    with_features(tmp_path / "test.parquet", CAT_DOG, [-1, -1])
    source = read(tmp_path)
    assert list(source.splits) == ["train"]
    assert source.notes == ("there is no test split: its labels are all -1, which means unknown",)


def test_names_of_classes_in_lists_as_older_versions_of_datasets_write_them(tmp_path: Path):
    with_features(tmp_path / "train.parquet", [CAT_DOG], [[0], [0, 1]])
    assert read(tmp_path).classes == ("cat", "dog")


def test_files_that_name_other_classes_are_refused(tmp_path: Path):
    with_features(tmp_path / "train.parquet", CAT_DOG, [0, 1])
    with_features(tmp_path / "test.parquet", CAT_DOG | {"names": ["dog", "cat"]}, [0, 1])
    with pytest.raises(InputError, match=r"test\.parquet: names other classes than .*train\.parquet"):
        read(tmp_path)


def test_small_tables_that_expand_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages that are nothing but zeros, or a row that is repeated, and a label of megabytes."""
    import pyarrow.parquet

    def written(name: str, images: list[bytes], label: str) -> Path:
        columns = pyarrow.table({"image": images, "label": [label, "other"] * (len(images) // 2)})
        pyarrow.parquet.write_table(columns, tmp_path / name, compression="zstd")
        return tmp_path / name

    monkeypatch.setattr("flatout.data.members._EXPANSION_SLACK_BYTES", 1 << 16)
    with pytest.raises(InputError, match=r"pages\.parquet: expands from [\d,]+ to 2,\d{3},\d{3} bytes"):
        read(written("pages.parquet", [bytes(1 << 20), bytes(1 << 20) + b"1"], "cat"))
    monkeypatch.undo()
    monkeypatch.setattr("flatout.data.formats.datasets._FEW_ROWS", 1000)
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


def test_each_byte_of_the_metadata_may_be_damaged(tmp_path: Path):
    """Some bytes say that a column is required, which its statistics deny: pyarrow aborts where it is asked for it."""
    cells = [{"bytes": png(i), "path": f"{i}.png"} for i in range(2)]
    content = table(tmp_path / "whole.parquet", image=cells, label=[0, 1]).read_bytes()
    file = tmp_path / "a.parquet"
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    refused = 0
    for place in range(start, len(content)):
        file.write_bytes(content[:place] + b"\x19" + content[place + 1 :])
        try:
            read(file)
        except InputError as error:
            assert "a.parquet" in str(error)
            refused += 1
    assert refused > (len(content) - start) / 4


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
        monkeypatch.setattr("flatout.data.formats.datasets._GROUP_BYTES", limit)
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
    reads.clear()
    assert source.files is not None
    order = np.random.default_rng(0).permutation(20)
    assert [source.files[i].read_bytes() for i in order] == [images[i] for i in order]
    assert (len(reads) == 10) == (limit is None)
