"""The training loop: epochs, evaluation, schedule, the best weights, when to stop. It knows no device.

The loop's position is (epoch, step); everything else it needs is a function of that, the seed and the history, so it
can begin anywhere.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.order import steps_per_epoch, training_batches
from flatout.dist.control import Flag
from flatout.dist.world import World
from flatout.engine.base import DeviceSplit, Engine
from flatout.errors import Stopped, TrainingFailed
from flatout.numerics.augment import epoch_transforms
from flatout.numerics.metrics import NO_COUNTS, Counts
from flatout.numerics.random import Stream, raw
from flatout.numerics.schedule import learning_rate
from flatout.recipe import Recipe
from flatout.run.progress import EpochRecord, Progress

MEND = "a lower optimizer.lr is the usual mend. The weights of the last good epoch are kept."


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What the loop tells its caller.

    Attributes:
        flags: what to request of all processes of the run with the next step.
        step: after every step, with the progress and the number of images of the step.
        poll: whether to fetch the running loss now, which waits for the device; asked after every step, and the same on
            every process.
        loss: takes the mean loss and the number of steps since it was last told.
        epoch: after every epoch, its evaluation and the choice of the best weights.
    """

    flags: Callable[[], Flag]
    step: Callable[[Progress, int], None]
    poll: Callable[[Progress], bool]
    loss: Callable[[Progress, float], None]
    epoch: Callable[[Progress], None]


def train(
    engine: Engine, world: World, recipe: Recipe, splits: Mapping[str, DeviceSplit], progress: Progress, tell: Callbacks
) -> str:
    """Train from where `progress` stands to the end of the recipe, updating it.

    Args:
        engine: holds the model.
        world: the processes of the run.
        recipe: what to do.
        splits: by name; the engine placed them.
        progress: where to begin; it always matches the engine's state when this returns or raises `Stopped`.
        tell: callbacks.

    Returns:
        Why training ended before the last epoch, as words; empty if it did not.

    Raises:
        TrainingFailed: a loss was not finite; the message names epoch and step.
        Stopped: one of the processes was asked to end.
    """
    steps = steps_per_epoch(len(splits["train"].samples), recipe.batch_size, recipe.drop_last)
    while progress.epoch < recipe.epochs:
        rate = _train_epoch(engine, world, recipe, splits["train"], steps, progress, tell)
        record = world.broadcast_object(_finish_epoch(recipe, splits, steps, rate, progress))
        progress.history.append(record)
        _keep_best(engine, recipe, progress)
        tell.epoch(progress)
        waited = progress.epoch - progress.best_epoch
        if recipe.early_stopping and progress.best_epoch and waited >= recipe.early_stopping:
            return f"early stopping: no better validation result in {waited} epochs"
    return ""


def _train_epoch(
    engine: Engine,
    world: World,
    recipe: Recipe,
    train: DeviceSplit,
    steps: int,
    progress: Progress,
    tell: Callbacks,
) -> float:
    """Run the steps of one epoch that are left; return the last learning rate."""
    epoch, count = progress.epoch, len(train.samples)
    clock, rate = _Clock(progress), recipe.optimizer.lr
    watched = _watched_losses(progress.history)
    batches = training_batches(recipe.seed, epoch, count, recipe.batch_size, recipe.drop_last, start=progress.step)
    train.begin_epoch(epoch_transforms(recipe.augment, recipe.seed, epoch, count))
    seeds = raw(recipe.seed, Stream.STEP, epoch, steps) >> np.uint64(1)
    first_step = progress.step
    for inputs in clock.waiting(train.feed(batches)):
        rate = learning_rate(recipe, epoch * steps + progress.step, steps, watched)
        world.control.request(tell.flags())
        train.train_step(inputs, rate, int(seeds[progress.step]))
        progress.step += 1
        images = min(recipe.batch_size, count - (progress.step - 1) * recipe.batch_size)
        progress.images_trained += images
        clock.tick()
        progress.note_first_steps()
        tell.step(progress, images)
        flags = world.control.received()
        if Flag.LOSS in flags or tell.poll(progress):
            tell.loss(progress, _fetch_counts(engine, progress, first_step).loss)
        if flags & (Flag.INTERRUPT | Flag.TERMINATE):
            _fetch_counts(engine, progress, first_step)
            raise Stopped(signal.SIGTERM if Flag.TERMINATE in flags else signal.SIGINT)
    _fetch_counts(engine, progress, first_step)
    clock.tick()
    progress.communication_seconds += engine.communication_seconds()
    return rate


