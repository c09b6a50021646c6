"""Torch map-style data sets."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from flatout.data.formats.datasets import from_dataset
from flatout.errors import InputError


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


def pixels(image: Any) -> np.ndarray:
    source = from_dataset(Items([(image, 0), (image, 1)]))
    assert source.images is not None
    np.testing.assert_array_equal(source.images[0], source.images[1])
    return source.images[0]


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(GREY),
        GREY,
        GREY[..., None],
        torch.from_numpy(GREY),
        torch.from_numpy(GREY)[None],
        torch.from_numpy(GREY)[None] / 255,
        GREY / 255,
    ],
)
def test_kinds_of_grey_images(image: Any):
    np.testing.assert_array_equal(pixels(image), GREY[..., None])


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(COLOUR),
        Image.fromarray(np.dstack([COLOUR, COLOUR[..., :1]])),  # RGBA; the alpha channel is dropped
        COLOUR,
        COLOUR / np.float32(255),
        COLOUR.transpose(2, 0, 1),
        torch.from_numpy(COLOUR).permute(2, 0, 1),
        torch.from_numpy(COLOUR).permute(2, 0, 1) / 255,
    ],
)
def test_kinds_of_colour_images(image: Any):
    np.testing.assert_array_equal(pixels(image), COLOUR)


def test_channels_of_a_tensor_come_first_and_of_an_array_last():
    square = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels(square), square)
    np.testing.assert_array_equal(pixels(torch.from_numpy(square)), square.transpose(1, 2, 0))


def test_each_item_is_read_once_and_the_first_ones_again():
    data = Items([(GREY, i % 2) for i in range(40)])
    assert from_dataset({"train": data}).notes == ()
    assert data.reads == {i: 2 if i < 16 else 1 for i in range(40)}


def test_a_random_transform_is_reported():
    class Flipped(Items):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image[:, ::-1] if np.random.random() < 0.5 else image, label

    (note,) = from_dataset(Flipped([(GREY, i % 2) for i in range(40)])).notes
    assert "the train data set differ each time they are read" in note
    assert "use augment= or transform= instead" in note


def test_splits_and_class_names():
    data = Items([(GREY, i % 3) for i in range(9)], classes=["a", "b", "c"])
    source = from_dataset((data, Subset(data, [3, 4])))
    assert source.splits == {"train": (0, 9), "test": (9, 11)}
    assert source.labels[-2:].tolist() == [0, 1]
    assert source.classes == ("a", "b", "c")
    assert from_dataset(Subset(data, [0, 1])).classes == ("a", "b", "c")


def test_kinds_of_labels():
    images = torch.zeros(4, 1, 5, 4)
    for labels in (torch.tensor([0, 1, 1, 0]), torch.tensor([[0], [1], [1], [0]]), torch.eye(2)[[0, 1, 1, 0]]):
        assert from_dataset(TensorDataset(images, labels)).labels.tolist() == [0, 1, 1, 0]
    source = from_dataset(Items([(GREY, "yes"), (GREY, "no")]))
    assert (source.classes, source.labels.tolist()) == (("no", "yes"), [1, 0])


def test_torchvision_with_a_transform(tmp_path):
    from torchvision import datasets, transforms

    for i, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        Image.fromarray(COLOUR).resize((9 + i, 7)).save(tmp_path / name / "1.png")
    steps: list[Any] = [transforms.Resize((8, 8)), transforms.ToTensor()]
    transform = transforms.Compose(steps)
    source = from_dataset(datasets.ImageFolder(str(tmp_path), transform))
    assert source.images is not None
    assert source.images.shape == (2, 8, 8, 3)
    assert source.classes == ("a", "b")
    steps.append(transforms.Normalize((0.5,) * 3, (0.2,) * 3))
    with pytest.raises(InputError, match="take Normalize out"):
        from_dataset(datasets.ImageFolder(str(tmp_path), transform))
    with pytest.raises(InputError, match=r"item 1 has .* 7x10x3 where item 0 has 7x9x3; put a Resize"):
        from_dataset(datasets.ImageFolder(str(tmp_path)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "is a int; give"),
        (Items([]), "the data set is empty"),
        ({"train": Items([(GREY, 0), (GREY, 1)]), "test": Items([])}, "test: the data set is empty"),
        ({"test": Items([(GREY, 0)])}, "no training split"),
        (Items([GREY, GREY]), "item 0 is a ndarray; a pair"),
        (Items([{"image": GREY}]), "item 0 is a dict of image; name its label one of label,"),
        (Items([("a.png", 0)]), "the image is a str; a PIL image"),
        (Items([(GREY, 0), (COLOUR, 1)]), "item 1 has .* put a conversion to RGB"),
        (Items([(GREY.astype(np.int64), 0)]), "pixels of type int64"),
        (Items([(GREY.astype(float), 0)]), "pixels run from 0 to 228, outside 0..1; take Normalize out"),
        (Items([(GREY * np.nan, 0)]), "outside 0..1"),
        (Items([(torch.zeros(5, 4, 3), 0)]), r"a tensor of shape \(5, 4, 3\); \[C, H, W\]"),
        (Items([(np.zeros((5, 5, 5)), 0)]), "channels may be first or last"),
        (Items([(Image.new("I", (4, 4)), 0)]), "32 bits per pixel"),
        (Items([(GREY, 0), (GREY.astype(np.uint16), 1)]), "item 1 has 16 bits per channel where item 0 has 8"),
        (Items([(GREY, 0), (GREY, [1, 2])]), "labels differ in shape"),
        (Items([(GREY, 0), (GREY, -1)]), "train: label 1: negative label -1"),
        (Items([(GREY, 0), (GREY, 2)], classes=["a", "b"]), "train: label 1: label outside the class list"),
        (Items([(GREY, 1), (GREY, 1)]), "all images are of one class"),
    ],
)
def test_refused(data: Any, message: str):
    with pytest.raises(InputError, match=message):
        from_dataset(data)


def test_items_of_16_bits_and_many_bands() -> None:
    bands = np.random.default_rng(0).integers(0, 65536, (2, 4, 6, 9)).astype(np.uint16)
    source = from_dataset(Items([(torch.from_numpy(image), i) for i, image in enumerate(bands)]))
    assert source.images is not None
    assert source.images.dtype == np.uint16
    assert np.array_equal(source.images, bands.transpose(0, 2, 3, 1))
