"""Data sets of other libraries: in Python, Parquet files, and the tables of Hugging Face."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from flatout.data.formats.datasets import from_dataset
from tests.data.small_sets import png, read, refused, table

# In Python


class Items(Dataset):
    """Items given as a list; counts how often each is read."""

    def __init__(self, items: list[Any], classes: Any = None) -> None:
        self.items = items
        self.reads: Counter[int] = Counter()
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return self.items[index]


GREY = np.arange(20, dtype=np.uint8).reshape(5, 4) * 12
COLOUR = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
SQUARE = COLOUR[:3, :3]
BANDS = np.random.default_rng(0).integers(0, 65536, (4, 6, 9)).astype(np.uint16)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY), GREY[..., None]),
        (GREY, GREY[..., None]),
        (torch.from_numpy(GREY) / 255, GREY[..., None]),
        (Image.fromarray(COLOUR), COLOUR),
        # Transparent images are over white, as in files.
        (Image.fromarray(np.dstack([COLOUR, np.full((5, 4), 255, np.uint8)])), COLOUR),
        (Image.fromarray(np.dstack([COLOUR, np.zeros((5, 4), np.uint8)])), np.full_like(COLOUR, 255)),
        (COLOUR.transpose(2, 0, 1), COLOUR),
        (torch.from_numpy(COLOUR).permute(2, 0, 1) / 255, COLOUR),
        (SQUARE, SQUARE),  # channels of an array are last, those of a tensor first
        (torch.from_numpy(SQUARE.copy()), SQUARE.transpose(1, 2, 0)),
        (torch.from_numpy(BANDS), BANDS.transpose(1, 2, 0)),
    ],
)
def test_kinds_of_images(image: Any, expected: np.ndarray):
    source = from_dataset(Items([(image, 0), (image, 1)]))
    assert source.images is not None
    assert source.images.dtype == expected.dtype
    np.testing.assert_array_equal(source.images, [expected, expected])


def test_kinds_of_labels_splits_and_class_names():
    images = torch.zeros(4, 1, 5, 4)
    for labels in (
        torch.tensor([0, 1, 1, 0]).bfloat16(),
        torch.tensor([[0], [1], [1], [0]]),
        torch.eye(2)[[0, 1, 1, 0]],
    ):
        assert from_dataset(TensorDataset(images, labels)).labels.tolist() == [0, 1, 1, 0]
    source = from_dataset(Items([(GREY, ["cat", "dog"]), (GREY, ["cat"]), (GREY, [])]))
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [[1, 1], [1, 0], [0, 0]])
    source = from_dataset(Items([(GREY, "yes"), (GREY, "no")]))
    assert (source.classes, source.labels.tolist()) == (("no", "yes"), [1, 0])
    data = Items([(GREY, i % 3) for i in range(9)], classes=["a", "b", "c"])
    source = from_dataset((data, Subset(data, [3, 4])))
    assert (source.splits, source.classes) == ({"train": (0, 9), "test": (9, 11)}, ("a", "b", "c"))
    assert source.labels[-2:].tolist() == [0, 1]


def test_an_iterable_data_set_may_know_its_length():
    class Stream(IterableDataset):
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Any]:
            return iter([(GREY, 0), (GREY, 1)])

    assert len(from_dataset(Stream())) == 2


def test_each_item_is_read_once_and_the_first_ones_again_for_random_transforms():
    data = Items([(GREY, i % 2) for i in range(40)])
    assert from_dataset({"train": data}).notes == ()
    assert data.reads == {i: 2 if i < 16 else 1 for i in range(40)}

    class Flipped(Items):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image[:, ::-1] if np.random.random() < 0.5 else image, label

    (note,) = from_dataset(Flipped(data.items)).notes
    assert "the train data set differ each time they are read" in note
    assert "use augment= or transform= instead" in note


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "is a int; give"),
        ({"train": Items([(GREY, 0), (GREY, 1)]), "test": Items([])}, "test: the data set is empty"),
        (Items([{"image": GREY}]), "item 0 is a dict; a pair"),
        (Items([("a.png", 0)]), "the image is a str; a PIL image"),
        (Items([(GREY, 0), (COLOUR, 1)]), "item 1 has .* 5x4x3 uint8 where item 0 has 5x4x1 uint8"),
        (Items([(GREY.astype(np.int64), 0)]), "pixels of type int64"),
        (Items([(GREY * np.nan, 0)]), "outside 0..1; take Normalize out"),
        (Items([(torch.zeros(5, 4, 3), 0)]), r"a tensor of shape \(5, 4, 3\); \[C, H, W\]"),
        (Items([(GREY, 0), (GREY, [1, 2])]), "train: the labels differ in shape"),
        (
            {"train": Items([(GREY, 0)]), "test": Items([(GREY.astype(np.uint16), 0)])},
            r"differ in type \(train uint8, test uint16\)",
        ),
        (Items([(GREY, 0), (GREY, 2)], classes=["a", "b"]), "train: label 1: label outside the class list"),
    ],
)
def test_refused(data: Any, message: str):
    refused(message, from_dataset, data)


# Parquet


def contents(path: Path, **options: Any) -> tuple[tuple[str, ...], list[bytes]]:
    source = read(path, **options)
    return source.classes, [file.read_bytes() for file in source.files or ()]


def test_columns(tmp_path: Path):
    images = [png(0), png(1)]
    path = table(tmp_path / "a.parquet", left=images, right=images[::-1], kind=[3, 4], other=[1, 1])
    refused("has the columns left, right, kind, other; name those of images", read, path)
    assert contents(path, file_column="right", label_column="kind") == (("3", "4"), images[::-1])
    path = table(tmp_path / "a.parquet", **{"the.image": images, "image.label": ["a", "b"]})
    assert contents(path) == (("a", "b"), images)


def test_rows_without_labels_or_images_are_named(tmp_path: Path):
    path = table(tmp_path / "a.parquet", image=[png(), png(), png()], label=["a", None, "b"])
    refused(r"rows without a label: .*a\.parquet: row 1", read, path)
    with pytest.raises(OSError, match="the row holds no bytes"):
        contents(table(tmp_path / "b.parquet", image=[png(), None], label=["a", "b"]))


CAT_DOG = {"_type": "ClassLabel", "names": ["cat", "dog"]}


def with_features(path: Path, feature: Any, labels: list[Any]) -> None:
    """Write two images as Hugging Face's libraries do, with the kind of the labels in the metadata."""
    table(path, {"info": {"features": {"label": feature}}}, image=[png(), png()], label=labels)


