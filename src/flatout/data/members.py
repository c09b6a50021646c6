"""Encoded images that are no files of their own: slices of containers, in place and by any number of threads.

An image is whatever has `read_bytes()`, which raises OSError as that of `pathlib.Path` does, and a name for messages.
"""

import bz2
import errno
import gzip
import lzma
import math
import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Generic, Protocol, TypeVar, overload

import numpy as np

from flatout.data.limits import MAX_FILE_BYTES
from flatout.errors import DiskFull, InputError
from flatout.files import NO_SPACE

Item = TypeVar("Item")

# What is larger than its compressed form by more than this is taken for a decompression bomb.
_MAX_EXPANSION = 200
_EXPANSION_SLACK_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 20
# Places in an `EncodedList` from here on are of parts of containers.
_PARTS = 1 << 40
_COMPRESSIONS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_ERRORS_OF_STREAMS = (EOFError, OSError, zlib.error, lzma.LZMAError)


def refuse_bomb(where: object, compressed: int, expanded: int) -> None:
    """Refuse what expands from `compressed` bytes to far more; called with what is known, or read so far.

    Raises:
        InputError: it looks like a decompression bomb.
    """
    if expanded > _MAX_EXPANSION * compressed + _EXPANSION_SLACK_BYTES:
        raise InputError(
            f"{where}: expands from {compressed:,} to {expanded:,} bytes or more; if it is no decompression bomb, "
            "unpack it first"
        )


class Encoded(Protocol):
    """An image as bytes of some image format: a `pathlib.Path`, or a part of a container."""

    def read_bytes(self) -> bytes:
        """Return the bytes; raises OSError."""
        ...


class Container:
    """A file that holds images, read at any place by any thread.

    With `decompress`, what is compressed with gzip, bzip2 or xz is decompressed once, up to about `limit` bytes of it,
    into a temporary file without a name, which disappears with the process.

    Raises:
        InputError: the file cannot be read, is damaged, or expands to far more than its size.
        DiskFull: there is no room for the decompressed bytes.
    """

    def __init__(self, path: Path, *, decompress: bool = False, limit: float = math.inf) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        try:
            start, self.size = self.read(0, 6), path.stat().st_size
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        opener = next((opener for magic, opener in _COMPRESSIONS.items() if start.startswith(magic)), None)
        if opener and decompress:
            try:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
            except OSError as error:  # of thousands of shards, one after the other is open
                is_limit = error.errno == errno.EMFILE
                fix = "raise the limit (ulimit -n), or decompress the files" if is_limit else "see TMPDIR"
                place = f"{path}: cannot be decompressed into {tempfile.gettempdir()}"
                raise InputError(f"{place}: {error.strerror}; {fix}") from None
            weakref.finalize(self, self._file.close)
            self.size = self._decompress(opener, self._file, limit)

    def _decompress(self, opener, file: IO[bytes], limit: float) -> int:
        written = 0
        try:
            with opener(self.path) as stream:
                while written < limit and (block := stream.read(_BLOCK_BYTES)):
                    written += len(block)
                    refuse_bomb(self.path, self.size, written)
                    file.write(block)
            file.flush()
        except _ERRORS_OF_STREAMS as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise DiskFull(
                    f"{tempfile.gettempdir()}: the disk is full: {self.path} is decompressed there; set TMPDIR to a "
                    "folder on a larger disk, or decompress it"
                ) from None
            raise InputError(f"{self.path}: is damaged or cut off ({error}); get it again") from None
        return written

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer at the end of the file."""
        with self.opened() as descriptor:
            return os.pread(descriptor, length, offset)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Lend a descriptor for `os.pread`; only for a while, as there may be thousands of containers."""
        if self._file is not None:
            yield self._file.fileno()
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a container that is stored as it is; `name` is its place there, such as "record 17"."""

    container: Container
    name: str
    offset: int
    size: int

    COUNT: ClassVar[int] = 2

    @property
    def numbers(self) -> tuple[int, ...]:
        """All but container and name."""
        return self.offset, self.size

    def __str__(self) -> str:
        return f"{self.container.path}: {self.name}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the part."""
        with self.container.opened() as descriptor:
            return _read_whole(descriptor, self.offset, self.size)


