"""Data to download, and what a download leaves in the cache."""

import io
from pathlib import Path

import numpy as np
import pytest

from flatout.console import Console
from flatout.data.build import find
from flatout.data.source import DataRef
from flatout.errors import InputError


def npz(count: int = 60, size: int = 8, seed: int = 0) -> bytes:
    """Return images of two classes that differ in brightness, as an .npz file."""
    labels = np.arange(count) % 2
    pixels = np.random.default_rng(seed).integers(0, 128, (count, size, size), np.uint8)
    file = io.BytesIO()
    np.savez(file, images=pixels + (128 * labels[:, None, None]).astype(np.uint8), labels=labels)
    return file.getvalue()


def fetch(url: str, stream: io.StringIO | None = None) -> Path:
    found = find(url, console=Console(stream))
    assert isinstance(found, DataRef)
    return found.path


def downloads(cache: Path) -> list[Path]:
    """Return the files of complete downloads."""
    return [path for path in cache.glob("remote/*/*") if path.is_file() and path.name != ".download.json"]


def partial(cache: Path) -> list[Path]:
    return [path for path in cache.glob("remote/*.partial/*") if path.is_file()]


def message(url: str) -> str:
    with pytest.raises(InputError) as caught:
        fetch(url)
    return str(caught.value)
