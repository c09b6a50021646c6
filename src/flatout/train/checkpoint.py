"""Checkpoints: the engine's state and the loop's progress in one file that executes no code and detects damage."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import FREE_KEYS, Recipe, from_dict, load_recipe, of_run
from flatout.distributed.environment import restart_count
from flatout.models.weights import read_weights, save_tensors
from flatout.train.progress import Progress, from_plain, to_plain
from flatout.train.request import TrainRequest
from flatout.utils import run_files
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.train.context import TrainContext

_BEST = "best."


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything a run needs to continue.

    Attributes:
        state: the engine's state at `progress`; see `Engine.state`.
        best: the state of `progress.best`; empty if there is none.
        progress: the loop's position and results.
        recipe: the recipe of the run.
        data: see `data_facts`.
    """

    state: dict[str, Any]
    best: dict[str, Any]
    progress: Progress
    recipe: Recipe
    data: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write a file into the run's `checkpoints/` atomically; of older ones only the previous is kept.

        Raises:
            TrainingFailed: the disk is full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"epoch-{self.progress.epoch:05d}-step-{self.progress.step:07d}.safetensors"
        tensors = {**self.state, **{_BEST + name: value for name, value in self.best.items()}}
        metadata = {
            "progress": json.dumps(to_plain(self.progress)),
            "recipe": self.recipe.to_toml(),
            "data": json.dumps(self.data),
        }
        save_tensors(path, tensors, metadata)
        older = [other for other in newest_first(folder) if other.name < path.name]
        for other in newest_first(folder):
            # Newer files are damaged: the run was resumed from an older one.
            if other not in (path, *older[:1]):
                other.unlink()

    def check_resumable(self, recipe: Recipe, data: dict[str, Any], report: Callable[[str], None]) -> None:
        """Check that a run can continue with a recipe and data.

        Args:
            report: called with a message if the content of the data has changed.

        Raises:
            InputError: the classes differ, a key other than `FREE_KEYS` differs, or more epochs are done than wanted.
        """
        check_same(self.recipe, recipe)
        if recipe.epochs < self.progress.epoch:
            raise InputError(f"--resume: epochs = {recipe.epochs}, but {self.progress.epoch} are done; give more")
        if self.data["classes"] != data["classes"]:
            raise InputError(
                f"--resume: the run was trained on the classes {', '.join(self.data['classes'])}, but the data has "
                f"{', '.join(data['classes'])}: restore the data, or start a new run"
            )
        if changed := [name for name, value in data.items() if self.data.get(name) != value]:
            report(f"the data has changed since the run began: {', '.join(changed)} differ")


def check_same(before: Recipe, now: Recipe) -> None:
    """Raise InputError if the recipe of a continued run differs in a key other than `FREE_KEYS`."""
    flat = before.flat()
    for key, value in now.flat().items():
        if key not in FREE_KEYS and flat[key] != value:
            raise InputError(
                f"--resume: the run has {key} = {flat[key]!r}; {key} = {value!r} needs a new run. "
                f"Only {', '.join(FREE_KEYS)} can change"
            )


def data_facts(pack: "Pack") -> dict[str, Any]:
    """Return facts that identify the data: classes, split sizes, and a digest of images and labels."""
    splits = {name: stop - start for name, (start, stop) in pack.splits.items()}
    return {"classes": list(pack.classes), "splits": splits, "images and labels": pack.fingerprint}


def load_newest(folder: Path, report: Callable[[str], None], since: float = 0.0) -> Checkpoint | None:
    """Return the newest intact checkpoint; None if nothing was saved yet.

    Args:
        folder: the run's `checkpoints/`.
        report: called with a message for each damaged file.
        since: older files are ignored; by time.time.

    Raises:
        InputError: all checkpoints are damaged.
    """
    paths = newest_first(folder, since)
    for path in paths:
        try:
            return _read(path)
        except InputError as error:
            report(str(error))
    if paths:
        raise InputError(f"{folder}: all {len(paths)} checkpoints are damaged; train with --overwrite to start again")
    return None


def continued_recipe(request: TrainRequest, run_dir: Path, world: "World") -> Recipe | None:
    """Return the recipe of the continued run; None if nothing was saved yet. All ranks call this."""

    def read() -> Recipe | None:
        if not (_is_continued(request) and newest_first(run_dir / run_files.CHECKPOINTS, _since(request))):
            return None
        return of_run(load_recipe(run_dir / run_files.RECIPE))

    return world.from_main(read)


def restore(context: "TrainContext") -> Checkpoint | None:
    """If the run is continued, load the newest intact checkpoint into the engine.

    All ranks call this; the main process reads the file.

    Returns:
        The checkpoint without its tensors; None if nothing was saved yet.

    Raises:
        InputError: see `load_newest` and `Checkpoint.check_resumable`.
    """
    engine, recipe, note = context.engine, context.recipe, context.log.note
    if not (_is_continued(context.request) and recipe.epochs):
        return None
    state: dict[str, Any] = {}
    best: dict[str, Any] = {}

    def without_tensors() -> Checkpoint | None:
        found = load_newest(context.run_dir / run_files.CHECKPOINTS, note, _since(context.request))
        if found is None:
            return None
        # The engine distributes the tensors.
        state.update(found.state)
        best.update(found.best)
        return replace(found, state={}, best={})

    newest = context.world.from_main(without_tensors)
    if newest is None:
        note("nothing was saved yet: training starts from the beginning")
        return None
    newest.check_resumable(recipe, context.data_facts, note)
    if newest.progress.best_record and recipe.keep == "best":
        engine.load_state({**state, **best})
        newest.progress.best = engine.snapshot(weights_only=True)
    engine.load_state(state)
    note(f"resumed after epoch {newest.progress.epoch}, step {newest.progress.step}")
    return newest


def _is_continued(request: TrainRequest) -> bool:
    """Whether the run continues from a checkpoint, if there is one."""
    return request.options.resume or restart_count() > 0


def _since(request: TrainRequest) -> float:
    """Return the time from which checkpoints belong to this run: a run to overwrite may have left older ones."""
    return request.prepared_at if request.options.overwrite else 0.0


def _read(path: Path) -> Checkpoint:
    tensors, metadata = read_weights(path)
    best = {name.removeprefix(_BEST): value for name, value in tensors.items() if name.startswith(_BEST)}
    try:
        return Checkpoint(
            state={name: value for name, value in tensors.items() if not name.startswith(_BEST)},
            best=best,
            progress=from_plain(json.loads(metadata["progress"])),
            recipe=of_run(from_dict(tomllib.loads(metadata["recipe"]), where=str(path))),
            data=json.loads(metadata["data"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a checkpoint of flatout ({type(error).__name__}: {error})") from None


def newest_first(folder: Path, since: float = 0.0) -> list[Path]:
    """Return the checkpoint files in a folder, newest first, without those older than `since`, by time.time."""
    found = sorted(folder.glob("epoch-*.safetensors"), reverse=True)
    return [path for path in found if path.stat().st_mtime >= since]
