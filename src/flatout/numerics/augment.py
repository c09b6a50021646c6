"""Random augmentation: drawn on the host as one table per epoch, applied on the device.

The table is computed by NumPy in float64, so that every engine applies the same numbers.
Shape letters: N samples, B batch, H height, W width, C channels.
"""

from typing import TYPE_CHECKING

import numpy as np

from flatout.numerics.random import Stream, uniform
from flatout.recipe import Augment

if TYPE_CHECKING:
    import torch

FLIP, SHEAR, ZOOM_X, ZOOM_Y, ROTATE, SHIFT_X, SHIFT_Y, CROP_AREA, CROP_ASPECT, CROP_X, CROP_Y, DRAWS = range(12)
CROP_ASPECTS = (3 / 4, 4 / 3)


def epoch_transforms(augment: Augment, seed: int, epoch: int, count: int) -> np.ndarray | None:
    """Return the augmentation of every sample in one epoch; row i belongs to sample i.

    Returns:
        None where nothing is random; uint8 [N], 1 to mirror, where only flips are random; else float32 [N, 2, 3], the
        affine map from a position in the result to one in the image, with x and y from -1 to 1.
    """
    if not augment.is_random:
        return None
    draws = uniform(seed, Stream.AUGMENT, epoch, (count, DRAWS))
    flip = (draws[:, FLIP] < 0.5) & augment.flip
    return affine_maps(augment, draws, flip) if augment.is_affine else flip.astype(np.uint8)


def affine_maps(augment: Augment, draws: np.ndarray, flip: np.ndarray) -> np.ndarray:
    """Return float32 [N, 2, 3] from uniform draws [N, DRAWS] and mirror flags bool [N].

    The map is crop · rotate · shear · zoom · mirror, followed by the shift.
    """
    either_way = 2 * draws - 1
    angle = np.deg2rad(augment.rotate) * either_way[:, ROTATE]
    cos, sin = np.cos(angle), np.sin(angle)
    shear = augment.shear * either_way[:, SHEAR]
    zoom_x = 1 + augment.zoom * either_way[:, ZOOM_X]
    zoom_y = 1 + augment.zoom * either_way[:, ZOOM_Y]
    mirror = np.where(flip, -1.0, 1.0)

    maps = np.empty((len(draws), 2, 3))
    maps[:, 0, 0] = cos * zoom_x * mirror
    maps[:, 0, 1] = (cos * shear - sin) * zoom_y
    maps[:, 1, 0] = sin * zoom_x * mirror
    maps[:, 1, 1] = (sin * shear + cos) * zoom_y
    # Coordinates run from -1 to 1, so a shift by a fraction of the image is twice that fraction.
    maps[:, 0, 2] = 2 * augment.shift * either_way[:, SHIFT_X]
    maps[:, 1, 2] = 2 * augment.shift * either_way[:, SHIFT_Y]
    if augment.crop:
        width, height, x, y = crop_boxes(augment.crop, draws)
        maps[:, 0] *= width[:, None]
        maps[:, 1] *= height[:, None]
        maps[:, 0, 2] += x
        maps[:, 1, 2] += y
    return maps.astype(np.float32)


def crop_boxes(smallest_area: float, draws: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return width, height (fractions of the image) and centre x, y (-1..1) of random resized crops, each [N].

    Area uniform, aspect ratio log-uniform, position uniform (Szegedy et al., arXiv 1409.4842); sides are at most those
    of the image.
    """
    area = smallest_area + (1 - smallest_area) * draws[:, CROP_AREA]
    low, high = np.log(CROP_ASPECTS)
    aspect = np.exp(low + (high - low) * draws[:, CROP_ASPECT])
    width = np.minimum(1, np.sqrt(area * aspect))
    height = np.minimum(1, np.sqrt(area / aspect))
    return width, height, (1 - width) * (2 * draws[:, CROP_X] - 1), (1 - height) * (2 * draws[:, CROP_Y] - 1)


def apply(images_BHWC: "torch.Tensor", transforms: "torch.Tensor | None", scale: "torch.Tensor", bias: "torch.Tensor"):
    """Normalise a batch and apply its transforms, on the device where the batch is.

    Args:
        images_BHWC: uint8.
        transforms: the batch's rows of `epoch_transforms`; None for evaluation.
        scale, bias: float32 [C]; a pixel p becomes p * scale + bias.

    Returns:
        float32 [B, C, H, W] in channels_last order. Resampling is bilinear; outside, the nearest edge pixel counts.
    """
    import torch

    images = images_BHWC.to(scale.dtype).mul_(scale).add_(bias).permute(0, 3, 1, 2)
    if transforms is None:
        return images
    if transforms.dtype == torch.uint8:
        return torch.where(transforms.bool()[:, None, None, None], images.flip(3), images)
    grid = torch.nn.functional.affine_grid(transforms, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
