"""Checkpoints: the engine's state and the loop's progress in one file that executes no code and notices damage."""

import json
import tomllib
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.models.weights import read_weights, save_tensors
from flatout.recipe import Recipe, from_dict
from flatout.run.progress import Progress, from_plain, to_plain

KEPT = 2
# What may differ when a run goes on: how long it lasts, and what changes no result.
FREE_KEYS = ("epochs", "early_stopping", "log_every", "micro_batch", "shard", "data.path", "data.placement")
_BEST = "best."


def save(folder: Path, state: dict[str, Any], progress: Progress, recipe: Recipe) -> Path:
    """Write a checkpoint atomically, then remove all but the newest `KEPT`.

    Args:
        folder: the run's `checkpoints/`.
        state: as `Engine.state` returns it, matching `progress`.
        progress: the loop's position.
        recipe: compared on resuming.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{progress.epoch:05d}-step-{progress.step:07d}.safetensors"
    tensors = {**state, **{_BEST + name: value for name, value in progress.best.items()}}
    metadata = {"progress": json.dumps(to_plain(progress)), "recipe": recipe.to_toml()}
    save_tensors(path, tensors, metadata)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()
    return path


def load_newest(folder: Path) -> tuple[dict[str, Any], Progress, Recipe, list[str]]:
    """Return state, progress and recipe of the newest whole checkpoint, and a sentence for each damaged one.

    Raises:
        InputError: there is no checkpoint, or none is whole.
    """
    problems = []
    for path in _newest_first(folder):
        try:
            tensors, metadata = read_weights(path)
        except InputError as error:
            problems.append(str(error))
            continue
        best = {k.removeprefix(_BEST): v for k, v in tensors.items() if k.startswith(_BEST)}
        state = {k: v for k, v in tensors.items() if not k.startswith(_BEST)}
        recipe = from_dict(tomllib.loads(metadata["recipe"]), where=str(path))
        return state, from_plain(json.loads(metadata["progress"]), best), recipe, problems
    reasons = "; ".join(problems) or "there is none"
    raise InputError(f"{folder}: no checkpoint to resume from: {reasons}; train with --overwrite to start again")


def check_resumable(saved: Recipe, wanted: Recipe, progress: Progress) -> None:
    """Check that a run may go on under a recipe: what shaped its first part must be what shapes the rest.

    Raises:
        InputError: another key than those of `FREE_KEYS` differs, or fewer epochs are wanted than are done.
    """
    before, now = saved.flat(), wanted.flat()
    for key, value in now.items():
        if key not in FREE_KEYS and before[key] != value:
            raise InputError(
                f"--resume: the run has {key} = {before[key]!r}, so {key} = {value!r} needs a run of its own; "
                f"what may change is {', '.join(FREE_KEYS)}"
            )
    if wanted.epochs < progress.epoch:
        raise InputError(f"--resume: epochs = {wanted.epochs}, but {progress.epoch} are done already; give more")


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("epoch-*.safetensors"), reverse=True)
