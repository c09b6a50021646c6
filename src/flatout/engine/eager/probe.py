"""Measure in about a second how long a model takes; `factory.choose_processes` and generated recipes decide by it."""

import contextlib
import time

import torch
from torch import nn

from flatout.engine.eager.accelerator import Accelerator, accelerator_of
from flatout.engine.eager.device_setup import autocast, choose_precision
from flatout.recipe import Recipe

# Images of each measurement on a CPU and on an accelerator. The later ones are left out once a measurement has taken
# long enough to be reliable.
BATCHES, BATCHES_OF_ACCELERATORS = (2, 16, 16), (64, 64, 64)
RELIABLE_SECONDS = 0.25


def seconds_per_image(model: nn.Module, recipe: Recipe, device: str = "cpu") -> float:
    """Return the time that one core or one accelerator takes to train on one image; parameters stay as they are.

    With `precision = "auto"` that is the time in the fastest number format.

    Raises:
        InputError: the device lacks the recipe's precision.
    """
    accelerator = accelerator_of(torch.device(device))
    formats = [choose_precision(accelerator, recipe.precision)]
    if recipe.precision == "auto" and not recipe.exact_sums:
        formats = accelerator.precisions()
    model = model.train().to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    times = []
    for precision in formats:
        with contextlib.ExitStack() as undo:
            accelerator.adapt_process(undo, precision, threads=1)
            times.append(_seconds_per_image(model, recipe, accelerator, autocast(accelerator, precision)))
    return min(times)


def _seconds_per_image(
    model: nn.Module, recipe: Recipe, accelerator: Accelerator, context: contextlib.AbstractContextManager[object]
) -> float:
    seconds = 0.0
    with context:
        for images in BATCHES if accelerator.is_host else BATCHES_OF_ACCELERATORS:
            x = torch.rand(images, recipe.channels, *recipe.image_sides, device=accelerator.device)
            began = time.perf_counter()
            output = model(x.contiguous(memory_format=torch.channels_last))
            if output.requires_grad:
                output.sum().backward()
            output.detach().sum().item()  # waits for an accelerator: its work is done in order
            elapsed = time.perf_counter() - began
            seconds = elapsed / images
            if elapsed > RELIABLE_SECONDS:
                break
    return seconds
