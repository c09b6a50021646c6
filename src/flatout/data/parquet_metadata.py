"""The metadata of Parquet files, which are read with care: damaged or hostile ones come before any data."""

import io
from pathlib import Path
from typing import Any

from flatout.data.unpack import refuse_bomb
from flatout.errors import InputError

# More rows than these need a byte each in the file.
_FEW_ROWS = 1_000_000


class _Unreadable(io.RawIOBase):
    """A file of `size` bytes that gives none of them, and says whether it was asked for any."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.was_read = False
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        self.was_read = True
        return b""  # pyarrow keeps the memory of an exception


def columns_of_groups(path: Path, about: Any, names: set[str]) -> list[list[Any]]:
    """Return the metadata of columns in each row group of a Parquet file.

    pyarrow ends the process where it is asked for damaged metadata of a column, but raises an error where it meets them
    as it reads the column. So each is read up to its first page, in this thread: one of pyarrow's that still held the
    file at the end of the process would end it with SIGABRT.

    Raises:
        OSError: the metadata are damaged.
    """
    import pyarrow
    import pyarrow.parquet

    paths = [about.schema.column(i).path for i in range(len(about.schema))]
    wanted = [i for i, part in enumerate(paths) if any(_is_part(part, name) for name in names)]
    columns = []
    source = _Unreadable(path.stat().st_size)
    with pyarrow.parquet.ParquetFile(source, metadata=about, pre_buffer=False) as file:
        for number in range(about.num_row_groups):
            for i in wanted:
                source.was_read = False
                try:
                    file.reader.read_row_group(number, column_indices=[i], use_threads=False)
                except (pyarrow.ArrowException, OSError):
                    if not source.was_read:
                        raise
            group = about.row_group(number)
            columns.append([group.column(i) for i in wanted])
    return columns


def refuse_bombs(path: Path, rows: int, groups: list[list[Any]]) -> list[str]:
    """Return the parts of columns that are text or bytes, from the metadata of the columns in each row group.

    Raises:
        InputError: these columns expand to far more than their size, or have more rows than images can be in the file.
    """
    size = path.stat().st_size
    if rows > max(_FEW_ROWS, size):
        raise InputError(f"{path}: has {rows:,} rows in {size:,} bytes, too few for images; write it again")
    texts: set[str] = set()
    for number, columns in enumerate(groups):
        compressed, expanded = (
            sum(getattr(c, f"total_{how}_size") for c in columns) for how in ("compressed", "uncompressed")
        )
        values = max(column.num_values for column in columns)  # of lists, more than rows
        if values > max(_FEW_ROWS, 2 * size):
            raise InputError(f"{path}: row group {number}: has {values:,} values in {size:,} bytes; write it again")
        refuse_bomb(f"{path}: row group {number}", compressed, expanded)
        texts |= {column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"}
    return sorted(texts)


def bytes_of_column(columns: list[Any], name: str) -> int:
    """Return the size of a column in a row group, decompressed."""
    return sum(c.total_uncompressed_size for c in columns if _is_part(c.path_in_schema, name))


def _is_part(path: str, name: str) -> bool:
    """Whether a column that is stored is all of a named one, or a part of it."""
    return path == name or path.startswith(f"{name}.")
