"""`flatout plan`: does a job fit, how fast would it be, and what would it cost, before anything is rented.

For TPUs the real training step is compiled by the real compiler, for chips that are not there. What the compiler counts
is turned into time by three published peaks of the chip; docs/plan.md says what that leaves out.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console
from flatout.engine.xla.chips import Topology, parse_topologies
from flatout.errors import InputError
from flatout.estimate import Work, does_fit, memory_limit, row_of, scaling
from flatout.jobs import PUBLISHED
from flatout.run import write_json

if TYPE_CHECKING:
    from torch import nn

RESULT, CHART = "plan.json", "plan.png"
# The search for the largest batch ends when it is known to within this share, or after so many compilations.
BATCH_TOLERANCE, MOST_COMPILATIONS = 0.05, 8
# Packages whose version decides what the compiler says.
_COMPILERS = ("flatout", "torch", "jax", "jaxlib", "torchax", "libtpu")


def plan(
    job: str,
    data: str | None,
    changes: Mapping[str, Any],
    *,
    topologies: str,
    images: int | None,
    classes: int | None,
    price: float | None,
    largest_batch: bool,
    out: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Compile the job's step for each topology; write plan.json and plan.png; return the former's content.

    Args:
        job: a built-in job or a recipe file; or the path of data.
        data: the path of the data; None takes what is published about the job.
        changes: dotted recipe keys to override.
        topologies: names separated by commas, such as `v5e:2x4,v5e:4x4`.
        images, classes: of the training data, where they are not to be looked up.
        price: of one chip for an hour, in any currency.
        largest_batch: look for the largest batch that fits, even where the job's does.
        out: the folder to write to; None for a new one under `runs/`.
        console: told how far it has come.

    Raises:
        InputError: something given is wrong, or the model cannot be compiled.
    """
    chosen = parse_topologies(topologies)
    work = find_work(job, data, changes, images, classes, accelerated=True, console=console)
    compiler = _Compiler(work, console)
    rows = []
    for topology in chosen:
        row = row_of(work, topology, compiler.step(topology, work.recipe.batch_size), price)
        if not row["fits"] or largest_batch:
            row["largest_batch"] = compiler.largest_batch(topology, work.recipe.batch_size)
        rows.append(row)
    result = {
        "job": work.recipe.job,
        "model": work.recipe.model,
        "batch_size": work.recipe.batch_size,
        "epochs": work.recipe.epochs,
        "images": work.images,
        "classes": work.classes,
        "data": work.about,
        "estimate": True,
        "price_per_chip_hour": price,
        "topologies": rows,
        "scaling": scaling(work, next((row for row in rows if row["fits"]), None), price),
        "versions": _versions(),
    }
    out = out or Path("runs") / f"plan-{work.recipe.job}-{datetime.now():%Y%m%d-%H%M%S}"
    from flatout.report.plan_chart import draw_plan

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from None
    write_json(out / RESULT, result)
    draw_plan(out / CHART, result)
    return {**result, "out": str(out)}


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
    """Return the recipe, and how many images of how many classes it is for.

    They are what the user says, what the data holds that is named, or what is published about the job.

    Raises:
        InputError: they cannot be known; or as `resolve`.
    """
    from flatout.jobs import builtin_jobs, load_job
    from flatout.resolve import resolve

    given = {name: value for name, value in (("--images", images), ("--classes", classes)) if value is not None}
    for flag, value in given.items():
        if value < 1:
            raise InputError(f"{flag} {value}: must be at least 1")
    is_builtin = job in builtin_jobs()
    recipe = load_job(job).override(changes) if is_builtin else None
    has_own_data = recipe is not None and recipe.data.path
    if recipe is not None and data is None and not has_own_data and (job in PUBLISHED or len(given) == 2):
        found_images, found_classes = PUBLISHED.get(job, (0, 0))
        about = "as given" if len(given) == 2 else "as published"
    else:
        from flatout.data.source import Source

        recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console)
        source = found if isinstance(found, Source) else found.read()
        start, stop = source.splits["train"]
        found_images, found_classes = stop - start, len(source.classes)
        set_aside = 0.0 if "valid" in source.splits else recipe.data.valid_fraction
        set_aside += 0.0 if "test" in source.splits else recipe.data.test_fraction
        found_images -= round(found_images * set_aside)
        about = str(source.path or source.kind)
    if not recipe.data.mean:
        # What the pixels are divided by changes no time.
        recipe = recipe.override({"data.mean": [0.5] * recipe.channels, "data.std": [0.5] * recipe.channels})
    return Work(recipe=recipe, images=images or found_images, classes=classes or found_classes, about=about)


