"""The run folder: its exclusive use by one process, its recipe, and the checkpoints from which a run continues."""

import contextlib
import itertools
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.config import FREE_KEYS, Recipe, from_dict, of_run
from flatout.data.pack import Pack
from flatout.distributed.environment import launched, restart_count
from flatout.engine.base import Counts
from flatout.models.weights import read_weights, save_tensors
from flatout.train.request import Options, Progress, TrainContext, TrainRequest
from flatout.utils import run_files
from flatout.utils.errors import InputError, Stopped
from flatout.utils.files import default_folder, lock, sweep_temporary_files, write_atomically
from flatout.utils.host import process_place
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from flatout.distributed.world import World

# What --overwrite removes: the files that a run writes, then their folders.
_FILES = (
    *("checkpoints/epoch-*.safetensors", "checkpoints", "logs/rank-*.log", "logs/rank-*.samples.jsonl"),
    *(f"logs/{run_files.TRACKER_IDS}", run_files.LIVE, run_files.DEVICES, "logs"),
    *("tensorboard/events.out.tfevents.*", "tensorboard", *run_files.PICTURES, run_files.RECIPE, run_files.METRICS),
    *(run_files.SUMMARY, run_files.WEIGHTS, run_files.KNOWN, run_files.PREDICTIONS, run_files.SPLITS, run_files.REPORT),
)
_FOLDS = run_files.FOLD.format("[1-9]*")
_OWN_FILES = (*(f"{_FOLDS}/{name}" for name in _FILES), _FOLDS, *_FILES)
# Tolerance: a process's start is relative to the host's, which clock corrections shift.
_CLOCK_SECONDS = 5.0
# Prefix of the tensors of the best epoch in a checkpoint.
BEST = "best."

# --- Exclusive use ----------------------------------------------------------------------------------------------------


def check(options: Options) -> None:
    """Refuse a run folder that `claimed` will refuse, before the data is read."""
    if options.resume and options.out is None:
        raise InputError("resume needs out, the run folder to continue")
    if options.hosts.most == 1 and launched() is None:
        _check_content(options.out, resume=options.resume, overwrite=options.overwrite)


