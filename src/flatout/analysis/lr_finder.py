"""`flatout lr`: train a job for some steps while the learning rate rises, and suggest a rate from the losses.

The range test is Smith's (arXiv 1506.01186, section 3.3).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.analysis.throughput import endless_epochs, facts_of
from flatout.config import Recipe
from flatout.data.source import DataSource, ImageDataset
from flatout.distributed.world import World
from flatout.engine.base import DeviceDataset, Engine
from flatout.engine.schedule import scaled_rate
from flatout.train.request import Options, TrainRequest
from flatout.train.run import place, run_on_all_ranks, set_up
from flatout.utils import style
from flatout.utils.console import Console, aligned
from flatout.utils.errors import TrainingFailed
from flatout.utils.files import check_free, default_folder
from flatout.utils.run_files import JsonObject, write_json

LR_RESULT, LR_CHART = "lr.json", "lr.png"
# The decades by which the rate rises, and the steps of the test; the end is lower for optimizers such as Adam, whose
# steps do not shrink with the gradients.
DECADES, STEPS = 7, 140
HIGHEST, HIGHEST_ADAPTIVE = 10.0, 1.0
PROPORTIONAL = ("sgd", "momentum", "adagrad")
# The decay of the smoothed loss, and the multiple of its minimum at which the test ends.
SMOOTHING, DIVERGED = 0.9, 4.0
# Less than this relative decrease of the smoothed loss is not learning.
MIN_DECREASE = 0.02
# A loss above this multiple of the first one would flatten the rest of the curve.
MAX_LOSS_SHOWN = 1.25


def find_rate(recipe: Recipe, data: DataSource | ImageDataset, options: Options, console: Console) -> JsonObject:
    """Run the test; write lr.json and lr.png; return the former's content.

    `points` are [rate, loss, smoothed loss] of each step. `rate` is the suggestion for a step, and `lr` the value of
    `optimizer.lr` that yields it (they differ if the recipe scales `lr` to its batch size); both are None if the loss
    decreased at no rate. `diverged` is the rate at which the test ended early.
    """
    check_free(options.out)
    out = options.out or default_folder(f"lr-{recipe.job}")
    # The devices that suit one epoch suit this test, which is about as short.
    request = TrainRequest(recipe=recipe.override({"epochs": 1}), data=data, options=replace(options, out=out))
    return run_on_all_ranks(request, console, _test)


def _test(console: Console, world: World, request: TrainRequest) -> JsonObject:
    with set_up(console, world, request) as context:
        recipe = context.recipe
        train = place(context, only_train=True)["train"]
        points, diverged = _measure(context.engine, train, recipe, world, console)
        rate, current = suggest(*zip(*points, strict=True)), scaled_rate(recipe)
        result = {
            **facts_of(recipe),
            "optimizer": recipe.optimizer.name,
            "devices": context.devices,
            "steps": len(points),
            "rate": rate,
            "lr": None if rate is None else float(f"{rate * recipe.optimizer.lr / current:.2g}"),
            "recipe_rate": current,
            "diverged": diverged,
            "points": points,
            "out": str(context.run_dir),
        }
        if world.is_main:
            write_json(context.run_dir / LR_RESULT, result)
            _draw(context.run_dir / LR_CHART, result)
        return result


def _measure(
    engine: Engine, train: DeviceDataset, recipe: Recipe, world: World, console: Console
) -> tuple[list[tuple[float, float, float]], float | None]:
    highest = HIGHEST if recipe.optimizer.name in PROPORTIONAL else HIGHEST_ADAPTIVE
    rates = np.geomspace(highest / 10**DECADES, highest, STEPS).tolist()
    points: list[tuple[float, float, float]] = []
    average, least = 0.0, math.inf
    for rate, inputs in zip(rates, chain.from_iterable(endless_epochs(train, recipe)), strict=False):
        step = len(points)
        train.train_step(inputs, rate, step)
        world.control.received()
        world.watch.report_step(0, step + 1)
        loss = engine.counts()[0].loss
        # The average is divided by the sum of its weights, as Adam's are.
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING ** (step + 1))
        least = min(least, smoothed)
        if not smoothed < DIVERGED * least:  # or not finite
            break
        points.append((rate, loss, smoothed))
        console.update(step + 1, STEPS, "steps", f"learning rate {rate:.1e}, loss {loss:.4f}")
    console.finish()
    if not points:
        raise TrainingFailed("the loss is not finite in the first step; check the starting weights and data.std")
    return points, rates[len(points)] if len(points) < STEPS else None


def suggest(rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return a tenth of the highest rate with the lowest loss; None if the loss does not decrease.

    At the minimum the rate is already about to be too high, and an order of magnitude below it training is both fast
    and stable: Howard and Gugger, "Deep Learning for Coders with fastai and PyTorch" (2020), chapter 5.

    Losses that differ by less than their noise count as equal: if the loss stays low over decades, its minimum is
    arbitrary. All arguments have a value for each step; the rates rise.
    """
    least = int(np.argmin(smoothed))
    # The first tenth of the steps hardly changes the loss: its median is the loss before training.
    before = float(np.median(smoothed[: max(1, STEPS // 10)]))
    if not smoothed[least] < (1 - MIN_DECREASE) * before:
        return None
    of_a_step = np.std(np.subtract(losses, smoothed)[: least + 1])
    # The variance of an exponential average of independent numbers.
    noise = of_a_step * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))
    return rates[np.flatnonzero(np.array(smoothed) <= smoothed[least] + 2 * noise)[-1]] / 10


def format_lr(result: JsonObject) -> list[str]:
    """Return a table of the findings, as lines."""
    rates, _, smoothed = zip(*result["points"], strict=True)
    lowest = int(np.argmin(smoothed))
    table = [["", "learning rate", "smoothed loss"]]
    for name, i in (("first step", 0), ("lowest loss", lowest), ("last step", -1)):
        table.append([name, f"{rates[i]:.2g}", f"{smoothed[i]:.4f}"])
    table[-1] += ["diverged"] * bool(result["diverged"])
    table.append(["recipe", f"{result['recipe_rate']:.2g}"])
    remark = "no suggestion: the loss fell at no learning rate; check the labels, the images and the optimizer"
    if result["rate"] is not None:
        table.append(["suggested", f"{result['rate']:.2g}"])
        remark = f"train with it: --lr {result['lr']:g}"
    return [*aligned(table), "", remark, f"{result['out']}: {LR_RESULT}, {LR_CHART}"]


def _draw(path: Path, result: JsonObject) -> None:
    rates, losses, smoothed = zip(*result["points"], strict=True)
    job = style.shorten(result["job"], 40)
    title = f"{job}: learning-rate range test, {result['optimizer']}, batch {result['batch_size']:,}"
    figure = style.new_figure(7.2, 3.9, title=title)
    axes = figure.add_subplot()
    style.style_panel(axes, "", "learning rate")
    axes.set_ylabel("training loss", fontsize=8, color=style.MUTED)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.plot(rates, losses, color=style.FAINT, linewidth=1.0, label="loss of a step")
    axes.plot(rates, smoothed, color=style.RIGHT, linewidth=1.8, label="smoothed")
    for key, name, colour in (
        ("diverged", "diverged", style.WRONG),
        ("recipe_rate", "recipe", style.MUTED),
        ("rate", "suggested", style.ORANGE),
    ):
        if result[key]:
            label = f"{name}: {result[key]:.2g}"
            axes.axvline(result[key], color=colour, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
    low, high = min(losses), min(max(losses), MAX_LOSS_SHOWN * smoothed[0])
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    style.add_legend(axes, loc="lower left")
    style.write_png(figure, path)
