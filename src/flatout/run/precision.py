"""`precision = "auto"`: the fastest number format that keeps the accuracy, by real training steps on the device."""

import contextlib
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from flatout.data.order import epoch_batches
from flatout.recipe import Recipe
from flatout.run.budget import seconds_per_step

if TYPE_CHECKING:
    from flatout.data.feed import Samples
    from flatout.distributed.world import World
    from flatout.engine.base import Engine

# Training images, in batches, and seconds of each measurement. The formats are measured in turn, and the shortest time
# of each counts: the first steps warm up, and what else the host does makes steps slower, never faster.
BATCHES, SECONDS, ROUNDS = 4, 0.25, 3


def fastest_precision(
    make: "Callable[[Recipe], Engine]", samples: "Samples", recipe: Recipe, world: "World", formats: Sequence[str]
) -> tuple[str, str]:
    """Return a number format, and a sentence that explains it; all ranks call this.

    Args:
        make: returns an engine with a copy of the model.
        samples: training images, of which some batches are used.
        formats: what the device computes in, the default first; bf16 is one of them.
    """
    from flatout.engine.eager.device_setup import BF16_WORTH

    count = min(len(samples), BATCHES * recipe.batch_size)
    # Those that are needed first are there first.
    positions = np.concatenate([batch.samples for batch in islice(epoch_batches(recipe, samples, 0), BATCHES)])
    positions = np.sort(positions[:count])
    few = samples.at(positions)
    default = formats[0]
    seconds = dict.fromkeys((default, "bf16"), math.inf)
    for name in ROUNDS * (default, "bf16"):
        one = recipe.override({"precision": name})
        with contextlib.closing(make(one)) as engine:
            placed = engine.place(few)
            each = seconds_per_step(engine, placed, one, world, SECONDS, first_steps=1)
            seconds[name] = min(seconds[name], each)
    gain = seconds[default] / seconds["bf16"]
    chosen = "bf16" if gain >= BF16_WORTH else default
    compared = f"{gain:.1f} times as fast as" if gain >= 1.05 else "no faster than"
    return chosen, f"precision = {chosen}: a step in bf16 is {compared} in {default}"
