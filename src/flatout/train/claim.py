"""Exclusive use of a run folder by one process, until it ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from flatout.config import Recipe
from flatout.distributed.environment import launched
from flatout.train.request import Options
from flatout.utils import run_files
from flatout.utils.errors import InputError, Stopped
from flatout.utils.files import sweep_temporary_files, write_atomically
from flatout.utils.host import process_place

# What --overwrite removes: the files that a run writes, then their folders.
_FILES_OF_A_RUN = (
    f"{run_files.CHECKPOINTS}/epoch-*.safetensors",
    run_files.CHECKPOINTS,
    f"{run_files.LOGS}/rank-*.log",
    f"{run_files.LOGS}/rank-*.samples.jsonl",
    f"{run_files.LOGS}/{run_files.TRACKER_IDS}",
    run_files.LIVE,
    run_files.DEVICES,
    run_files.LOGS,
    f"{run_files.TENSORBOARD}/events.out.tfevents.*",
    run_files.TENSORBOARD,
    *run_files.PICTURES,
    run_files.RECIPE,
    run_files.METRICS,
    run_files.SUMMARY,
    run_files.WEIGHTS,
    run_files.KNOWN,
    run_files.PREDICTIONS,
    run_files.SPLITS,
    run_files.REPORT,
)
# Tolerance: a process's start is relative to the host's, which clock corrections shift.
_CLOCK_SECONDS = 5.0
_FOLDS = run_files.FOLD.format("[1-9]*")
_OWN_FILES = (*(f"{_FOLDS}/{name}" for name in _FILES_OF_A_RUN), _FOLDS, *_FILES_OF_A_RUN)


def check(options: Options) -> None:
    """Raise InputError early, before the data is read, if `claimed` will refuse the run folder on this host."""
    if options.hosts.most == 1 and launched() is None:
        _check_content(options.out, resume=options.resume, overwrite=options.overwrite)


@contextlib.contextmanager
def claimed(out: Path | None, job: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Create a run folder if necessary, and lock it while the context lasts.

    A new folder is removed if it stays empty, or if the run ends through wrong input or the user before training.

    Args:
        out: the folder; None for a new one under `runs/`, named by the job and the time.
        overwrite: replace the run in the folder, once `begin` is called.

    Raises:
        InputError: another process uses the folder, it has other content, or it cannot be written.
    """
    _check_content(out, resume=resume, overwrite=overwrite)
    target = out or Path("runs/new")
    existed = {path for path in (target, *target.parents) if path.exists()}
    with contextlib.ExitStack() as stack:
        try:
            folder = _make(out, job)
            stack.callback(_remove_empty, [path for path in (folder, *folder.parents) if path not in existed])
            stack.enter_context(_locked(folder))
            _check_content(folder, resume=resume, overwrite=overwrite)
            is_new = _is_empty(folder)
            sweep_temporary_files(folder)
        except OSError as error:
            raise InputError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
        try:
            yield folder
        except (InputError, Stopped, KeyboardInterrupt):
            # Weights and checkpoints, including those of folds.
            if is_new and not any(folder.rglob("*.safetensors")):
                with contextlib.suppress(OSError):
                    _remove_run(folder)
            raise


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that uses a run folder, or used it when it or its host failed.

    Attributes:
        process: its PID.
        started: its start in seconds since 1970.
        place: its host and container.
    """

    process: int
    started: float
    place: str

    def is_alive(self) -> bool | None:
        """Whether the process is alive; None if it is on another host."""
        if self.place != process_place():
            return None
        try:
            found = psutil.Process(self.process)
            return abs(found.create_time() - self.started) < _CLOCK_SECONDS and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def holder(folder: Path) -> Holder | None:
    """Return the process that uses a run folder, or None."""
    try:
        process, started, place = (folder / run_files.LOCK).read_text(encoding="utf-8").split()
        return Holder(process=int(process), started=float(started), place=place)
    except (OSError, ValueError):
        return None


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def begin(folder: Path, recipe: Recipe, *, overwrite: bool) -> None:
    """Write the recipe of a run into its folder, after removing an old run if `overwrite`."""
    try:
        if overwrite:
            _remove_run(folder)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from None
    head = f"Repeat this run: flatout train {run_files.RECIPE}"
    write_atomically(folder / run_files.RECIPE, recipe.to_toml(head).encode())


def _remove_run(folder: Path) -> None:
    for path in (p for name in _OWN_FILES for p in folder.glob(name)):
        if path.is_file():
            path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def _check_content(folder: Path | None, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise InputError("--resume and --overwrite contradict each other: give one of them")
    if folder is None or not folder.exists() or _is_empty(folder):
        return
    if not resume and not overwrite:
        raise InputError(f"{folder}: exists; choose another --out, or --resume or --overwrite the run in it")
    if not (folder / run_files.RECIPE).is_file():
        flag = "resume" if resume else "overwrite"
        raise InputError(f"{folder}: is not a run folder, so --{flag} does not touch it; choose another --out")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and all(path.name == run_files.LOCK for path in folder.iterdir())


def _make(out: Path | None, job: str) -> Path:
    """Make the folder; a default name is unique."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        return out
    name = f"{job}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = Path("runs") / name, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1
        folder = Path("runs") / f"{name}-{number}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder; the system releases the lock when the process dies."""
    path = folder / run_files.LOCK
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                process = (file.read().split() or ["unknown"])[0]
                raise InputError(
                    f"{folder}: in use by process {process}; wait for it or choose another --out"
                ) from None
            # The previous process may have removed the file after it was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    break
        file.truncate(0)
        file.write(f"{os.getpid()} {psutil.Process().create_time()} {process_place()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
