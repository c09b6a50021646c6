"""`flatout plan`: whether a job fits into memory, how fast it runs, and what it costs, before it is trained.

Steps are compiled for TPUs (`compile`) or measured on devices of this machine (`measure`); see docs/plan.md.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.console import Console
from flatout.errors import InputError
from flatout.jobs import PUBLISHED
from flatout.plan.chips import parse_topologies
from flatout.plan.compile import compile_for, versions
from flatout.plan.roofline import Work
from flatout.recipe import Recipe
from flatout.report.run_files import write_json

RESULT, CHART = "plan.json", "plan.png"


def plan(
    job: str,
    data: str | None,
    changes: Mapping[str, Any],
    *,
    topologies: str | None,
    devices: str | None,
    engine: str = "auto",
    images: int | None = None,
    classes: int | None = None,
    price: float | None = None,
    largest_batch: bool = False,
    allow_code: bool = False,
    out: Path | None = None,
    console: Console,
) -> dict[str, Any]:
    """Plan a job for topologies or for devices; write plan.json and plan.png; return the former's content.

    Args:
        job: a built-in job or a recipe file; or the path of data.
        data: the path of the data; None uses published figures of the job's data.
        changes: dotted recipe keys to override.
        topologies: TPUs to compile for, such as `v5e:2x4,v5e:4x4`; or
        devices: SPECs of devices to measure, such as `cpu,2xcpu`.
        images, classes: of the training data, if they are given.
        price: of one chip for an hour, in any currency.
        largest_batch: search for the largest batch that fits a topology, even if the job's batch does.
        allow_code: whether a model named as `package.module:factory` may be imported.
        out: a new or empty folder; None for a new one under `runs/`.

    Raises:
        InputError: an argument is wrong, or the model cannot be compiled.
        TrainingFailed: the devices or the compiler failed, or memory was insufficient.
    """
    from flatout.scale.scale import check_free, make_folder

    _check_flags(topologies, devices, engine, price, largest_batch)
    check_free(out)
    if topologies is not None:
        chosen = parse_topologies(topologies)
        work = find_work(job, data, changes, images, classes, accelerated=True, console=console)
        planned = compile_for(work, chosen, price, largest_batch=largest_batch, allow_code=allow_code, console=console)
    else:
        from flatout.engine.devices import machine
        from flatout.plan.measure import measure, parse_choices

        choices = parse_choices(devices or "", engine)
        accelerated = all(choice.is_accelerated for choice in choices.values())
        work = find_work(job, data, changes, images, classes, accelerated=accelerated, console=console)
        planned = {
            "estimate": False,
            "devices": measure(work, choices, allow_code=allow_code, console=console),
            "machine": machine(),
        }
    recipe = work.recipe
    result = {
        "job": recipe.job,
        "model": recipe.model,
        "batch_size": work.batch,
        "epochs": recipe.epochs,
        "images": work.images,
        "classes": work.classes,
        "data": work.about,
        **planned,
        "versions": versions(),
    }
    from flatout.plan.chart import draw_plan

    out = make_folder(out, f"plan-{recipe.job}")
    write_json(out / RESULT, result)
    draw_plan(out / CHART, result)
    return {**result, "out": str(out)}


def _check_flags(
    topologies: str | None, devices: str | None, engine: str, price: float | None, largest_batch: bool
) -> None:
    """Check the flags: one of --topology and --devices, and only flags that apply to it."""
    if topologies is None and devices is None:
        raise InputError(
            "plan needs --topology or --devices: --topology v5e:2x4 compiles the job for TPUs that you don't have, "
            "--devices cpu measures a few steps on this machine"
        )
    if topologies is not None and devices is not None:
        raise InputError("--topology compiles, --devices measures: give one of them")
    if price is not None and not (price > 0 and math.isfinite(price)):
        raise InputError(f"--price {price:g}: must be greater than 0")
    only_compiled = {"--price": price is not None, "--largest-batch": largest_batch}
    for flag in (flag for flag, is_given in only_compiled.items() if is_given and devices is not None):
        raise InputError(f"{flag}: requires --topology")
    if topologies is not None and engine == "torch":
        raise InputError("--engine torch: not available with --topology, which compiles with XLA")


def find_work(
    job: str,
    data: str | None,
    changes: Mapping[str, Any],
    images: int | None,
    classes: int | None,
    *,
    accelerated: bool,
    console: Console,
) -> Work:
    """Return the recipe and the size of its data: given, counted in the data, or published.

    Raises:
        InputError: the size is unknown; or as `resolve`.
    """
    from flatout.jobs import builtin_jobs, load_job
    from flatout.recipe import load_recipe

    for flag, value in (("--images", images), ("--classes", classes)):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value}: must be at least 1")
    recipe = None
    if job in builtin_jobs():
        recipe = load_job(job).override(changes)
    elif Path(job).suffix == ".toml":
        recipe = load_recipe(Path(job)).override(changes)
    given = images or 0, classes or 0
    if recipe is None or data is not None or (recipe.data.path and not all(given)):
        recipe, *sizes, about = _look(job, data, changes, accelerated, console)
    elif all(given):
        sizes, about = given, "as given"
    elif job in PUBLISHED:
        sizes, about = PUBLISHED[job], "as published"
    else:
        raise InputError(f"{job}: the size of its data is unknown; give --images N and --classes K, or --data PATH")
    if not recipe.data.mean:
        # The values do not affect speed.
        recipe = recipe.override({"data.mean": [0.5] * recipe.channels, "data.std": [0.5] * recipe.channels})
    return Work(recipe=recipe, images=given[0] or sizes[0], classes=given[1] or sizes[1], about=about)


def _look(
    job: str, data: str | None, changes: Mapping[str, Any], accelerated: bool, console: Console
) -> tuple[Recipe, int, int, str]:
    """Return the recipe for existing data, its training images and classes, and its path."""
    from flatout.data.build import bits_of
    from flatout.data.source import Source
    from flatout.run.resolve import resolve
    from flatout.tasks import with_task

    recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console)
    source = found if isinstance(found, Source) else found.read()
    recipe = recipe.override({"data.bits": recipe.data.bits or bits_of(source)})
    start, stop = source.splits["train"]
    set_aside = 0.0 if "valid" in source.splits else recipe.data.valid_fraction
    # A test split is set aside only where there is neither.
    set_aside += recipe.data.test_fraction if len(source.splits) == 1 else 0.0
    images = stop - start - round((stop - start) * set_aside)
    return with_task(recipe, source.task), images, len(source.classes) or 1, str(source.path or source.kind)
