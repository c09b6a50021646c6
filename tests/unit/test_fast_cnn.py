"""The networks `fast-cnn`: patches, their whitening, and gradients on images with a plain background."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from tests.nets import build


@pytest.mark.parametrize(("size", "inner"), [(4, 3), (8, 7), (28, 27), (48, 47), (64, 32), (128, 32), (224, 28)])
@pytest.mark.parametrize("channels", [1, 3])
def test_fast_cnns_cut_large_images_into_patches(size: int, inner: int, channels: int):
    net: Any = build("fast-cnn-16", num_classes=7, image_size=size, channels=channels, seed=1).eval()
    shapes: list[tuple[int, ...]] = []
    net.stem.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(output.shape[2:])))
    with torch.no_grad():
        assert net(torch.zeros(2, channels, size, size)).shape == (2, 7)
    assert shapes == [(inner, inner)]


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (128, 3)])
def test_fast_cnns_whiten_patches(size: int, channels: int):
    """The basis is orthonormal, so no pixel is lost; the patches of smooth images become nearly uncorrelated."""
    net: Any = build("fast-cnn-16", num_classes=7, image_size=size, channels=channels, seed=1).train()
    basis = net.stem.basis.flatten(1)
    assert torch.allclose(basis @ basis.T, torch.eye(len(basis)), atol=1e-6)
    torch.manual_seed(1)
    smooth = functional.avg_pool2d(torch.rand(32, channels, size + 8, size + 8), 9, stride=1)
    patches = functional.conv2d(smooth, net.stem.basis, stride=net.stem.stride)
    whitened = net.stem.norm(torch.cat([patches, -patches], dim=1))[:, : len(basis)]
    correlations = torch.corrcoef(whitened.movedim(1, 0).flatten(1))
    pixels = torch.corrcoef(
        smooth.unfold(2, 2, 1).unfold(3, 2, 1).movedim((1, 4, 5), (0, 1, 2)).flatten(3).flatten(0, 2)
    )
    assert (correlations - torch.eye(len(basis))).abs().max() < 0.5 < pixels.abs().sort().values[:, -2].min()


@pytest.mark.parametrize("background", ["dark", "bright"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_plain_background_leaves_the_gradient_to_the_digits(background: str, precision: torch.dtype):
    """No gradient is above the others by orders of magnitude, and bfloat16 computes the same one."""
    digits: Any = load_digits()
    images = torch.from_numpy(np.asarray(digits.images[:256], np.float32))[:, None]
    images = functional.pad(functional.interpolate(images, size=20), [4] * 4)
    images = (images - images.mean()) / images.std() * (1 if background == "dark" else -1)
    labels = torch.from_numpy(np.asarray(digits.target[:256]))

    def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        net = build("fast-cnn-32", num_classes=10, image_size=28, channels=1, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = net(images)
        functional.cross_entropy(logits.float(), labels).backward()
        return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}

    expected = gradients(torch.float32)
    for name, gradient in gradients(precision).items():
        assert gradient.norm() < 3, name
        assert (gradient - expected[name]).norm() < 0.3 * expected[name].norm(), name
