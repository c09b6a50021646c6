"""`flatout lr`: train a job for some steps while the learning rate rises, and suggest a rate from the losses.

The range test is Smith's (arXiv 1506.01186, section 3.3). Steps are those of a run: its engine, augmentation, optimizer
and starting weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout import __version__
from flatout.console import Console, aligned
from flatout.errors import TrainingFailed
from flatout.lr.chart import CHART, RESULT, draw_rates
from flatout.numerics.schedule import scaled_rate
from flatout.recipe import Recipe
from flatout.report.run_files import write_json
from flatout.run.fit import run_session
from flatout.run.options import Options
from flatout.run.session import Session
from flatout.scale.scale import check_free
from flatout.scale.steps import endless_epochs

if TYPE_CHECKING:
    from flatout.data.source import DataRef, Source
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceSplit, Engine

# The rate rises by so many decades in so many steps, to a lower end for Adam, whose steps do not shrink with gradients.
DECADES, STEPS = 7, 140
HIGHEST = {"sgd": 10.0, "momentum": 10.0, "adagrad": 10.0, "adam": 1.0, "adamw": 1.0}
# The weight of the past in the smoothed loss, and the multiple of its minimum at which the test ends.
SMOOTHING, DIVERGED = 0.9, 4.0
# Less than this relative decrease of the smoothed loss is no learning.
LEAST_DECREASE = 0.02


def find_rate(recipe: Recipe, data: "DataRef | Source", options: Options, console: Console) -> dict[str, Any]:
    """Run the test; write lr.json and lr.png; return the former's content.

    Args:
        recipe, data: as `resolve` returns them.
        options: how to run; `out` is a new or empty folder, None for a new one under `runs/`.

    Returns:
        `points` are [rate, loss, smoothed loss] of each step. `rate` is the suggestion for a step, and `lr` the value
        of `optimizer.lr` that yields it (they differ where the recipe scales `lr` to its batch size); both are None
        where the loss decreased at no rate. `recipe_rate` is the rate that the recipe has now. `diverged` is the rate
        at which the test ended early, or None.

    Raises:
        InputError: the data, the recipe or the folder is wrong.
        TrainingFailed: not even the first loss is finite, or a rank was lost.
    """
    check_free(options.out)
    out = options.out or Path("runs") / f"lr-{recipe.job}-{datetime.now():%Y%m%d-%H%M%S}"
    # The devices that suit one epoch suit this test, which is about as short.
    session = Session(recipe.override({"epochs": 1}), data, replace(options, out=out))
    return run_session(session, console, _test)


def _test(console: Console, world: "World", session: Session) -> dict[str, Any]:
    """Test on one of the ranks; all return the same, and the main one writes the files."""

    with session.set_up(console, world) as (_, splits, engine):
        recipe = session.recipe
        train = session.place(engine, {"train": splits["train"]})["train"]
        points, diverged = _measure(engine, train, recipe, world, console)
        rate = suggest(*zip(*points, strict=True))
        current = scaled_rate(recipe)
        result = {
            **{key: getattr(recipe, key) for key in ("job", "model", "batch_size")},
            "optimizer": recipe.optimizer.name,
            "devices": session.devices,
            "steps": len(points),
            "rate": rate,
            "lr": None if rate is None else float(f"{rate * recipe.optimizer.lr / current:.2g}"),
            "recipe_rate": current,
            "diverged": diverged,
            "points": points,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "version": __version__,
            "out": str(session.out),
        }
        if world.is_main:
            write_json(session.out / RESULT, result)
            draw_rates(session.out / CHART, result)
        return result


def _measure(
    engine: "Engine", train: "DeviceSplit", recipe: Recipe, world: "World", console: Console
) -> tuple[list[tuple[float, float, float]], float | None]:
    """Return (rate, loss, smoothed loss) of each step, and the rate at which training diverged, if it did."""
    highest = HIGHEST[recipe.optimizer.name]
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
    """Return a tenth of the highest rate with the lowest loss; None where the loss does not decrease.

    At the minimum the rate is already about to be too high, and an order of magnitude below it training is both fast
    and stable: Gugger, "How do you find a good learning rate" (2018), and Howard and Gugger, "Deep Learning for Coders
    with fastai and PyTorch" (2020), chapter 5. Of fastai's other rules, the steepest descent depends on the noise of
    single steps, and the middle of the longest descent ("valley") lies several times lower here.

    Losses that differ by less than their noise are the same: where the loss stays low over decades, its lowest point
    is anywhere.

    Args:
        rates: of each step, rising.
        losses: of each step.
        smoothed: the losses, smoothed.
    """
    least = int(np.argmin(smoothed))
    # The first tenth of the steps changes next to nothing: its median is the loss before training.
    before = float(np.median(smoothed[: max(1, STEPS // 10)]))
    if not smoothed[least] < (1 - LEAST_DECREASE) * before:
        return None
    of_a_step = np.std(np.subtract(losses, smoothed)[: least + 1])
    # The variance of an exponential average of independent numbers.
    noise = of_a_step * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))
    return rates[np.flatnonzero(np.array(smoothed) <= smoothed[least] + 2 * noise)[-1]] / 10


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return a table of the findings, as lines; `result` is what `find_rate` returned."""
    rates, _, smoothed = zip(*result["points"], strict=True)
    lowest = int(np.argmin(smoothed))
    table = [
        ["", "learning rate", "smoothed loss"],
        ["first step", f"{rates[0]:.2g}", f"{smoothed[0]:.4f}"],
        ["lowest loss", f"{rates[lowest]:.2g}", f"{smoothed[lowest]:.4f}"],
        ["last step", f"{rates[-1]:.2g}", f"{smoothed[-1]:.4f}", *["diverged"] * bool(result["diverged"])],
        ["recipe", f"{result['recipe_rate']:.2g}"],
    ]
    files = f"{result['out']}: {RESULT}, {CHART}"
    if result["rate"] is None:
        fix = "check the labels, the images and the optimizer"
        return [*aligned(table), "", f"no suggestion: the loss fell at no learning rate; {fix}", files]
    return [*aligned([*table, ["suggested", f"{result['rate']:.2g}"]]), "", files]