def _fetch_counts(engine: Engine, progress: Progress, first_step: int) -> Counts:
    """Wait for the device and add what it counted to the epoch's sums; return what was added."""
    counts, bad_step = engine.counts()
    if bad_step is not None:
        raise TrainingFailed(
            f"the loss is not finite in epoch {progress.epoch + 1}, step {first_step + bad_step + 1}; {MEND}"
        )
    progress.counts += counts
    return counts


def _finish_epoch(
    recipe: Recipe, splits: Mapping[str, DeviceSplit], steps: int, rate: float, progress: Progress
) -> EpochRecord:
    began = time.perf_counter()
    # The test split is looked at after every epoch only where no validation split exists, and decides nothing.
    watched = "valid" if "valid" in splits else "test"
    evaluated = {watched: splits[watched].evaluate().counts} if watched in splits else {}
    if evaluated and not math.isfinite(evaluated[watched].loss):
        raise TrainingFailed(f"the {watched} loss is not finite after epoch {progress.epoch + 1}; {MEND}")
    progress.evaluate_seconds += time.perf_counter() - began
    counts, seconds = progress.counts, progress.epoch_seconds
    progress.epoch, progress.step, progress.counts, progress.epoch_seconds = progress.epoch + 1, 0, NO_COUNTS, 0.0
    results = {}
    for name in ("valid", "test"):
        split = evaluated.get(name)
        results[f"{name}_loss"] = split.loss if split else None
        results[f"{name}_accuracy"] = split.accuracy if split else None
    return EpochRecord(
        epoch=progress.epoch,
        step=progress.epoch * steps,
        learning_rate=rate,
        train_loss=counts.loss,
        train_accuracy=counts.accuracy,
        images=counts.count,
        seconds=seconds,
        images_per_second=counts.count / seconds if seconds else 0.0,
        **results,
    )


def _watched_losses(history: list[EpochRecord]) -> list[float]:
    """Return the losses that the plateau schedule watches: validation, or training where there is none."""
    return [r.train_loss if r.valid_loss is None else r.valid_loss for r in history]


def _keep_best(engine: Engine, recipe: Recipe, progress: Progress) -> None:
    """Note the epoch, and keep its weights, if it is the best by validation accuracy; equals go by the lower loss."""
    record = progress.history[-1]
    if record.valid_accuracy is None:
        return

    def merit(r: EpochRecord) -> tuple[float, float]:
        loss = r.valid_loss if r.valid_loss is not None and math.isfinite(r.valid_loss) else math.inf
        return (r.valid_accuracy or 0.0, -loss)

    if progress.best_epoch == 0 or merit(record) > merit(progress.history[progress.best_epoch - 1]):
        progress.best_epoch = record.epoch
        if recipe.keep == "best":
            progress.best = {k: v for k, v in engine.state().items() if k.startswith("model.")}


class _Clock:
    """Adds the time of an epoch to the progress as it passes."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._last = progress, time.perf_counter()

    def tick(self) -> None:
        """Count the time since the last tick as training."""
        now = time.perf_counter()
        self._progress.train_seconds += now - self._last
        self._progress.epoch_seconds += now - self._last
        self._last = now

    def waiting(self, inputs: Iterator[Any]) -> Iterator[Any]:
        """Yield inputs, counting the time they take to come."""
        while True:
            began = time.perf_counter()
            item = next(inputs, None)
            self._progress.wait_seconds += time.perf_counter() - began
            if item is None:
                return
            yield item
