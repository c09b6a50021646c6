"""How long a model takes on one core: a look of about a second, on which `choose.plan` decides."""

import time
from typing import TYPE_CHECKING

from flatout.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

# Images of the two looks. The second is left out where the first has taken long enough to be believed.
FEW, MORE = 2, 16
ENOUGH_SECONDS = 0.25


def seconds_per_image(model: "nn.Module", recipe: Recipe) -> float:
    """Return the time that one core takes to train on one image; the model's weights stay as they are."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = model.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        seconds = 0.0
        for images in (FEW, MORE, MORE):
            x = torch.rand(images, recipe.channels, recipe.image_size, recipe.image_size)
            began = time.perf_counter()
            output = model(x.contiguous(memory_format=torch.channels_last))
            if output.requires_grad:
                output.sum().backward()
            seconds = (time.perf_counter() - began) / images
            if seconds * images > ENOUGH_SECONDS:
                break
        return seconds
    finally:
        torch.set_num_threads(threads)
