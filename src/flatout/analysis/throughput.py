"""`flatout bench`: how fast the input path, the step and training are, and what limits the job.

The steps that are timed are those of the training loop.
"""

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import __version__
from flatout.config import Recipe
from flatout.data.batches import epoch_batches, steps_per_epoch
from flatout.engine.devices import machine
from flatout.train.request import Options, TrainRequest
from flatout.train.run import place, run_on_all_ranks, set_up
from flatout.utils.console import Console, aligned

if TYPE_CHECKING:
    from flatout.data.source import DataSource, ImageDataset
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceDataset, Engine

# Minimum seconds of the measurement that determines the number of steps of the others.
RELIABLE_SECONDS = 0.3
# Batches that a feed has ready after a pause. They are consumed untimed; then the same number is measured.
READ_AHEAD = 4
# How often each rate is measured, in turn with the others; the seconds of each measurement; and the seconds after which
# no other round begins.
ROUNDS, SECONDS, LIMIT_SECONDS = 5, 1.0, 30.0
# The batches on which the step alone is timed: at most this many, and this many bytes of images.
MAX_BATCHES, MAX_BYTES = 64, 1 << 28
# Training below this share of its limit is reported.
EFFICIENT = 0.9
RATES = {"input": "the input path alone", "compute": "the step alone", "training": "training"}

Steps = Generator[None, None, None]


class Timed:
    """Times steps of an endless sequence, which `engine` runs; all processes take the same ones."""

    def __init__(self, steps: Steps, engine: "Engine", world: "World") -> None:
        self._steps, self._engine, self._world = steps, engine, world
        self.close = steps.close  # ends the threads that read ahead

    def seconds(self, steps: int) -> float:
        """Take some steps, wait for them, and return the time of one in the slowest process."""
        began = time.perf_counter()
        self.take(steps)
        return max(self._world.all_gather_object((time.perf_counter() - began) / steps))

    def steps_in(self, seconds: float) -> int:
        """Measure the number of steps that take about `seconds`, at least one."""
        steps, one = 1, self.seconds(1)
        while steps * one < min(RELIABLE_SECONDS, seconds):
            steps *= 2
            one = self.seconds(steps)
        return max(1, round(seconds / one))

    def take(self, steps: int) -> None:
        """Take some steps and wait for them."""
        for _ in islice(self._steps, steps):
            pass
        self._engine.counts()


def endless_epochs(split: "DeviceDataset", recipe: Recipe) -> Iterator[Iterator[Any]]:
    """Begin one epoch after the other, and yield the inputs of its training steps."""
    for epoch in count():
        split.begin_epoch(epoch)
        yield split.feed(epoch_batches(recipe, split.samples, epoch))


def training(split: "DeviceDataset", engine: "Engine", world: "World", recipe: Recipe) -> Steps:
    """Train epoch by epoch as the training loop does, at a learning rate of 0, so that the weights stay."""
    for epoch in endless_epochs(split, recipe):
        for number, inputs in enumerate(epoch):
            _step(split, world, inputs, number)
            yield
        engine.counts()


def _training_on(inputs: Sequence[Any], split: "DeviceDataset", world: "World") -> Steps:
    for number, one in enumerate(cycle(inputs)):
        _step(split, world, one, number)
        yield


def _preparing(split: "DeviceDataset", world: "World", recipe: Recipe) -> Steps:
    for epoch in endless_epochs(split, recipe):
        for _ in epoch:
            world.watch.keep_alive()
            yield


def _step(split: "DeviceDataset", world: "World", inputs: Any, number: int) -> None:
    split.train_step(inputs, 0.0, number)
    world.control.received()
    world.watch.report_step(0, number + 1)


