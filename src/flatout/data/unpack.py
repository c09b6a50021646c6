"""ZIP and tar archives: unpacked once into the cache, with limits against hostile ones.

Only regular files and folders are written, below the folder of the archive.
"""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import re
import stat
import tarfile
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flatout.data.cache import UNPACKED, Progress, cache_folder, combined_digest, remove, unfinished, use
from flatout.utils.console import Console
from flatout.utils.errors import DiskFull, InputError, first_line
from flatout.utils.files import NO_SPACE, printable, write_atomically

_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_MAX_EXPANSION = 200  # a larger factor is treated as a decompression bomb
_EXPANSION_SLACK_BYTES = 1 << 26
_MAX_MEMBERS = 10_000_000
_READ_BYTES = 1 << 20
_BLOCK = 512
_COMPRESSIONS = {b"\x1f\x8b\x08": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(_SUFFIXES) and path.is_file()


class UnpackedArchive:
    """The content of an archive in `folder`, which the cache does not remove while this object exists."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._release = weakref.finalize(self, os.close, descriptor)

    def remove(self) -> None:
        """Remove the folder, unless another process uses it."""
        self._release()
        remove(self.folder.parent)


def unpack(path: Path, report: Progress | None = None) -> UnpackedArchive:
    """Unpack an archive into the cache, unless an unpacked copy of the unchanged archive exists."""
    report, status = report or Console(), path.stat()
    known = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    entry = cache_folder() / "unpacked" / combined_digest([os.fsencode(known)])
    descriptor = use(entry, "unpacking this archive", report, lambda: _publish(path, entry, report))
    return UnpackedArchive(entry / path.name, descriptor)


def _publish(path: Path, entry: Path, report: Progress) -> None:
    total = path.stat().st_size  # the least, if a tar archive is compressed
    if path.suffix.lower() == ".zip":
        with reading(path), zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
    refuse_bomb(path, path.stat().st_size, total)
    with unfinished(entry, f"unpacking {path} needs {total:,} bytes", total) as folder:
        report.note(f"unpacking {path} ({total / 1e6:,.1f} MB)")
        (folder / path.name).mkdir()
        with reading(path):
            _write_members(path, folder / path.name, total, report)
        write_atomically(folder / UNPACKED, json.dumps({"url": printable(path.absolute())}).encode())
        folder.rename(entry)


def _write_members(path: Path, folder: Path, total: int, report: Progress) -> None:
    size, written = path.stat().st_size, 0
    members = _zip_members(path) if path.suffix.lower() == ".zip" else _tar_members(path)
    for count, (name, stream) in enumerate(members, start=1):
        where = f"{path}: member {printable(name)[:300]}"
        if count > _MAX_MEMBERS:
            raise InputError(f"{path}: has more than {_MAX_MEMBERS:,} members; unpack it and give the folder")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name or (parts and re.fullmatch("[A-Za-z]:", parts[0])):
            raise InputError(f"{where}: leads out of the archive; get the archive from a source that you trust")
        target = folder.joinpath(*parts)
        with reading(where):
            try:
                (target if stream is None else target.parent).mkdir(parents=True, exist_ok=True)
                if stream is None:
                    continue
                with target.open("xb") as file:
                    while block := stream.read(_READ_BYTES):
                        written += len(block)
                        refuse_bomb(where, size, written)
                        file.write(block)
                        report.update(min(written, total) // 10**6, max(1, total // 10**6), "MB")
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise InputError(f"{where}: is there twice; remove one, or unpack it and give the folder") from None


def _zip_members(path: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.replace("\\", "/")
            is_plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
            if not is_plain or info.flag_bits & 1:  # encrypted
                what = "is a link, device or encrypted"
                raise InputError(f"{path}: member {printable(name)}: {what}; unpack the archive and give the folder")
            if name.endswith("/"):
                yield name, None
            else:
                with archive.open(info) as stream:
                    yield name, stream


def _tar_members(path: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with open_decompressed(path) as stream:
        for archive, member in tar_members(stream, path):
            yield member.name, archive.extractfile(member)


def tar_members(file: IO[bytes], path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the files and folders of a tar archive, or of several that were concatenated, and their archive.

    `tarfile` takes a damaged header, or a cut between two members, for the end; a real one has a block of zeros.
    """
    with reading(path):
        stream = LimitedStream(file, path)
        while True:
            with tarfile.open(fileobj=stream, mode="r:") as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined] - millions would take gigabytes
                    if not (member.isreg() or member.isdir()) or member.issparse() or member.size < 0:
                        what = "is a link, device or sparse file, or damaged"
                        raise InputError(f"{path}: member {printable(member.name)}: {what}; give an unpacked folder")
                    yield archive, member
                end = archive.offset  # type: ignore[attr-defined]
            block = stream.last
            if len(block) < _BLOCK or any(block):
                raise InputError(f"{path}: is damaged or cut off: no header or end at byte {end:,}; get it again")
            while block and not any(block):
                block = stream.read(_BLOCK)
            if not block:
                return
            stream.seek(stream.tell() - len(block))


class LimitedStream(io.RawIOBase):
    """The decompressed bytes of a file, and the `last` piece read.

    Refuses decompression bombs, and reads of more than a mebibyte, which a damaged header may cause.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__()
        self.last = b""
        self._file, self._path, self._compressed = file, path, path.stat().st_size

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _READ_BYTES:
            raise InputError(f"{self._path}: is damaged (a header of {size:,} bytes); get it again")
        self.last = self._file.read(size)
        refuse_bomb(self._path, self._compressed, self._file.tell())
        return self.last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        refuse_bomb(self._path, self._compressed, position)
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


def refuse_bomb(where: object, compressed: int, expanded: int) -> None:
    """Raise InputError if the sizes known or read so far are those of a decompression bomb."""
    if expanded > _MAX_EXPANSION * compressed + _EXPANSION_SLACK_BYTES:
        fix = "if it is not a decompression bomb, unpack it first"
        raise InputError(f"{where}: expands from {compressed:,} to {expanded:,} bytes or more; {fix}")


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file that may be compressed with gzip, bzip2 or xz."""
    return (opener_of(path) or open)(path, "rb")


def opener_of(path: Path) -> Callable[..., IO[bytes]] | None:
    """Return the function that opens a file compressed with gzip, bzip2 or xz; None for another file."""
    with path.open("rb") as file:
        start = file.read(6)
    return next((opener for magic, opener in _COMPRESSIONS.items() if start.startswith(magic)), None)


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Turn errors about damaged or unreadable files into InputError; a full disk stays OSError."""
    try:
        yield
    except (InputError, DiskFull):
        raise
    except Exception as error:  # the libraries raise nearly every built-in error on damaged files
        number = error.errno if isinstance(error, OSError) else None
        if number in NO_SPACE:
            raise
        if number not in (None, errno.EINVAL):
            raise InputError(f"{where}: cannot be read: {os.strerror(number)}") from None
        raise InputError(f"{where}: is damaged or cut off ({first_line(error)}); get it again") from None
