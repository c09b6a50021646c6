"""Frozen networks through OpenVINO: the values of torch, prepared once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.models.features import frozen_network


class Unknown(nn.Module):
    """A network that OpenVINO cannot compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 3).flatten(1).cumprod(1)


class Noise(nn.Module):
    """A random output, so that the first images already differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) + torch.rand_like(x).mean((2, 3))


class FixedBatch(nn.Module):
    """A network in whose trace the number of images is a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)).reshape(len(x), -1)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(19, 3, 7, 7, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_features_are_those_of_torch_for_any_number_of_images(images: torch.Tensor) -> None:
    own = network(0)
    computed = frozen_network(own, images, 2)
    assert computed is not own
    for count in (1, 8, 19):
        torch.testing.assert_close(computed(images[:count]), own(images[:count]))


def test_a_network_prepared_with_one_image_takes_several(images: torch.Tensor) -> None:
    own = FixedBatch()
    torch.testing.assert_close(frozen_network(own, images[:1], 2)(images), own(images))


@pytest.mark.parametrize(("kind", "reason"), [(Unknown, "adaptive_avg_pool2d"), (Noise, "OpenVINO differ by")])
def test_a_network_that_openvino_computes_otherwise_or_not_is_its_own_function(
    kind: type[nn.Module], reason: str, images: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reason is reported, and torch prints nothing."""
    own, sentences = kind().eval(), list[str]()
    assert frozen_network(own, images, 2, sentences.append) is own
    assert len(sentences) == 1 and "features are computed by torch" in sentences[0] and reason in sentences[0]
    assert capfd.readouterr() == ("", "")


def test_nothing_is_sent_to_the_makers_of_a_library(tmp_path: Path) -> None:
    """OpenVINO's import would fork a process that reports it, and write an identity into the home folder."""
    code = """
import os, torch
os.register_at_fork(before=lambda: print("a process is forked"))
from flatout.models.features import frozen_network
network = torch.nn.Conv2d(3, 4, 3)
print(frozen_network(network, torch.rand(3, 3, 7, 7), 2) is network)
"""
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS")}
    env["HOME"] = str(tmp_path)
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "False\n"
    assert not [*tmp_path.iterdir()]
