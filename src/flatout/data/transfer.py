"""Download a file from any server, so that an interrupted download continues where it ended."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import InputError

Chunks = Generator[bytes, None, None]


class TransferError(InputError):
    """A file could not be downloaded, for `reason`."""

    def __init__(self, url: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{url}: {reason}" + (f"; {fix}" if fix else ""))
        self.reason = reason


class SourceChanged(TransferError):
    """The file is another one than when its download began, so the parts do not fit together."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "changed during the download", "run the same command again to download what is there now")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as a server describes it.

    Attributes:
        url: what messages name: without a query, which may be a signature.
        name: its path in the folder of the download, with `/`.
        size: its bytes; None where the server does not tell.
        version: an ETag or the like, which another content would not have; empty where the server gives none.
        digest: the name of a hash function and its hexadecimal digest; None where the server gives none.
        read: takes the first byte wanted; returns the first byte that arrives, which is 0 where the server cannot
            start elsewhere, and the chunks from there on. Both raise TransferError.
    """

    url: str
    name: str
    size: int | None = None
    version: str = ""
    digest: tuple[str, str] | None = None
    read: Callable[[int], tuple[int, Chunks]]


def transfer(file: RemoteFile, path: Path, advance: Callable[[int], None]) -> None:
    """Download a file to `path`, which may have its beginning already, and flush it to the disk.

    Args:
        file: the file; only one with size and version is continued.
        path: where it goes; its folder exists.
        advance: receives numbers of bytes as they arrive; what it raises ends the transfer.

    Raises:
        TransferError: not all arrived; the beginning stays, unless it is of another version or damaged.
        OSError: the file cannot be written.
    """
    with path.open("ab") as out:
        start = out.tell()
        if not file.version or start > (file.size or 0):
            start = 0
        if start == file.size:
            advance(start)
        else:
            start, chunks = file.read(start)
            with contextlib.closing(chunks):  # and its connection
                out.truncate(start)
                advance(start)
                for chunk in chunks:
                    advance(len(chunk))
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    if fault := _fault(file, path):
        path.unlink()
        raise TransferError(file.url, fault, "it was damaged on the way, or has changed: run the same command again")


def _fault(file: RemoteFile, path: Path) -> str:
    """Return how a file differs from what the server describes; empty if it does not."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size:,} bytes arrived instead of {file.size:,}"
    if file.digest is None:
        return ""
    name, expected = file.digest
    found = digest_of(path, name)
    return "" if found == expected else f"the file there has {name.upper()} {found} instead of {expected}"


def digest_of(path: Path, name: str) -> str:
    """Return the hexadecimal digest of a file by a hash function of hashlib."""
    with path.open("rb") as file:
        # Against damage, not attacks; it is what the publishers give.
        return hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False)).hexdigest()
