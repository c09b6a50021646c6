"""Short measurements with real training steps before training: the number format, and checks of long runs.

The checks are from Karpathy, "A Recipe for Training Neural Networks" (2019): "verify loss @ init" and "overfit one
batch".
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, repeat
from typing import TYPE_CHECKING

import numpy as np

from flatout.config import Recipe
from flatout.data.batches import epoch_batches
from flatout.engine.schedule import scaled_rate
from flatout.train.budget import seconds_per_step

if TYPE_CHECKING:
    from flatout.data.batches import Split
    from flatout.distributed.world import World
    from flatout.engine.base import Engine
    from flatout.train.context import TrainContext
    from flatout.train.progress import Progress

# Training images, in batches, and seconds of each measurement. The formats alternate, and the minimum of each counts:
# the first steps warm up, and other load makes steps slower, never faster.
PRECISION_BATCHES, PRECISION_SECONDS, PRECISION_ROUNDS = 4, 0.25, 3
# Steps on one batch, how many of the last are averaged, and their largest share of a run: shorter runs skip them.
SANITY_STEPS, LAST_STEPS, LARGEST_SHARE = 25, 5, 0.01
# Logits of standard deviation s cost about s²/2 more than guessing; fresh models have logits of less than 2.
LARGEST_EXCESS = 2.0
# A run learns nothing if at the pace of those steps it would change the loss by less than this share.
MIN_CHANGE = 0.01


def fastest_precision(
    make: "Callable[[Recipe], Engine]", samples: "Split", recipe: Recipe, world: "World", formats: Sequence[str]
) -> tuple[str, str]:
    """Return the fastest number format, and an explanation; all ranks call this.

    Args:
        make: creates an engine with a copy of the model.
        samples: training images; a few batches are used.
        formats: the number formats of the device, the default first; bf16 is one of them.
    """
    from flatout.engine.torch.accelerator import BF16_WORTH

    count = min(len(samples), PRECISION_BATCHES * recipe.batch_size)
    first_batches = islice(epoch_batches(recipe, samples, 0), PRECISION_BATCHES)
    few = samples.at(np.sort(np.concatenate([batch.samples for batch in first_batches])[:count]))
    default = formats[0]
    seconds = dict.fromkeys((default, "bf16"), math.inf)
    for name in PRECISION_ROUNDS * (default, "bf16"):
        one = recipe.override({"precision": name})
        with contextlib.closing(make(one)) as engine:
            placed = engine.place(few)
            each = seconds_per_step(engine, placed, one, world, PRECISION_SECONDS, first_steps=1)
            seconds[name] = min(seconds[name], each)
    gain = seconds[default] / seconds["bf16"]
    chosen = "bf16" if gain >= BF16_WORTH else default
    compared = f"{gain:.1f} times as fast as" if gain >= 1.05 else "no faster than"
    return chosen, f"a step in bf16 is {compared} in {default}"


def check_sanity(context: "TrainContext", progress: "Progress") -> None:
    """Before a long run, train on one batch, restore the engine, and note problems that would make the run useless.

    All ranks call this. A resumed run was checked before.
    """
    recipe, engine, world = context.recipe, context.engine, context.world
    steps = recipe.total_steps(context.steps_per_epoch)
    is_resumed = (progress.epoch, progress.step) != (0, 0)
    has_own_loss = context.options.functions.loss is not None
    # The checks take only a small share of a long run.
    if not context.datasets or is_resumed or has_own_loss or LARGEST_SHARE * steps < SANITY_STEPS:
        return
    rate, train, before = scaled_rate(recipe), context.datasets["train"], engine.snapshot()
    train.begin_epoch(0)
    batch = replace(next(epoch_batches(recipe, train.samples, 0)), ahead=())
    first = math.nan
    for step, inputs in enumerate(train.feed(repeat(batch, SANITY_STEPS)), start=1):
        # A short warm-up. The seed is always the same, so that dropout adds no noise to the losses.
        train.train_step(inputs, rate * step / SANITY_STEPS, 0)
        world.control.received()
        world.watch.keep_alive()
        if step == 1:
            first = engine.counts()[0].loss
        elif step == SANITY_STEPS - LAST_STEPS:
            engine.counts()
    last = engine.counts()[0].loss
    engine.restore(before)
    engine.communication_seconds()  # epochs of training begin at 0
    for sentence in _problems(context, first, last, steps):
        context.log.note(sentence)
    context.log.lap("check")


def _problems(context: "TrainContext", first: float, last: float, steps: int) -> list[str]:
    """Return a sentence for each problem that the first and the last losses of one batch suggest."""
    recipe, classes, found = context.recipe, len(context.pack.classes), list[str]()
    rate, guessing = scaled_rate(recipe), context.engine.task.guessing_loss(classes)
    is_fresh = not (recipe.pretrained or recipe.weights)
    if is_fresh and not first < guessing + LARGEST_EXCESS:
        what = f" one of {classes} classes" if recipe.task in ("auto", "single-label") else ""
        found.append(
            f"the first loss is {first:.3g}, and that of guessing{what} {guessing:.3g}: usual "
            "causes are a data.mean and data.std that do not suit the images, and large weights in the last layer"
        )
    # The rate rose to its peak, so it was half of that on average.
    change_at_this_pace = 2 * abs(first - last) * steps / SANITY_STEPS
    if not last < max(first, guessing) + LARGEST_EXCESS:
        found.append(
            f"{SANITY_STEPS} steps on one batch raised its loss from {first:.3g} to {last:.3g}: usual causes are too "
            f"high a learning rate ({rate:.2g}; flatout lr finds one), and a data.mean and data.std that do not suit "
            "the images"
        )
    elif change_at_this_pace < MIN_CHANGE * first and first > guessing / 2:  # the initial weights do not fit the head
        found.append(
            f"{SANITY_STEPS} steps on one batch left its loss at {last:.3g}: usual causes are too low a learning rate "
            f"({rate:.2g}; flatout lr finds one), and outputs that hardly depend on the trained weights"
        )
    return found
