"""`flatout plan --devices`: measure a few real steps of a job on devices of this machine.

Images are random, since the time of a step does not depend on them. Each SPEC is measured in new processes.
"""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.console import Console
from flatout.models.load import build_model
from flatout.plan.roofline import Work
from flatout.scale.scale import split_specs, spread
from flatout.scale.steps import Timed, training
from flatout.tasks import task_of

if TYPE_CHECKING:
    from flatout.data.feed import Samples
    from flatout.distributed.world import World
    from flatout.engine.base import Engine
    from flatout.engine.devices import Devices

# The random images: at least this many batches, and more up to this many bytes.
MIN_BATCHES, SAMPLE_BYTES = 4, 2**26
# The number of measurements, the duration of each, and the duration after which no other one begins.
REPEATS, REPEAT_SECONDS, LIMIT_SECONDS = 5, 1.5, 12.0
# If one batch takes longer, frozen layers included, only one batch is measured.
SLOW_SECONDS = 3.0


def parse_choices(devices: str, engine: str) -> "dict[str, Devices]":
    """Turn `cpu,2xcpu` into the devices of each SPEC.

    Raises:
        InputError: a SPEC does not parse or names too many devices, or the engine is unknown.
    """
    from flatout.engine.devices import engine_for, parse_devices

    return {spec: parse_devices(spec, engine_for(spec, engine)) for spec in split_specs(devices)}


def measure(
    work: Work, choices: "Mapping[str, Devices]", *, allow_code: bool, console: Console
) -> list[dict[str, Any]]:
    """Return a row for each SPEC; see docs/plan.md.

    Raises:
        InputError: the model cannot be built, or the batch is smaller than the number of processes.
        TrainingFailed: the devices failed, or memory was insufficient.
    """
    return [_row(work, spec, devices.engine, allow_code, console) for spec, devices in choices.items()]


def _row(work: Work, spec: str, engine: str, allow_code: bool, console: Console) -> dict[str, Any]:
    """Measure one SPEC."""
    from flatout.engine.factory import choose_processes
    from flatout.run.launch import check_batch, run_on_devices

    recipe = work.recipe
    chosen = choose_processes(
        spec, recipe, work.images, lambda: build_model(recipe, work.classes, allow_code=allow_code), engine
    )
    if chosen.reason:
        console.note(chosen.reason)
    ranks = chosen.devices.ranks
    check_batch(work.batch, len(ranks.names))
    console.note(f"{spec}: measuring steps of {work.batch:,} images")
    arguments = (work, str(chosen.devices), engine, allow_code, REPEAT_SECONDS)
    measured = run_on_devices(
        _on_rank,
        arguments,
        spec=str(chosen.devices),
        engine=engine,
        threads=chosen.threads,
        console=console,
        own_process=True,
    )
    jobs = [measured["once_seconds"] * work.images + seconds * work.steps for seconds in measured["step_seconds"]]
    return {
        "devices": spec,
        "kind": chosen.devices.kind,
        "engine": engine,
        "processes": len(ranks.names),
        "threads_per_process": measured["threads"],
        "runs_on": measured["runs_on"],
        "step_seconds": spread(measured["step_seconds"]),
        "images_per_second": spread([work.images_trained / seconds for seconds in jobs]),
        "job_seconds": spread(jobs),
        "once_seconds": measured["once_seconds"] * work.images,
        "warmup_seconds": measured["warmup_seconds"],
        "peak_device_bytes": measured["peak_device_bytes"],
        "peak_rss_bytes": measured["peak_rss_bytes"],
        "repeats": len(jobs),
        "steps_each": measured["steps_each"],
        "images_measured": measured["images"],
        "image_bytes": image_bytes(work) * work.images,
    }


def _on_rank(
    console: Console, world: "World", work: Work, devices: str, engine: str, allow_code: bool, repeat_seconds: float
) -> dict[str, Any]:
    """Measure on one of the ranks; all return the same."""
    from flatout.engine.factory import make_engine

    began = time.perf_counter()
    model = build_model(work.recipe, work.classes, allow_code=allow_code)
    made = make_engine(model, work.recipe, engine=engine, devices=devices, world=world, report=console.note)
    try:
        return _measured(work, made, world, began, repeat_seconds)
    finally:
        made.close()


def _measured(work: Work, engine: "Engine", world: "World", began: float, repeat_seconds: float) -> dict[str, Any]:
    """Warm up, measure, and return the figures. All ranks take the same steps; the main process's clock counts."""
    from flatout.engine.devices import spec_of
    from flatout.host import peak_rss_bytes

    images = work.batch
    once, timed = _warm_up(work, engine, world, images)
    if once + timed.seconds(1) < SLOW_SECONDS:
        timed.close()
        images = sample_size(work)
        once, timed = _warm_up(work, engine, world, images)
    steps = timed.steps_in(repeat_seconds)
    warmup_seconds = time.perf_counter() - began
    found: list[float] = []
    while len(found) < REPEATS and steps * sum(found) < LIMIT_SECONDS:
        found.append(timed.seconds(steps))
    gather = world.all_gather_object
    return {
        "threads": engine.threads,
        "runs_on": spec_of([name for names in gather(engine.device_names) for name in names]),
        "step_seconds": found,
        "steps_each": steps,
        "once_seconds": once / images,
        "warmup_seconds": warmup_seconds,
        "images": images,
        "peak_rss_bytes": sum(gather(peak_rss_bytes())),
        "peak_device_bytes": max(gather(engine.peak_memory_bytes() or 0)) or None,
    }


def _warm_up(work: Work, engine: "Engine", world: "World", images: int) -> tuple[float, Timed]:
    """Place images and take a step; return the seconds of what the engine does only once, and its steps."""

    def seconds_to_begin(epoch: int) -> float:
        began = time.perf_counter()
        placed.begin_epoch(epoch)
        engine.counts()
        return time.perf_counter() - began

    placed = engine.place(random_samples(work, images))
    # The output of frozen layers is cached for each view when an epoch begins with it for the first time.
    views = range(min(max(1, work.recipe.augment.views), work.recipe.epochs))
    first, again = (sum(map(seconds_to_begin, views)) for _ in range(2))
    placed.compile()
    timed = Timed(training(placed, engine, world, work.recipe), engine, world)
    timed.seconds(1)
    return world.broadcast_object(max(0.0, first - again)), timed


def sample_size(work: Work) -> int:
    """Return the number of random images: whole batches, at most the job's number."""
    batch_bytes = work.batch * image_bytes(work)
    return min(work.images, work.batch * max(MIN_BATCHES, SAMPLE_BYTES // batch_bytes))


def image_bytes(work: Work) -> int:
    """Return the bytes of one image in memory."""
    return math.prod(work.recipe.stored_sides) * work.recipe.channels * (work.recipe.data.bits or 8) // 8


def random_samples(work: Work, images: int) -> "Samples":
    """Return random images of the recipe's shape, with random labels."""
    from flatout.data.feed import Samples

    recipe, rng = work.recipe, np.random.default_rng(work.recipe.seed)
    shape, bits = (images, *recipe.stored_sides, recipe.channels), recipe.data.bits or 8
    return Samples(
        images=rng.integers(0, 2**bits, shape, dtype=np.uint16 if bits == 16 else np.uint8),
        rows=np.arange(images),
        labels=task_of(work.recipe).random_labels(rng, images, work.classes),
    )
