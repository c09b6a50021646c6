"""Augmentation of images that are no squares: angles and aspect ratios are those of pixels."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flatout.config import Augment, Data, Recipe
from flatout.engine import augment
from flatout.utils.random import Stream, uniform

ONE, ZERO = torch.ones(3), torch.zeros(3)
WIDE = (96, 160)


def recipe(settings: Augment, stored: tuple[int, int] = WIDE) -> Recipe:
    data = Data(stored_size=stored)
    return Recipe(model="any", image_size=WIDE, epochs=1, batch_size=1, augment=settings, data=data)


def by_hand(image_HWC: np.ndarray, height: int, width: int, source: Callable[[float, float], tuple[float, float]]):
    """Return the image whose pixel at (x, y) from the centre is that at source(x, y), bilinear, edges repeated."""
    rows, columns = image_HWC.shape[:2]
    found = np.empty((height, width, image_HWC.shape[2]))
    for i in range(height):
        for j in range(width):
            x, y = source(j + 0.5 - width / 2, i + 0.5 - height / 2)
            x = float(np.clip(x + columns / 2 - 0.5, 0, columns - 1))
            y = float(np.clip(y + rows / 2 - 0.5, 0, rows - 1))
            a, b = min(int(y), rows - 2), min(int(x), columns - 2)
            top, bottom = image_HWC[a, b : b + 2], image_HWC[a + 1, b : b + 2]
            across = x - b
            upper, lower = top[0] * (1 - across) + top[1] * across, bottom[0] * (1 - across) + bottom[1] * across
            found[i, j] = upper * (1 - (y - a)) + lower * (y - a)
    return found


def pictures(count: int, size: tuple[int, int] = WIDE) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, (count, *size, 3), dtype=np.uint8))


@pytest.mark.parametrize("stored", [WIDE, (120, 180)])
def test_a_rotation_of_a_wide_image_is_one_of_pixels(stored: tuple[int, int]) -> None:
    images, wanted = pictures(2, stored), recipe(Augment(rotate=40.0, shear=0.3), stored)
    table = augment.epoch_transforms(wanted, 0, len(images))
    assert table is not None
    found = augment.apply(images, {"affine": torch.from_numpy(table["affine"])}, ONE, ZERO, WIDE)
    draws = 2 * uniform(1, Stream.AUGMENT, 0, (len(images), augment.DRAWS)) - 1
    for image, drawn, result in zip(images.numpy(), draws, found.permute(0, 2, 3, 1).numpy(), strict=True):
        angle, shear = np.deg2rad(40) * drawn[augment.ROTATE], 0.3 * drawn[augment.SHEAR]
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ [[1, shear], [0, 1]]
        expected = by_hand(image.astype(float), *WIDE, lambda x, y, turn=turn: tuple(turn @ (x, y)))
        np.testing.assert_allclose(result, expected, atol=0.05)


def test_a_policy_turns_pixels() -> None:
    maps, _ = augment.policy_operations("trivialaugment", 1, 0, 4000, 160 / 96)
    to_pixels = np.diag([80.0, 48.0])
    linear = to_pixels @ maps[:, :, :2] @ np.linalg.inv(to_pixels)
    turned = [m for m in linear if abs(m[0, 1] + m[1, 0]) < 1e-9 and abs(m[0, 1]) > 1e-3]
    assert len(turned) > 100
    np.testing.assert_allclose([m @ m.T for m in turned], np.broadcast_to(np.eye(2), (len(turned), 2, 2)), atol=1e-9)
    assert max(np.abs(linear[:, 0, 1])) == pytest.approx(1, abs=0.02), "the largest shear or turn"


@pytest.mark.parametrize("stored", [WIDE, (100, 100), (160, 96)])
def test_crops_distort_wide_images_as_little_as_squares(stored: tuple[int, int]) -> None:
    """Pixels of the result become wider or higher by up to 4/3, unless the box is limited by the image."""
    rows = augment.epoch_transforms(recipe(Augment(crop=0.1), (stored[0] * 2, stored[1] * 2)), 0, 2000)
    assert rows is not None
    across, down = np.abs(rows["affine"][:, 0, 0]), np.abs(rows["affine"][:, 1, 1])
    free = (across < 1) & (down < 1)
    assert free.sum() > 500
    distorted = (across * stored[1] / 160) / (down * stored[0] / 96)
    assert 3 / 4 - 1e-6 <= distorted[free].min() < 0.77
    assert 1.3 < distorted[free].max() <= 4 / 3 + 1e-6


def test_erased_boxes_have_the_aspect_of_pixels() -> None:
    rows = augment.epoch_transforms(recipe(Augment(erase=1.0)), 0, 2000)
    assert rows is not None
    top, left, bottom, right = rows["erase"].T
    free = (right - left < 1) & (bottom - top < 1)
    aspects = ((right - left) * 160 / ((bottom - top) * 96))[free]
    assert 0.3 - 1e-4 <= aspects.min() < 0.33
    assert 3 < aspects.max() <= 10 / 3 + 1e-4


def test_the_centre_of_a_wide_image() -> None:
    images = pictures(1, (120, 180))
    found = augment.apply(images, None, ONE, ZERO, WIDE)
    assert torch.equal(found, images[:, 12:108, 10:170].permute(0, 3, 1, 2).float())
