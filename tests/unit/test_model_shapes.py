"""Models for images of any shape and number of channels."""

from typing import Any

import pytest
import torch

from flatout.errors import InputError
from flatout.models.build import build_model, list_names
from flatout.recipe import Recipe


def recipe(model: str, size: Any, channels: int) -> Recipe:
    plain = Recipe(model=model, image_size=1, channels=channels, epochs=1, batch_size=1)
    return plain.override({"image_size": size})


@pytest.mark.parametrize("name", list_names())
@pytest.mark.parametrize(("size", "channels"), [((32, 64), 5), ((64, 32), 2)])
def test_our_nets(name: str, size: tuple[int, int], channels: int) -> None:
    model = build_model(recipe(name, size, channels), 3).eval()
    with torch.no_grad():
        assert model(torch.rand(2, channels, *size)).shape == (2, 3)


def test_the_smaller_side_must_be_enough() -> None:
    with pytest.raises(InputError, match=r"image_size = \[8, 64\]: keras-cnn needs images of at least 18x18 pixels"):
        build_model(recipe("keras-cnn", (8, 64), 1), 3)


@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:vit_tiny_patch16_224"])
def test_timm_models(name: str) -> None:
    model = build_model(recipe(name, (32, 64), 4), 3).eval()
    with torch.no_grad():
        assert model(torch.rand(2, 4, 32, 64)).shape == (2, 3)


def test_the_patches_of_other_channels_are_an_orthonormal_basis() -> None:
    basis: Any = build_model(recipe("fast-cnn-16", 32, 5), 3).get_buffer("stem.basis").flatten(1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), atol=1e-5, rtol=0)
