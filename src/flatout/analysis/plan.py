"""`flatout plan`: whether a job fits into memory, how fast it runs, and what it costs, before it is trained.

Steps are compiled or traced for hardware that this machine lacks; see docs/plan.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.analysis.gpu import chips_named, estimate_on_gpus
from flatout.analysis.tpu import compiler_versions, estimate_row, parse_topologies, step_compiler
from flatout.config import Recipe
from flatout.config.jobs import PUBLISHED
from flatout.data.batches import steps_per_epoch
from flatout.data.build import bits_of
from flatout.models.build import check_name, default_shape
from flatout.tasks import with_task
from flatout.train.recipes import resolve, start_of
from flatout.utils.console import Console, aligned, counted, duration
from flatout.utils.errors import InputError
from flatout.utils.files import check_free, default_folder, make_folder
from flatout.utils.run_files import JsonObject, write_json
from flatout.utils.style import plain

PLAN_RESULT = "plan.json"
# The limits of a step on TPUs, and their names.
LIMITS = {"compute": "compute", "memory": "memory", "interconnect": "links"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A complete recipe, the numbers of its training images and classes, and where these are from."""

    recipe: Recipe
    images: int
    classes: int
    about: str

    @property
    def batch(self) -> int:
        """Images per step."""
        return min(self.recipe.batch_size, self.images)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return steps_per_epoch(self.images, self.batch, self.recipe.drop_last)

    @property
    def images_per_epoch(self) -> int:
        """Images trained in one epoch."""
        return self.steps_per_epoch * self.batch if self.recipe.drop_last else self.images

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return self.recipe.total_steps(self.steps_per_epoch)


def plan(
    job: str | None,
    data: str | None,
    changes: Mapping[str, object],
    *,
    topologies: str | None = None,
    gpus: str | None = None,
    inference: bool = False,
    images: int | None = None,
    classes: int | None = None,
    price: float | None = None,
    allow_code: bool = False,
    out: Path | None = None,
    console: Console,
) -> JsonObject:
    """Plan a job (None if `changes` name a model) for GPUs or TPUs; write plan.json and return its content.

    `images` and `classes` are those of the training data, which are otherwise counted or published; `price` is that of
    one chip for an hour, in any currency.
    """
    if (topologies is None) == (gpus is None):
        raise InputError(
            "plan needs either --gpu or --topology: --gpu h100 estimates the job on GPUs that you don't have, "
            "--topology v5e:2x4 compiles it for TPUs; flatout bench and flatout scale measure it on this machine"
        )
    if inference and gpus is None:
        raise InputError("--inference: requires --gpu")
    for flag, value in (("--price", price), ("--images", images), ("--classes", classes)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} {value:g}: must be greater than 0")
    check_free(out)
    chips = chips_named(gpus) if gpus is not None else {}
    slices = parse_topologies(topologies) if topologies is not None else []
    if job is None and (slices or data is not None or "model" not in changes or None in (images, classes)):
        raise InputError("plan needs a JOB, or --gpu with --model NAME, --images N and --classes K")
    work = find_work(job, data, changes, images, classes, console=console)
    if gpus is not None:
        planned = estimate_on_gpus(work, chips, price, inference=inference, allow_code=allow_code)
    else:
        compile_step = step_compiler(work, allow_code, console)
        rows = [estimate_row(work, choice, compile_step(choice), price) for choice in slices]
        planned = {"estimate": True, "price_per_chip_hour": price, "topologies": rows}
    result = {
        **{key: getattr(work.recipe, key) for key in ("job", "model", "epochs")},
        "batch_size": work.batch,
        "images": work.images,
        "classes": work.classes,
        "data": work.about,
        **planned,
        "versions": compiler_versions(),
    }
    out = make_folder(out or default_folder(f"plan-{work.recipe.job}"))
    write_json(out / PLAN_RESULT, result)
    return {**result, "out": str(out)}


def find_work(
    job: str | None,
    data: str | None,
    changes: Mapping[str, Any],
    images: int | None,
    classes: int | None,
    *,
    console: Console,
) -> Work:
    """Return the recipe and the size of its data: given, counted in the data, or published.

    Without a job, the recipe is that of the model in `changes`: by default one epoch of SGD with momentum.
    """
    start: str | Recipe | None = job
    if job is None:
        check_name(changes["model"])
        start = Recipe(model=changes["model"], image_size=default_shape(changes["model"])[1], epochs=1, batch_size=256)
        changes = {"optimizer.name": "momentum", **changes}
    recipe, is_complete = start_of(start, changes)
    if not is_complete or data is not None or (recipe.data.path and None in (images, classes)):
        recipe, *sizes, about = _count(start, data, changes, console)
    elif images is not None and classes is not None:
        sizes, about = (images, classes), "as given"
    elif job in PUBLISHED:
        sizes, about = PUBLISHED[job], "as published"
    else:
        raise InputError(f"{job}: the size of its data is unknown; give --images N and --classes K, or --data PATH")
    given = [name for name, value in (("images", images), ("classes", classes)) if value is not None]
    if given and about != "as given":
        about = f"{about}, but {' and '.join(given)} as given"
    if not recipe.epochs:
        raise InputError(
            "epochs = 0: the job fits the head to features and trains nothing; --epochs N estimates training, and "
            "--gpu with --inference --epochs 1 the pass that computes the features"
        )
    if recipe.data.folds:
        raise InputError(f"data.folds = {recipe.data.folds}: flatout plan estimates single runs; leave it out")
    if not recipe.data.mean:
        # The values do not affect speed.
        recipe = recipe.override({"data.mean": [0.5] * recipe.channels, "data.std": [0.5] * recipe.channels})
    return Work(recipe=recipe, images=images or sizes[0], classes=classes or sizes[1], about=about)