def bench(recipe: Recipe, data: "DataSource | ImageDataset", options: Options, console: Console) -> dict[str, Any]:
    """Measure a job; nothing is written.

    The rates are those of batches ordered, read and copied to the devices without a step (`input`), of steps on the
    same few batches (`compute`, augmentation included), and of both, as in a run. `efficiency` is the last by the lower
    of the first two, which `limit` names.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        # The devices that suit one epoch suit this measurement, which is about as short.
        recipe = recipe.override({"epochs": 1})
        options = replace(options, out=Path(folder) / "run")
        return run_on_all_ranks(TrainRequest(recipe=recipe, data=data, options=options), console, _bench_on_rank)


def _bench_on_rank(console: Console, world: "World", request: TrainRequest) -> dict[str, Any]:
    with set_up(console, world, request) as context, contextlib.ExitStack() as stack:
        recipe, engine, pack = context.recipe, context.engine, context.pack
        train = place(context, only_train=True)["train"]
        console.note("measuring for about 20 s")
        timed = _timed_rates(train, engine, world, recipe)
        for steps, _ in timed.values():
            stack.callback(steps.close)
        rates, communication = _measure_in_turn(timed, engine)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        spreads = {n: {"median": medians[n], "min": min(found), "max": max(found)} for n, found in rates.items()}
        limit = "input" if medians["input"] < medians["compute"] else "compute"
        # Of the same round, in which a slow machine affects both equally.
        shares = [both / alone for both, alone in zip(rates["training"], rates[limit], strict=True)]
        result = {
            **{key: getattr(recipe, key) for key in ("job", "model", "batch_size", "image_size", "precision")},
            "devices": context.devices,
            "engine": request.options.engine,
            "world_size": world.size,
            "train_images": len(train.samples),
            "input_images_per_second": medians["input"],
            "compute_images_per_second": medians["compute"],
            "images_per_second": medians["training"],
            "spread": spreads,
            "limit": limit,
            "efficiency": statistics.median(shares),
            "communication_fraction": communication,
            "decode_images_per_second": len(pack.labels) / pack.build_seconds if pack.build_seconds else None,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine(),
            "version": __version__,
        }
        return {**result, "verdict": _verdict(result)}


def _timed_rates(
    train: "DeviceDataset", engine: "Engine", world: "World", recipe: Recipe
) -> dict[str, tuple[Timed, float]]:
    images, batch = len(train.samples), recipe.batch_size
    steps = steps_per_epoch(images, batch, recipe.drop_last)
    mean = batch if recipe.drop_last and images >= batch else images / steps
    kept = min(MAX_BATCHES, max(1, MAX_BYTES // (batch * max(1, train.samples.nbytes // images))))
    train.begin_epoch(0)
    batches = list(islice(epoch_batches(recipe, train.samples, 0), kept))
    inputs = list(train.feed(batches))
    return {
        "input": (Timed(_preparing(train, world, recipe), engine, world), mean),
        "compute": (
            Timed(_training_on(inputs, train, world), engine, world),
            sum(batch.count for batch in batches) / len(batches),
        ),
        "training": (Timed(training(train, engine, world, recipe), engine, world), mean),
    }


def _measure_in_turn(
    timed: Mapping[str, tuple[Timed, float]], engine: "Engine"
) -> tuple[dict[str, list[float]], float | None]:
    steps = {name: max(READ_AHEAD, one.steps_in(SECONDS)) for name, (one, _) in timed.items()}
    rates: dict[str, list[float]] = {name: [] for name in timed}
    spent = dict.fromkeys(timed, 0.0)
    communication = 0.0
    engine.communication_seconds()
    while len(rates["training"]) < ROUNDS and sum(spent.values()) < LIMIT_SECONDS:
        for name, (one, images) in timed.items():
            one.take(READ_AHEAD)
            seconds = one.seconds(steps[name])
            rates[name].append(images / seconds)
            spent[name] += seconds * steps[name]
            communicated = engine.communication_seconds()
            communication += communicated if name == "training" else 0.0
    return rates, communication / spent["training"] if math.isfinite(communication) else None


def _verdict(result: Mapping[str, Any]) -> list[str]:
    prepared, computed = result["input_images_per_second"], result["compute_images_per_second"]
    ratio = max(prepared, computed) / min(prepared, computed)
    times = f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"
    if result["limit"] == "compute":
        found = [f"limited by compute: the input path could feed {times} times as many images"]
        found.append("more devices, bf16 or a cheaper model are faster; a faster disk is not")
    else:
        found = [f"limited by input: the step could train {times} times as many images"]
        found.append("memory that holds all images, a faster disk or smaller images are faster; more devices are not")
    efficiency, communication = result["efficiency"], result["communication_fraction"] or 0.0
    reached = f"training reaches {min(efficiency, 1):.0%} of the limit"
    found.append(reached if efficiency >= EFFICIENT else f"{reached}: input and step wait for each other or for cores")
    if communication >= 1 - EFFICIENT:
        found.append(
            f"the exchange of gradients takes {communication:.0%} of the time; a larger batch needs fewer of them"
        )
    return found


def format_bench(result: Mapping[str, Any]) -> list[str]:
    """Return the table and the verdict, as lines."""
    table = [[f"images per second on {result['devices']}", "median", "least", "most"]]
    for name, what in RATES.items():
        found = result["spread"][name]
        table.append([what, *(f"{found[key]:,.0f}" for key in ("median", "min", "max"))])
    if result["decode_images_per_second"]:
        table.append(["decoding, once", f"{result['decode_images_per_second']:,.0f}"])
    return [*aligned(table), "", *result["verdict"]]
