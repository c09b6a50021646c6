"""Augmentation: the geometry against exact operations, and independence of how batches are cut."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import map_coordinates

from flatout.config import Augment, Data, Recipe
from flatout.engine import augment, pixels
from flatout.utils.random import Stream, uniform

ONE, ZERO = torch.ones(3), torch.zeros(3)
WIDE = (96, 160)
Size = int | tuple[int, int]


def recipe(settings: Augment, image_size: Size = 16, stored_size: Size = 0) -> Recipe:
    data = Data(stored_size=stored_size)
    return Recipe(model="any", image_size=image_size, epochs=1, batch_size=1, augment=settings, data=data)


def pictures(count: int = 6, size: Size = 16) -> torch.Tensor:
    sides = (size, size) if isinstance(size, int) else size
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, *sides, 3), dtype=np.uint8))


def plain(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float()


def tables_of(settings: Augment, count: int, epoch: int = 0, size: Size = 16, stored: Size = 0) -> augment.Transforms:
    tables = augment.epoch_transforms(recipe(settings, size, stored), epoch, count)
    assert tables is not None
    return tables


def rows_of(settings: Augment, count: int, **options: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(table) for name, table in tables_of(settings, count, **options).items()}


@pytest.mark.parametrize("flip", [False, True])
def test_shifts_alone_move_by_whole_pixels(flip: bool) -> None:
    images = pictures(64)
    found = augment.apply(images, rows_of(Augment(shift=2.4 / 16, flip=flip), len(images)), ONE, ZERO)
    seen = set()
    for moved, image in zip(found.numpy(), plain(images).numpy(), strict=True):
        for y, x, step in itertools.product(range(-2, 3), range(-2, 3), (1, -1) if flip else (1,)):
            rows, columns = (np.clip(np.arange(16) + by, 0, 15) for by in (y, x))
            if np.allclose(moved, image[:, rows][:, :, columns[::step]], atol=1e-2):
                seen.add((y, x))
                break
        else:
            pytest.fail("no whole number of pixels")
    assert len(seen) > 20, "25 are as likely"


def test_rows_belong_to_samples_and_epochs_differ() -> None:
    settings = Augment(flip=True, rotate=10.0, crop=0.5)
    first, again, later = (tables_of(settings, 100, epoch)["affine"] for epoch in (0, 0, 1))
    assert first.shape == (100, 2, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, later)
    flips, others = (tables_of(Augment(flip=True), 1000, epoch)["flip"] for epoch in (0, 1))
    assert flips.dtype == np.uint8
    assert 400 < flips.sum() < 600
    assert np.array_equal(others, 1 - flips)
    assert augment.epoch_transforms(recipe(Augment()), 0, 100) is None


ALL = Augment(
    flip=True, rotate=20.0, zoom=0.2, color_jitter=0.4, policy="trivialaugment", erase=0.5, mixup=0.2, cutmix=1.0
)


def test_the_split_into_batches_does_not_matter() -> None:
    images = pictures(8)
    tables = rows_of(ALL, 8)
    whole = augment.apply(images, tables, ONE, ZERO)
    parts = [
        augment.apply(images[i : i + 3], {name: table[i : i + 3] for name, table in tables.items()}, ONE, ZERO)
        for i in range(0, 8, 3)
    ]
    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-4, rtol=1e-6)


# --- colours: Pillow is the oracle, which rounds to whole numbers after each operation --------------------------------


def recolored(images: torch.Tensor, **columns: float) -> np.ndarray:
    names = ["brightness", "contrast", "saturation", "sharpness", "posterize", "solarize", "autocontrast", "equalize"]
    row = pixels.UNCHANGED.copy()
    for name, value in columns.items():
        row[names.index(name)] = value
    rows = torch.from_numpy(np.tile(row, (len(images), 1))).float()
    found = augment.apply(images, {"color": rows}, ONE, ZERO)
    return found.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(
    ("columns", "by_pillow"),
    [
        ({"brightness": 1.4}, lambda image: ImageEnhance.Brightness(image).enhance(1.4)),
        ({"contrast": 0.3}, lambda image: ImageEnhance.Contrast(image).enhance(0.3)),
        ({"saturation": 1.8}, lambda image: ImageEnhance.Color(image).enhance(1.8)),
        ({"sharpness": 1.9}, lambda image: ImageEnhance.Sharpness(image).enhance(1.9)),
        ({"sharpness": 0.1}, lambda image: ImageEnhance.Sharpness(image).enhance(0.1)),
        ({"posterize": 2.0**5}, lambda image: ImageOps.posterize(image, 3)),
        ({"solarize": 100.0}, lambda image: ImageOps.solarize(image, 100)),
        ({"autocontrast": 1.0}, ImageOps.autocontrast),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_colors_are_pillows(columns: dict[str, float], by_pillow: Callable[[Image.Image], Image.Image]) -> None:
    images = pictures(4) // 2 + 40
    found = recolored(images, **columns)
    for image, ours in zip(images.numpy(), found, strict=True):
        theirs = np.asarray(by_pillow(Image.fromarray(image)), np.float32)
        assert np.abs(ours - theirs).max() <= 1.5


@pytest.mark.parametrize(("size", "spread"), [(40, 4), (40, 1), (12, 1), (40, 300)])
def test_equalised_histograms_are_exactly_those_of_torchvision_and_pillow(size: int, spread: int) -> None:
    """Also of too few pixels and of one level, which stay as they are."""
    from torchvision.transforms.v2.functional import equalize

    images = pictures(4, size=size) // spread + (30 if spread > 1 else 0)
    found = recolored(images, equalize=1.0)
    theirs = equalize(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
    assert (found == theirs).all()
    for image, ours in zip(images.numpy(), found, strict=True):
        assert (ours == np.asarray(ImageOps.equalize(Image.fromarray(image)))).all()


def test_color_jitter_stays_within_its_bounds() -> None:
    rows = rows_of(Augment(color_jitter=0.4), 2000)["color"]
    assert rows.shape == (2000, 3)
    assert 0.6 <= float(rows.min()) < float(rows.max()) <= 1.4
    assert torch.allclose(rows.mean(0), torch.ones(3), atol=0.03)


# --- policies, rectangles, mixtures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["trivialaugment", "randaugment"])
def test_a_policy_moves_pixels_as_often_as_it_draws_such_an_operation(policy: Any) -> None:
    tables = rows_of(Augment(policy=policy), 4000)
    moved = (tables["affine"] != torch.eye(2, 3)).flatten(1).any(1)
    recolored = (tables["color"] != torch.from_numpy(pixels.UNCHANGED).float()).any(1)
    operations = len(augment.POLICY)
    if policy == "trivialaugment":
        # One operation each: a map or a colour. Five of fourteen move pixels; magnitude 0, of 31, does nothing.
        assert not (moved & recolored).any()
        assert float(moved.float().mean()) == pytest.approx(5 / operations * 30 / 31, abs=0.03)
    else:
        assert float(moved.float().mean()) == pytest.approx(1 - (1 - 5 / operations) ** 2, abs=0.03)
    assert recolored.any()


def test_erased_rectangles_get_the_mean_and_have_their_share_and_the_aspect_of_pixels() -> None:
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.25)
    images = torch.full((400, *WIDE, 3), 255, dtype=torch.uint8)
    rows = rows_of(Augment(erase=0.25), 400, size=WIDE)
    found = augment.apply(images, rows, 1 / (255 * std), -mean / std)
    erased = (found == 0).all(1)
    assert torch.equal(erased | (found == 2).all(1), torch.ones_like(erased))
    share = erased.flatten(1).float().mean(1)
    assert float((share > 0).float().mean()) == pytest.approx(0.25, abs=0.06)
    assert float(share.max()) < 0.4
    top, left, bottom, right = rows_of(Augment(erase=1.0), 2000, size=WIDE)["erase"].T
    free = (right - left < 1) & (bottom - top < 1)
    aspects = ((right - left) * 160 / ((bottom - top) * 96))[free]
    assert 0.3 - 1e-4 <= aspects.min() < 0.33
    assert 3 < aspects.max() <= 10 / 3 + 1e-4


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixtures_have_the_labels_share_of_the_pixels(mixup: float, cutmix: float) -> None:
    count, size = 600, 24
    tables = rows_of(Augment(mixup=mixup, cutmix=cutmix), count)
    ones, zeros = torch.ones(count, 1, size, size), torch.zeros(count, 1, size, size)
    mixed = augment.mix(zeros, ones, tables["mix"])
    torch.testing.assert_close(mixed.mean((1, 2, 3)), tables["mix"][:, 5], atol=0.1, rtol=0)
    whole = (mixed == mixed[:, :, :1, :1]).flatten(1).all(1).float().mean()
    assert float(whole) == pytest.approx(1.0 if not cutmix else 0.5 if mixup else 0.0, abs=0.12)
    assert torch.equal(tables["partner"].long().sort().values, torch.arange(count))


# --- images stored larger than the model takes them -------------------------------------------------------------------


def test_evaluation_takes_the_centre_and_a_mirror_image_is_exact() -> None:
    images, flags = pictures(size=20), torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.uint8)
    found = augment.apply(images, None, ONE, ZERO, (16, 16))
    assert torch.equal(found, plain(images)[:, :, 2:-2, 2:-2])
    mirrored = augment.apply(images, {"flip": flags}, ONE, ZERO, (16, 16))
    for image, own, flag in zip(mirrored, found, flags, strict=True):
        assert torch.equal(image, own.flip(2) if flag else own)
    wide = pictures(1, (120, 180))
    assert torch.equal(augment.apply(wide, None, ONE, ZERO, WIDE), plain(wide)[:, :, 12:108, 10:170])


def test_maps_show_the_centre_and_crops_any_part() -> None:
    """A map that changes nothing, of 16 of 20 stored pixels, shows the 16 at the centre."""
    images = pictures(1000, size=20)
    still = augment.apply(images, rows_of(Augment(zoom=1e-9), 1000, stored=20), ONE, ZERO, (16, 16))
    torch.testing.assert_close(still, plain(images)[:, :, 2:-2, 2:-2], atol=0.05, rtol=0)
    maps = tables_of(Augment(crop=0.1), 1000, stored=20)["affine"]
    corners = np.abs(maps[:, [0, 1], [0, 1]]) + np.abs(maps[:, :, 2])
    assert 0.99 < corners.max() <= 1 + 1e-6


# 16 bits and other channels


def test_16_bits_are_0_to_255_with_fractions() -> None:
    deep = torch.from_numpy(np.random.default_rng(0).integers(0, 65536, (2, 6, 8, 5)).astype(np.uint16))
    mean, std = torch.linspace(0.3, 0.7, 5), torch.linspace(0.2, 0.4, 5)
    expected = (deep.to(torch.float64) / 65535 - mean) / std
    normalised = augment.apply(deep, None, 1 / (255 * std), -mean / std)
    torch.testing.assert_close(normalised.double(), expected.permute(0, 3, 1, 2), atol=2e-6, rtol=0)
    assert normalised.is_contiguous(memory_format=torch.channels_last)
    rows = torch.tensor([[1.2, 0.7, 1.3]] * 2)
    found = augment.apply(deep, {"color": rows}, torch.ones(5), torch.zeros(5)).permute(0, 2, 3, 1).double()
    brighter = (deep.to(torch.float64) / 257 * 1.2).clip(0, 255)
    middle = brighter.mean((1, 2), keepdim=True)
    torch.testing.assert_close(found, (middle + 0.7 * (brighter - middle)).clip(0, 255), atol=1e-3, rtol=1e-5)


def test_tables_do_not_depend_on_the_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Augment(flip=True, crop=0.3, color_jitter=0.2, policy="randaugment", erase=0.5, mixup=0.2)
    whole = tables_of(settings, 50, 1)
    monkeypatch.setattr(augment, "SAMPLES_AT_ONCE", 8)
    parts = tables_of(settings, 50, 1)
    assert whole.keys() == parts.keys() == {"affine", "color", "erase", "mix", "partner"}
    assert all((whole[name] == parts[name]).all() for name in whole)


# --- images that are no squares: angles and aspect ratios are those of pixels -----------------------------------------


def by_hand(image_HWC: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return the wide image whose pixel at p from the centre is that at turn @ p, bilinear, edges repeated."""
    (height, width), (rows, columns) = WIDE, image_HWC.shape[:2]
    y, x = np.mgrid[:height, :width] + 0.5
    x, y = np.tensordot(turn, [x - width / 2, y - height / 2], 1)
    places = [np.clip(y + rows / 2 - 0.5, 0, rows - 1), np.clip(x + columns / 2 - 0.5, 0, columns - 1)]
    return np.stack([map_coordinates(image_HWC[..., c], places, order=1) for c in range(3)], axis=2)


