"""The cache of packs, downloads and compiled programs: keys, locks and the size limit.

Packs, downloads and unpacked archives are folders called KEY, with KEY.partial and KEY.lock next to them while made.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flatout.utils.errors import DiskFull, InputError
from flatout.utils.files import NO_SPACE, lock, write_atomically
from flatout.utils.host import usable_cores

LIMIT = "FLATOUT_CACHE_LIMIT"
_UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_OWNER = ".owner"
# Describes a complete entry, and is locked while the entry is used.
DOWNLOAD, UNPACKED = ".download.json", ".archive.json"
_DESCRIPTIONS = {"packs": "pack.json", "remote": DOWNLOAD, "unpacked": UNPACKED}
_KINDS = (*_DESCRIPTIONS, "downloads")
_OTHERS = ("digests", "plans", "xla")  # each one entry; anything else in the folder is the user's

DIGEST_BYTES = 20
# The digest of a larger file is that of its parts' digests, computed on all cores: a data set may be one file.
_PART_BYTES = 1 << 23
_PARTS_PER_TASK = 64
# A file changed twice within one tick of the file system's clock looks the same as after the first change, so digests
# are stored only for files unchanged for longer than that. Ticks are 2 s at most.
_RESTED_NS = 25 * 10**8


class Progress(Protocol):
    """Shows progress to the user."""

    def update(self, done: int, total: int, unit: str = "images") -> None: ...

    def note(self, text: str) -> None: ...


class NotWritable(InputError):
    """An entry of the cache, or a pack elsewhere, cannot be written."""

    def __init__(self, folder: Path, error: OSError) -> None:
        fix = "choose another folder (for the cache: set FLATOUT_CACHE)"
        super().__init__(f"{folder}: cannot be written ({error.strerror}); {fix}")


def cache_folder() -> Path:
    """Return FLATOUT_CACHE, or else `flatout` in the user's cache folder."""
    if own := os.environ.get("FLATOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def limit_bytes(folder: Path) -> int:
    """Return the size limit of the cache: FLATOUT_CACHE_LIMIT, or else 20 % of the disk's capacity."""
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return int(0.2 * shutil.disk_usage(folder).total)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.lower())
    if match is None:
        raise InputError(f"{LIMIT} = {text!r}: must be a size such as 50GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def temporary_folder() -> tuple[Path, int]:
    """Make a temporary folder, and a descriptor to close on removal; also remove folders of killed processes."""
    for owner in Path(tempfile.gettempdir()).glob(f"flatout-*/{_OWNER}"):
        with contextlib.suppress(OSError):  # in use, or another user's
            descriptor = lock(owner, wait=False)
            shutil.rmtree(owner.parent, ignore_errors=True)
            os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    descriptor = lock(folder / ".new")
    (folder / ".new").rename(folder / _OWNER)  # it gets its name when it is locked
    return folder, descriptor


@contextlib.contextmanager
def making(target: Path, doing: str, report: Progress) -> Iterator[None]:
    """Lock a folder to be made, waiting with a note while another process has the lock; it ends with the process."""
    path = target.with_name(target.name + ".lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = lock(path, wait=False)
        except BlockingIOError:
            report.note(f"another process is {doing}; waiting for it")
            descriptor = lock(path)
    except OSError as error:
        raise NotWritable(target.parent, error) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(folder: Path, what: str, needed: int = 0) -> Iterator[None]:
    """Make a folder to write to; raise NotWritable, or DiskFull, at once if fewer than the `needed` bytes are free.

    `what` is for the message, such as "500 images need 1,000,000 bytes".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if needed > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise NotWritable(folder, error) from None
        raise DiskFull(
            f"{folder}: the disk is full, or a limit reached: {what} and {shutil.disk_usage(folder).free:,} are free; "
            "make room, or choose another disk (for the cache, set FLATOUT_CACHE; for temporary files, TMPDIR)"
        ) from None


@contextlib.contextmanager
def unfinished(target: Path, what: str, needed: int) -> Iterator[Path]:
    """Yield an empty folder next to `target`, to be filled and renamed to it; an error removes it."""
    folder = target.with_name(target.name + ".partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process
    with writing(target.parent, what, needed):
        try:
            folder.mkdir()
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


# Entries


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or folder in the cache: its last use in seconds since 1970, and whether it counts for the limit."""

    path: Path
    what: str
    size_bytes: int
    used: float
    is_limited: bool


def entries(folder: Path | None = None) -> list[Entry]:
    """List the cache, least recently used first."""
    folder = folder or cache_folder()
    paths = [folder / name for name in _OTHERS]
    paths += [path for kind in _KINDS for path in (folder / kind).glob("*") if path.suffix != ".lock"]
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(_entry(path))
    return sorted(found, key=lambda entry: entry.used)


def use(target: Path, doing: str, report: Progress, make: Callable[[], None]) -> int:
    """Make an entry unless it exists, in one process; return a descriptor that keeps it in the cache until closed."""
    with making(target, doing, report):
        if not target.exists():
            make()
        with contextlib.suppress(OSError):  # only records the last use
            os.utime(target)
        descriptor = lock(target / _DESCRIPTIONS[target.parent.name], shared=True)
    make_room(target.parent.parent, report)
    return descriptor


def make_room(folder: Path, report: Progress) -> None:
    """Remove least recently used entries that are not in use, until the limit is met, with a note for each."""
    limited = [entry for entry in entries(folder) if entry.is_limited]
    excess = sum(entry.size_bytes for entry in limited) - limit_bytes(folder)
    for entry in limited[:-1]:  # the newest is about to be used
        if excess > 0 and remove(entry.path):
            excess -= entry.size_bytes
            report.note(f"removed the least recently used entry from the cache, which is full: {entry.what}")


def _entry(path: Path) -> Entry:
    kind, used, size_bytes = path.parent.name, path.stat().st_mtime, 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += file.lstat().st_size
    what = kind if kind == "downloads" else path.name
    if kind in _DESCRIPTIONS:
        try:
            about = json.loads((path / _DESCRIPTIONS[kind]).read_text(encoding="utf-8"))
            what = about["url"] if kind != "packs" else f"{about['images']:,} images, {about['path'] or about['kind']}"
        except (OSError, ValueError, LookupError, TypeError):
            what = f"incomplete: {path.name}"
    return Entry(path=path, what=what, size_bytes=size_bytes, used=used, is_limited=kind in _DESCRIPTIONS)


def remove(path: Path) -> bool:
    """Remove an entry unless a process uses or makes it; return whether it was removed."""
    target, locks = path.with_name(path.name.removesuffix(".partial")), list[Path]()
    if path.parent.name in _KINDS:
        locks = [target.with_name(f"{target.name}.lock"), target / _DESCRIPTIONS.get(path.parent.name, ".lock")]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for file in filter(Path.is_file, locks):
            stack.callback(os.close, lock(file, wait=False))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return True
    return False


# Keys


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return one hexadecimal digest of several pieces and of the boundaries between them."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def digest_files(paths: Sequence[object], *, memo: Path, report: Progress) -> Iterator[bytes]:
    """Yield the digest of each file's content, read on all cores; one that cannot be read has the digest of the reason.

    `memo` is a folder of digests: while size, inode and times of all files are unchanged, none is read again.
    """
    now_ns = time.time_ns()
    names = [os.path.abspath(path) for path in paths]  # type: ignore[type-var]  # noqa: PTH100 - Path.absolute keeps ".."
    stamps = list(map(_stamp, names))
    stamped = (os.fsencode(f"{stamp} {name}") for stamp, name in zip(stamps, names, strict=True))
    known, digests = memo / combined_digest(stamped), b""
    with contextlib.suppress(OSError):
        digests = known.read_bytes()
    if len(digests) != DIGEST_BYTES * len(names):
        digests = _read_digests(names, stamps, report)
        if all(changed_ns and now_ns - changed_ns > _RESTED_NS for _, _, changed_ns, _ in stamps):
            with contextlib.suppress(OSError, InputError, DiskFull):  # the memo only saves time
                memo.mkdir(parents=True, exist_ok=True)
                write_atomically(known, digests)
    return (digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))


def _read_digests(names: Sequence[str], stamps: Sequence[tuple[int, ...]], report: Progress) -> bytes:
    parts = [(i, start) for i, (size, *_) in enumerate(stamps) for start in range(0, size or 1, _PART_BYTES)]
    step = max(1, min(_PARTS_PER_TASK, len(parts) // usable_cores()))
    tasks = [parts[first : first + step] for first in range(0, len(parts), step)]
    digests, done = [b""] * len(names), 0

    def read(i: int, start: int) -> bytes:
        if not any(stamps[i]):  # reading a FIFO or a device might never end
            return b"not a regular file"
        try:
            with open(names[i], "rb", buffering=0) as file:  # noqa: PTH123 - faster than Path.open
                return os.pread(file.fileno(), _PART_BYTES, start)
        except OSError as error:
            return f"cannot be read: {error.errno}".encode()

    with ThreadPoolExecutor(usable_cores()) as pool:
        results = pool.map(lambda task: [_blake2b(read(*part)) for part in task], tasks)
        for task, found in zip(tasks, results, strict=True):
            for (i, _), digest in zip(task, found, strict=True):
                digests[i] += digest
            done += len(task)
            report.update(done, len(parts), "files")
    return b"".join(digest if len(digest) == DIGEST_BYTES else _blake2b(digest) for digest in digests)


def _stamp(name: str) -> tuple[int, int, int, int]:
    """Return size, times and inode; zeros for what is not a regular file."""
    with contextlib.suppress(OSError):
        status = os.stat(name)  # noqa: PTH116 - twice as fast as Path.stat, and called for every file of a data set
        if stat.S_ISREG(status.st_mode):
            return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return 0, 0, 0, 0


def _blake2b(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
