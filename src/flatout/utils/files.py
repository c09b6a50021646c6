"""Atomic files, locks, and folders for output."""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from flatout.utils.errors import DiskFull, InputError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The names of files that are being written.
_TEMPORARY = f".*[.-]{'[0-9a-f]' * 8}.tmp"


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> int:
    """Lock a file until the returned descriptor is closed or the process ends.

    Raises BlockingIOError if another process has it and this one does not `wait`. A missing file is created unless the
    lock is `shared`, that is, compatible with other shared locks.
    """
    descriptor = os.open(path, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_atomically(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file, which replaces another only when it is complete; an error leaves nothing behind.

    `content` is its bytes, or a function that writes the path it is given. Raises DiskFull or InputError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = None
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            descriptor = lock(temporary)  # so that it is not swept
        if callable(content):
            # Some writers create files readable only by their owner; apply the umask instead.
            temporary.touch()
            mode = temporary.stat().st_mode
            content(temporary)
            temporary.chmod(mode)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_SPACE:
            raise DiskFull(f"{path}: cannot be written: {reason}; free disk space, then continue") from None
        raise InputError(f"{path}: cannot be written: {reason}; fix that, or choose another --out") from None
    finally:
        with contextlib.suppress(OSError):  # the folder itself may be missing
            temporary.unlink()
        if descriptor is not None:
            os.close(descriptor)


def sweep_temporary_files(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder and its subfolders."""
    for path in folder.rglob(_TEMPORARY):
        with contextlib.suppress(OSError):  # a process is writing it
            descriptor = lock(path, wait=False)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def printable(name: object) -> str:
    """Return a path or name with bytes that are not UTF-8 escaped, as in `caf\\xe9`, so that it can be written."""
    return os.fsencode(str(name)).decode("utf-8", "backslashreplace")


def check_free(folder: Path | None, flag: str = "--out") -> None:
    """Raise InputError if an output folder, which `flag` names, is not empty."""
    try:
        is_used = folder is not None and folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}; choose another {flag}") from None
    if is_used:
        raise InputError(f"{folder}: exists and is not an empty folder; choose another {flag}")


def default_folder(name: str) -> Path:
    """Return a new name under `runs/`."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def make_folder(folder: Path, flag: str = "--out") -> Path:
    """Make an output folder if it is missing; raise InputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}; choose another {flag}") from None
    return folder
