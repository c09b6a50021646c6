"""Digests of file contents, remembered so that unchanged files are not read again."""

import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.host import usable_cores

if TYPE_CHECKING:
    from flatout.data.pack import Progress

DIGEST_BYTES = 20

_READ_BYTES = 1 << 20
_FILES_PER_TASK = 64
_ROWS_PER_QUERY = 10_000

# A file changed twice within one tick of the file system's clock looks the same as after the first change, so a digest
# is only remembered once the file has rested. Ticks are 10 ms at most, or 2 s where times are whole seconds.
_RESTED_SECONDS = 0.1
_RESTED_SECONDS_COARSE = 2.5

_Stamp = tuple[int, int, int, int]
_Digested = tuple[str, bytes, _Stamp | None]


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return one hexadecimal digest of several pieces, which also depends on where one ends and the next begins."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def digest_files(paths: Sequence[Path], *, memo: Path | None, report: "Progress | None" = None) -> list[bytes]:
    """Return the BLAKE2b digest of each file's content, in the order of `paths`, reading on all cores.

    Args:
        paths: the files.
        memo: an SQLite database, made where there is none; several processes may use it at once. A file whose size,
            inode and times of modification and status change are unchanged is not read again. It only saves time: a
            damaged one is replaced, and where none can be written everything is read.
        report: receives the number of files read.

    Returns:
        A digest of DIGEST_BYTES bytes for each file. A file that cannot be read has the digest of the reason; it is
        reported by whoever decodes it.
    """
    names = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - Path.absolute keeps "..", Path.resolve is slow
    stamps = {name: _stamp(name) for name in names}
    known = _recall(memo, list(stamps)) if memo is not None else {}
    digests = {name: known[name][1] for name, stamp in stamps.items() if name in known and known[name][0] == stamp}
    unread = sorted((name, stamp) for name, stamp in stamps.items() if name not in digests)
    if unread:
        tasks = [unread[start : start + _FILES_PER_TASK] for start in range(0, len(unread), _FILES_PER_TASK)]
        read: list[_Digested] = []
        with ThreadPoolExecutor(usable_cores()) as pool:
            for results in pool.map(lambda files: [_digest(name, stamp) for name, stamp in files], tasks):
                read += results
                if report is not None:
                    report.update(len(read), len(unread), "files")
        digests.update((name, digest) for name, digest, _ in read)
        if memo is not None:
            _remember(memo, read)
    return [digests[name] for name in names]


def _stamp(name: str) -> _Stamp:
    """Return what changes with the content; zeros for what is not a regular file."""
    try:
        status = os.stat(name)  # noqa: PTH116 - twice as fast as Path.stat, and called for every file of a data set
    except OSError:
        return 0, 0, 0, 0
    if not stat.S_ISREG(status.st_mode):
        return 0, 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(name: str, before: _Stamp) -> _Digested:
    """Return name, digest and, if the digest may be remembered, the stamp of a file."""
    now_ns = time.time_ns()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if not any(before):  # reading a FIFO or a device might never end
        return name, hashlib.blake2b(b"not a regular file", digest_size=DIGEST_BYTES).digest(), None
    try:
        with open(name, "rb", buffering=0) as file:  # noqa: PTH123 - faster than Path.open
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        digest.update(f"cannot be read: {error.errno}".encode())
        return name, digest.digest(), None
    changed_ns = before[2]
    rested = _RESTED_SECONDS_COARSE if changed_ns % 1_000_000_000 == 0 else _RESTED_SECONDS
    is_settled = now_ns - changed_ns > rested * 1e9 and _stamp(name) == before
    return name, digest.digest(), before if is_settled else None


@contextmanager
def _open_memo(memo: Path) -> Iterator[sqlite3.Connection]:
    memo.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(memo, timeout=30)) as database, database:
        # SQLite's integers are signed 64-bit; an inode may use the last bit, so it is kept as text.
        database.execute(
            "CREATE TABLE IF NOT EXISTS digests (path BLOB PRIMARY KEY, size INTEGER, modified_ns INTEGER, "
            "changed_ns INTEGER, inode TEXT, digest BLOB) WITHOUT ROWID"
        )
        yield database


def _recall(memo: Path, names: Sequence[str]) -> dict[str, tuple[_Stamp, bytes]]:
    known = {}
    try:
        with _open_memo(memo) as database:
            for start in range(0, len(names), _ROWS_PER_QUERY):
                some = [os.fsencode(name) for name in names[start : start + _ROWS_PER_QUERY]]
                marks = ",".join("?" * len(some))
                rows = database.execute(f"SELECT * FROM digests WHERE path IN ({marks})", some)
                for path, size, modified_ns, changed_ns, inode, digest in rows:
                    known[os.fsdecode(path)] = ((size, modified_ns, changed_ns, int(inode)), digest)
    except (sqlite3.OperationalError, OSError):  # locked for long, or not writable
        return {}
    except sqlite3.DatabaseError:  # damaged
        memo.unlink(missing_ok=True)
        return {}
    return known


def _remember(memo: Path, digested: Iterable[_Digested]) -> None:
    rows = [
        (os.fsencode(name), *stamp[:3], str(stamp[3]), digest) for name, digest, stamp in digested if stamp is not None
    ]
    try:
        with _open_memo(memo) as database:
            database.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?)", rows)
    except (sqlite3.DatabaseError, OSError):  # it only saves time
        return
