"""Timing what the training loop does: whole steps, steps without their input, and the input without steps."""

import time
from collections.abc import Generator, Iterator, Sequence
from itertools import count, cycle, islice
from typing import TYPE_CHECKING, Any

from flatout.data.order import epoch_batches
from flatout.recipe import Recipe

if TYPE_CHECKING:
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceSplit, Engine

# The shortest measurement that determines the number of steps of the others, in seconds.
RELIABLE_SECONDS = 0.3
# Batches that a feed has ready after a pause. They are taken first, without the clock; and as many are measured.
READ_AHEAD = 4

Steps = Generator[None, None, None]


class Timed:
    """Times some of endless steps; all processes take the same ones.

    Args:
        engine: runs them; it is waited for.
    """

    def __init__(self, steps: Steps, engine: "Engine", world: "World") -> None:
        self._steps, self._engine, self._world = steps, engine, world

    def seconds(self, steps: int) -> float:
        """Take some steps, wait for them, and return the time of one in the slowest process."""
        began = time.perf_counter()
        self._take(steps)
        return max(self._world.all_gather_object((time.perf_counter() - began) / steps))

    def steady_seconds(self, steps: int) -> float:
        """Do so once nothing is left that was read ahead during a pause."""
        self._take(READ_AHEAD)
        return self.seconds(steps)

    def steps_in(self, seconds: float) -> int:
        """Return how many steps take about so long, at least one; found by taking some."""
        steps, one = 1, self.seconds(1)
        while steps * one < min(RELIABLE_SECONDS, seconds):
            steps *= 2
            one = self.seconds(steps)
        return max(1, round(seconds / one))

    def close(self) -> None:
        """End the threads that read ahead."""
        self._steps.close()

    def _take(self, steps: int) -> None:
        for _ in islice(self._steps, steps):
            pass
        self._engine.counts()


def endless_epochs(split: "DeviceSplit", recipe: Recipe) -> Iterator[Iterator[Any]]:
    """Begin one epoch after the other, and yield the inputs of its training steps."""
    for epoch in count():
        split.begin_epoch(epoch)
        yield split.feed(epoch_batches(recipe, split.samples, epoch))


def training(split: "DeviceSplit", engine: "Engine", world: "World", recipe: Recipe) -> Steps:
    """Train epoch by epoch as the training loop does, at a learning rate of 0.

    That keeps the weights: random labels could make them diverge.
    """
    for epoch in endless_epochs(split, recipe):
        for number, inputs in enumerate(epoch):
            _step(split, world, inputs, number)
            yield
        engine.counts()


def training_on(inputs: Sequence[Any], split: "DeviceSplit", world: "World") -> Steps:
    """Train on the same batches again and again: `inputs` are what `split.feed` has yielded for them."""
    for number, one in enumerate(cycle(inputs)):
        _step(split, world, one, number)
        yield


def preparing(split: "DeviceSplit", world: "World", recipe: Recipe) -> Steps:
    """Prepare the inputs of the steps of each epoch, and take none."""
    for epoch in endless_epochs(split, recipe):
        for _ in epoch:
            world.watch.keep_alive()
            yield


def _step(split: "DeviceSplit", world: "World", inputs: Any, number: int) -> None:
    split.train_step(inputs, 0.0, number)
    world.control.received()
    world.watch.report_step(0, number + 1)
