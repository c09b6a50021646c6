"""Torch modules as JAX functions: value, gradients and buffers against torch; randomness; what cannot be compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.utils.errors import InputError
from tests.engine.engines import make_engine
from tests.engine.test_against_plain_loop import make_recipe

make_engine("xla 1", nn.Flatten(), make_recipe())

import jax  # noqa: E402  (started with the devices that all tests share)
import jax.numpy as jnp  # noqa: E402

from flatout.engine.xla.function import Function, SampleMask  # noqa: E402
from flatout.engine.xla.program import to_array  # noqa: E402

BATCH = 6


class Lambda(nn.Module):
    """A function with one weight before it, so that there is a gradient."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.flatten(2)).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Tied(nn.Module):
    """Has one weight under two names, and one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


IMAGE = (BATCH, 4, 8, 8)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "conv, same, no bias": lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 7)),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, plain": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False, momentum=0.3)),
    "batch norm 1d": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 5), nn.BatchNorm1d(5)),
    "layer norm": lambda: nn.LayerNorm([8, 8]),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "max pool": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, stride=2, padding=1)),
    "max pool, ceil": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, stride=2, ceil_mode=True)),
    "max pool, 2 x 2": lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.MaxPool2d(2)),
    "max pool, 2 x 2, ceil": lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.MaxPool2d(2, ceil_mode=True)),
    "mean pool": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2)),
    "adaptive pool": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1)),
    "squeeze and excite": SqueezeExcite,
    "attention": Attention,
    "shared weights": Tied,
    **{
        str(layer): (lambda layer=layer: Lambda(layer))
        for layer in (
            nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(),
            nn.Mish(), nn.Sigmoid(), nn.Tanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.Softplus(), nn.Softmax(-1),
            nn.LogSoftmax(-1), nn.Hardtanh(),
        )
    },
    "prelu": lambda: nn.PReLU(),
    "upsample": lambda: Lambda(nn.Upsample(scale_factor=2, mode="bilinear")),
    "pixel unshuffle": lambda: Lambda(nn.PixelUnshuffle(2)),
    "pad": lambda: Lambda(lambda x: nn.functional.pad(x, (1, 2, 0, 1))),
    "split and cat": lambda: Lambda(lambda x: torch.cat([*x.chunk(2, 1), x.flip(3)], dim=1)),
    "interpolate": lambda: Lambda(lambda x: nn.functional.interpolate(x, size=(5, 5), mode="nearest")),
}  # fmt: skip


def run(function: Function, module: nn.Module, x: torch.Tensor, mask: SampleMask | None = None):
    """Return output, gradients by name, and buffers, of the sum of the output weighted by a fixed pattern."""
    parameters = {name: to_array(p) for name, p in module.named_parameters()}
    buffers = {name: to_array(b) for name, b in module.named_buffers()}

    def objective(parameters):
        y, after = function(parameters, buffers, to_array(x), mask=mask)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), (y, after)

    gradients, (y, after) = jax.jit(jax.grad(objective, has_aux=True))(parameters)
    return y, gradients, after


def torchs(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
    y = module(x)
    (y * torch.cos(torch.arange(y.numel()).reshape(y.shape))).sum().backward()
    return y, {name: p.grad for name, p in module.named_parameters()}, dict(module.named_buffers())


def assert_close(found, expected: torch.Tensor, what: str, scale: float = 0.0) -> None:
    """Compare to within a fraction of the largest value, or of `scale` where nothing but rounding is expected."""
    expected = expected.detach()
    scale = max(float(expected.abs().max()), scale, 1e-6) if expected.numel() else 1.0
    np.testing.assert_allclose(np.asarray(found) / scale, expected.numpy() / scale, atol=2e-5, err_msg=what)


class Together(nn.Module):
    """Layers side by side: one export and one compilation for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build() for build in LAYERS.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x).flatten(1) for layer in self.layers], dim=1)


def test_layers_equal_torchs() -> None:
    torch.manual_seed(0)
    module, x = Together().train(), torch.randn(IMAGE)
    sizes = [layer.eval()(x).flatten(1).shape[1] for layer in module.layers]
    module.train()
    found = run(Function(module, (x,), name="layers"), module, x)
    expected = torchs(module, x)
    ends = np.cumsum(sizes)
    for number, (name, start, end) in enumerate(zip(LAYERS, ends - sizes, ends, strict=True)):
        assert_close(found[0][:, start:end], expected[0][:, start:end], f"output of {name}")
        for what, ours, theirs in zip(("gradient", "buffer"), found[1:], expected[1:], strict=True):
            own = {key: value for key, value in theirs.items() if key.startswith(f"layers.{number}.")}
            scale = 0.1 * max((float(t.detach().abs().max()) for t in own.values()), default=0)
            for key, value in own.items():
                assert_close(ours[key], value, f"{what} of {name}: {key}", scale)
    assert found[1].keys() == expected[1].keys()
    assert found[2].keys() == expected[2].keys()


def test_equal_maxima_share_nothing() -> None:
    """Ties go to one place, as in torch: flat areas of real images have nothing but ties."""
    module = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3))
    x = torch.zeros(IMAGE)
    x[:, :, 2:5, 2:5] = 1
    found, expected = run(Function(module, (x,), name="ties"), module, x), torchs(module, x)
    for key, value in expected[1].items():
        assert_close(found[1][key], value, key)


def test_a_lone_value_goes_by_the_running_statistics() -> None:
    module, x = nn.BatchNorm1d(4).train(), torch.randn(3, 4)
    module.running_mean = torch.full((4,), 2.0)
    mask = SampleMask(jnp.array([1.0, 0.0, 0.0]))
    y, _, after = run(Function(module, (x,), name="net"), module, x, mask)
    assert_close(y[:1], module.eval()(x)[:1], "output")
    np.testing.assert_array_equal(after["running_mean"], np.full(4, 2.0))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_max_pool2d(x, 2)


def test_an_operation_without_equivalent_names_its_layer() -> None:
    for layer in (Unknown(), nn.AdaptiveMaxPool2d(2)):
        with pytest.raises(InputError) as raised:
            Function(nn.Sequential(layer), (torch.ones(IMAGE),), name="python:Net")
        assert f"layer 0 ({type(layer).__name__}) uses aten.adaptive_max_pool2d" in str(raised.value)


def test_the_torch_engine_works_beside_it() -> None:
    """Importing torchax must leave torch's optimizers and attention as they were."""
    assert torch.backends.mha.get_fastpath_enabled()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.Adam([parameter]).step()
    assert float(parameter.detach()[0]) < 1
