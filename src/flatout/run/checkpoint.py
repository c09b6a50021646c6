"""Checkpoints: the engine's state and the loop's progress in one file that executes no code and detects damage."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError
from flatout.models.weights import read_weights, save_tensors
from flatout.recipe import FREE_KEYS, Recipe, from_dict, of_run
from flatout.run.progress import Progress, from_plain, to_plain

if TYPE_CHECKING:
    from flatout.distributed.world import World
    from flatout.engine.base import Engine

_BEST = "best."


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """All that a run needs to continue.

    Attributes:
        state: as `Engine.state` returns it, matching `progress`.
        best: the same of `progress.best`; empty where there is none.
        progress: the loop's position and results.
        recipe: the recipe of the run.
        data: facts of the data (see `consistency.data_facts`); empty in checkpoints that were written without them.
    """

    state: dict[str, Any]
    best: dict[str, Any]
    progress: Progress
    recipe: Recipe
    data: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write a file into the run's `checkpoints/` atomically; of the others only the one before it is kept.

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
            # Files that sort after this one are damaged: the run was resumed from an older one.
            if other not in (path, *older[:1]):
                other.unlink()

    def check_resumable(self, recipe: Recipe, data: dict[str, Any], report: Callable[[str], None]) -> None:
        """Check that a run can continue under a recipe and on some data: what shaped its first part shapes the rest.

        Args:
            report: called with a sentence where the content of the data has changed.

        Raises:
            InputError: the classes differ, a key other than `FREE_KEYS` differs, or more epochs are done than wanted.
        """
        check_same(self.recipe, recipe)
        if recipe.epochs < self.progress.epoch:
            raise InputError(f"--resume: epochs = {recipe.epochs}, but {self.progress.epoch} are done; give more")
        if not self.data:
            return
        if self.data["classes"] != data["classes"]:
            raise InputError(
                f"--resume: the run was trained on the classes {', '.join(self.data['classes'])}, but the data has "
                f"{', '.join(data['classes'])}: restore the data, or start a new run"
            )
        if changed := [name for name, value in data.items() if self.data.get(name) != value]:
            report(f"the data has changed since the run began: {', '.join(changed)} differ")


def check_same(before: Recipe, now: Recipe) -> None:
    """Raise InputError where a run is to go on with a recipe that differs in a key other than `FREE_KEYS`."""
    flat = before.flat()
    for key, value in now.flat().items():
        if key not in FREE_KEYS and flat[key] != value:
            raise InputError(
                f"--resume: the run has {key} = {flat[key]!r}; {key} = {value!r} needs a new run. "
                f"Only {', '.join(FREE_KEYS)} can change"
            )


def load_newest(folder: Path, report: Callable[[str], None], since: float = 0.0) -> Checkpoint | None:
    """Return the newest whole checkpoint; None where nothing was saved yet.

    Args:
        folder: the run's `checkpoints/`.
        report: called with a sentence for each damaged file.
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


def restore_newest(
    engine: "Engine",
    folder: Path,
    recipe: Recipe,
    data: dict[str, Any],
    world: "World",
    report: Callable[[str], None],
    since: float = 0.0,
) -> Checkpoint | None:
    """Load the newest whole checkpoint into the engine. All ranks call this; the main process reads the file.

    Returns:
        The checkpoint without its tensors; None where nothing was saved yet.

    Raises:
        InputError: see `load_newest` and `Checkpoint.check_resumable`.
    """
    state: dict[str, Any] = {}
    best: dict[str, Any] = {}

    def without_tensors() -> Checkpoint | None:
        found = load_newest(folder, report, since)
        if found is None:
            return None
        # The engine distributes the tensors.
        state.update(found.state)
        best.update(found.best)
        return replace(found, state={}, best={})

    newest = world.from_main(without_tensors)
    if newest is None:
        return None
    newest.check_resumable(recipe, data, report)
    if newest.progress.best_record and recipe.keep == "best":
        engine.load_state({**state, **best})
        newest.progress.best = engine.snapshot(weights_only=True)
    engine.load_state(state)
    return newest


def _read(path: Path) -> Checkpoint:
    tensors, metadata = read_weights(path)
    best = {name.removeprefix(_BEST): value for name, value in tensors.items() if name.startswith(_BEST)}
    try:
        return Checkpoint(
            state={name: value for name, value in tensors.items() if not name.startswith(_BEST)},
            best=best,
            progress=from_plain(json.loads(metadata["progress"])),
            recipe=of_run(from_dict(tomllib.loads(metadata["recipe"]), where=str(path))),
            data=json.loads(metadata.get("data", "{}")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a checkpoint of flatout ({type(error).__name__}: {error})") from None


def newest_first(folder: Path, since: float = 0.0) -> list[Path]:
    """Return the files of the checkpoints in a folder; those older than `since`, by time.time, are ignored."""
    found = sorted(folder.glob("epoch-*.safetensors"), reverse=True)
    return [path for path in found if path.stat().st_mtime >= since]
