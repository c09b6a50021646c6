"""Augmentation inside XLA programs: the torch engine's pixels, computed without fetching single ones."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.numerics import augment, pixels
from tests.engine.engines import make_engine
from tests.engine.test_against_plain_loop import make_recipe

FLIP, CROP = {"augment.flip": True}, {"augment.crop": 0.25}
COLORS = {"augment.color_jitter": 0.4, "augment.policy": "trivialaugment", "augment.erase": 0.5, "augment.mixup": 0.3}
SEPARABLE = {**FLIP, **CROP, "augment.zoom": 0.3, "augment.shift": 0.1}


@pytest.mark.parametrize(
    "changes", [{}, FLIP, CROP, SEPARABLE, {**SEPARABLE, "augment.rotate": 20.0, "augment.shear": 0.2}, COLORS],
    ids=["none", "flip", "crop", "separable", "affine", "colors"],
)  # fmt: skip
def test_pixels_equal_torchs(changes: dict[str, Any]) -> None:
    from flatout.engine.xla.augment import Augmentation, mix

    recipe = make_recipe(**changes, **{"data.stored_size": 15})
    images = np.random.default_rng(0).integers(0, 256, (64, 15, 15, 1), dtype=np.uint8)
    tables = augment.epoch_transforms(recipe, 0, len(images)) or {}
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    transforms = {name: torch.from_numpy(table) for name, table in tables.items()}
    expected = augment.apply(torch.from_numpy(images), transforms, 1 / (255 * std), -mean / std, recipe.image_size)
    found: Any = Augmentation(recipe)(images, tables, is_training=True)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    if "mix" in tables:
        expected = augment.mix(expected, expected[tables["partner"]], transforms["mix"])
        rows: Any = tables["mix"]
        np.testing.assert_allclose(mix(found, found[tables["partner"]], rows), expected, atol=2e-5)


def test_histograms_are_equalised_as_by_torch() -> None:
    from flatout.engine.xla.augment import Augmentation

    recipe = make_recipe(image_size=32)
    images = np.random.default_rng(0).integers(30, 90, (8, 32, 32, 1), dtype=np.uint8)
    rows = np.tile(pixels.UNCHANGED, (8, 1)).astype(np.float32)
    rows[::2, pixels.EQUALIZE] = 1
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    expected = augment.apply(torch.from_numpy(images), {"color": torch.from_numpy(rows)}, 1 / (255 * std), -mean / std)
    found: Any = Augmentation(recipe)(images, {"color": rows}, is_training=True)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert float(expected[0].max() - expected[0].min()) > 3 * float(expected[1].max() - expected[1].min())


def test_crops_and_flips_fetch_no_single_pixels() -> None:
    """The program of a step with crops has the gathers of one without: none, or those that look up labels."""
    assert gathers(SEPARABLE) == gathers({})
    assert gathers({"augment.rotate": 10.0}) > gathers({}), "the search would find them"


def gathers(changes: dict[str, Any]) -> int:
    from flatout.engine.xla.step import Program

    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    engine: Any = make_engine("xla 2", net, make_recipe(**changes))
    program = Program(net, engine.recipe, batch=16, evaluation_batch=16)
    text = engine.sharding.lower_step(program, program.initial_state()).as_text()
    assert "dot_general" in text
    return text.count("stablehlo.gather")
