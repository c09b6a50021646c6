"""Learning-rate schedules: pure functions of the step or of the validation losses."""

import math
from collections.abc import Sequence

from flatout.config import Recipe

# Warm-up epochs for a large batch (Goyal et al., section 5.1: 5 of 90), and their largest fraction of a run.
LARGE_BATCH_WARMUP_EPOCHS = 5
LARGE_BATCH_WARMUP_SHARE = 0.1


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int, valid_losses: Sequence[float] = ()) -> float:
    """Return the learning rate of a step, counted from 0 over the whole run.

    All schedules reach `scaled_rate`; all but one-cycle start with a linear `warm_up`. `valid_losses` are the monitored
    losses of finished epochs, for the plateau schedule.
    """
    schedule, lr = recipe.schedule, scaled_rate(recipe)
    epochs, total = recipe.length_at(step, steps_per_epoch)
    if schedule.name == "one-cycle":
        # Rises from `start_factor` to 1 and falls to nearly 0 (Smith and Topin, arXiv 1708.07120).
        progress, rise, start = step / max(1, total - 1), schedule.rise, schedule.start_factor
        if progress < rise:
            return lr * _cosine(start, 1.0, progress / rise)
        return lr * _cosine(1.0, start * 1e-4, (progress - rise) / (1 - rise))
    warmup_epochs, start = warm_up(recipe, epochs)
    warmup = warmup_epochs * steps_per_epoch
    if step < warmup:
        return start + (lr - start) * (step + 1) / (warmup + 1)
    if schedule.name == "cosine":
        return lr * _cosine(1.0, schedule.final_factor, (step - warmup) / max(1, total - warmup))
    if schedule.name == "step":
        return lr * schedule.factor ** (step // steps_per_epoch // schedule.step_epochs)
    if schedule.name == "plateau":
        return lr * schedule.factor ** plateau_reductions(valid_losses, schedule.patience, schedule.threshold)
    return lr


def scaled_rate(recipe: Recipe) -> float:
    """Return the learning rate for the recipe's batch size, given `lr` for `lr_base_batch`, if set.

    Linear scaling preserves the sum of k small steps of SGD (Goyal et al., arXiv 1706.02677); the square root preserves
    the variance of a step (Krizhevsky, arXiv 1404.5997) and suits Adam (Malladi et al., arXiv 2205.10287).
    """
    optimizer = recipe.optimizer
    ratio = recipe.batch_size / optimizer.lr_base_batch if optimizer.lr_base_batch else 1.0
    return optimizer.lr * (ratio if optimizer.lr_scaling == "linear" else math.sqrt(ratio))


def warm_up(recipe: Recipe, run_epochs: int) -> tuple[float, float]:
    """Return the number of warm-up epochs in a run of `run_epochs`, and the learning rate at their start.

    With a batch larger than `lr_base_batch` it rises from `lr`, and has a default length if `warmup_epochs` is 0.
    """
    epochs, lr = recipe.schedule.warmup_epochs, recipe.optimizer.lr
    if scaled_rate(recipe) <= lr:
        return epochs, 0.0
    return epochs or min(LARGE_BATCH_WARMUP_EPOCHS, run_epochs * LARGE_BATCH_WARMUP_SHARE), lr


def describe_scaling(recipe: Recipe, run_epochs: int) -> str:
    """Return a sentence for the log."""
    optimizer, rate = recipe.optimizer, scaled_rate(recipe)
    base = f"{optimizer.lr:g} for batches of {optimizer.lr_base_batch}, scaled ({optimizer.lr_scaling})"
    sentence = f"learning rate {rate:.4g} for batches of {recipe.batch_size}: {base}"
    epochs, start = warm_up(recipe, run_epochs)
    if start and recipe.schedule.name != "one-cycle":
        sentence += f"; warm-up from {start:g} over {epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    return sentence


def plateau_reductions(losses: Sequence[float], patience: int, threshold: float) -> int:
    """Count how often more than `patience` epochs in a row had no new best loss.

    A new best is lower by the relative `threshold`, as in torch's ReduceLROnPlateau.
    """
    reductions, best, bad_epochs = 0, math.inf, 0
    for loss in losses:
        bad_epochs += 1
        if loss < best * (1 - threshold):
            best, bad_epochs = loss, 0
        elif bad_epochs > patience:
            reductions, bad_epochs = reductions + 1, 0
    return reductions


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