@contextlib.contextmanager
def claimed(out: Path | None, job: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Lock a run folder while the context lasts; without `out`, a new one under `runs/`, named by the job and the time.

    It is removed if it is new, and stays empty or the run ends through wrong input or the user before training.
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


def _check_content(folder: Path | None, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise InputError("--resume and --overwrite contradict each other: give one of them")
    try:
        if folder is None or not folder.exists() or _is_empty(folder):
            return
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    if not resume and not overwrite:
        raise InputError(f"{folder}: exists; choose another --out, or --resume or --overwrite the run in it")
    if not (folder / run_files.RECIPE).is_file():
        flag = "resume" if resume else "overwrite"
        raise InputError(f"{folder}: is not a run folder, so --{flag} does not touch it; choose another --out")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and all(path.name == run_files.LOCK for path in folder.iterdir())


def _make(out: Path | None, job: str) -> Path:
    if out:
        out.mkdir(parents=True, exist_ok=True)
        return out
    name = default_folder(job)
    for folder in itertools.chain([name], (Path(f"{name}-{number}") for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):  # of a run that began in the same second
            folder.mkdir(parents=True)
            break
    return folder


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _remove_run(folder: Path) -> None:
    for path in (p for name in _OWN_FILES for p in folder.glob(name)):
        if path.is_file():
            path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder; the system releases the lock when the process dies."""
    path = folder / run_files.LOCK
    while True:
        try:
            descriptor = lock(path, wait=False)
        except BlockingIOError:
            user = holder(folder)
            name = user.process if user else "unknown"
            raise InputError(f"{folder}: in use by process {name}; wait for it or choose another --out") from None
        # The previous process may have removed the file after it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                break
        os.close(descriptor)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {psutil.Process().create_time()} {process_place()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that uses or has used a run folder: PID, start in seconds since 1970, host and container."""

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


def begin(folder: Path, recipe: Recipe, *, overwrite: bool) -> None:
    """Write the recipe of a run into its folder, after removing an old run if `overwrite`."""
    try:
        if overwrite:
            _remove_run(folder)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from None
    write_recipe(folder, recipe)


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of a run into its folder."""
    head = f"Repeat this run: flatout train {run_files.RECIPE}"
    write_atomically(folder / run_files.RECIPE, recipe.to_toml(head).encode())


def write_devices(folder: Path, devices: str) -> None:
    """Write the devices of a run, on which it is resumed, even if it is killed before its first epoch."""
    (folder / run_files.LOGS).mkdir(exist_ok=True)
    write_atomically(folder / run_files.DEVICES, devices.encode())


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything a run needs to continue, as one safetensors file, which executes no code and detects damage."""

    tensors: dict[str, Any]  # the engine's state, see `Engine.state`; and, named by BEST, that of the best epoch
    has_best: bool = False  # whether the tensors have the best epoch
    progress: Progress  # without `best`
    recipe: Recipe
    data: JsonObject  # see `facts_of`

    def save(self, folder: Path) -> None:
        """Write a file into the run's `checkpoints/` atomically; of older ones only the previous is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"epoch-{self.progress.epoch:05d}-step-{self.progress.step:07d}.safetensors"
        progress = {name: value for name, value in asdict(self.progress).items() if name != "best"}
        metadata = {"progress": json.dumps(progress), "recipe": self.recipe.to_toml(), "data": json.dumps(self.data)}
        save_tensors(path, self.tensors, metadata)
        older = [other for other in newest_first(folder) if other.name < path.name]
        for other in newest_first(folder):
            # Newer files are damaged: the run was resumed from an older one.
            if other not in (path, *older[:1]):
                other.unlink()

    def check_resumable(self, recipe: Recipe, data: JsonObject, report: Callable[[str], None]) -> None:
        """Refuse to continue with other classes or keys; `report` gets a message if the data has changed."""
        check_same(self.recipe, recipe)
        if recipe.epochs < self.progress.epoch:
            raise InputError(f"--resume: epochs = {recipe.epochs}, but {self.progress.epoch} are done; give more")
        if self.data["classes"] != data["classes"]:
            raise InputError(
                f"--resume: the run was trained on the classes {', '.join(self.data['classes'])}, but the data has "
                f"{', '.join(data['classes'])}: restore the data, or start a new run"
            )
        before, now = (facts.get("functions") for facts in (self.data, data))
        if before is not None and before != now:
            raise InputError(
                f"--resume: the run was trained with {' and '.join(before) or 'no function'} given in Python: continue "
                "with flatout.fit and the same functions"
            )
        if changed := [name for name, value in data.items() if self.data.get(name, value) != value]:
            report(f"the data has changed since the run began: {', '.join(changed)} differ")


def check_same(before: Recipe, now: Recipe) -> None:
    """Refuse to continue with a recipe that differs in a key other than `FREE_KEYS`."""
    flat = before.flat()
    for key, value in now.flat().items():
        if key not in FREE_KEYS and flat[key] != value:
            raise InputError(
                f"--resume: the run has {key} = {flat[key]!r}; {key} = {value!r} needs a new run. "
                f"Only {', '.join(FREE_KEYS)} can change"
            )


def data_facts(pack: Pack) -> JsonObject:
    """Return what identifies the data."""
    splits = {name: stop - start for name, (start, stop) in pack.splits.items()}
    return {"classes": list(pack.classes), "splits": splits, "images and labels": pack.fingerprint}


def facts_of(context: TrainContext) -> JsonObject:
    """Return what a run continues with besides its recipe: the data, and the names of functions given in Python."""
    return data_facts(context.pack) | {"functions": context.options.functions.in_training}


def continued(request: TrainRequest, run_dir: Path, world: "World", note: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint if the run is continued and has one. All ranks call this.

    Only the main process has its tensors.
    """
    tensors = dict[str, Any]()

    def read() -> Checkpoint | None:
        # A run to overwrite may have left older ones.
        since = request.prepared_at if request.options.overwrite else 0.0
        paths = [path for path in newest_first(run_dir / run_files.CHECKPOINTS) if path.stat().st_mtime >= since]
        if paths and not request.recipe.epochs:
            raise InputError("--resume: epochs = 0, but fine-tuning has begun; give more")
        for path in paths:
            try:
                found = _read(path)
            except InputError as error:
                note(str(error))
            else:
                tensors.update(found.tensors)
                return replace(found, tensors={})
        if paths:
            what = f"all {len(paths)} checkpoints are damaged"
            raise InputError(f"{paths[0].parent}: {what}; train with --overwrite to start again")
        if request.recipe.epochs:
            note("nothing was saved yet: training starts from the beginning")
        return None

    found = world.from_main(read) if request.options.resume or restart_count() > 0 else None
    return replace(found, tensors=tensors) if found else None


def restore(context: TrainContext, newest: Checkpoint) -> Progress:
    """Load a checkpoint into the engine, which distributes the tensors; return its progress. All ranks call this."""
    engine, tensors, progress, note = context.engine, newest.tensors, newest.progress, context.log.note
    newest.check_resumable(context.recipe, facts_of(context), note)
    best = {name.removeprefix(BEST): tensors.pop(name) for name in [*tensors] if name.startswith(BEST)}
    if newest.has_best:
        engine.load_state({**tensors, **best})
        progress.best = engine.snapshot(weights_only=True)
    engine.load_state(tensors)
    tensors.clear()
    note(f"resumed after epoch {progress.epoch}, step {progress.step}")
    return progress


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoint files in a folder."""
    return sorted(folder.glob("epoch-*.safetensors"), reverse=True)


def _read(path: Path) -> Checkpoint:
    tensors, metadata = read_weights(path)
    try:
        fields = json.loads(metadata["progress"])
        fields.pop("first_steps", None)  # of older versions
        fields["counts"] = Counts(**fields["counts"])
        return Checkpoint(
            tensors=tensors,
            has_best=any(name.startswith(BEST) for name in tensors),
            progress=Progress(**fields),
            recipe=of_run(from_dict(tomllib.loads(metadata["recipe"]), where=str(path))),
            data=json.loads(metadata["data"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a checkpoint of flatout ({type(error).__name__}: {error})") from None
