"""Augmentation: the geometry against exact operations, and independence of how batches are cut."""

import numpy as np
import pytest
import torch

from flatout.numerics import augment
from flatout.recipe import Augment

ONE, ZERO = torch.ones(3), torch.zeros(3)


def pictures(count: int = 6, size: int = 16) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8))


def transformed(images: torch.Tensor, draws: dict[int, float], flip: bool = False, **settings: float) -> torch.Tensor:
    table = np.full((len(images), augment.DRAWS), 0.5)
    for column, value in draws.items():
        table[:, column] = value
    maps = augment.affine_maps(Augment(**settings), table, np.full(len(images), flip))  # type: ignore[arg-type]
    return augment.apply(images, torch.from_numpy(maps), ONE, ZERO)


def plain(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float()


def test_normalisation_is_mean_and_std() -> None:
    images = pictures()
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])
    expected = (plain(images) / 255 - mean[:, None, None]) / std[:, None, None]
    found = augment.apply(images, None, 1 / (255 * std), -mean / std)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_mirror_alone_is_exact() -> None:
    images, flags = pictures(), torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.uint8)
    found = augment.apply(images, flags, ONE, ZERO)
    for i, flag in enumerate(flags):
        assert torch.equal(found[i], plain(images)[i].flip(2) if flag else plain(images)[i])


def test_middle_draws_change_nothing() -> None:
    found = transformed(pictures(), {}, shear=0.3, zoom=0.3, rotate=30.0, shift=0.3)
    torch.testing.assert_close(found, plain(pictures()), atol=1e-3, rtol=1e-5)


def test_mirror_as_a_map() -> None:
    torch.testing.assert_close(
        transformed(pictures(), {}, flip=True, zoom=0.1), plain(pictures()).flip(3), atol=1e-3, rtol=1e-5
    )


def test_rotation_by_a_right_angle() -> None:
    found = transformed(pictures(), {augment.ROTATE: 1.0}, rotate=90.0)
    assert torch.allclose(found, plain(pictures()).rot90(1, (2, 3)), atol=0.05) or torch.allclose(
        found, plain(pictures()).rot90(-1, (2, 3)), atol=0.05
    )


def test_shift_by_whole_pixels_repeats_the_edge() -> None:
    found = transformed(pictures(), {augment.SHIFT_X: 1.0}, shift=4 / 16)
    original = plain(pictures())
    torch.testing.assert_close(found[..., :-4], original[..., 4:], atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(found[..., -4:], original[..., -1:].expand(-1, -1, -1, 4), atol=1e-2, rtol=1e-4)


def test_zoom_reads_a_smaller_part() -> None:
    gradient = torch.arange(16, dtype=torch.uint8)[None, None, :, None].expand(1, 16, 16, 3).contiguous()
    found = transformed(gradient, {augment.ZOOM_X: 0.0, augment.ZOOM_Y: 0.0}, zoom=0.5)[0, 0, 0]
    spread = float(found.max() - found.min())
    assert 7 < spread < 8


def test_shear_moves_rows_apart() -> None:
    gradient = torch.arange(16, dtype=torch.uint8)[None, None, :, None].expand(1, 16, 16, 3).contiguous()
    found = transformed(gradient, {augment.SHEAR: 1.0}, shear=0.5)[0, 0]
    offsets = found[:, 8] - found[0, 8]
    assert float(offsets[-1]) == pytest.approx(0.5 * 15, abs=0.5)
    assert float((offsets[1:] - offsets[:-1]).std()) < 0.1


def test_crops_stay_inside_and_keep_the_area() -> None:
    draws = np.random.default_rng(0).random((5000, augment.DRAWS))
    width, height, x, y = augment.crop_boxes(0.25, draws)
    assert (np.abs(x) + width <= 1 + 1e-12).all()
    assert (np.abs(y) + height <= 1 + 1e-12).all()
    assert 0.2 < (width * height).min() < 0.26
    assert (width * height).max() <= 1


def test_rows_belong_to_samples_and_epochs_differ() -> None:
    settings = Augment(flip=True, rotate=10.0, crop=0.5)
    first = augment.epoch_transforms(settings, 1, 0, 100)
    again = augment.epoch_transforms(settings, 1, 0, 100)
    later = augment.epoch_transforms(settings, 1, 1, 100)
    assert first is not None
    assert first.shape == (100, 2, 3)
    assert np.array_equal(first, again)  # type: ignore[arg-type]
    assert not np.array_equal(first, later)  # type: ignore[arg-type]
    flips = augment.epoch_transforms(Augment(flip=True), 1, 0, 1000)
    assert flips is not None
    assert flips.dtype == np.uint8
    assert 400 < flips.sum() < 600
    assert augment.epoch_transforms(Augment(), 1, 0, 100) is None


def test_the_split_into_batches_does_not_matter() -> None:
    images = pictures(8)
    maps = torch.from_numpy(augment.epoch_transforms(Augment(flip=True, rotate=20.0, zoom=0.2), 1, 0, 8))
    whole = augment.apply(images, maps, ONE, ZERO)
    parts = torch.cat([augment.apply(images[i : i + 3], maps[i : i + 3], ONE, ZERO) for i in range(0, 8, 3)])
    assert torch.equal(whole, parts)
