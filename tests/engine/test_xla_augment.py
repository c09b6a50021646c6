"""Augmentation inside XLA programs: the torch engine's pixels, which TPUs compute without fetching single ones."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

from flatout.config import Recipe
from flatout.engine import augment
from flatout.engine.xla.functional import Augmentation, mix
from tests.engine.test_against_plain_loop import make_recipe

FLIP = {"augment.flip": True}
COLORS = {"augment.color_jitter": 0.4, "augment.policy": "trivialaugment", "augment.erase": 0.5, "augment.mixup": 0.3}
UPRIGHT = {**FLIP, "augment.crop": 0.25, "augment.zoom": 0.3, "augment.shift": 0.1}
SHEAR = {**FLIP, "augment.zoom": 0.3, "augment.shear": 0.2}
ROTATE = {"augment.rotate": 180.0, "augment.zoom": 0.3}
ALL = {**UPRIGHT, **SHEAR, **ROTATE}
POLICY = {**SHEAR, "augment.policy": "trivialaugment"}
AFFINE = {"upright": UPRIGHT, "shear": SHEAR, "rotate": ROTATE, "all": ALL, "policy": POLICY}
CHANGES = {"none": {}, "flip": FLIP, **AFFINE, "colors": COLORS}
WHOLE = {"channels": 3, "data.mean": [0.0], "data.std": [1.0]}


def augmented(recipe: Recipe, images: np.ndarray, tables: Any) -> Any:
    return jax.jit(functools.partial(Augmentation(recipe), is_training=True))(images, tables)


def by_torch(recipe: Recipe, images: np.ndarray, tables: dict[str, Any]) -> torch.Tensor:
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    transforms = {name: torch.from_numpy(table) for name, table in tables.items()}
    return augment.apply(torch.from_numpy(images), transforms, 1 / (255 * std), -mean / std, recipe.image_sides)


def interpolated(image_HWC: np.ndarray, affine: np.ndarray, size: int) -> np.ndarray:
    """The definition, pixel by pixel: bilinear between four neighbours; the image's edge pixels are repeated."""
    sides = np.array(image_HWC.shape[:2])
    found = np.empty((size, size, image_HWC.shape[2]))
    for p, q in np.ndindex(size, size):
        x, y = affine.astype(np.float64) @ [(2 * q + 1) / size - 1, (2 * p + 1) / size - 1, 1]
        position = np.clip(((np.array([y, x]) + 1) * sides - 1) / 2, 0, sides - 1)
        (top, left), (down, right) = np.floor(position).astype(int), position % 1
        bottom, far = np.minimum([top + 1, left + 1], sides - 1)
        upper = (1 - right) * image_HWC[top, left] + right * image_HWC[top, far]
        lower = (1 - right) * image_HWC[bottom, left] + right * image_HWC[bottom, far]
        found[p, q] = (1 - down) * upper + down * lower
    return found


@pytest.mark.parametrize("platform", ["tpu", "default"])
@pytest.mark.parametrize("name", AFFINE)
def test_both_engines_interpolate_between_four_pixels(
    name: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a TPU computes is computed here on the CPU."""
    monkeypatch.setattr("jax.lax.platform_dependent", lambda *arguments, **ways: ways[platform](*arguments))
    recipe = make_recipe(**AFFINE[name], **WHOLE)
    images = np.random.default_rng(0).integers(0, 256, (24, 13, 18, 3), dtype=np.uint8)
    maps = (augment.epoch_transforms(recipe, 0, len(images)) or {})["affine"]
    oracle = np.stack([interpolated(image, affine, 12) for image, affine in zip(images, maps, strict=True)])
    expected = oracle.transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(augmented(recipe, images, {"affine": maps}), expected, atol=1e-5)
    transforms = {"affine": torch.from_numpy(maps)}
    torchs = augment.apply(torch.from_numpy(images), transforms, torch.ones(3) / 255, torch.zeros(3), (12, 12))
    np.testing.assert_allclose(torchs, expected, atol=1e-5)


WIDE = {"image_size": [12, 20], "channels": 5, "data.stored_size": [14, 26], "augment.color_jitter": 0.3}


# Policies are for up to three channels of 8 bits.
SHAPES = [(name, {"data.stored_size": 15}) for name in ("none", "flip", "upright", "colors")]
SHAPES += [(name, WIDE) for name in ("none", "flip", "upright", "shear", "all")]


@pytest.mark.parametrize("platform", ["tpu", "default"])
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_pixels_equal_torchs(name: str, shape: dict[str, Any], platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of square images, and of wide ones with 16 bits and many channels."""
    monkeypatch.setattr("jax.lax.platform_dependent", lambda *arguments, **ways: ways[platform](*arguments))
    recipe, rng = make_recipe(**{**CHANGES[name], **shape}), np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 15, 15, 1), dtype=np.uint8)
    if shape is WIDE:
        images = rng.integers(0, 65536, (16, 14, 26, 5)).astype(np.uint16)
    tables: dict[str, Any] = augment.epoch_transforms(recipe, 0, len(images)) or {}
    expected, found = by_torch(recipe, images, tables), augmented(recipe, images, tables)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    if "mix" in tables:
        expected = augment.mix(expected, expected[tables["partner"]], torch.from_numpy(tables["mix"]))
        np.testing.assert_allclose(mix(found, found[tables["partner"]], tables["mix"]), expected, atol=2e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_programs_for_tpus_fetch_no_single_pixels(name: str) -> None:
    recipe, images = make_recipe(**CHANGES[name]), np.zeros((4, 12, 12, 1), np.uint8)
    tables = augment.epoch_transforms(recipe, 0, len(images))
    traced = jax.jit(functools.partial(Augmentation(recipe), is_training=True)).trace(images, tables)
    tpu, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu"))
    assert "gather" not in tpu
    assert ("gather" in cpu) == recipe.augment.is_affine, "the search would find them"
