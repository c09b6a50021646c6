"""`flatout bench`: how fast the input path is, how fast the step is, how fast training is, and what limits it."""

import contextlib
import math
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import __version__
from flatout.console import Console, aligned
from flatout.data.order import epoch_batches, steps_per_epoch
from flatout.recipe import Recipe
from flatout.run.fit import run_session
from flatout.run.options import Options
from flatout.run.session import Session
from flatout.scale.scale import spread
from flatout.scale.steps import READ_AHEAD, Timed, preparing, training, training_on

if TYPE_CHECKING:
    from flatout.data.source import DataRef, Source
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceSplit, Engine

# How often each rate is measured, in turn with the others; the seconds of each measurement; and the seconds after which
# no other round begins.
ROUNDS, SECONDS, LIMIT_SECONDS = 5, 1.0, 30.0
# The batches on which the step alone is timed: at most this many, and this many bytes of images.
MAX_BATCHES, MAX_BYTES = 64, 1 << 28
# Training below this share of what limits it is worth a sentence.
EFFICIENT = 0.9
RATES = {"input": "the input path alone", "compute": "the step alone", "training": "training"}


def bench(recipe: Recipe, data: "DataRef | Source", options: Options, console: Console) -> dict[str, Any]:
    """Measure a job; nothing is written.

    Args:
        recipe, data: as `resolve` returns them.

    Returns:
        `input_images_per_second`: batches ordered, read and copied to the devices, without a step.
        `compute_images_per_second`: steps on the same few batches, which need no input. Augmentation is part of a step.
        `images_per_second`: both, as in a run. All three are medians; `spread` has the least and the most.
        `efficiency`: the last by the lower of the first two. `limit`: which one that is, `input` or `compute`.
        `decode_images_per_second`: when the pack was built, once. `verdict`: sentences.

    Raises:
        InputError: the data, the recipe or the devices are wrong.
        TrainingFailed: a process was lost.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        # The devices that suit one epoch suit this measurement, which is about as short.
        recipe = recipe.override({"epochs": 1})
        session = Session(recipe, data, replace(options, out=Path(folder) / "run"))
        return run_session(session, console, _on_rank)


def _on_rank(console: Console, world: "World", session: Session) -> dict[str, Any]:
    """Measure on one of the ranks; all return the same."""
    from flatout.engine.devices import machine

    with session.set_up(console, world) as (pack, splits, engine), contextlib.ExitStack() as stack:
        recipe = session.recipe
        train = session.place(engine, {"train": splits["train"]})["train"]
        console.note("measuring for about 20 s")
        timed = _measurements(stack, train, engine, world, recipe)
        steps = {name: max(READ_AHEAD, one.steps_in(SECONDS)) for name, (one, _) in timed.items()}
        engine.communication_seconds()
        rates: dict[str, list[float]] = {name: [] for name in timed}
        seconds = exchanging = 0.0
        while len(rates["training"]) < ROUNDS and seconds < LIMIT_SECONDS:
            for name, (one, images) in timed.items():
                each = one.steady_seconds(steps[name])
                rates[name].append(images / each)
                seconds += each * steps[name]
                exchanged = engine.communication_seconds()
                exchanging += exchanged if name == "training" else 0.0
        spreads = {name: spread(found) for name, found in rates.items()}
        medians = {name: found["median"] for name, found in spreads.items() if found}
        trained_for = sum(steps["training"] * timed["training"][1] / rate for rate in rates["training"])
        limit = "input" if medians["input"] < medians["compute"] else "compute"
        # Of the same round: a machine that slows down affects both alike.
        shares = [both / alone for both, alone in zip(rates["training"], rates[limit], strict=True)]
        result = {
            **{key: getattr(recipe, key) for key in ("job", "model", "batch_size", "image_size", "precision")},
            "devices": session.devices,
            "engine": session.options.engine,
            "world_size": world.size,
            "train_images": len(train.samples),
            "input_images_per_second": medians["input"],
            "compute_images_per_second": medians["compute"],
            "images_per_second": medians["training"],
            "spread": spreads,
            "limit": limit,
            "efficiency": statistics.median(shares),
            "communication_fraction": exchanging / trained_for if math.isfinite(exchanging) else None,
            "decode_images_per_second": len(pack.labels) / pack.build_seconds if pack.build_seconds else None,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine(),
            "version": __version__,
        }
        return {**result, "verdict": verdict(result)}


def _measurements(
    stack: contextlib.ExitStack, train: "DeviceSplit", engine: "Engine", world: "World", recipe: Recipe
) -> dict[str, tuple[Timed, float]]:
    """Return what to time, and the images of a step of each on average."""
    images, batch = len(train.samples), recipe.batch_size
    steps = steps_per_epoch(images, batch, recipe.drop_last)
    on_average = batch if recipe.drop_last and images >= batch else images / steps
    kept = min(MAX_BATCHES, max(1, MAX_BYTES // (batch * max(1, train.samples.nbytes // images))))
    train.begin_epoch(0)
    batches = list(islice(epoch_batches(recipe, train.samples, 0), kept))
    inputs = list(train.feed(batches))
    found = {
        "input": (preparing(train, world, recipe), on_average),
        "compute": (training_on(inputs, train, world), sum(b.count for b in batches) / len(batches)),
        "training": (training(train, engine, world, recipe), on_average),
    }
    for generator, _ in found.values():
        stack.callback(generator.close)
    return {name: (Timed(generator, engine, world), images) for name, (generator, images) in found.items()}


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Return what limits the job, how close training comes to that, and what would help."""
    prepared, computed = result["input_images_per_second"], result["compute_images_per_second"]
    ratio = max(prepared, computed) / min(prepared, computed)
    times = f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"
    if result["limit"] == "compute":
        found = [f"limited by compute: the input path could feed {times} times as many images"]
        found.append("more devices, bf16 or a cheaper model are faster; a faster disk is not")
    else:
        found = [f"limited by input: the step could train {times} times as many images"]
        found.append("memory that holds all images, a faster disk or smaller images are faster; more devices are not")
    efficiency, exchanging = result["efficiency"], result["communication_fraction"] or 0.0
    reached = f"training reaches {min(efficiency, 1):.0%} of the limit"
    found.append(reached if efficiency >= EFFICIENT else f"{reached}: input and step wait for each other or for cores")
    if exchanging >= 1 - EFFICIENT:
        found.append(
            f"the exchange of gradients takes {exchanging:.0%} of the time; a larger batch needs fewer of them"
        )
    return found


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return the table and the verdict, as lines; `result` is what `bench` returned."""
    table = [[f"images per second on {result['devices']}", "median", "least", "most"]]
    for name, what in RATES.items():
        found = result["spread"][name]
        table.append([what, *(f"{found[key]:,.0f}" for key in ("median", "min", "max"))])
    if result["decode_images_per_second"]:
        table.append(["decoding, once", f"{result['decode_images_per_second']:,.0f}"])
    return [*aligned(table), "", *result["verdict"]]
