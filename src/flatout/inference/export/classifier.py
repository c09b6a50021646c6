"""A run as one module from raw images to probabilities: the source of ONNX files and torch.export programs.

Shape letters: N images, H height, W width, C channels, V views, K classes.
"""

import copy
import json
from typing import TYPE_CHECKING

import torch
from torch import nn

from flatout import __version__
from flatout.engine.augment import tta_views
from flatout.engine.pixels import FROM_16_BITS, view
from flatout.models.keras import KerasModule
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from flatout.inference.run import Run


def bits_of(run: "Run") -> int:
    """Return the bits of each channel of a run's images."""
    return run.recipe.data.bits or 8


def resize_matrix(
    size: int, offset: torch.Tensor, used: torch.Tensor, filled: torch.Tensor, pixels: torch.Tensor
) -> torch.Tensor:
    """Return the weights float32 [size, pixels] of a bilinear, antialiased resize along one axis.

    Args:
        size: the length of the result.
        offset, used: first pixel and number of pixels that are used of the image.
        filled: how much of the result they fill; it is centred, and zeros are around it.
        pixels: float32, the positions 0, 1, 2 ... of the image.
    """
    start = torch.floor((size - filled) / 2)
    rows = torch.arange(size, dtype=torch.float32)[:, None] - start
    scale = used / filled
    centre = (rows + 0.5) * scale - 0.5
    weights = (1 - (pixels - offset - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((pixels >= offset) & (pixels < offset + used))
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
    return weights * ((rows >= 0) & (rows < filled))


class Resize(nn.Module):
    """Resizes images uint8 or uint16 [N, H, W, C] to integers in float32 [N, C, height, width].

    Args:
        size: height and width of the result.
        mode: "squash", "crop" to the largest centred part of that shape, or "pad" with black.
        bits: of the images, 8 or 16.
    """

    def __init__(self, size: tuple[int, int], mode: str, bits: int) -> None:
        super().__init__()
        self.size, self.mode, self.bits = size, mode, bits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the resized images."""
        (rows, columns), (height, width) = self.size, images.shape[1:3]
        y, x = (torch.arange(length, dtype=torch.float32) for length in (height, width))
        used_y, used_x = (torch.full((), length, dtype=torch.float32) for length in (height, width))
        all_y, all_x, filled_y, filled_x = used_y, used_x, used_y * 0 + rows, used_x * 0 + columns
        is_wide = used_y * columns <= used_x * rows
        if self.mode == "crop":
            used_y = torch.where(is_wide, all_y, (all_x * rows / columns).round().clamp(min=1))
            used_x = torch.where(is_wide, (all_y * columns / rows).round().clamp(min=1), all_x)
        elif self.mode == "pad":
            filled_y = torch.where(is_wide, (columns * all_y / all_x).round().clamp(min=1), filled_y)
            filled_x = torch.where(is_wide, filled_x, (rows * all_x / all_y).round().clamp(min=1))
        across = resize_matrix(columns, torch.floor((all_x - used_x) / 2), used_x, filled_x, x)
        down = resize_matrix(rows, torch.floor((all_y - used_y) / 2), used_y, filled_y, y)
        narrow = images.permute(0, 3, 1, 2).float() @ across.T
        if self.bits == 8:  # each pass is rounded, as in 8-bit arithmetic
            narrow = torch.floor(narrow + 0.5)
        return torch.floor(down @ narrow + 0.5)


class ExportedModel(nn.Module):
    """The network of a run with normalisation, the average over views, and the conversion of logits.

    Args:
        run: one run; its network is copied.
        dtype: of the network's weights and arithmetic.

    Raises:
        InputError: the run trained a Keras model.
    """

    scale: torch.Tensor
    bias: torch.Tensor

    def __init__(self, run: "Run", dtype: torch.dtype) -> None:
        super().__init__()
        recipe = run.recipe
        if isinstance(run.model, KerasModule):
            raise InputError(f"{run.path}: trained a Keras model, which Keras saves: run.model.to_keras().save(FILE)")
        self.network = copy.deepcopy(run.model).eval().to(dtype)
        self.task, self.size, self.dtype = run.task, recipe.eval_sides, dtype
        self.views = tta_views(recipe) if recipe.tta else []
        mean, std = (torch.tensor(values).expand(recipe.channels) for values in (recipe.data.mean, recipe.data.std))
        # A pixel p of 0..255 becomes p * scale + bias.
        self.register_buffer("scale", (1 / (255 * std))[:, None, None])
        self.register_buffer("bias", (-mean / std)[:, None, None])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, K] or numbers [N, 1] of pixels 0..255, float32 [N, C, H, W]."""
        (rows, columns), (height, width) = self.size, pixels.shape[2:]
        top, left = (height - rows) // 2, (width - columns) // 2
        images = pixels[:, :, top : top + rows, left : left + columns] * self.scale + self.bias
        # All views are one batch, so the file contains the network once.
        views = [view(torch, images, *each) for each in self.views]
        logits = self.network((torch.cat(views) if views else images).to(self.dtype)).float()
        if views:
            logits = self.task.averaged(logits.reshape(len(views), images.shape[0], *logits.shape[1:]))
        return self.task.probabilities(logits)


class Classifier(nn.Module):
    """Images uint8 or uint16 [N, H, W, C] of any height and width to probabilities float32 [N, K].

    A regression has its number in place of probabilities. Several members, as of a cross-validation, are averaged.

    Args:
        run: one run, or a cross-validation.
        dtype: of the networks' weights and arithmetic.

    Raises:
        InputError: the run trained a Keras model.
    """

    def __init__(self, run: "Run", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.resize = Resize(run.recipe.stored_sides, run.recipe.data.resize, bits_of(run))
        self.members = nn.ModuleList(ExportedModel(member, dtype) for member in run.members)
        self.eval().requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the probabilities."""
        pixels = self.resize(images)
        if self.resize.bits == 16:
            pixels = pixels * FROM_16_BITS
        found = [member(pixels) for member in self.members]
        return torch.stack(found).mean(dim=0) if len(found) > 1 else found[0]


def metadata_of(run: "Run", precision: str) -> dict[str, str]:
    """Return the metadata of an exported file, all as text; docs/export.md has the keys."""
    recipe, calibration = run.recipe, run.calibration
    found = {
        "producer": f"flatout {__version__}",
        "model": recipe.model,
        "task": run.task.name,
        "classes": json.dumps(run.classes, ensure_ascii=False),
        "image_size": json.dumps(recipe.stored_sides),
        "channels": str(recipe.channels),
        "bits": str(bits_of(run)),
        "resize": recipe.data.resize,
        "precision": precision,
        "temperature": repr(run.task.temperature),
    }
    if run.task.thresholds:
        found["thresholds"] = json.dumps(run.task.thresholds)
    if calibration:
        found["calibration_images"] = str(calibration.images)
        found["set_thresholds"] = json.dumps(calibration.set_thresholds)
    return found
