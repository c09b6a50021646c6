"""The built-in jobs, one TOML recipe each."""

import tomllib
from importlib import resources

from flatout.config import Recipe, from_dict
from flatout.config.settings import nearest
from flatout.utils.errors import InputError

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
    return sorted(
        p.name.removesuffix(".toml") for p in resources.files("flatout.config.jobs").iterdir() if p.name[-5:] == ".toml"
    )


def load_job(name: str) -> Recipe:
    """Return the recipe of a built-in job.

    Raises:
        InputError: there is no such job; the nearest is suggested.
    """
    if name not in builtin_jobs():
        raise InputError(f"no job, recipe file or data called {name!r}; {nearest(name, builtin_jobs())}")
    text = (resources.files("flatout.config.jobs") / f"{name}.toml").read_text(encoding="utf-8")
    return from_dict({"job": name, **tomllib.loads(text)}, where=f"job {name}")
