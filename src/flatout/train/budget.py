"""Measurements with real steps before training: the steps that fit into `--minutes`, and the fastest number format."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from flatout.config import Recipe
from flatout.data.batches import Split, epoch_batches, steps_per_epoch
from flatout.distributed.world import World
from flatout.engine.augment import tta_views
from flatout.engine.base import DeviceDataset, Engine
from flatout.engine.torch.accelerator import BF16_WORTH
from flatout.inference.calibration import TRAINING_IMAGES
from flatout.train.photo_plan import MAX_FINE_TUNING
from flatout.train.request import Progress, TrainContext
from flatout.train.run_dir import write_recipe
from flatout.utils.console import duration
from flatout.utils.errors import InputError

# Seconds for weights, predictions, pictures, the report and the end of the processes, without the last evaluation.
REPORT_SECONDS = 10.0
# Seconds for several processes to end.
RANKS_SECONDS = 4.0
# Slowdown of the last evaluation, which keeps logits and features.
KEEPING_FACTOR = 1.4
# The measurement: warm-up steps, which choose algorithms and allocate memory; then steps for this long.
FIRST_STEPS, MEASURED_SECONDS, LARGEST_SHARE = 3, 3.0, 0.03
# The remaining steps are replanned after each such share of the budget, if they are off by more than TOLERANCE.
REPLAN_SHARE, TOLERANCE = 0.05, 0.02
# If the set-up took longer than planned, as on a busy machine, one epoch of at most this share of the budget is still
# trained, provided the run ends within this many budgets: the user gets a model.
SHORT_EPOCH, LATEST_END = 0.1, 1.5
# For the number format: training images, in batches, and seconds of each measurement. The formats alternate, and the
# minimum of each counts: the first steps warm up, and other load makes steps slower, never faster.
PRECISION_BATCHES, PRECISION_SECONDS, PRECISION_ROUNDS = 4, 0.25, 3


@dataclass(kw_only=True)
class Rates:
    """Measured seconds."""

    step: float  # of training
    evaluate: float  # of one evaluation of all held-out images
    watch: float  # of an evaluation of those evaluated during training


class Budget:
    """The time budget of a run, from the user's command, at `began` by time.perf_counter, to its report."""

    def __init__(self, seconds: float, began: float, rates: Rates, recipe: Recipe, images: int) -> None:
        self._seconds, self._rates = seconds, rates
        # The last epoch, which may be short, is evaluated like the others.
        self._ends = began + seconds - rates.watch - rates.evaluate - REPORT_SECONDS
        self._steps = steps_per_epoch(images, recipe.batch_size, recipe.drop_last)
        # After a fitted head, there is little left to learn.
        self._most = MAX_FINE_TUNING * self._steps if recipe.linear_probe else sys.maxsize
        self._planned_at = self._first_at = time.perf_counter()
        self._first_done: int | None = None

    def plan(self, recipe: Recipe, done: int) -> tuple[Recipe, str]:
        """Return the recipe with as many steps as fit, and a warning about a late end, or ""."""
        total, late = self._total(done), ""
        if total < self._steps:
            epoch = (self._steps - done) * self._each()
            needed, minutes = self._seconds + time.perf_counter() + epoch - self._ends, f"{self._seconds / 60:g}"
            if epoch > SHORT_EPOCH * self._seconds or needed > LATEST_END * self._seconds:
                raise InputError(
                    f"--minutes {minutes}: an epoch takes {duration(self._steps * self._rates.step)} here and does not "
                    f"fit; give at least --minutes {needed / 60 + 0.05:.1f}, fewer images or a smaller model"
                )
            total = self._steps
            late = f"--minutes {minutes}: no time is left for training; one epoch ends after {duration(needed)} in all"
        return self._with_steps(recipe, total, done), late

    def fits_epoch(self) -> bool:
        """Whether there is time for an epoch, within a fifth."""
        return self._total(0) >= 0.8 * self._steps

    def is_due(self) -> bool:
        """Whether to replan."""
        return time.perf_counter() - self._planned_at > REPLAN_SHARE * self._seconds

    def replan(self, recipe: Recipe, done: int) -> Recipe:
        """Return the recipe with another number of steps, if steps are slower or faster than planned."""
        now = time.perf_counter()
        if self._first_done is None:
            self._first_at, self._first_done = now, done
        elif done > self._first_done:
            # Includes the time of checkpoints.
            elapsed, evaluations = now - self._first_at, done // self._steps - self._first_done // self._steps
            training = max(elapsed - evaluations * self._rates.watch, elapsed / 2)
            self._rates.step = training / (done - self._first_done)
        self._planned_at = now
        total, planned = self._total(done), recipe.total_steps(self._steps)
        is_off = abs(total - planned) > TOLERANCE * planned and self._first_done != done
        return self._with_steps(recipe, total, done) if is_off else recipe

    def _each(self) -> float:
        """Return the seconds of a step, and its share of the evaluation after each epoch."""
        return self._rates.step + self._rates.watch / self._steps

    def _total(self, done: int) -> int:
        """Return the steps of the whole run that fit, as far as they help."""
        return min(done + max(0, int((self._ends - time.perf_counter()) / self._each())), self._most)

    def _with_steps(self, recipe: Recipe, total: int, done: int) -> Recipe:
        """Return the recipe with a new length from a step on, and the earlier lengths, which repeat the run."""
        total = max(total, done + 1)
        earlier = [pair for pair in recipe.schedule.earlier_lengths if pair[0] < done]
        if done:
            earlier.append((done, recipe.length_at(done - 1, self._steps)[1]))
        corrections = " ".join(f"{end}:{steps}" for end, steps in earlier)
        length = {"max_steps": total, "epochs": -(-total // self._steps)}
        return recipe.override({**length, "schedule.corrections": corrections})


def plan_minutes(context: TrainContext, progress: Progress) -> tuple[TrainContext, Budget | None]:
    """With a time budget, choose the number of steps from the measured time of some.

    If there is no time for an epoch, the fitted head is the result: the context has no epochs, and there is no budget.
    """
    recipe, stage, world, log = context.recipe, context.stage, context.world, context.log
    seconds = context.options.seconds
    if seconds is None or not context.datasets:
        return context, None
    rates = _measure(context, min(MEASURED_SECONDS, LARGEST_SHARE * seconds))
    budget = Budget(seconds, context.options.began, rates, recipe, len(context.splits["train"]))
    done = progress.position(context.steps_per_epoch)
    # The main process's clock decides for all.
    if stage and not done and not world.broadcast_object(budget.fits_epoch()):
        # Whatever the value of `keep`, the weights are those of the evaluated head.
        stage.give(context.engine)
        log.note("fine-tuning is left out: an epoch takes longer than what is left of the time")
        return replace(with_length(context, recipe.without_fine_tuning()), datasets={}), None
    planned, late = world.from_main(lambda: budget.plan(recipe, done))
    count, per_second = planned.total_steps(context.steps_per_epoch) - done, recipe.batch_size / rates.step
    fit = f"{count:,} steps fit, {count / context.steps_per_epoch:.1f} epochs, at {per_second:,.0f} images per second"
    log.note(late or f"--minutes {seconds / 60:g}: {fit}")
    if planned.linear_probe and planned.epochs >= MAX_FINE_TUNING:
        log.note(
            f"fine-tuning ends after {MAX_FINE_TUNING} epochs, before the time is up: "
            "more or different images would help more than time"
        )
    log.lap("measure")
    return with_length(context, planned), budget


def with_length(context: TrainContext, recipe: Recipe) -> TrainContext:
    """Return the context with the main process's `recipe` of another length, and write it. All ranks call this."""
    recipe = context.world.broadcast_object(recipe)
    if recipe != context.recipe and context.world.is_main:
        write_recipe(context.run_dir, recipe)
    return replace(context, recipe=recipe)


def _measure(context: TrainContext, seconds: float) -> Rates:
    """Take real steps and evaluate once, then restore the engine. All ranks call this."""
    engine, datasets, recipe, stage = context.engine, context.datasets, context.recipe, context.stage
    before = engine.snapshot()
    each = seconds_per_step(engine, datasets["train"], recipe, context.world, seconds)
    held_out = {name: split for name, split in datasets.items() if name != "train"}
    evaluated = watched = 0.0
    if held_out:
        name, began = "valid" if "valid" in held_out else "test", time.perf_counter()
        # Behind a fitted head, each evaluation averages over views, not only the last.
        held_out[name].evaluate(tta=recipe.tta and stage is not None)
        watched = max(context.world.all_gather_object(time.perf_counter() - began))
        views = len(tta_views(recipe)) if recipe.tta else 1
        images = sum(len(s.samples) for s in held_out.values()) * views
        # Some training images are evaluated, too.
        images += min(len(datasets["train"].samples), TRAINING_IMAGES) if "valid" in held_out else 0
        each_image = KEEPING_FACTOR * watched / len(held_out[name].samples) / (views if stage else 1)
        if stage and not stage.placed:
            # With cached output, an evaluation is faster than the features were.
            each_image = 1 / stage.record["images_per_second"]
        evaluated = images * each_image
        if stage and stage.placed and "valid" in stage.fitted_splits:
            # The head is fitted once more, to these images alone.
            share = len(stage.labels["valid"]) / sum(len(stage.labels[split]) for split in stage.fitted_splits)
            evaluated += share * stage.seconds["head"]
    engine.restore(before)
    return Rates(step=each, evaluate=evaluated + RANKS_SECONDS * context.world.is_joined, watch=watched)


def seconds_per_step(
    engine: Engine,
    train: DeviceDataset,
    recipe: Recipe,
    world: World,
    seconds: float,
    *,
    first_steps: int = FIRST_STEPS,
) -> float:
    """Take steps of a learning rate close to 0 for about `seconds`, and return the time of one on the slowest rank."""

    def steps(count: int) -> float:
        train.begin_epoch(0)
        began, number = time.perf_counter(), 0
        while number < count:
            for inputs in islice(train.feed(epoch_batches(recipe, train.samples, 0)), count - number):
                train.train_step(inputs, 1e-6, number)
                world.control.received()
                world.watch.keep_alive()
                number += 1
        engine.counts()
        engine.communication_seconds()  # not of the training
        return max(world.all_gather_object((time.perf_counter() - began) / number))

    each = steps(first_steps)
    return steps(max(1, round(seconds / each))) if first_steps * each < seconds else each


def fastest_precision(
    make: Callable[[Recipe], Engine], samples: Split, recipe: Recipe, world: World, formats: Sequence[str]
) -> tuple[str, str]:
    """Return the faster of the first format, the device's default, and bf16, and why. All ranks call this."""
    count = min(len(samples), PRECISION_BATCHES * recipe.batch_size)
    first_batches = islice(epoch_batches(recipe, samples, 0), PRECISION_BATCHES)
    few = samples.at(np.sort(np.concatenate([batch.samples for batch in first_batches])[:count]))
    default = formats[0]
    seconds = dict.fromkeys((default, "bf16"), math.inf)
    for name in PRECISION_ROUNDS * (default, "bf16"):
        one = recipe.override({"precision": name})
        with contextlib.closing(make(one)) as engine:
            each = seconds_per_step(engine, engine.place(few), one, world, PRECISION_SECONDS, first_steps=1)
            seconds[name] = min(seconds[name], each)
    gain = seconds[default] / seconds["bf16"]
    chosen = "bf16" if gain >= BF16_WORTH else default
    compared = f"{gain:.1f} times as fast as" if gain >= 1.05 else "no faster than"
    return chosen, f"a step in bf16 is {compared} in {default}"
