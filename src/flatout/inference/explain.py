"""Heatmaps by LayerCAM: activations times their positive gradients, summed over the channels of the last useful layer.

Jiang et al., "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", IEEE TIP 2021.
Shape letters: N or B images, K outputs, C channels, H height, W width, h and w a grid.
"""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from flatout.engine import augment, pixels
from flatout.models.keras import KerasModule
from flatout.report.pictures import overlaid
from flatout.utils.errors import InputError
from flatout.utils.files import check_free, default_folder, make_folder, write_atomically
from flatout.utils.run_files import visible

if TYPE_CHECKING:
    from flatout.config import Recipe
    from flatout.inference.run import Run

# Minimum cells on a grid's shorter side, if any layer has as many; coarser grids show little.
MIN_CELLS = 4
# The number of last layers whose gradients are computed.
MAX_LAYERS = 40
# A grid may differ from the shape of the image by this factor, since convolutions without padding cut edges.
SAME_SHAPE = 1.3
# Images per batch, whose activations are kept.
_AT_ONCE = 8
# Images are enlarged to at least this many pixels.
_MIN_PIXELS = 192


def layer_cam(model: nn.Module, images_BCHW: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return heatmaps float32 [B, H, W] in 0..1 of normalised images; None if no layer has positions.

    `score` maps logits [B, K] to the explained number of each image, [B]. The model does not change. In the last block
    of transformers the logits depend on the class token alone, so the layer is the last whose gradient is not zero.
    """
    height, width = images_BCHW.shape[2:]
    images = images_BCHW.detach().requires_grad_()
    with torch.enable_grad(), _recorded(model) as outputs:
        logits = model(images)
        grids = [(output, view) for output in outputs if (view := _as_grid(output, height, width, model))]
        grids = grids[-MAX_LAYERS:]
        if not grids:
            return None
        # Positions without influence on the logits have no gradient at all.
        gradients = torch.autograd.grad(score(logits).sum(), [output for output, _ in grids], allow_unused=True)
    maps = [
        (functional.relu(view(gradient)) * view(output.detach())).sum(dim=1).relu()
        for (output, view), gradient in zip(grids, gradients, strict=True)
        if gradient is not None and view(gradient).any()
    ]
    if not maps:
        return None
    fine = [found for found in maps if min(found.shape[1:]) >= MIN_CELLS and found.any()]
    # If all grids are coarse, the finest.
    chosen = fine[-1] if fine else max(maps, key=lambda found: found[0].numel())
    chosen = chosen.float() / chosen.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return functional.interpolate(chosen[:, None], size=(height, width), mode="bilinear", align_corners=False)[:, 0]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record the outputs of all modules in the order of their computation."""
    outputs: list[torch.Tensor] = []

    def record(module: nn.Module, arguments: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and output.is_floating_point():
            outputs.append(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if module is not model:
                hooks.enter_context(module.register_forward_hook(record))
        yield outputs


def _as_grid(
    output: torch.Tensor, height: int, width: int, model: nn.Module
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a view of an output (feature map or tokens) as [B, C, h, w]; None if it has no grid."""
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


def heatmaps(run: "Run", pixels_NHWC: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return heatmaps float32 [N, H, W] in 0..1 for images in the stored size; the mean over a run's members.

    They explain the class of each image in `answers`, int64 [N]; in regression the number.
    """
    if len(run.members) > 1:
        return np.mean([heatmaps(member, pixels_NHWC, answers) for member in run.members], axis=0)
    try:
        return heatmaps_of(run.model, run.recipe, pixels_NHWC, answers)
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from None


def heatmaps_of(model: nn.Module, recipe: "Recipe", pixels_NHWC: np.ndarray, answers: np.ndarray | None) -> np.ndarray:
    """Compute `heatmaps` for a model of a recipe; without `answers`, of the most probable class of each image."""
    if isinstance(model, KerasModule):
        raise InputError("heatmaps need a torch network; this one is a Keras model")
    parts = []
    for start in range(0, len(pixels_NHWC), _AT_ONCE):
        images = normalised(recipe, pixels_NHWC[start : start + _AT_ONCE])
        wanted = None if answers is None else torch.from_numpy(answers[start : start + _AT_ONCE])
        found = layer_cam(model.eval(), images, lambda logits, wanted=wanted: _score(recipe.task, logits, wanted))
        if found is None:
            raise InputError(f"{recipe.model} has no layer with positions in the image to explain by")
        parts.append(found.numpy())
    return np.concatenate(parts)


def normalised(recipe: "Recipe", pixels_NHWC: np.ndarray) -> torch.Tensor:
    """Return the input of a recipe's model, float32 [N, C, H, W], for images in the stored size."""
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    images = torch.from_numpy(np.ascontiguousarray(pixels_NHWC))
    return augment.apply(images, None, 1 / (255 * std), -mean / std, recipe.eval_sides)


def _score(task: str, logits: torch.Tensor, answers: torch.Tensor | None) -> torch.Tensor:
    """Return the logit of each image's class; for a single logit, its value or its negative."""
    if logits.shape[1] == 1:
        if task == "regression":
            return logits[:, 0]
        is_first = logits[:, 0] < 0 if answers is None else answers == 0
        return logits[:, 0].where(~is_first, -logits[:, 0])
    return logits.gather(1, (logits.argmax(dim=1) if answers is None else answers)[:, None])[:, 0]


class HeatmapWriter:
    """Writes a PNG for each image into a new or empty folder: the model's input next to its heatmap."""

    def __init__(self, run: "Run", folder: Path | str) -> None:
        self.run, self.folder = run, Path(folder or default_folder("explain"))
        check_free(self.folder, "--explain")
        self._count = 0

    def write(self, names: list[str], pixels_NHWC: np.ndarray, answers: np.ndarray) -> list[str]:
        """Write pictures of images as they are stored, and return their paths; for `answers` see `heatmaps`."""
        make_folder(self.folder, "--explain")
        paths = []
        maps = heatmaps(self.run, pixels_NHWC, answers)
        shown = visible(pixels.centre(pixels_NHWC, *self.run.recipe.eval_sides))
        for name, image, heatmap in zip(names, shown, maps, strict=True):
            path = self.folder / f"{self._count:05d}-{Path(name).stem[:80]}.png"
            write_atomically(path, _side_by_side(image, overlaid(image, heatmap)))
            paths.append(str(path))
            self._count += 1
        return paths


def _side_by_side(image_HWC: np.ndarray, overlay_HWC: np.ndarray) -> bytes:
    """Return a PNG of both; tiny images are enlarged by a whole factor."""
    factor = max(1, -(-_MIN_PIXELS // max(image_HWC.shape[:2])))
    first, second = (
        np.broadcast_to(one, (*one.shape[:2], 3)).repeat(factor, axis=0).repeat(factor, axis=1)
        for one in (image_HWC, overlay_HWC)
    )
    gap = np.full((len(first), 8, 3), 255, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([first, gap, second], axis=1)).save(buffer, format="png")
    return buffer.getvalue()
