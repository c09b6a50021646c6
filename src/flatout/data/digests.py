"""Digests of file contents, remembered so that unchanged files are not read again."""

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import DiskFull, InputError
from flatout.files import write_atomically
from flatout.host import usable_cores

if TYPE_CHECKING:
    from flatout.data.image_bytes import ImageBytes
    from flatout.data.pack import Progress

DIGEST_BYTES = 20

_READ_BYTES = 1 << 20
_FILES_PER_TASK = 64
_TASKS_AT_ONCE = 1024
# Larger files have the digest of the digests of their parts, which are read on all cores: a data set may be one file.
_PART_BYTES = 1 << 23

# A file changed twice within one tick of the file system's clock looks the same as after the first change, so digests
# are only remembered once the files have rested. Ticks are 10 ms at most, or 2 s where times are whole seconds.
_RESTED_NS = 10**8
_RESTED_NS_COARSE = 25 * 10**8

_Stamp = tuple[int, int, int, int]


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return one hexadecimal digest of several pieces, which also depends on where one ends and the next begins."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def digest_files(
    paths: "Sequence[ImageBytes]", *, memo: Path | None, report: "Progress | None" = None
) -> Iterator[bytes]:
    """Yield the BLAKE2b digest of each file's content, in the order of `paths`, reading on all cores.

    Args:
        paths: the files; images in containers are found by the content of these instead.
        memo: a folder to remember the digests in, made if need be. If size, inode and times of modification and status
            change of all files are unchanged, none is read again. Where it cannot be written, everything is read.
        report: receives the number of files read.

    Yields:
        A digest of DIGEST_BYTES bytes for each file. A file that cannot be read has the digest of the reason; it is
        reported by whoever decodes it.
    """
    # Nothing else is kept of a file: there may be millions.
    known = memo and memo / combined_digest(os.fsencode(f"{_stamp(name)} {name}") for name in map(_name, paths))
    if known:
        with suppress(OSError):
            content = known.read_bytes()
            if len(content) == DIGEST_BYTES * len(paths):
                yield from _each(content)
                return
    digests, are_settled, done = bytearray(), True, 0
    cores = usable_cores()
    step = max(1, min(_FILES_PER_TASK, len(paths) // cores))

    def read(start: int) -> list[tuple[bytes, bool]]:
        return [_digest(_name(path), max(1, cores // len(paths))) for path in paths[start : start + step]]

    with ThreadPoolExecutor(cores) as pool:
        starts = range(0, len(paths), step)
        # Some tasks at a time: each that waits takes memory.
        groups = (starts[first : first + _TASKS_AT_ONCE] for first in range(0, len(starts), _TASKS_AT_ONCE))
        for results in (results for group in groups for results in pool.map(read, group)):
            digests += b"".join(digest for digest, _ in results)
            are_settled = are_settled and all(is_settled for _, is_settled in results)
            done += len(results)
            if report is not None:
                report.update(done, len(paths), "files")
    if known and are_settled:
        with suppress(OSError, InputError, DiskFull):  # it only saves time
            known.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(known, bytes(digests))
    yield from _each(digests)


def _each(digests: bytes | bytearray) -> Iterator[bytes]:
    return (bytes(digests[i : i + DIGEST_BYTES]) for i in range(0, len(digests), DIGEST_BYTES))


def _name(path: "ImageBytes") -> str:
    """Return a file's absolute path."""
    assert isinstance(path, Path)
    return os.path.abspath(path)  # noqa: PTH100 - Path.absolute keeps "..", Path.resolve is slow


def _stamp(name: str) -> _Stamp:
    """Return what changes with the content; zeros for what is not a regular file."""
    try:
        status = os.stat(name)  # noqa: PTH116 - twice as fast as Path.stat, and called for every file of a data set
    except OSError:
        return 0, 0, 0, 0
    if not stat.S_ISREG(status.st_mode):
        return 0, 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(name: str, threads: int) -> tuple[bytes, bool]:
    """Return the digest of a file, of which so many parts are read at once, and whether its stamp may stand for it."""
    now_ns, before = time.time_ns(), _stamp(name)
    changed_ns = before[2]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if not any(before):  # reading a FIFO or a device might never end
        digest.update(b"not a regular file")
        return digest.digest(), False
    try:
        with open(name, "rb", buffering=0) as file:  # noqa: PTH123 - faster than Path.open
            if before[0] <= _PART_BYTES:
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
            else:
                with ThreadPoolExecutor(threads) as pool:
                    starts = range(0, before[0], _PART_BYTES)
                    for part in pool.map(partial(_digest_of_part, file.fileno()), starts):
                        digest.update(part)
    except OSError as error:
        digest.update(f"cannot be read: {error.errno}".encode())
        return digest.digest(), False
    is_rested = now_ns - changed_ns > (_RESTED_NS if changed_ns % 10**9 else _RESTED_NS_COARSE)
    return digest.digest(), is_rested and _stamp(name) == before


def _digest_of_part(descriptor: int, start: int) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for offset in range(start, start + _PART_BYTES, _READ_BYTES):
        digest.update(os.pread(descriptor, _READ_BYTES, offset))
    return digest.digest()
