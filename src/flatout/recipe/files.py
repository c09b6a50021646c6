"""Recipe files, and what differs in those of runs of earlier versions."""

import tomllib
from pathlib import Path

from flatout.errors import InputError
from flatout.recipe.recipe import Recipe, from_dict

# What runs are that were begun before these keys were written: those had no choice.
EARLIER = {"data.bits": 8, "data.order": "full", "task": "single-label"}


def of_run(recipe: Recipe) -> Recipe:
    """Return a recipe from a run's files with what earlier versions did not write."""
    flat = recipe.flat()
    return recipe.override({key: value for key, value in EARLIER.items() if flat[key] in (0, "auto")})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        InputError: the file cannot be read or parsed, or its content is no recipe.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe: {error}") from None
    return from_dict({"job": path.stem, **table}, where=str(path))
