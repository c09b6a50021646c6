"""Heatmaps of what an answer rests on."""

import numpy as np
import pytest
import torch
from torch import nn

from flatout.inference.predict import layer_cam
from flatout.report.pictures import heat_scale, overlaid


class Bright(nn.Module):
    """The logit of class 1 is the mean of the first channel, that of class 0 its negative; a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 2, 1, bias=False)
        with torch.no_grad():
            self.features.weight[:] = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])[..., None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean(dim=(2, 3))


@pytest.fixture
def images() -> torch.Tensor:
    """Return one image: channel 0 is bright at the top left, channel 1 at the bottom right."""
    images = torch.zeros(1, 3, 12, 16)
    images[0, 0, :6, :8] = 1
    images[0, 1, 6:, 8:] = 1
    return images


@pytest.mark.parametrize("answer", [0, 1])
def test_places_that_speak_for_an_answer_are_bright(images: torch.Tensor, answer: int):
    found = layer_cam(Bright().eval(), images, lambda logits: logits[:, answer])
    np.testing.assert_allclose(found, images[:, 1 - answer])


def test_only_what_speaks_for_an_answer_counts(images: torch.Tensor):
    """Not how much of it there is at a place where something else speaks against the answer."""
    model = Bright().eval().requires_grad_(False)
    images[0, 1, :6, :8] = 1

    def difference(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, 1] - 2 * logits[:, 0]

    np.testing.assert_allclose(layer_cam(model, images, difference), images[:, 0])
    assert model.features.weight.grad is None, "nothing of the model changes"
    assert not model.features._forward_hooks


def test_tokens_become_the_grid_of_their_patches():
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": (64, 96), "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 4}
    model = timm.create_model("deit_tiny_distilled_patch16_224", **sizes).eval()
    images = torch.randn(2, 3, 64, 96)
    found = layer_cam(model, images, lambda logits: logits[:, 1])
    assert found.shape == (2, 64, 96)
    assert found.min() >= 0
    assert found.max() > 0.5


def test_a_model_without_positions_has_no_heatmap():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4), nn.ReLU(), nn.Linear(4, 2))
    assert layer_cam(model.eval(), torch.randn(2, 3, 8, 8), lambda logits: logits[:, 0]) is None


def test_the_colours_of_a_heatmap():
    grey, heat = np.full((2, 12, 1), 200, np.uint8), np.tile(np.linspace(0, 1, 12), (2, 1))
    painted = overlaid(grey, heat).astype(int)
    assert (painted[:, 0] == 200).all(), "places that say nothing stay as they are"
    away = np.abs(painted - 200).sum(axis=2)[0]
    assert (np.diff(away) > 0).all(), "the more, the more colour"
    photo = np.zeros((1, 1, 3), np.uint8) + np.array([30, 60, 90], np.uint8)
    assert overlaid(photo, np.zeros((1, 1))).tolist() == [[[60, 60, 60]]], "only the heatmap has colours"
    np.testing.assert_array_equal(heat_scale(12), overlaid(grey[:1] * 0 + 128, heat[:1]))
