"""Encoded images: separate files, or slices of larger files that any number of threads read in place."""

import errno
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from flatout.data.decode import MAX_FILE_BYTES, ImageBytes


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a file; `name` is its position, such as "record 17"."""

    file: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the part; raises OSError."""
        if self.size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {self.size:,} bytes, more than {MAX_FILE_BYTES:,}, the limit")
        # Open only briefly: there may be thousands of files.
        with self.file.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) < self.size:
            raise OSError(errno.EIO, "it is cut off")
        return data


class ImageBytesList(Sequence[ImageBytes]):
    """Images in a list that stores paths and slices in few bytes: millions take little memory."""

    def __init__(self, *parts: Iterable[ImageBytes]) -> None:
        # Each image has an owner (the folder of a path, the file of a slice, or an image of another kind), a name, and
        # for slices an offset and a size.
        self._owners: list[Any] = []
        self._numbers: dict[Any, int] = {}  # of the owners
        self._owner, self._names, self._places = array("L"), list[str](), array("Q")
        for part in parts:
            if isinstance(part, ImageBytesList):
                own = np.array([self._number_of(owner) for owner in part._owners], np.dtype("L"))
                self._add(own[np.asarray(part._owner)], part._names, part._places)
                continue
            for image in part:
                self.append(image)

    @classmethod
    def of_paths(cls, folders: Sequence[str], numbers: np.ndarray, names: list[str]) -> "ImageBytesList":
        """Make a list of paths from folders and, for each path, its folder index and name."""
        files = cls()
        files._owners = list(folders)
        files._add(numbers.astype(np.dtype("L")), names, array("Q", bytes(16 * len(names))))
        return files

    def _add(self, owner: np.ndarray, names: list[str], places: "array[int]") -> None:
        self._owner.frombytes(owner.tobytes())
        self._names += names
        self._places += places

    def _number_of(self, owner: Any) -> int:
        """Return the index of an owner, added if new."""
        number = len(self._owners)
        if isinstance(owner, str | Path):
            number = self._numbers.setdefault(owner, number)
        if number == len(self._owners):
            self._owners.append(owner)
        return number

    def append(self, image: ImageBytes) -> None:
        """Add an image to the end."""
        owner, name, offset, size = image, "", 0, 0
        if isinstance(image, Path):
            owner, name = os.path.split(image)
        elif isinstance(image, Slice):
            owner, name, offset, size = image.file, image.name, image.offset, image.size
        self._owner.append(self._number_of(owner))
        self._names.append(name)
        self._places.extend((offset, size))

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> ImageBytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageBytes]: ...
    def __getitem__(self, index: int | slice) -> ImageBytes | Sequence[ImageBytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        owner, name = self._owners[self._owner[index]], self._names[index]
        if isinstance(owner, str):
            return Path(owner, name)
        if isinstance(owner, Path):
            return Slice(owner, name, *self._places[2 * index : 2 * index + 2])
        return owner
