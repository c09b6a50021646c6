"""Checks before a long run: whether the first loss is about that of guessing, and whether one batch can be fitted.

Both are from Karpathy, "A Recipe for Training Neural Networks" (2019): "verify loss @ init" and "overfit one batch".
"""

import math
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

from flatout.data.order import epoch_batches, steps_per_epoch
from flatout.numerics.schedule import scaled_rate
from flatout.recipe import Recipe

if TYPE_CHECKING:
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceSplit, Engine

# Steps on one batch, and how many of the last of them are averaged. Runs of which they are more than a share skip them.
STEPS, LAST_STEPS, LARGEST_SHARE = 25, 5, 0.01
# Logits of standard deviation s cost about s²/2 more than guessing; fresh models have logits of less than 2.
LARGEST_EXCESS = 2.0
# If a run changes the loss by less than this share at the pace of those steps, it learns nothing.
LEAST_CHANGE = 0.01


def is_worthwhile(recipe: Recipe, images: int) -> bool:
    """Return whether a run is so long that the checks take only a small share of it."""
    return LARGEST_SHARE * _total_steps(recipe, images) >= STEPS


def check(
    engine: "Engine", train: "DeviceSplit", recipe: Recipe, world: "World", classes: int, *, is_fresh: bool
) -> list[str]:
    """Train on one batch, go back to where the engine was, and return a sentence for each thing that seems wrong.

    All ranks call this, and all get the same sentences.

    Args:
        engine: at the state to train from.
        is_fresh: whether no trained weights were loaded.
    """
    rate, images, before = scaled_rate(recipe), len(train.samples), engine.snapshot()
    train.begin_epoch(0)
    batch = replace(next(epoch_batches(recipe, train.samples, 0)), ahead=())
    first = math.nan
    for step, inputs in enumerate(train.feed(repeat(batch, STEPS)), start=1):
        # A short warm-up. The seed is always the same, so that dropout adds no noise to the losses.
        train.train_step(inputs, rate * step / STEPS, 0)
        world.control.received()
        world.watch.keep_alive()
        if step == 1:
            first = engine.counts()[0].loss
        elif step == STEPS - LAST_STEPS:
            engine.counts()
    last = engine.counts()[0].loss
    engine.restore(before)
    engine.communication_seconds()  # those of training begin at 0

    guessing, found = engine.task.guessing_loss(classes), []
    if is_fresh and not first < guessing + LARGEST_EXCESS:
        what = f" one of {classes} classes" if recipe.task in ("auto", "single-label") else ""
        found.append(
            f"the first loss is {first:.3g}, and that of guessing{what} {guessing:.3g}: usual "
            "causes are a data.mean and data.std that do not suit the images, and large weights in the last layer"
        )
    # The rate rose to its peak, so it was half of that on average.
    change_at_this_pace = 2 * abs(first - last) * _total_steps(recipe, images) / STEPS
    if not last < max(first, guessing) + LARGEST_EXCESS:
        found.append(
            f"{STEPS} steps on one batch raised its loss from {first:.3g} to {last:.3g}: usual causes are too high a "
            f"learning rate ({rate:.2g}; flatout lr finds one), and a data.mean and data.std that do not suit the "
            "images"
        )
    elif change_at_this_pace < LEAST_CHANGE * first and first > guessing / 2:  # the starting weights do not fit it
        found.append(
            f"{STEPS} steps on one batch left its loss at {last:.3g}: usual causes are too low a learning rate "
            f"({rate:.2g}; flatout lr finds one), and outputs that hardly depend on the trained weights"
        )
    return found


def _total_steps(recipe: Recipe, images: int) -> int:
    return recipe.total_steps(steps_per_epoch(images, recipe.batch_size, recipe.drop_last))
