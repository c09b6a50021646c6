"""Random augmentation: drawn on the host as tables for each epoch, applied on the device.

NumPy computes the tables in float64, so that every engine applies the same numbers; row i belongs to sample i.
"""

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from flatout.config import Augment, Recipe
from flatout.engine import pixels
from flatout.utils.random import Stream, block_permutation, permutation, uniform

# The key of the view of a split's images that evaluations see.
NOT_AUGMENTED = -1
Transforms = dict[str, np.ndarray]
# The first draw is unused (formerly mirroring); it remains so that seeds keep their results.
_, SHEAR, ZOOM_X, ZOOM_Y, ROTATE, SHIFT_X, SHIFT_Y, CROP_AREA, CROP_ASPECT, CROP_X, CROP_Y, DRAWS = range(12)
CROP_ASPECTS = (3 / 4, 4 / 3)

# The operations of TrivialAugment and RandAugment, with the strongest magnitude of each (torchvision's wide ranges).
POLICY = {
    "identity": 0.0,
    "shear_x": 0.99,
    "shear_y": 0.99,
    "shift_x": 32 / 224,
    "shift_y": 32 / 224,
    "rotate": 135.0,
    "brightness": 0.99,
    "saturation": 0.99,
    "contrast": 0.99,
    "sharpness": 0.99,
    "posterize": 6.0,
    "solarize": 255.0,
    "autocontrast": 0.0,
    "equalize": 0.0,
}
# RandAugment: operations per image, and their magnitude (Cubuk et al., arXiv 1909.13719, for ImageNet).
RAND_OPERATIONS, RAND_MAGNITUDE = 2, 9 / 30
# TrivialAugment draws one of this many magnitudes (Müller and Hutter, arXiv 2103.10158).
TRIVIAL_MAGNITUDES = 31
# Samples per chunk of the tables, whose intermediate results take several times their memory.
SAMPLES_AT_ONCE = 1 << 16
# Test-time augmentation shifts images of at least this size by two pixels, smaller ones by one, and photos not at all.
TWO_PIXELS_FROM, PHOTO_FROM = 64, 96
# Random erasing: area and aspect ratio of the rectangle (Zhong et al., arXiv 1708.04896).
ERASE_AREAS, ERASE_ASPECTS = (0.02, 1 / 3), (0.3, 10 / 3)


def epoch_transforms(recipe: Recipe, epoch: int, count: int, block: int = 0) -> Transforms | None:
    """Return the augmentation of each of `count` samples in one epoch, as the tables that the recipe needs, or None.

    flip: uint8 [N], 1 to mirror; if images are not resampled.
    affine: float32 [N, 2, 3], the map from positions in the result to positions in the image, x and y from -1 to 1.
    color: float32 [N, 3] or [N, 8], see `pixels.recolor`.
    erase: float32 [N, 4], a box, see `pixels.inside`.
    partner: int32 [N], the sample that this one is mixed with.
    mix: float32 [N, 6]: the partner's share of each pixel, a box of the partner's pixels alone, its share of the label.
    """
    augment = recipe.augment
    if not augment.is_random:
        return None
    if augment.views:
        epoch %= augment.views
    found: Transforms = {}
    for start in range(0, count, SAMPLES_AT_ONCE):
        part = _transforms(recipe, epoch, start, min(SAMPLES_AT_ONCE, count - start))
        for name, rows in part.items():
            found.setdefault(name, np.empty((count, *rows.shape[1:]), rows.dtype))[start : start + len(rows)] = rows
    if augment.mixup or augment.cutmix:
        found["partner"] = _partners(recipe.seed, epoch, count, block).astype(np.int32)
    return found


