"""What readers share that needs no torch: the message about a damaged file, and the order of names."""

import re
from pathlib import Path

from flatout.errors import InputError, one_line


def damaged(path: Path, what: str, reason: object) -> InputError:
    """Return the error for a file that its format's reader cannot follow."""
    return InputError(f"{path}: cannot be read as {what} ({one_line(reason)}); it is damaged or something else")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `conv2d_10` behind `conv2d_9`, and `conv2d` before `conv2d_1`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