@pytest.mark.parametrize("stored", [WIDE, (120, 180)])
def test_a_rotation_of_a_wide_image_is_one_of_pixels(stored: tuple[int, int]) -> None:
    images, settings = pictures(2, stored), Augment(rotate=40.0, shear=0.3)
    found = augment.apply(images, rows_of(settings, 2, size=WIDE, stored=stored), ONE, ZERO, WIDE)
    draws = 2 * uniform(1, Stream.AUGMENT, 0, (len(images), augment.DRAWS)) - 1
    for image, drawn, result in zip(images.numpy(), draws, found.permute(0, 2, 3, 1).numpy(), strict=True):
        angle, shear = np.deg2rad(40) * drawn[augment.ROTATE], 0.3 * drawn[augment.SHEAR]
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ [[1, shear], [0, 1]]
        expected = by_hand(image.astype(float), turn)
        np.testing.assert_allclose(result, expected, atol=0.05)


def test_a_policy_turns_pixels() -> None:
    maps, _ = augment.policy_operations("trivialaugment", 1, 0, 4000, 160 / 96, 0)
    to_pixels = np.diag([80.0, 48.0])
    linear = to_pixels @ maps[:, :, :2] @ np.linalg.inv(to_pixels)
    turned = [m for m in linear if abs(m[0, 1] + m[1, 0]) < 1e-9 and abs(m[0, 1]) > 1e-3]
    assert len(turned) > 100
    np.testing.assert_allclose([m @ m.T for m in turned], np.broadcast_to(np.eye(2), (len(turned), 2, 2)), atol=1e-9)
    assert max(np.abs(linear[:, 0, 1])) == pytest.approx(1, abs=0.02), "the largest shear or turn"


@pytest.mark.parametrize("stored", [WIDE, (100, 100), (160, 96)])
def test_crops_distort_wide_images_as_little_as_squares(stored: tuple[int, int]) -> None:
    """Pixels of the result become wider or higher by up to 4/3, unless the box is limited by the image."""
    maps = tables_of(Augment(crop=0.1), 2000, size=WIDE, stored=(stored[0] * 2, stored[1] * 2))["affine"]
    across, down = np.abs(maps[:, 0, 0]), np.abs(maps[:, 1, 1])
    free = (across < 1) & (down < 1)
    assert free.sum() > 500
    distorted = (across * stored[1] / 160) / (down * stored[0] / 96)
    assert 3 / 4 - 1e-6 <= distorted[free].min() < 0.77
    assert 1.3 < distorted[free].max() <= 4 / 3 + 1e-6
