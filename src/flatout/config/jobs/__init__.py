"""The built-in jobs, one TOML recipe each."""

from pathlib import Path

from flatout.config import Recipe, load_recipe

_FOLDER = Path(__file__).parent
# Published numbers of training images and classes of the jobs' data, for planning without it.
PUBLISHED = {
    "cats-dogs": (8_000, 2),
    "fashion-mnist": (60_000, 10),
    "fashion-mnist-keras": (60_000, 10),
    "mnist-parallel": (50_000, 10),
    "oct-vgg16": (84_495, 4),
}


def builtin_jobs() -> list[str]:
    """Return the names of the built-in jobs."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_job(name: str) -> Recipe:
    """Return the recipe of a built-in job."""
    return load_recipe(_FOLDER / f"{name}.toml")
