"""Checkpoints: the engine's state and the loop's progress in one file that executes no code and notices damage."""

import json
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.models.weights import read_weights, save_tensors
from flatout.progress import Progress, from_plain, to_plain
from flatout.recipe import Recipe

KEPT = 2
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


def load_newest(folder: Path) -> tuple[dict[str, Any], Progress, list[str]]:
    """Return state and progress of the newest checkpoint that is whole, and a sentence for each damaged one.

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
        return state, from_plain(json.loads(metadata["progress"]), best), problems
    reasons = "; ".join(problems) or "there is none"
    raise InputError(f"{folder}: no checkpoint to resume from: {reasons}; train with --overwrite to start again")


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("epoch-*.safetensors"), reverse=True)
