"""Heatmaps: which parts of an image speak for an answer.

LayerCAM (Jiang et al., "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", IEEE TIP 2021,
doi 10.1109/TIP.2021.3089943): the activations of a layer times their positive gradients, summed over the channels. The
layer is the last one with a grid of positions whose gradient is not zero. Tokens of transformers are laid out as the
grid of their patches; in the last block the answer depends on the class token alone, so that an earlier layer is taken.

Shape letters: B batch, K outputs, C channels, T tokens, h and w a grid.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# A grid has at least so many cells on its shorter side, if any layer has; coarser ones show little.
LEAST_CELLS = 4
# Gradients are taken for so many of the last layers.
MOST_LAYERS = 40
# A grid may differ from the shape of the image by this factor, since convolutions without padding cut edges.
SAME_SHAPE = 1.3


def heatmaps(model: nn.Module, images_BCHW: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return heatmaps float32 [B, H, W] in 0..1; None where no layer has positions.

    Args:
        model: in evaluation mode, a torch module; its parameters and their gradients are not changed.
        images_BCHW: normalised images.
        score: from logits [B, K] to the number of each image, [B], whose reasons are shown.
    """
    height, width = images_BCHW.shape[2:]
    images = images_BCHW.detach().requires_grad_()
    with torch.enable_grad(), _recorded(model) as outputs:
        logits = model(images)
        grids = [(output, view) for output in outputs if (view := _as_grid(output, height, width, model))]
        grids = grids[-MOST_LAYERS:]
        if not grids:
            return None
        # Positions that the answer does not depend on have no gradient at all.
        gradients = torch.autograd.grad(score(logits).sum(), [output for output, _ in grids], allow_unused=True)
    maps = [
        (functional.relu(view(gradient)) * view(output.detach())).sum(dim=1).relu()
        for (output, view), gradient in zip(grids, gradients, strict=True)
        if gradient is not None and view(gradient).any()
    ]
    if not maps:
        return None
    fine = [found for found in maps if min(found.shape[1:]) >= LEAST_CELLS and found.any()]
    # Of coarse grids, the finest.
    chosen = fine[-1] if fine else max(maps, key=lambda found: found[0].numel())
    chosen = chosen.float() / chosen.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return functional.interpolate(chosen[:, None], size=(height, width), mode="bilinear", align_corners=False)[:, 0]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record the outputs of all modules in the order of their computation."""
    outputs: list[torch.Tensor] = []

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and output.is_floating_point():
            outputs.append(output)

    hooks = [module.register_forward_hook(record) for module in model.modules() if module is not model]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _as_grid(
    output: torch.Tensor, height: int, width: int, model: nn.Module
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return how to view an output as [B, C, h, w]: that of a convolution, or tokens; None where it has no grid."""
    shape = height / width
    if output.ndim == 4:
        # Channels come second, or last in some transformers; sides are in the proportion of the image's.
        for axes in ((0, 1, 2, 3), (0, 3, 1, 2)):
            h, w = (output.shape[axis] for axis in axes[2:])
            if min(h, w) > 1 and max(h / w / shape, shape / (h / w)) <= SAME_SHAPE:
                return lambda x, axes=axes: x.permute(axes)
        return None
    if output.ndim != 3 or output.shape[2] != getattr(model, "num_features", output.shape[2]):
        return None
    for prefix in dict.fromkeys((getattr(model, "num_prefix_tokens", 0), 0, 1, 2, 5)):
        tokens = output.shape[1] - prefix
        h = round(math.sqrt(max(0, tokens) * shape))
        if h > 1 and tokens % h == 0 and tokens // h > 1 and round(h / shape) == tokens // h:
            size = (h, tokens // h)
            return lambda x, prefix=prefix, size=size: x[:, prefix:].transpose(1, 2).unflatten(2, size)
    return None
