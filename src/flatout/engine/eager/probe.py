"""Measure in about a second how long a model takes on one core; `factory.choose_processes` decides by it."""

import contextlib
import time

import torch
from torch import nn

from flatout.engine.eager.accelerator import CPU
from flatout.engine.eager.device_setup import autocast, choose_precision
from flatout.recipe import Recipe

# Images of each measurement. The later ones are left out once a measurement has taken long enough to be reliable.
BATCHES = (2, 16, 16)
RELIABLE_SECONDS = 0.25


def seconds_per_image(model: nn.Module, recipe: Recipe) -> float:
    """Return the time that one core takes to train on one image; the parameters stay as they are.

    With `precision = "auto"` that is the time in the fastest number format.

    Raises:
        InputError: the CPU lacks the recipe's precision.
    """
    cpu = CPU(torch.device("cpu"))
    formats = [choose_precision(cpu, recipe.precision)]
    if recipe.precision == "auto" and not recipe.exact_sums:
        formats = cpu.precisions()
    model = model.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    with contextlib.ExitStack() as undo:
        cpu.adapt_process(undo, formats[0], threads=1)
        return min(_seconds_per_image(model, recipe, autocast(cpu, precision)) for precision in formats)


def _seconds_per_image(model: nn.Module, recipe: Recipe, context: contextlib.AbstractContextManager[object]) -> float:
    seconds = 0.0
    with context:
        for images in BATCHES:
            x = torch.rand(images, recipe.channels, recipe.image_size, recipe.image_size)
            began = time.perf_counter()
            output = model(x.contiguous(memory_format=torch.channels_last))
            if output.requires_grad:
                output.sum().backward()
            elapsed = time.perf_counter() - began
            seconds = elapsed / images
            if elapsed > RELIABLE_SECONDS:
                break
    return seconds
