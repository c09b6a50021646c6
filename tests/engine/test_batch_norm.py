"""Batch normalisation over the samples that count, against torch's own."""

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.distributed.world import World
from flatout.engine.torch.batch_norm import BatchNorm, ReplacedFunctions
from tests.engine.ranks import on_ranks


def replaced(batch_size: int, count: int) -> ReplacedFunctions:
    batch_norm = BatchNorm()
    batch_norm.begin(batch_size, count, count, is_padded=count < batch_size)
    return ReplacedFunctions({functional.batch_norm: batch_norm})


SHAPES = [(6, 5), (6, 3, 7), (6, 10, 4, 4), (6, 16, 3, 5), (6, 70, 3, 5), (4, 4, 3, 3, 3)]


def norm_for(x: Tensor, **options: object) -> nn.Module:
    cls = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.ndim]
    norm = cls(x.shape[1], **options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("options", "padding"),
    [({}, 0), ({}, 2), ({"affine": False}, 0), ({"track_running_stats": False}, 0), ({"momentum": None}, 0)],
)
def test_equals_torchs_without_the_padding(shape: tuple[int, ...], options: dict[str, object], padding: int) -> None:
    torch.manual_seed(0)
    count = shape[0] - padding
    x, weights = torch.randn(shape) * 3 + 2, torch.randn(shape)
    x[count:], weights[count:] = 1e6, 0
    results = []
    for ours in (False, True):
        norm, inputs = norm_for(x, **options), (x if ours else x[:count]).clone().requires_grad_()
        with replaced(shape[0], count) if ours else contextlib.nullcontext():
            y = norm(inputs)
        (y * weights[: len(y)]).sum().backward()
        assert inputs.grad is not None
        assert not inputs.grad[count:].any()
        results.append([y[:count], inputs.grad[:count], *(p.grad for p in norm.parameters()), *norm.buffers()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_one_value_per_channel_goes_by_the_running_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    with replaced(4, 1):
        y = norm(x)
    expected = nn.BatchNorm1d(3).eval()(x)
    torch.testing.assert_close(y, expected)
    assert not norm.running_mean.any()  # type: ignore[union-attr]


# Fewer channels than a vector, one vector, and many channels, for which the ranks use different code; and two formats.
# Samples of the second rank may be padding.
ACROSS_RANKS = list(itertools.product((10, 16, 70), (torch.float32, torch.bfloat16), (0, 2)))
SIZE, SHARES = 12, (slice(0, 7), slice(7, 12))


def across_ranks(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, nn.Module]:
    """Return images whose mean drifts from rank to rank, the gradients of the output, and a layer."""
    torch.manual_seed(0)
    shape = (SIZE, channels, 5, 3)
    x, grads = torch.randn(shape) * 3 + torch.arange(12.0)[:, None, None, None], torch.randn(shape)
    x, grads = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, grads))
    return x, grads, norm_for(x)


class GPUKernels:
    """What the kernels of torch's SyncBatchNorm compute, which exist for GPUs only."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        values = x.float().movedim(1, -1).flatten(0, -2)
        return values.mean(0), (values.var(0, correction=0) + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(
        x: Tensor, means: Tensor, inverses: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor]:
        running_mean, running_var, momentum, eps, counts = others
        n, shares = counts.sum(), (counts / counts.sum())[:, None]
        mean = (means * shares).sum(0)
        var = ((inverses**-2 - eps + (means - mean) ** 2) * shares).sum(0)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * n / (n - 1), momentum)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
        return functional.batch_norm(x.float(), mean, inverse**-2 - eps, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    def batch_norm_backward_reduce(
        grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *_: bool
    ) -> tuple[Tensor, ...]:
        grads, values = (t.float().movedim(1, -1).flatten(0, -2) for t in (grad, x))
        sum_dy, sum_dy_xmu = grads.sum(0), (grads * (values - mean)).sum(0)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * inverse, sum_dy

    @staticmethod
    def batch_norm_backward_elemt(
        grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *sums: Tensor
    ) -> Tensor:
        sum_dy, sum_dy_xmu, counts = sums
        assert counts.dtype == torch.int32
        grads, values, n = grad.float().movedim(1, -1), x.float().movedim(1, -1), counts.sum()
        found = (grads - sum_dy / n - (values - mean) * inverse**2 * sum_dy_xmu / n) * inverse * weight
        return found.movedim(-1, 1).to(x.dtype)


def normalised_on_rank(world: World, *, on_host: bool) -> list[list[Tensor]]:
    """Return outputs, gradients of inputs, gradients of parameters, and buffers, of each case."""
    results = []
    for channels, dtype, padding in ACROSS_RANKS:
        x, grads, norm = across_ranks(channels, dtype)
        own, count = SHARES[world.rank], SIZE - padding
        inputs = x[own].clone().requires_grad_()
        real = min(own.stop, count) - own.start
        grads = grads[own].clone()
        grads[real:] = 0
        batch_norm = BatchNorm(world, on_host=on_host, has_kernels=not on_host)
        batch_norm.begin(len(inputs), real, count, is_padded=padding > 0)
        with ReplacedFunctions({functional.batch_norm: batch_norm}), pytest.MonkeyPatch.context() as patch:
            for name, kernel in vars(GPUKernels).items():
                if name.startswith("batch_norm"):
                    patch.setattr(torch, name, kernel.__func__)
            y = norm(inputs)
            y.backward(grads)
        assert inputs.grad is not None
        parameters = [p.grad for p in norm.parameters() if p.grad is not None]
        results.append([y.detach()[:real], inputs.grad[:real], *parameters, *norm.buffers()])
    return results


@pytest.mark.parametrize("on_host", [True, False])
def test_ranks_normalise_by_the_statistics_of_all(on_host: bool) -> None:
    ranks = on_ranks(2, functools.partial(normalised_on_rank, on_host=on_host))
    for (channels, dtype, padding), first, second in zip(ACROSS_RANKS, *ranks, strict=True):
        x, grads, norm = across_ranks(channels, dtype)
        inputs = x.float()[: SIZE - padding].requires_grad_()
        y = norm(inputs)
        y.backward(grads.float()[: SIZE - padding])
        assert inputs.grad is not None
        error = 1e-4 if dtype == torch.float32 else 2e-2
        for expected, index in ((y, 0), (inputs.grad, 1)):
            found = torch.cat([first[index], second[index]])
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected, rtol=error, atol=error)
        for number, parameter in enumerate(norm.parameters()):
            # Each rank has its part, which is added up with the other gradients.
            found = first[2 + number] + second[2 + number]
            torch.testing.assert_close(found, parameter.grad, rtol=error, atol=error)
        for number, buffer in enumerate(norm.buffers()):
            for rank in (first, second):
                torch.testing.assert_close(rank[4 + number], buffer, rtol=1e-4, atol=1e-5)
