"""Sets of a few tiny images in containers; those of `containers` are whole data sets."""

import io
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from flatout.config import Data
from flatout.data.detect import recognise
from flatout.data.source import ImageDataset
from tests.data import containers as c


def png(value: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4), value).save(stream, "PNG")
    return stream.getvalue()


def read(path: Path, **options: Any) -> ImageDataset:
    return recognise(path, Data(**options)).read()


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            c.add_member(archive, name, content)
    return path


def table(path: Path, **columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
    return path