def _transforms(recipe: Recipe, epoch: int, start: int, count: int) -> Transforms:
    """Those of samples from `start` on, without the partners."""
    augment, seed = recipe.augment, recipe.seed
    found: Transforms = {}
    colors = np.tile(pixels.UNCHANGED, (count, 1))
    # Alternate flip: every second epoch shows the other side of each image (K. Jordan, arXiv 2404.00498).
    flip = np.zeros(count, bool)
    if augment.flip:
        flip = (uniform(seed, Stream.FLIP, epoch // 2, (count, 1), start)[:, 0] < 0.5) ^ (epoch % 2 == 1)
    (height, width), (stored_height, stored_width) = recipe.image_sides, recipe.stored_sides
    aspect = width / height
    if augment.is_affine:
        draws = uniform(seed, Stream.AUGMENT, epoch, (count, DRAWS), start)
        maps = affine_maps(augment, draws, flip, aspect, stored_width / stored_height)
        if augment.only_shifts and recipe.image_sides == recipe.stored_sides:
            _to_whole_pixels(maps, augment.shift, draws[:, [SHIFT_X, SHIFT_Y]], np.array([width, height]))
        if not augment.crop:
            maps *= [[width / stored_width], [height / stored_height]]
        if augment.policy != "none":
            moves, colors = policy_operations(augment.policy, seed, epoch, count, aspect, start)
            _follow(maps, moves)
        found["affine"] = maps.astype(np.float32)
    elif augment.flip:
        found["flip"] = flip.astype(np.uint8)
    if augment.color_jitter:
        jitter = uniform(seed, Stream.COLOR, epoch, (count, 3), start)
        colors[:, :3] *= 1 + augment.color_jitter * (2 * jitter - 1)
    if augment.color_jitter or augment.policy != "none":
        found["color"] = colors[:, : 3 if augment.policy == "none" else None].astype(np.float32)
    if augment.erase:
        erase = uniform(seed, Stream.ERASE, epoch, (count, 5), start)
        low, high = ERASE_AREAS
        sides = _sides(low + (high - low) * erase[:, 0], erase[:, 1], ERASE_ASPECTS, 1 / aspect)
        found["erase"] = np.where(erase[:, 4:] < augment.erase, _boxes(*sides, erase[:, 2:4]), 0).astype(np.float32)
    if augment.mixup or augment.cutmix:
        found["mix"] = mixtures(augment, uniform(seed, Stream.MIX, epoch, (count, 4), start)).astype(np.float32)
    return found


def _partners(seed: int, epoch: int, count: int, block: int) -> np.ndarray:
    """Return a permutation of the samples, int64 [N]; in block order within windows in memory."""
    if not block:
        return permutation(seed, Stream.PARTNER, epoch, count)
    (order, _), (others, _) = (block_permutation(seed, s, epoch, count, block) for s in (Stream.ORDER, Stream.PARTNER))
    return others[np.argsort(order)]


def affine_maps(
    augment: Augment, draws: np.ndarray, flip: np.ndarray, aspect: float, stored_aspect: float
) -> np.ndarray:
    """Return the maps crop · rotate · shear · zoom · mirror, then the shift, float64 [N, 2, 3], from uniform draws.

    `aspect` is width / height of the result, in whose pixels angles are measured, `stored_aspect` that of the image.
    """
    either_way = 2 * draws - 1
    angle = np.deg2rad(augment.rotate) * either_way[:, ROTATE]
    cos, sin = np.cos(angle), np.sin(angle)
    shear = augment.shear * either_way[:, SHEAR]
    zoom_x, zoom_y = (1 + augment.zoom * either_way[:, column] for column in (ZOOM_X, ZOOM_Y))
    mirror = np.where(flip, -1.0, 1.0)
    # Coordinates run from -1 to 1, so a shift by a fraction of the image is twice that fraction.
    shift_x, shift_y = (2 * augment.shift * either_way[:, column] for column in (SHIFT_X, SHIFT_Y))
    in_x = cos * zoom_x * mirror, (cos * shear - sin) * zoom_y, shift_x
    in_y = sin * zoom_x * mirror, (sin * shear + cos) * zoom_y, shift_y
    maps = _maps(*in_x, *in_y, aspect=aspect)
    if augment.crop:
        # Area uniform, aspect ratio log-uniform, position uniform (Szegedy et al., arXiv 1409.4842). The proportions of
        # the content change by up to 4/3.
        area = augment.crop + (1 - augment.crop) * draws[:, CROP_AREA]
        width, height = _sides(area, draws[:, CROP_ASPECT], CROP_ASPECTS, aspect / stored_aspect)
        maps[:, 0] *= width[:, None]
        maps[:, 1] *= height[:, None]
        maps[:, 0, 2] += (1 - width) * either_way[:, CROP_X]
        maps[:, 1, 2] += (1 - height) * either_way[:, CROP_Y]
    return maps


def _to_whole_pixels(maps: np.ndarray, shift: float, draws_N2: np.ndarray, sides: np.ndarray) -> None:
    """Then nothing is resampled: training images are as sharp as in evaluation. A shift below a pixel is kept."""
    most = np.floor(shift * sides + 1e-6)
    moved = np.floor(draws_N2 * (2 * most + 1)) - most
    maps[:, :, 2] = np.where(most > 0, 2 * moved / sides, maps[:, :, 2])


def _maps(*columns: np.ndarray, aspect: float) -> np.ndarray:
    """Return maps [N, 2, 3] for images of this width / height: as it is, a rotation would shear what is not square."""
    maps = np.stack(columns, axis=1).reshape(-1, 2, 3)
    maps[:, 0, 1] /= aspect
    maps[:, 1, 0] *= aspect
    return maps


def _follow(maps: np.ndarray, moves: np.ndarray) -> None:
    """Apply `moves` [N, 2, 3] before the maps."""
    maps[:, :, 2] += (maps[:, :, :2] @ moves[:, :, 2:])[..., 0]
    maps[:, :, :2] = maps[:, :, :2] @ moves[:, :, :2]


def _sides(
    area: np.ndarray, draws: np.ndarray, aspects: tuple[float, float], middle: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return width and height of rectangles, whose ratio is log-uniform in the range `aspects`, times `middle`."""
    low, high = np.log(aspects)
    aspect = np.exp(low + (high - low) * draws) * middle
    return np.minimum(1, np.sqrt(area * aspect)), np.minimum(1, np.sqrt(area / aspect))


def policy_operations(
    policy: str, seed: int, epoch: int, count: int, aspect: float, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the operations of a policy: maps [N, 2, 3] from the moved image to the unmoved one, and rows for `recolor`.

    `aspect` is width / height of the images.
    """
    strongest = np.array(list(POLICY.values()))
    maps, colors = np.tile(np.eye(2, 3), (count, 1, 1)), np.tile(pixels.UNCHANGED, (count, 1))
    for number in range(RAND_OPERATIONS if policy == "randaugment" else 1):
        draws = uniform(seed, Stream.POLICY, RAND_OPERATIONS * epoch + number, (count, 3), start)
        operation = (draws[:, 0] * len(POLICY)).astype(np.int64)
        share = RAND_MAGNITUDE
        if policy == "trivialaugment":
            share = np.floor(draws[:, 1] * TRIVIAL_MAGNITUDES) / (TRIVIAL_MAGNITUDES - 1)
        amount = share * strongest[operation]
        signed = np.where(draws[:, 2] < 0.5, -amount, amount)
        drawn = {name: operation == number for number, name in enumerate(POLICY)}
        shear_x, shear_y, shift_x, shift_y, angle = (
            np.where(drawn[name], signed, 0.0) for name in ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")
        )
        cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
        # At most one of the five is not zero.
        _follow(maps, _maps(cos, shear_x - sin, 2 * shift_x, shear_y + sin, cos, 2 * shift_y, aspect=aspect))
        for column, name in enumerate(("brightness", "contrast", "saturation", "sharpness")):
            colors[:, column] *= np.where(drawn[name], 1 + signed, 1.0)
        others = {"posterize": 2 ** np.rint(amount), "solarize": 255 - amount, "autocontrast": 1.0, "equalize": 1.0}
        for column, (name, value) in enumerate(others.items(), pixels.POSTERIZE):
            colors[:, column] = np.where(drawn[name], value, colors[:, column])
    return maps, colors


def mixtures(augment: Augment, draws: np.ndarray) -> np.ndarray:
    """Return rows [N, 6] of the table `mix` from uniform draws: the share, two for the position, mixup or CutMix.

    The shares of mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899) are Beta distributed.
    """
    is_cut = (draws[:, 3] < (0.5 if augment.mixup else 1.0)) & (augment.cutmix > 0)
    alpha = np.where(is_cut, augment.cutmix or 1.0, augment.mixup or 1.0)
    share = scipy.special.betaincinv(alpha, alpha, draws[:, 0])
    side = np.sqrt(share)
    boxes = np.where(is_cut[:, None], _boxes(side, side, draws[:, 1:3]), 0.0)
    return np.column_stack([np.where(is_cut, 0.0, share), boxes, share])


def _boxes(width: np.ndarray, height: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return rectangles at uniform positions [N, 2]; see `pixels.inside`."""
    top, left = (1 - height) * positions[:, 1], (1 - width) * positions[:, 0]
    return np.stack([top, left, top + height, left + width], axis=1)


def apply(
    images_BHWC: Tensor,
    transforms: dict[str, Tensor] | None,
    scale: Tensor,
    bias: Tensor,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Normalise a batch and apply its transforms except mixing; return float32 [B, C, H, W].

    Resampling is bilinear with edge pixels repeated; images that are not resampled are cropped at the centre.

    Args:
        images_BHWC: uint8; or uint16, whose pixels are divided by 257 first, to 0..255.
        transforms: the batch's rows of `epoch_transforms`; None for evaluation.
        scale, bias: float32 [C]; a pixel p of 0..255 becomes p * scale + bias.
        size: height and width of the result; None for the images' own.
    """
    transforms = transforms or {}
    if size and "affine" not in transforms:
        images_BHWC = pixels.centre(images_BHWC, *size)
    images = images_BHWC.to(scale.dtype)
    if images_BHWC.dtype == torch.uint16:
        images = images.mul_(pixels.FROM_16_BITS)
    has_color = "color" in transforms
    if not has_color:
        images = images.mul_(scale).add_(bias)
    images = images.permute(0, 3, 1, 2)
    if "flip" in transforms:
        images = torch.where(transforms["flip"].bool()[:, None, None, None], images.flip(3), images)
    if "affine" in transforms:
        grid = _affine_grid(transforms["affine"], *(size or images.shape[2:]))
        images = grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if has_color:
        images = pixels.recolor(torch, images.permute(0, 2, 3, 1), transforms["color"], _count_darker)
        images = images.mul(scale).add(bias).permute(0, 3, 1, 2)
    if "erase" in transforms:
        images = images * ~inside(transforms["erase"], images)
    return images


def _affine_grid(maps_B23: Tensor, height: int, width: int) -> Tensor:
    """Return the source of each pixel, [B, H, W, 2] as (x, y) in -1..1.

    torch's own `affine_grid` is a matrix product, which TF32 would round by hundredths of a pixel.
    """
    y, x = (torch.linspace(-1, 1, n, device=maps_B23.device) * (n - 1) / n for n in (height, width))
    of_x, of_y, moved = (maps_B23[:, None, None, :, column] for column in range(3))
    return of_x * x[:, None] + of_y * y[:, None, None] + moved


def _count_darker(levels_BHWC: Tensor) -> Tensor:
    """See `pixels.recolor`."""
    levels_BCP = levels_BHWC.permute(0, 3, 1, 2).flatten(2).long()
    empty = levels_BHWC.new_zeros(*levels_BCP.shape[:2], 256)
    histograms = empty.scatter_add(2, levels_BCP, empty.new_ones(()).expand(levels_BCP.shape))
    darker_BCP = (histograms.cumsum(2) - histograms).gather(2, levels_BCP)
    return darker_BCP.unflatten(2, levels_BHWC.shape[1:3]).permute(0, 2, 3, 1)


def tta_views(recipe: Recipe) -> list[tuple[int, bool]]:
    """Return the views that test-time augmentation averages, as arguments of `pixels.view`.

    Photos are not shifted: their networks are hardly sensitive to it, and each view takes as long as an evaluation.
    Nor are images of a fitted head, whose features are those of images and mirror images.
    """
    side = min(recipe.eval_sides)
    shifts = (0,) if side >= PHOTO_FROM or recipe.linear_probe else (0, -1, 1) if side < TWO_PIXELS_FROM else (0, -2, 2)
    mirrors = (False, True) if recipe.augment.flip else (False,)
    return [(moved, is_mirrored) for is_mirrored in mirrors for moved in shifts]


def mix(images_BCHW: Tensor, partners_BCHW: Tensor, rows_B6: Tensor) -> Tensor:
    """Return images mixed with their partners according to rows of the table `mix`."""
    return pixels.mixed(images_BCHW, partners_BCHW, rows_B6, inside(rows_B6[:, 1:5], images_BCHW))


def inside(boxes_B4: Tensor, images_BCHW: Tensor) -> Tensor:
    """Return the mask of a box in each image, bool [B, 1, H, W]."""
    height, width = (torch.arange(length, device=boxes_B4.device) for length in images_BCHW.shape[2:])
    return pixels.inside(boxes_B4, height, width)[:, None]
