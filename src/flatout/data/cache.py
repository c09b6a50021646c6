"""The folder for what can be made again (packs, downloads, compiled programs), its limit, and temporary folders.

Packs and downloads by URL are folders called KEY, with KEY.partial and KEY.lock beside them while they are made.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import InputError
from flatout.settings import Size, sides, typed

if TYPE_CHECKING:
    from flatout.data.pack import Progress

LIMIT = "FLATOUT_CACHE_LIMIT"
_LIMIT_SHARE = 0.2
_UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_OWNER = ".owner"
# What describes a complete entry, and is locked while the entry is used.
DOWNLOAD = ".download.json"
UNPACKED = ".archive.json"
_KINDS = {"packs": "pack", "remote": "download", "unpacked": "archive"}
_DESCRIPTIONS = {"packs": "pack.json", "remote": DOWNLOAD, "unpacked": UNPACKED}


def cache_folder() -> Path:
    """Return FLATOUT_CACHE, or else `flatout` in the user's cache folder."""
    if own := os.environ.get("FLATOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def limit_bytes(folder: Path) -> int:
    """Return the most bytes that limited entries may take: FLATOUT_CACHE_LIMIT, or else 20 % of the disk's capacity.

    Raises:
        InputError: FLATOUT_CACHE_LIMIT is no size.
    """
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return int(_LIMIT_SHARE * shutil.disk_usage(folder).total)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.lower())
    if match is None:
        raise InputError(f"{LIMIT} = {text!r}: must be a size such as 50GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> int | None:
    """Lock a file until the returned descriptor is closed or the process ends; None where another holds it.

    The file is made if it is missing and the lock is not `shared`, that is, compatible with other shared locks.
    """
    descriptor = os.open(path, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def temporary_folder() -> tuple[Path, int]:
    """Make a temporary folder and a descriptor to close when it is removed; folders of killed processes are removed."""
    for owner in Path(tempfile.gettempdir()).glob(f"flatout-*/{_OWNER}"):
        with contextlib.suppress(OSError):  # another user's
            descriptor = lock(owner, wait=False)
            if descriptor is not None:
                shutil.rmtree(owner.parent, ignore_errors=True)
                os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    descriptor = lock(folder / ".new")
    assert descriptor is not None
    (folder / ".new").rename(folder / _OWNER)  # it gets its name when it is locked
    return folder, descriptor


class NotWritable(InputError):
    """An entry of the cache, or a pack elsewhere, cannot be written."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"{folder}: cannot be written ({error.strerror}); choose another folder (for the cache: set FLATOUT_CACHE)"
        )


@contextlib.contextmanager
def making(target: Path, doing: str, report: "Progress") -> Iterator[None]:
    """Hold the right to make a folder, which ends with the process; wait, with a note, while another one has it.

    Raises:
        NotWritable: the folder around it cannot be written.
    """
    path = target.with_name(target.name + ".lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path, wait=False)
        if descriptor is None:
            report.note(f"another process is {doing}; waiting for it")
            descriptor = lock(path)
        assert descriptor is not None
    except OSError as error:
        raise NotWritable(target.parent, error) from None
    try:
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or folder in the cache: its last use in seconds since 1970, and whether it counts for the limit."""

    path: Path
    what: str
    size_bytes: int
    used: float
    is_limited: bool


def entries(folder: Path | None = None) -> list[Entry]:
    """Return what is in the cache, least recently used first."""
    folder = folder or cache_folder()
    limited = {path for kind in _DESCRIPTIONS for path in folder.glob(f"{kind}/*") if path.is_dir()}
    others = (*folder.glob("downloads/*"), *folder.glob("*"))
    others = [path for path in others if path.name not in (*_DESCRIPTIONS, "downloads")]
    found = [_entry(path, is_limited=path in limited) for path in (*limited, *others)]
    return sorted(found, key=lambda entry: entry.used)


def clear(some: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Remove entries; return those removed, and those that are in use or cannot be removed."""
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in some:
        (removed if _remove(entry) else kept).append(entry)
    return removed, kept


def make_room(folder: Path) -> list[Entry]:
    """Remove the least recently used entries that are not in use until the rest is within the limit; return them."""
    limited = [entry for entry in entries(folder) if entry.is_limited]
    excess = sum(entry.size_bytes for entry in limited) - limit_bytes(folder)
    removed = []
    for entry in limited[:-1]:  # the newest is about to be used
        if excess > 0 and _remove(entry):
            excess -= entry.size_bytes
            removed.append(entry)
    return removed


def _entry(path: Path, *, is_limited: bool) -> Entry:
    size_bytes = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    what = path.parent.name if path.parent.name == "downloads" else path.name
    if is_limited:
        try:
            what = _described(path)
        except (OSError, ValueError, LookupError, TypeError, InputError):
            what = f"incomplete {_KINDS[path.parent.name]}"
    return Entry(path=path, what=what, size_bytes=size_bytes, used=path.stat().st_mtime, is_limited=is_limited)


def _described(path: Path) -> str:
    about = json.loads((path / _DESCRIPTIONS[path.parent.name]).read_text(encoding="utf-8"))
    if path.parent.name != "packs":
        return about["url"]
    size = " x ".join(map(str, sides(typed(about["size"], Size, "size"))))
    return f"{about['images']:,} images, {size}, {about['path'] or about['kind']}"


def _remove(entry: Entry) -> bool:
    """Remove an entry unless a process uses or makes it."""
    locks: list[int | None] = []
    try:
        if entry.is_limited:
            target = entry.path.with_name(entry.path.name.removesuffix(".partial"))
            locks.append(lock(target.with_name(target.name + ".lock"), wait=False))
            description = target / _DESCRIPTIONS[target.parent.name]
            if description.is_file():
                locks.append(lock(description, wait=False))
        if None in locks:
            return False
        shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink()
    except OSError:
        return False
    finally:
        for descriptor in locks:
            if descriptor is not None:
                os.close(descriptor)
    return True
