"""The training loop: epochs, evaluation, schedule, best weights, early stopping. It is independent of the device.

The position is (epoch, step); everything else is a function of it, the seed and the history.
"""

import math
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flatout.config import Recipe
from flatout.data.batches import Ahead, epoch_batches, steps_per_epoch
from flatout.distributed.world import STOP_FLAGS, Flag, World
from flatout.engine.base import Counts, DeviceDataset, Engine
from flatout.engine.schedule import learning_rate
from flatout.train.request import Progress, metrics_of
from flatout.utils.errors import Stopped, TrainingFailed
from flatout.utils.random import Stream, raw
from flatout.utils.run_files import JsonObject

# Steps that count as warm-up.
FIRST_STEPS = 10
FIX = "; try a lower optimizer.lr. The weights of the last good epoch are kept."


class LoopHooks:
    """Hooks of the loop; all processes call each method at the same point."""

    def begin_step(self, train: DeviceDataset, inputs: object) -> Flag:
        """Called before every step with its inputs; return the flags to send to all processes with it."""
        return Flag.NONE

    def step(self) -> bool:
        """Called after every step; return whether to fetch the loss even without a request."""
        return False

    def loss(self, loss: float) -> None:
        """Called with the mean loss since the last call."""

    def checkpoint(self) -> None:
        """Called when a checkpoint was requested."""

    def replan(self) -> Recipe:  # pyright: ignore[reportReturnType]
        """Return the recipe with another length; called when requested."""

    def epoch(self, *, is_best: bool) -> str:
        """Called after every epoch with finite weights; return the reason to end training here, or ""."""
        return ""


