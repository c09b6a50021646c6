"""HDF5 files, of which only what lies in them as plain numbers and short texts is read.

Links other than to objects of the file itself, numbers kept in other files, virtual data sets, filters and types with
references are refused, and sizes are compared with that of the file before memory is taken.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.convert.problems import damaged, natural
from flatout.errors import InputError, one_line

WHAT = "an HDF5 file of Keras"
# Of one attribute: the description of a whole model is one.
_MAX_ATTRIBUTE_BYTES = 64 << 20
_MAX_OBJECTS = 50_000
_MAX_DEPTH = 64


@contextmanager
def opened(path: Path, content: IO[bytes] | None = None) -> Iterator["Group"]:
    """Open an HDF5 file, or the content of one that is a member of `path`.

    Raises:
        InputError: also inside the block, whatever HDF5 finds wrong.
    """
    try:
        import h5py
    except ImportError:
        raise InputError(f"{path}: files of Keras need the package h5py: pip install 'flatout[convert]'") from None
    try:
        with h5py.File(content or path, "r") as file:
            size = path.stat().st_size if content is None else content.seek(0, 2)
            yield Group(path, file, _Budget(size, _MAX_OBJECTS))
    except InputError:
        raise
    except Exception as error:  # h5py passes on whatever the library finds, as several types
        raise damaged(path, WHAT, type(error).__name__) from None


class _Budget:
    """The bytes that may still be read, which are no more than the file has, and the objects."""

    def __init__(self, size: int, objects: int) -> None:
        self.size, self.bytes, self.objects = size, size, objects


class Group:
    """A group; `path` is that of the file, for messages."""

    def __init__(self, path: Path, group: Any, budget: _Budget, depth: int = 0) -> None:
        self.path, self._group, self._budget, self._depth = path, group, budget, depth

    @property
    def name(self) -> str:
        """The path of the group inside the file, without a slash before it."""
        return str(self._group.name).strip("/")

    def names(self) -> list[str]:
        """Return the names of what the group holds, 10 behind 9."""
        return sorted(self._group, key=natural)

    def get(self, name: str) -> "Group | np.ndarray | None":
        """Return a group or the numbers that a path names; None if there is no such thing."""
        first, _, rest = name.partition("/")
        if rest:
            inner = self.get(first)
            return inner.get(rest) if isinstance(inner, Group) else None
        if first not in self._group:
            return None
        return self._own(first)

    def _own(self, name: str) -> "Group | np.ndarray":
        import h5py

        self._budget.objects -= 1
        if self._budget.objects < 0 or self._depth > _MAX_DEPTH:
            raise damaged(self.path, WHAT, "its groups are too many or nested too deeply")
        if not isinstance(self._group.get(name, getlink=True), h5py.HardLink):
            raise InputError(f"{self.path}: {one_line(name)} is a link out of its group; such files are not read")
        found = self._group[name]
        if isinstance(found, h5py.Dataset):
            return self._numbers(found)
        if not isinstance(found, h5py.Group):
            raise damaged(self.path, WHAT, f"{name} is neither a group nor numbers")
        return Group(self.path, found, self._budget, self._depth + 1)

    def _numbers(self, found: Any) -> np.ndarray:
        properties = found.id.get_create_plist()
        if found.is_virtual or properties.get_external_count():
            raise InputError(
                f"{self.path}: the numbers of {one_line(found.name)} are in another file; such files are not read"
            )
        if properties.get_nfilters():
            raise InputError(f"{self.path}: {one_line(found.name)} is compressed; save the weights without compression")
        if found.dtype.kind not in "biuf" or found.dtype.itemsize > 8:
            raise damaged(self.path, WHAT, f"{found.name} is no array of numbers")
        self._budget.bytes -= found.nbytes
        if self._budget.bytes < 0:
            raise damaged(self.path, WHAT, f"{found.name} has more numbers than the file")
        return found[()]

    def attribute(self, name: str) -> Any:
        """Return an attribute that is text, or a list of texts; None if there is none."""
        if name not in self._group.attrs:
            return None
        found = self._group.attrs.get_id(name)
        count = int(np.prod(found.shape, dtype=np.float64)) if found.shape else 1
        if count == 0:
            return []
        if count > min(self._budget.size, _MAX_ATTRIBUTE_BYTES) or found.get_storage_size() > _MAX_ATTRIBUTE_BYTES:
            raise damaged(self.path, WHAT, f"the attribute {name} is too large")
        value = self._group.attrs[name]
        return [_text(v) for v in value.reshape(-1).tolist()] if isinstance(value, np.ndarray) else _text(value)

    def texts(self, name: str) -> list[str]:
        """Return an attribute that is a list of texts; Keras splits long ones into name0, name1, ..."""
        value = self.attribute(name)
        if value is not None:
            return value if isinstance(value, list) else [value]
        parts: list[list[str]] = []
        while isinstance(part := self.attribute(f"{name}{len(parts)}"), list):
            parts.append(part)
        return [text for part in parts for text in part]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def json_of(path: Path, text: str | bytes, what: str) -> Any:
    """Return a description in JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(path, WHAT, f"its {what} is no JSON") from None