def test_metadata_of_hugging_face(tmp_path: Path):
    with_features(tmp_path / "train.parquet", CAT_DOG, [0, 1])
    with_features(tmp_path / "test.parquet", CAT_DOG, [-1, -1])
    source = read(tmp_path)
    assert (list(source.splits), source.classes) == (["train"], ("cat", "dog"))
    assert source.notes == ("there is no test split: its labels are all -1, which means unknown",)
    with_features(tmp_path / "test.parquet", CAT_DOG | {"names": ["dog", "cat"]}, [0, 1])
    refused(r"test\.parquet: names other classes than .*train\.parquet", read, tmp_path)
    with_features(tmp_path / "train.parquet", [CAT_DOG], [[0], [0, 1]])  # lists, as older versions write them
    source = read(tmp_path / "train.parquet")
    assert (source.task, source.classes, source.labels.tolist()) == ("multi-label", ("cat", "dog"), [[1, 0], [1, 1]])


def test_small_tables_that_expand_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages that are nothing but zeros, or a row that is repeated, and a label of megabytes."""

    def written(name: str, images: list[bytes], label: str) -> Path:
        columns = pyarrow.table({"image": images, "label": [label, "other"] * (len(images) // 2)})
        pyarrow.parquet.write_table(columns, tmp_path / name, compression="zstd")
        return tmp_path / name

    monkeypatch.setattr("flatout.data.unpack._EXPANSION_SLACK_BYTES", 1 << 16)
    pages = written("pages.parquet", [bytes(1 << 20), bytes(1 << 20) + b"1"], "cat")
    refused(r"pages\.parquet: expands from [\d,]+ to 2,\d{3},\d{3} bytes", read, pages)
    rows = written("rows.parquet", [b"x"] * 20_000, "cat")
    refused(r"rows\.parquet: expands from [\d,]+ to 2,000,000 bytes", read, rows)
    monkeypatch.undo()
    label = written("label.parquet", [png(0)] * 4, "x" * 100_000)
    refused(r"label\.parquet: train: the label 'xxx.* has 100,000 characters", read, label)


@pytest.mark.parametrize("limit", [None, 0])
def test_row_groups_in_memory_are_few(limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of all files, or as many as take little memory, each of which is then read once."""
    if limit is not None:
        monkeypatch.setattr("flatout.data.formats.datasets._GROUP_BYTES", limit)
    images = [png(i) for i in range(20)]
    for i in range(2):
        columns = pyarrow.table({"image": images[10 * i : 10 * i + 10], "label": [i % 2 for i in range(10)]})
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