@dataclass(frozen=True, slots=True)
class ZipPart:
    """A member of a ZIP archive, stored or deflated; `header` is the offset of its local header."""

    container: Container
    name: str
    header: int
    compressed_size: int
    size: int
    crc32: int
    is_deflated: int

    COUNT: ClassVar[int] = 5

    @property
    def numbers(self) -> tuple[int, ...]:
        """All but container and name."""
        return self.header, self.compressed_size, self.size, self.crc32, self.is_deflated

    def __str__(self) -> str:
        return f"{self.container.path}: {self.name}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the member, decompressed and checked."""
        with self.container.opened() as descriptor:
            header = _read_whole(descriptor, self.header, 30)
            if header[:4] != b"PK\3\4":
                raise OSError(errno.EIO, "its header is damaged")
            extra = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            data = _read_whole(descriptor, self.header + 30 + extra, self.compressed_size)
        if self.is_deflated:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.size + 1)
            except zlib.error as error:
                raise OSError(errno.EIO, f"it is damaged ({error})") from None
        if len(data) != self.size or zlib.crc32(data) != self.crc32:
            raise OSError(errno.EIO, "it is damaged: its checksum is wrong")
        return data


class _Numbered(Generic[Item]):
    """Different items, counted from 0 as they come."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._numbers: dict[Item, int] = {}

    def number_of(self, item: Item) -> int:
        """Return the number of an item."""
        if item not in self._numbers:
            self._numbers[item] = len(self.items)
            self.items.append(item)
        return self._numbers[item]


class EncodedList(Sequence[Encoded]):
    """Images in a list that keeps paths, and parts of containers, in few bytes: millions take little memory.

    A member of an archive comes back as its part.
    """

    def __init__(self, *parts: Iterable[Encoded]) -> None:
        # The names of all paths and parts, the end of each, and its folder; of a part, `_PARTS` and the place in
        # `_numbers` of its owner and its numbers; of other images, -1 minus the place in `_others`.
        self._names, self._ends, self._places = bytearray(), array("Q"), array("q")
        self._folders = _Numbered[str]()
        self._numbers = array("Q")
        self._owners = _Numbered[tuple[type[Slice] | type[ZipPart], Container]]()
        self._others: list[Encoded] = []
        for part in parts:
            if isinstance(part, EncodedList) and not part._numbers and not part._others:
                self._add_paths(part._folders.items, np.asarray(part._places), part._names, np.asarray(part._ends))
                continue
            for image in part:
                self.append(image)

    @classmethod
    def of_paths(cls, folders: Sequence[str], numbers: np.ndarray, names: Iterable[str]) -> "EncodedList":
        """Make a list of paths from folders and, of each path, the number of its folder and its name."""
        encoded = list(map(os.fsencode, names))
        files = cls()
        files._add_paths(folders, numbers, b"".join(encoded), np.cumsum([len(name) for name in encoded]))
        return files

    def _add_paths(
        self, folders: Sequence[str], numbers: np.ndarray, names: bytes | bytearray, ends: np.ndarray
    ) -> None:
        own_numbers = np.array([self._folders.number_of(folder) for folder in folders], np.int64)
        self._places.frombytes(own_numbers[numbers].tobytes())
        self._ends.frombytes((ends.astype(np.uint64) + np.uint64(len(self._names))).tobytes())
        self._names += names

    def append(self, image: Encoded) -> None:
        """Add an image."""
        image = getattr(image, "part", image)
        if isinstance(image, Path):
            folder, name = os.path.split(image)
            self._names += os.fsencode(name)
            self._places.append(self._folders.number_of(folder))
        elif isinstance(image, Slice | ZipPart):
            self._names += image.name.encode("utf-8", "surrogateescape")
            self._places.append(_PARTS + len(self._numbers))
            self._numbers.append(self._owners.number_of((type(image), image.container)))
            self._numbers.extend(image.numbers)
        else:
            self._others.append(image)
            self._places.append(-len(self._others))
        self._ends.append(len(self._names))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | Sequence[Encoded]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        place = self._places[index]
        if place < 0:
            return self._others[-1 - place]
        name = bytes(self._names[self._ends[index - 1] if index else 0 : self._ends[index]])
        if place < _PARTS:
            return Path(self._folders.items[place], os.fsdecode(name))
        owner, *numbers = self._numbers[place - _PARTS : place - _PARTS + 6]
        kind, container = self._owners.items[owner]
        return kind(container, name.decode("utf-8", "surrogateescape"), *numbers[: kind.COUNT])


def _read_whole(descriptor: int, offset: int, size: int) -> bytes:
    if size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {MAX_FILE_BYTES:,}, the limit")
    data = os.pread(descriptor, size, offset)
    if len(data) < size:
        raise OSError(errno.EIO, "it is cut off")
    return data
