"""Files that are either whole or not there."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from flatout.errors import InputError


def write_atomically(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file through a temporary one beside it: flushed to the disk, then renamed.

    Args:
        path: the file; an old one is replaced only when the new one is whole.
        content: its bytes, or a function that writes the path it is given.

    Raises:
        InputError: the disk is full or the folder cannot be written; nothing half-written is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            # Some writers make files that only their owner may read; a run is for others too, as far as the umask says.
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
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}; mend that, or choose another --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # the folder itself may be what is missing
            temporary.unlink(missing_ok=True)
