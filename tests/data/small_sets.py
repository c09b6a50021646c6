"""Sets of a few tiny images in containers; those of `containers` are whole data sets."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from flatout.config import Data
from flatout.data.detect import recognise
from flatout.data.source import ImageDataset
from flatout.utils.errors import InputError
from tests.data import containers as c


def png(value: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4), value).save(stream, "PNG")
    return stream.getvalue()


def read(path: Path, task: str = "auto", **options: Any) -> ImageDataset:
    return recognise(path, Data(**options), task).read()


def refused(message: str, function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Call a function, which must raise InputError with a message that matches; return the message."""
    with pytest.raises(InputError, match=message) as caught:
        function(*args, **options)
    return str(caught.value)


def grow(root: Path, *names: str, content: str = "x") -> Path:
    """Write files of one content, and folders, whose names end with a slash."""
    for name in names:
        if name.endswith("/"):
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            c.write(root / name, content)
    return root


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            c.add_member(archive, name, content)
    return path


def table(path: Path, about: object = None, **columns: list[Any]) -> Path:
    """Write a Parquet file; `about` is what the libraries of Hugging Face know of the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(about)})
    pyarrow.parquet.write_table(content, path, row_group_size=1)
    return path
