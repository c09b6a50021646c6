"""A CSV manifest and the files that it lists."""

from pathlib import Path

from flatout.config import Data
from flatout.data.detect import recognise
from flatout.data.source import ImageDataset


def with_images(folder: Path) -> Path:
    """Give a folder images/0.png to images/9.png, which are never opened."""
    (folder / "images").mkdir()
    for i in range(10):
        (folder / "images" / f"{i}.png").touch()
    return folder


def read(folder: Path, text: str | bytes, name: str = "list.csv", task: str = "auto", **settings) -> ImageDataset:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return recognise(path, Data(**settings), task).read()
