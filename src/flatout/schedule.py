"""Learning-rate schedules, each a pure function of the step or of the validation losses so far."""

import math
from collections.abc import Sequence

from flatout.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int, valid_losses: Sequence[float] = ()) -> float:
    """Return the learning rate of a step, counted from 0 over the whole run.

    Every schedule but one-cycle, which rises by itself, starts with a linear warm-up over `warmup_epochs`.
    `valid_losses` holds the watched loss of every finished epoch; only the plateau schedule reads it.
    """
    schedule, lr = recipe.schedule, recipe.optimizer.lr
    total = recipe.epochs * steps_per_epoch
    if schedule.name == "one-cycle":
        return lr * _one_cycle(step / max(1, total - 1), schedule.rise, schedule.start_factor)
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if schedule.name == "cosine":
        progress = (step - warmup) / max(1, total - warmup)
        return lr * _cosine(1.0, schedule.final_factor, progress)
    if schedule.name == "step":
        return lr * schedule.factor ** (step // steps_per_epoch // schedule.step_epochs)
    if schedule.name == "plateau":
        return lr * schedule.factor ** plateau_reductions(valid_losses, schedule.patience, schedule.threshold)
    return lr


def plateau_reductions(losses: Sequence[float], patience: int, threshold: float) -> int:
    """Return how often a plateau was reached: more than `patience` epochs in a row without a new best loss.

    A loss is a new best if it is below the best one by the relative `threshold`, as in torch's ReduceLROnPlateau.
    """
    reductions, best, bad_epochs = 0, math.inf, 0
    for loss in losses:
        if loss < best * (1 - threshold):
            best, bad_epochs = loss, 0
        else:
            bad_epochs += 1
        if bad_epochs > patience:
            reductions, bad_epochs = reductions + 1, 0
    return reductions


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def _one_cycle(progress: float, rise: float, start_factor: float) -> float:
    """Rise from `start_factor` to 1 and fall to nearly 0, both as half cosines (Smith and Topin, arXiv 1708.07120)."""
    if progress < rise:
        return _cosine(start_factor, 1.0, progress / rise)
    return _cosine(1.0, start_factor * 1e-4, (progress - rise) / (1 - rise))