def _count(
    job: str | Recipe | None, data: str | None, changes: Mapping[str, object], console: Console
) -> tuple[Recipe, int, int, str]:
    recipe, found = resolve(job, data, changes, accelerated=True, console=console, fetch=False)
    source = found.read()
    recipe = recipe.override({"data.bits": recipe.data.bits or bits_of(source)})
    start, stop = source.splits["train"]
    share = 0.0 if "valid" in source.splits else recipe.data.valid_fraction
    # A test split is taken from the training images only if there is neither split.
    share += recipe.data.test_fraction if len(source.splits) == 1 else 0.0
    images = stop - start - round((stop - start) * share)
    return with_task(recipe, source.task), images, len(source.classes) or 1, str(source.path or source.kind)


def format_plan(result: JsonObject) -> list[str]:
    """Return the result of `plan` as lines."""
    head = (
        f"{result['job']}: {result['model']}, batch {result['batch_size']:,}, {counted(result['epochs'], 'epoch')} of "
        f"{result['images']:,} images of {result['classes']} classes ({result['data']})"
    )
    lines = (_format_gpus if "gpus" in result else _format_estimate)(result)
    return [head, "", *lines, f"{result['out']}: {PLAN_RESULT}"]


def _format_estimate(result: JsonObject) -> list[str]:
    with_cost = result["price_per_chip_hour"] is not None
    head = ["topology", "chips", "memory of each", *LIMITS.values(), "step", "images/s", "job"]
    table = [head + ["cost"] * with_cost]
    for row in result["topologies"]:
        needed = _bytes(row["needed_bytes"]) if row["needed_bytes"] else "?"
        cells = [row["topology"], str(row["chips"]), f"{needed} of {_bytes(row['memory_bytes'])}"]
        if row["fits"]:
            times = row["seconds"]
            cells += [f"{_short(times[name])}{'*' if name == row['limit'] else ' '}" for name in LIMITS]
            cells += [_short(times["step"]), f"≤ {plain(row['images_per_second'])}", _span(row["job_seconds"])]
        table.append([*cells, *_cost(row)] if row["fits"] else [*cells, "does not fit"])
    lines = [
        *aligned(table),
        "",
        "* limits the step. All figures are upper bounds of the speed: the compiler's counts at the chip's peak rates.",
        "  Real steps take longer; reading images, starting steps and evaluation are not included: docs/plan.md.",
    ]
    lines += [
        f"{row['topology']}: {row['devices']} devices cannot share a batch of {result['batch_size']:,} evenly; "
        f"{row['padding_fraction']:.1%} of the work is padding. A batch of {row['batch_padded']:,} costs the same."
        for row in result["topologies"]
        if row["padding_fraction"] > 0
    ]
    return lines


def _format_gpus(result: JsonObject) -> list[str]:
    with_cost = result["price_per_gpu_hour"] is not None
    table = [["GPU", "memory", "largest batch", "step", "images/s", "epoch", "job", *["cost"] * with_cost, "limit"]]
    for row in result["gpus"]:
        cells = [row["gpu"], f"{_bytes(row['memory_bytes'])} of {_bytes(row['gpu_memory_bytes'])}"]
        cells += [f"{row['largest_batch']:,}", _short(row["step_seconds"]), plain(row["images_per_second"])]
        cells += [_span(row["epoch_seconds"]), _span(row["job_seconds"])]
        table.append([*cells, *_cost(row), f"{row['limit']} ({row['precision']})"])
    median, most = (result["gpus"][0][key] for key in ("expected_error", "expected_error_90"))
    what = "predictions" if result["inference"] else "training steps"
    return [
        *aligned(table),
        "",
        f"Estimates of {what} on one GPU. On networks that the method had not seen, half of the estimates were",
        f"within {median:.0%} of the measured speed, and nine of ten within {most:.0%}. Decoding, evaluation and",
        "reports are not included: docs/plan.md.",
    ]


def _cost(row: JsonObject) -> list[str]:
    cost = row["cost"]
    return [] if cost is None else [f"{cost:,.2f}" if cost >= 0.1 else f"{cost:.2g}"]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if count < 1000 else f"{count / 1024:.3g} TiB"


def _span(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else _short(seconds)


def _short(seconds: float) -> str:
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if factor * seconds < 999.5:
            return f"{factor * seconds:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