class _Compiler:
    """Compiles a job's step for topologies, or finds in the cache what was compiled before."""

    def __init__(self, work: Work, console: Console) -> None:
        self._work, self._console = work, console
        self._model: nn.Module | None = None
        self._devices: dict[str, list[Any]] = {}

    def step(self, topology: Topology, batch: int) -> dict[str, Any]:
        """Return what the compiler says of the step at a batch size: the fields of `engine.xla.topology.Compiled`."""
        path = self._cached(topology, batch)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
        self._console.note(f"compiling {self._work.recipe.model}, batch {batch:,}, for {topology.name}")
        compiled = self._compile(topology, batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, compiled)
        return compiled

    def largest_batch(self, topology: Topology, batch: int) -> int | None:
        """Return the largest batch known to fit, to within a twentieth; None if not even one sample a chip does.

        What a step needs grows almost in proportion to its batch, so each attempt goes where a line through the
        last two says that the memory ends; where that leads nowhere new, to the middle.
        """
        limit, chips = memory_limit(topology), topology.chips
        fits, fails = 0, 0
        known: list[tuple[int, float]] = []
        for _ in range(MOST_COMPILATIONS):
            compiled = self.step(topology, batch)
            known.append((batch, compiled["needed_bytes"]))
            if does_fit(compiled, topology):
                fits = max(fits, batch)
            else:
                fails = min(fails or batch, batch)
            if fits and fails and fails - fits <= max(chips, BATCH_TOLERANCE * fits):
                break
            if fails and fails <= chips:
                return None
            batch = _next_batch(known, limit, fits, fails, chips)
        return fits or None

    def _compile(self, topology: Topology, batch: int) -> dict[str, Any]:
        from flatout.engine.xla import devices

        devices.settle_for_compiling()
        from flatout.engine.xla.topology import chips, compile_step
        from flatout.models.dropout import set_dropout
        from flatout.models.freeze import freeze
        from flatout.models.load import build

        recipe = self._work.recipe
        if self._model is None:
            self._model = build(
                recipe.model,
                num_classes=self._work.classes,
                loss=recipe.loss,
                seed=recipe.seed,
                allow_code=True,
                image_size=recipe.image_size,
                channels=recipe.channels,
            )
            freeze(self._model, recipe.freeze)
            set_dropout(self._model, recipe.dropout)
        if topology.name not in self._devices:
            self._devices[topology.name] = chips(topology.name)
        return asdict(compile_step(self._model, recipe.override({"batch_size": batch}), self._devices[topology.name]))

    def _cached(self, topology: Topology, batch: int) -> Path:
        """Return the file for a program: named by everything that decides it."""
        from flatout.data.pack import cache_folder

        recipe = self._work.recipe.override({"batch_size": batch, "epochs": 1})
        decides = [recipe.to_toml(""), self._work.classes, topology.name, _versions()]
        name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        return cache_folder() / "plans" / f"{name}.json"


def _next_batch(known: Sequence[tuple[int, float]], limit: float, fits: int, fails: int, chips: int) -> int:
    """Return the batch to try next, a multiple of the chips between the two that are known."""
    guess = 0.0
    if len(known) > 1:
        (b0, m0), (b1, m1) = sorted(known[-2:])
        if b1 > b0 and m1 > m0:
            guess = b0 + (limit - m0) * (b1 - b0) / (m1 - m0)
    elif known[0][1]:
        guess = known[0][0] * limit / known[0][1]
    # A little below the line, since a batch that fits is worth more than one that does not.
    batch = int(0.98 * guess) // chips * chips
    low, high = fits or chips, fails or math.inf
    if not low < batch < high:
        batch = (fits + fails) // 2 // chips * chips if fails else 2 * (fits or known[-1][0])
    return max(batch, chips)


def _versions() -> dict[str, str]:
    found = {}
    for package in _COMPILERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
