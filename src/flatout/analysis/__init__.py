"""Everything around training: inspecting data, planning and benchmarking jobs, comparing runs."""

from datetime import datetime
from pathlib import Path

from flatout.utils.errors import InputError


def check_free(out: Path | None) -> None:
    """Raise InputError if an output folder is not empty."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty folder; choose another --out")


def default_folder(name: str) -> Path:
    """Return a new name under `runs/`."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def make_folder(out: Path | None, name: str) -> Path:
    """Make the folder `out`, or a new one under `runs/`; raise InputError if it cannot be written."""
    out = out or default_folder(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
    return out
