"""Image sizes that networks of timm's take with their weights."""

from typing import Any

import pytest
import timm
import torch

from flatout.config import Recipe
from flatout.models.build import create_timm, usable_size


@pytest.mark.filterwarnings("ignore::UserWarning:timm")
@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("resnet18", 100, 100),  # any size
        ("vit_tiny_patch16_224", 128, 128),  # position embeddings are resized
        ("vit_tiny_patch16_224", (96, 160), (96, 160)),
        ("vit_tiny_patch16_224", 100, 224),  # not whole patches
        ("levit_128s", 128, 224),  # attention biases are of one size
        ("pvt_v2_b0", 128, 128),  # patches overlap
        ("halonet26t", 128, 256),  # the least size that timm lists
    ],
)
def test_the_size_fits_the_network_and_its_weights(name: str, wanted: Any, expected: Any) -> None:
    size = usable_size(f"timm:{name}", wanted, channels=1)
    assert size == expected
    recipe = Recipe(model=f"timm:{name}", image_size=size, channels=1, epochs=1, batch_size=1)
    model = create_timm(recipe, 1000, timm.create_model(name, num_classes=1000).state_dict()).eval()
    images = torch.rand(1, 1, *(size if isinstance(size, tuple) else (size, size)))
    with torch.no_grad():
        assert model(images).shape == (1, 1000)


def test_other_networks_are_taken_to_fit() -> None:
    assert usable_size("fast-cnn-32", (7, 9), channels=3) == (7, 9)
    assert usable_size("file.py:net", 7, channels=3) == 7


def test_nothing_is_drawn_from_the_generator() -> None:
    state = torch.random.get_rng_state()
    usable_size("timm:levit_128s", 64, channels=3)
    assert torch.equal(torch.random.get_rng_state(), state)
