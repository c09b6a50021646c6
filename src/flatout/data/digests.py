"""Digests of file contents, remembered, so that files which have not changed are not read again."""

import hashlib
import os
import sqlite3
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


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return one hexadecimal digest of several pieces; where one piece ends and the next begins counts."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def digest_files(paths: Sequence[Path], *, memo: Path | None, report: "Progress | None" = None) -> list[bytes]:
    """Return the BLAKE2b digest of each file's content, in the order of `paths`.

    Files are read on all cores. With a memo, a file is not read again while its size, its times of modification and of
    status change and its inode stay the same. (A program can set the time of modification back; the other only the
    file system sets.)

    Args:
        paths: the files.
        memo: an SQLite database, made where there is none; several processes may use it at once. It only saves time:
            one that is damaged is replaced, and where none can be written everything is read.
        report: told how many of the files that must be read have been.

    Returns:
        A digest of DIGEST_BYTES bytes for each file. That of a file which cannot be read is of the reason: to name it,
        with all others that are bad, is up to whoever decodes it.
    """
    names = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - Path.absolute keeps "..", Path.resolve is slow
    stamps = [_stamp(name) for name in names]
    known = _recall(memo, names) if memo is not None else {}
    digests = {name: known[name][1] for name, stamp in zip(names, stamps, strict=True) if _is_known(known, name, stamp)}
    unread = sorted({name: stamp for name, stamp in zip(names, stamps, strict=True) if name not in digests}.items())
    if unread:
        tasks = [unread[start : start + _FILES_PER_TASK] for start in range(0, len(unread), _FILES_PER_TASK)]
        read: list[tuple[str, bytes, _Stamp | None]] = []
        with ThreadPoolExecutor(usable_cores()) as pool:
            for results in pool.map(_digest_some, tasks):
                read += results
                if report is not None:
                    report.update(len(read), len(unread), "files")
        digests.update((name, digest) for name, digest, _ in read)
        if memo is not None:
            _remember(memo, [(name, *stamp, digest) for name, digest, stamp in read if stamp is not None])
    return [digests[name] for name in names]


def _stamp(name: str) -> _Stamp | None:
    try:
        status = os.stat(name)  # noqa: PTH116 - twice as fast as Path.stat, and called for every file of a data set
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _is_known(known: dict[str, tuple[_Stamp, bytes]], name: str, stamp: _Stamp | None) -> bool:
    return name in known and known[name][0] == stamp


def _digest_some(files: list[tuple[str, _Stamp | None]]) -> list[tuple[str, bytes, _Stamp | None]]:
    """Return name, digest and, where the digest may be remembered, stamp of each file."""
    results = []
    for name, before in files:
        now_ns = time.time_ns()
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        try:
            with open(name, "rb", buffering=0) as file:  # noqa: PTH123 - as above
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
        except OSError as error:
            digest.update(f"cannot be read: {error.errno}".encode())
            before = None
        is_settled = before is not None and _has_rested(before, now_ns) and _stamp(name) == before
        results.append((name, digest.digest(), before if is_settled else None))
    return results


def _has_rested(stamp: _Stamp, now_ns: int) -> bool:
    _, _, changed_ns, _ = stamp
    is_coarse = changed_ns % 1_000_000_000 == 0
    return now_ns - changed_ns > (_RESTED_SECONDS_COARSE if is_coarse else _RESTED_SECONDS) * 1e9


# The memo


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
    except (sqlite3.OperationalError, OSError):  # locked for long, or not writable: go on without
        return {}
    except sqlite3.DatabaseError:  # damaged: begin a new one
        memo.unlink(missing_ok=True)
        return {}
    return known


def _remember(memo: Path, rows: Sequence[tuple[str, int, int, int, int, bytes]]) -> None:
    packed = [
        (os.fsencode(name), size, modified_ns, changed_ns, str(inode), digest)
        for name, size, modified_ns, changed_ns, inode, digest in rows
    ]
    try:
        with _open_memo(memo) as database:
            database.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?)", packed)
    except (sqlite3.DatabaseError, OSError):  # it only saves time
        return
