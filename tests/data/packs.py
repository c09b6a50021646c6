"""Sources for packs, and what is expected of them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from flatout.data.build import load_pack
from flatout.data.decode import decode_image
from flatout.data.detect import recognise
from flatout.data.formats.arrays import from_arrays
from flatout.data.pack import Pack, PackSettings
from flatout.data.source import DataSource, ImageDataset

SMALL_BLOCK = 10 * 16 * 16 * 3


class Recorder:
    def __init__(self) -> None:
        self.updates: list[tuple[int, int, str]] = []
        self.notes: list[str] = []

    def update(self, done: int, total: int, unit: str = "images") -> None:
        self.updates.append((done, total, unit))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Silent(Recorder):
    """Takes no notes."""

    def note(self, text: str) -> None:
        raise AssertionError(text)


def settings(**changes) -> PackSettings:
    return PackSettings(**{"size": 16, "channels": 3, **changes})


def class_folders(folder: Path) -> ImageDataset:
    """45 images of three classes, every fifth in the test split; each has its own content."""
    rng = np.random.default_rng(1)
    for index in range(45):
        file = folder / ("train" if index % 5 else "test") / "abc"[index % 3] / f"{index:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(file)
    return replace(recognise(folder).read(), notes=("A note.",))


def arrays(side: int = 16) -> ImageDataset:
    images = np.random.default_rng(2).integers(0, 256, (40, side, side, 3), np.uint8)
    return from_arrays((images, np.arange(40) % 2))


def repeated(folder: Path, count: int) -> ImageDataset:
    """So many images of two classes, from fewer files."""
    files = sorted(folder.rglob("*.jpg"))
    files = [files[i % len(files)] for i in range(count)]
    labels, splits = np.arange(count) % 2, {"train": (0, count)}
    return ImageDataset(kind="k", path=folder, classes=("a", "b"), labels=labels, splits=splits, files=files)


def expected_images(source: ImageDataset, wanted: PackSettings) -> np.ndarray:
    assert source.files is not None
    how = {"size": wanted.size, "channels": wanted.channels, "resize": wanted.resize}
    return np.stack([decode_image(file, **how) for file in source.files])


def load(source: DataSource | ImageDataset, cache: Path | None, wanted: PackSettings | None = None) -> Pack:
    return load_pack(source, wanted or settings(), cache=cache, report=Recorder())


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """Make writes beyond a size of a file fail as on a full disk: Python ignores the signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
