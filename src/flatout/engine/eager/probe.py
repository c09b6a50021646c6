"""Measure in about a second how long a model takes on one core; `factory.choose_processes` decides by it."""

import contextlib
import time
from typing import TYPE_CHECKING

from flatout.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

# Images of each measurement. The later ones are left out once a measurement has taken long enough to be reliable.
BATCHES = (2, 16, 16)
RELIABLE_SECONDS = 0.25


def seconds_per_image(model: "nn.Module", recipe: Recipe) -> float:
    """Return the time that one core takes to train on one image; the parameters stay as they are.

    Raises:
        InputError: the CPU lacks the recipe's precision.
    """
    import torch

    from flatout.engine.eager.accelerator import CPU
    from flatout.engine.eager.device_setup import autocast, choose_precision

    cpu = CPU(torch.device("cpu"))
    precision = choose_precision(cpu, recipe.precision)
    model = model.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    seconds = 0.0
    with contextlib.ExitStack() as undo:
        cpu.adapt_process(undo, precision, threads=1)
        for images in BATCHES:
            x = torch.rand(images, recipe.channels, recipe.image_size, recipe.image_size)
            began = time.perf_counter()
            with autocast(cpu, precision):
                output = model(x.contiguous(memory_format=torch.channels_last))
            if output.requires_grad:
                output.sum().backward()
            elapsed = time.perf_counter() - began
            seconds = elapsed / images
            if elapsed > RELIABLE_SECONDS:
                break
    return seconds
