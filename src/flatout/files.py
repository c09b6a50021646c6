"""Files that are either whole or absent."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from flatout.errors import DiskFull, InputError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = re.compile(r"\..+\.(\d+)-\w+\.tmp")


def write_atomically(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a temporary file beside `path`, flush it to the disk, then rename it. Nothing is left after an error.

    Args:
        path: the file; an existing one is replaced only when the new one is whole.
        content: its bytes, or a function that writes the path it is given.

    Raises:
        DiskFull: the disk is full.
        InputError: the folder is missing or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        if callable(content):
            # Some writers make files that only their owner may read; the umask decides here.
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
            temporary.unlink(missing_ok=True)


def sweep_temporary_files(folder: Path) -> None:
    """Remove what `write_atomically` left in a folder and its subfolders in processes that were killed."""
    import psutil

    for path in folder.rglob(".*.tmp"):
        if (match := _TEMPORARY.fullmatch(path.name)) and not psutil.pid_exists(int(match[1])):
            path.unlink(missing_ok=True)


def printable(name: object) -> str:
    """Return a path or name with bytes that are not UTF-8 escaped, as in `caf\\xe9`, so that it can be written."""
    return os.fsencode(str(name)).decode("utf-8", "backslashreplace")
