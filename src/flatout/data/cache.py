"""The folder for what can be made again (packs, downloads, compiled programs), its limit, and temporary folders."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import InputError
from flatout.settings import Size, sides, typed

LIMIT = "FLATOUT_CACHE_LIMIT"
_LIMIT_SHARE = 0.2
_UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_OWNER = ".owner"


def cache_folder() -> Path:
    """Return FLATOUT_CACHE, or else `flatout` in the user's cache folder."""
    if own := os.environ.get("FLATOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def limit_bytes(folder: Path) -> int:
    """Return the most bytes that packs may take: FLATOUT_CACHE_LIMIT, or else 20 % of the disk's capacity.

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


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or folder in the cache: what it is, and its last use in seconds since 1970; packs count for the limit."""

    path: Path
    what: str
    size_bytes: int
    used: float
    is_pack: bool


def entries(folder: Path | None = None) -> list[Entry]:
    """Return what is in the cache, least recently used first."""
    folder = folder or cache_folder()
    packs = [_entry(path, is_pack=True) for path in folder.glob("packs/*") if path.is_dir()]
    others = (*folder.glob("downloads/*"), *folder.glob("*"))
    found = [_entry(path, is_pack=False) for path in others if path.name not in ("packs", "downloads")]
    return sorted(packs + found, key=lambda entry: entry.used)


def clear(some: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Remove entries; return those removed, and those that are in use or cannot be removed."""
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in some:
        (removed if _remove(entry) else kept).append(entry)
    return removed, kept


def make_room(folder: Path) -> list[Entry]:
    """Remove the least recently used packs that are not in use until the rest is within the limit; return them."""
    packs = [entry for entry in entries(folder) if entry.is_pack]
    excess = sum(entry.size_bytes for entry in packs) - limit_bytes(folder)
    removed = []
    for entry in packs[:-1]:  # the newest is about to be used
        if excess > 0 and _remove(entry):
            excess -= entry.size_bytes
            removed.append(entry)
    return removed


def _entry(path: Path, *, is_pack: bool) -> Entry:
    size_bytes = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    what = path.parent.name if path.parent.name == "downloads" else path.name
    if is_pack:
        try:
            about = json.loads((path / "pack.json").read_text(encoding="utf-8"))
            size = " x ".join(map(str, sides(typed(about["size"], Size, "size"))))
            what = f"{about['images']:,} images, {size}, {about['path'] or about['kind']}"
        except (OSError, ValueError, LookupError, TypeError, InputError):
            what = "incomplete pack"
    return Entry(path=path, what=what, size_bytes=size_bytes, used=path.stat().st_mtime, is_pack=is_pack)


def _remove(entry: Entry) -> bool:
    """Remove an entry unless a process uses or makes it."""
    locks: list[int | None] = []
    try:
        if entry.is_pack:
            target = entry.path.with_name(entry.path.name.removesuffix(".partial"))
            locks.append(lock(target.with_name(target.name + ".lock"), wait=False))
            if (target / "pack.json").is_file():
                locks.append(lock(target / "pack.json", wait=False))
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