@dataclass
class TrainingLoop:
    """Trains on the placed splits from `progress` on.

    `progress` is updated: it matches the engine's state after every step, also when `Stopped` is raised.
    """

    engine: Engine
    world: World
    recipe: Recipe
    splits: Mapping[str, DeviceDataset]
    progress: Progress
    hooks: LoopHooks

    def __post_init__(self) -> None:
        self._ticked = time.perf_counter()  # the time up to which training is counted
        self._images = len(self.splits["train"].samples)
        self._steps = steps_per_epoch(self._images, self.recipe.batch_size, self.recipe.drop_last)
        recipe, samples = self.recipe, self.splits["train"].samples
        self._batches_of = Ahead(lambda epoch: epoch_batches(recipe, samples, epoch))

    def run(self) -> str:
        """Train all epochs that are left; return the reason of an early end, or ""."""
        progress = self.progress
        # A run that was stopped in the evaluation of its last epoch resumes with that evaluation.
        while self._steps_left > 0 or (self._steps_left == 0 and progress.step):
            # Before an epoch, not after it: a run that is killed after its last epoch ends here when it is resumed.
            if reason := self._early_stop():
                return reason
            if self._steps_left:
                self._train_epoch()
            if not self.engine.is_finite():
                raise TrainingFailed(f"training diverged in epoch {progress.epoch + 1}: a weight is not finite{FIX}")
            # All ranks use rank 0's times and choices.
            progress.history.append(self.world.broadcast_object(self._finish_epoch()))
            if ended := self.hooks.epoch(is_best=self._choose_best()):
                return ended
        return ""

    def _early_stop(self) -> str:
        progress, patience = self.progress, self.recipe.early_stopping
        waited = progress.epoch - progress.best_epoch
        has_result = bool(progress.history) and "valid_loss" in progress.history[-1]
        if not patience or progress.step or not has_result or waited < patience:
            return ""
        return f"early stopping: no better validation result in {waited} epochs"

    @property
    def _steps_left(self) -> int:
        return self.recipe.total_steps(self._steps) - self.progress.position(self._steps)

    def _train_epoch(self) -> None:
        recipe, progress, train, control = self.recipe, self.progress, self.splits["train"], self.world.control
        epoch, first_step, self._ticked = progress.epoch, progress.step, time.perf_counter()
        watched = _watched_losses(progress.history)
        batches = epoch_batches(recipe, train.samples, epoch, first_step) if first_step else self._batches_of(epoch)
        train.begin_epoch(epoch)
        seeds = raw(recipe.seed, Stream.STEP, epoch, self._steps) >> np.uint64(1)
        for inputs in self._waiting(train.feed(batches)):
            rate = learning_rate(self.recipe, progress.position(self._steps), self._steps, watched)
            control.request(self.hooks.begin_step(train, inputs))
            train.train_step(inputs, rate, int(seeds[progress.step]))
            progress.step += 1
            progress.images_trained += min(recipe.batch_size, self._images - (progress.step - 1) * recipe.batch_size)
            self._tick()
            if progress.position(self._steps) <= FIRST_STEPS:
                progress.first_seconds, progress.first_images = progress.train_seconds, progress.images_trained
            wants_loss, flags = self.hooks.step(), control.received()
            if wants_loss or flags & (Flag.LOSS | Flag.CHECKPOINT | STOP_FLAGS):
                self.hooks.loss(self._fetch_counts(first_step))
            if Flag.CHECKPOINT in flags:
                self.hooks.checkpoint()
                self._ticked = time.perf_counter()  # not of the training
            if Flag.REPLAN in flags:
                self.recipe = self.hooks.replan()
            if flags & STOP_FLAGS:
                raise Stopped(signal.SIGTERM if Flag.TERMINATE in flags else signal.SIGINT)
            if self._steps_left <= 0:
                break
        self._fetch_counts(first_step)
        self._tick()
        progress.communication_seconds += self.engine.communication_seconds()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.progress.train_seconds += now - self._ticked
        self.progress.epoch_seconds += now - self._ticked
        self._ticked = now

    def _waiting(self, feed: Iterator[object]) -> Iterator[object]:
        """Yield inputs, and count the time spent waiting for them."""
        while True:
            began = time.perf_counter()
            inputs = next(feed, None)
            self.progress.wait_seconds += time.perf_counter() - began
            if inputs is None:
                return
            yield inputs

    def _fetch_counts(self, first_step: int) -> float:
        """Wait for the device, add its counts to the epoch's sums, and return their mean loss."""
        counts, bad_step = self.engine.counts()
        if bad_step is not None:
            epoch, step = self.progress.epoch + 1, first_step + bad_step + 1
            raise TrainingFailed(f"training diverged in epoch {epoch}: the loss is not finite in step {step}{FIX}")
        self.progress.counts += counts
        return counts.loss

    def _finish_epoch(self) -> JsonObject:
        """Evaluate, count the epoch as finished, and return its record."""
        progress, results = self.progress, {}
        # Without a validation split, the test split is evaluated after every epoch, but never used for choices.
        watched = "valid" if "valid" in self.splits else "test"
        began = time.perf_counter()
        if watched in self.splits:
            # The fitted head was evaluated by the mean over its views; epochs must be comparable.
            result = self.splits[watched].evaluate(tta=self.recipe.tta and progress.head is not None)
            if not math.isfinite(result.loss):
                epoch = progress.epoch + 1
                raise TrainingFailed(f"training diverged in epoch {epoch}: the {watched} loss is not finite{FIX}")
            results = {f"{watched}_{key}": value for key, value in {"loss": result.loss, **result.metrics}.items()}
        progress.evaluate_seconds += time.perf_counter() - began
        counts, seconds, last_step = progress.counts, progress.epoch_seconds, progress.position(self._steps)
        record = {
            "epoch": progress.epoch + 1,
            "step": last_step,
            "learning_rate": learning_rate(self.recipe, last_step - 1, self._steps, _watched_losses(progress.history)),
            "train_loss": counts.loss,
            "images": counts.count,
            "seconds": seconds,
            "images_per_second": counts.count / seconds if seconds else 0.0,
            f"train_{self.engine.task.step_metric}": counts.metric,
            **results,
        }
        progress.epoch, progress.step, progress.counts, progress.epoch_seconds = record["epoch"], 0, Counts(), 0.0
        return record

    def _choose_best(self) -> bool:
        """Whether the last epoch is the best on the validation split; the loss breaks ties.

        Epochs after a fitted head differ by less than chance. One with a lower loss also counts as better if its metric
        is that of the head or more, and within a standard error of the highest: the one-standard-error rule (Breiman et
        al., Classification and Regression Trees, 1984). On Caltech 101, it gains 0.5 to 1 point of test accuracy.
        """
        progress, task = self.progress, self.engine.task
        if "valid_loss" not in progress.history[-1]:
            return False

        def result(record: JsonObject) -> tuple[float, float]:
            return task.selection_metric(metrics_of(record, "valid")), -record["valid_loss"]

        last = result(progress.history[-1])
        if best := progress.history[progress.best_epoch - 1] if progress.best_epoch else progress.head:
            enough = highest = max(result(record) for record in progress.records)[0]
            if head := progress.head:
                error = task.selection_error(highest, len(self.splits["valid"].samples))
                enough = max(highest - error, result(head)[0])
            if last <= result(best) and (last[0] < enough or last[1] <= result(best)[1]):
                return False
        progress.best_epoch = progress.epoch
        return True


def _watched_losses(history: list[JsonObject]) -> list[float]:
    """Return the losses that the plateau schedule watches: validation, or training if there is none."""
    return [record.get("valid_loss", record["train_loss"]) for record in history]
