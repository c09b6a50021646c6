"""Nets whose gradients are hard to add up: frozen, unused, shared, of several types, large."""

import torch
from torch import Tensor, nn


def frozen_stem() -> nn.Module:
    """The first layers are frozen, so that the engine computes their output once and caches it."""
    torch.manual_seed(3)
    stem = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2)).requires_grad_(False)
    return nn.Sequential(stem, nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))


def flat_frozen_stem() -> nn.Module:
    """What is cached is no image: its rows have no channels to be moved."""
    torch.manual_seed(3)
    stem = nn.Sequential(nn.Flatten(), nn.Linear(144, 20), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(stem, nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


def deep_net() -> nn.Module:
    """Has a 3D convolution, whose weights have no channels_last order."""
    torch.manual_seed(3)
    deep = (nn.Unflatten(1, (1, 4)), nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(nn.Conv2d(1, 4, 3), *deep, nn.Linear(2 * 2 * 8 * 8, 5))


def large_net() -> nn.Module:
    """More than one bucket of gradients."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3000), nn.Tanh(), nn.Linear(3000, 1600), nn.Linear(1600, 5))


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)


class SpareParts(Seeded):
    """Has parameters that no step uses; weight decay must not move them."""

    def __init__(self) -> None:
        super().__init__()
        self.first_spare = nn.Linear(7, 7)
        self.used = nn.Linear(144, 5)
        self.last_spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.flatten(1))


class Chooses(Seeded):
    """Uses some parameters only for batches with a certain bright pixel: on some ranks, on all or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(144, 5)
        self.sometimes = nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        y = self.always(x)
        return y + self.sometimes(x) if bool((x[:, 0] > 1.7).any()) else y


class Shared(Seeded):
    """Uses one layer three times, and takes no empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(144, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x.reshape(len(x), -1)))
        return self.out(torch.tanh(self.again(torch.tanh(self.again(x)))))[:, :5]


class MixedTypes(Seeded):
    """Single, double, single."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(144, 16), nn.Linear(16, 16).double(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))).double())).float())


class HalfFirst(Seeded):
    """Its first parameters are too narrow for a sample count or a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=True)
        self.rest = nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x.flatten(1)) + 0 * self.gain.float()


class OwnBuffers(Seeded):
    """Counts its calls, and has constants of many types."""

    calls: Tensor
    mask: Tensor
    scale: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(144) < 0.5)
        self.register_buffer("scale", torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("wide", torch.rand(144, dtype=torch.float64))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(torch.where(self.mask, x.flatten(1), x.flatten(1) * self.wide.float()) * self.scale.mean())
