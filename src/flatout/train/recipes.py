"""Resolve the user's JOB and DATA to a recipe and its data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe, load_recipe, with_settings
from flatout.config.jobs import builtin_jobs, load_job
from flatout.config.settings import nearest, nearest_path
from flatout.data.cache import cache_folder
from flatout.data.detect import find
from flatout.data.fetch import PUBLIC, PUBLIC_NAMES, download_public, is_remote, where_to_get
from flatout.data.source import DataSource, ImageDataset
from flatout.data.unpack import is_archive
from flatout.models.build import NETS, check_name
from flatout.train.auto_recipe import generate_recipe, measure_dataset
from flatout.utils.console import Console
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from flatout.engine.factory import Speeds


def resolve(
    job: str | Path | Recipe | None,
    data: object,
    changes: Mapping[str, object],
    *,
    accelerated: bool,
    console: Console,
    seconds: float | None = None,
    began: float | None = None,
    speeds: "Speeds | None" = None,
    explain: Callable[[str], None] = lambda sentence: None,
    fetch: bool = True,
) -> tuple[Recipe, DataSource | ImageDataset]:
    """Return the recipe of a job with changed keys, or one made from the data, and the recognised data.

    Without `data`, it is the recipe's, or the job's is downloaded. A generated recipe also depends on the device, the
    time budget and measured speeds; `explain` receives the reasons. Without `fetch`, published weights are assumed to
    exist.
    """
    plain, is_complete = start_of(job, changes)
    paths = _absolute_paths(changes, plain.data.path or job if data is None else data)
    plain, changes = plain.override(paths), {**_with_full_name(changes), **paths}
    if "data.path" in changes and (data is not None or not is_complete):
        raise InputError(f"data.path = {changes['data.path']!r}: data is given twice; remove one")
    if is_complete:
        recipe = plain.override(changes)
        if data is None:
            data = recipe.data.path or _public_data(recipe, console)
        recipe = recipe.override({"data.path": _plain(data)})  # "" for arrays
        return recipe, find(data, recipe.data, recipe.task, console=console)
    if (job is None) == (data is None):
        given = "no job and no data" if job is None else f"{job} is data, and so is --data {data}"
        raise InputError(f"{given}: give one of them")
    data = str(job) if data is None else data
    found = find(data, plain.data, plain.task, console=console)

    def report(sentence: str) -> None:
        console.note(sentence)
        explain(sentence)

    facts = measure_dataset(found, accelerated=accelerated, seconds=seconds, began=began)
    recipe, reasons = generate_recipe(facts, _plain(data), changes, speeds, report if fetch else None)
    chosen = {key.partition(".")[0] for key in changes} | set(changes)
    console.note("no recipe given; generated one from your data:")
    for key, reason in reasons.items():
        if key not in chosen:
            console.note(f"  {reason}")
            explain(reason)
    return recipe.override(changes), found


def start_of(job: str | Path | Recipe | None, changes: Mapping[str, object]) -> tuple[Recipe, bool]:
    """Return a job's recipe with changes, and True; without a job, a recipe of the changes alone, and False.

    Nothing is downloaded or measured, and torch is not imported.
    """
    recipe = _named_recipe(job)
    if recipe is not None:
        return recipe.override(changes), True
    known = {"linear_probe": True, **changes}
    if "optimizer.name" not in changes:
        # The generated recipe determines whether these are possible.
        known.pop("optimizer.nesterov", None)
        known.pop("optimizer.dampening", None)
    return with_settings(known), False


def _with_full_name(changes: Mapping[str, object]) -> Mapping[str, object]:
    """Prefix the model name with `timm:` if only timm has it."""
    name = changes.get("model")
    if not isinstance(name, str) or name in NETS:
        return changes
    if ":" not in name:
        import timm

        name = f"timm:{name}" if timm.is_model(name.partition(".")[0]) else name
    check_name(name)
    return {**changes, "model": name}


def _absolute_paths(changes: Mapping[str, Any], data: object) -> dict[str, str]:
    """Return the paths among the changes as absolute ones, so that the run can be used from any folder."""
    keys = ("weights", "data.images", "data.classes")
    if isinstance(data, str | Path) and (is_remote(data) or is_archive(Path(data))):
        keys = ("weights", "data.classes")  # `data.images` starts inside the archive
    given = [(key, Path(changes[key]).expanduser()) for key in keys if changes.get(key)]
    return {key: str(path.absolute()) for key, path in given if path.exists()}


def is_of_job(recipe: Recipe, job: str) -> bool:
    """Whether a run's recipe came from a JOB, judging by names."""
    named = _named_recipe(job)
    return recipe.job == named.job if named else recipe.data.path == _plain(job)


def _named_recipe(job: str | Path | Recipe | None) -> Recipe | None:
    """Return the recipe that a job names; None without a job, or if it is a data path."""
    if job is None or isinstance(job, Recipe):
        return job
    path = Path(job)
    if str(job) in builtin_jobs():
        return load_job(str(job))
    if _is_no_path(job):
        return None
    if path.suffix == ".toml":
        recipe = load_recipe(path)
        if (inner := recipe.data.path) and not _is_no_path(inner):
            # Relative to the recipe, not to the current folder.
            return recipe.override({"data.path": str(path.parent / inner)})
        return recipe
    if not path.exists() and "{" not in str(job):
        hint = nearest_path(path) or nearest(str(job), builtin_jobs())
        raise InputError(f"no job, recipe file or data called {str(job)!r}; {hint}")
    return None


def _plain(data: object) -> str:
    """Return the absolute path, or the URL, to write into the recipe; empty for data given in Python."""
    if not isinstance(data, str | Path):
        return ""
    return str(data) if _is_no_path(data) else str(Path(data).absolute())


def _is_no_path(data: str | Path) -> bool:
    """Whether data is not a local file or folder: `sklearn:digits` or a URL."""
    return str(data).startswith("sklearn:") or is_remote(data)


def _public_data(recipe: Recipe, console: Console) -> str:
    name = PUBLIC_NAMES.get(recipe.job)
    if name is None:
        where = where_to_get(recipe.job) if recipe.job in builtin_jobs() else "name it with --data PATH"
        raise InputError(f"job {recipe.job} has no data: {where}")
    return str(download_public(PUBLIC[name], cache_folder() / "downloads" / name, console))
