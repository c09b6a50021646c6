"""The networks `fast-cnn`: patches, their whitening, and gradients on images with a plain background."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from tests.nets import build


@pytest.mark.parametrize(
    ("size", "inner", "channels"), [(4, 3, 1), (8, 7, 5), (28, 27, 1), (48, 47, 3), (64, 32, 3), (224, 28, 3)]
)
def test_fast_cnns_whiten_patches_and_cut_large_images_into_them(size: int, inner: int, channels: int):
    """The basis is orthonormal, so no pixel is lost; the patches of smooth images become nearly uncorrelated."""
    net: Any = build("fast-cnn-16", num_classes=7, image_size=size, channels=channels, seed=1).train()
    torch.manual_seed(1)
    smooth = functional.avg_pool2d(torch.rand(32, channels, size + 8, size + 8), 9, stride=1)
    assert net.stem(smooth).shape[2:] == (inner, inner)
    assert net(smooth).shape == (32, 7)
    basis = net.stem.basis.flatten(1)
    assert torch.allclose(basis @ basis.T, torch.eye(len(basis)), atol=1e-5)
    if channels == 3:
        patches = functional.conv2d(smooth, net.stem.basis, stride=net.stem.stride)
        whitened = net.stem.norm(torch.cat([patches, -patches], dim=1))[:, : len(basis)]
        correlations = torch.corrcoef(whitened.movedim(1, 0).flatten(1))
        assert (correlations - torch.eye(len(basis))).abs().max() < 0.5


@pytest.mark.parametrize("background", ["dark", "bright"])
def test_a_plain_background_leaves_the_gradient_to_the_digits(background: str):
    """No gradient is above the others by orders of magnitude, and bfloat16 computes the same one."""
    digits: Any = load_digits()
    images = torch.from_numpy(np.asarray(digits.images[:256], np.float32))[:, None]
    images = functional.pad(functional.interpolate(images, size=20), [4] * 4)
    images = (images - images.mean()) / images.std() * (1 if background == "dark" else -1)
    labels = torch.from_numpy(np.asarray(digits.target[:256]))

    def gradients(is_bf16: bool) -> dict[str, torch.Tensor]:
        net = build("fast-cnn-32", num_classes=10, image_size=28, channels=1, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            logits = net(images)
        functional.cross_entropy(logits.float(), labels).backward()
        return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}

    expected, found = gradients(False), gradients(True)
    for name, gradient in expected.items():
        assert gradient.norm() < 3, name
        assert (found[name] - gradient).norm() < 0.3 * gradient.norm(), name
