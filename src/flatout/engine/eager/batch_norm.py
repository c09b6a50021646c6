"""Batch normalisation over the samples that count, for any module that calls torch's `batch_norm`.

Padding must not enter batch statistics, and on several ranks they are those of the global batch. torch's own kernel
cannot leave samples out, its SyncBatchNorm refuses CPUs, and on the CPU it is slow for few channels in channels_last
order (ten times, in its backward pass). So a mode steps in wherever a model, ours or the user's, calls
`torch.nn.functional.batch_norm` in training. The modules themselves, their names and their buffers stay what they are.

Shape letters: B batch, C channels, n values per channel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.dist.world import ALONE, World
from flatout.engine.eager.exact_sums import ExactSums

# Below this many channels a row of the image, rather than a pixel, is one row of the reduction, so that it vectorises.
FEW_CHANNELS = 64


class BatchStatistics(TorchFunctionMode):
    """While active, training batch normalisation uses the samples of each batch that are not padding, on all ranks.

    Where that is a single value per channel, the running statistics are used, and stay as they are.

    Args:
        world: the ranks whose samples count together; `ALONE` for statistics of each rank's own.
        native: use torch's kernel where it can compute them, as it is fast on this device.

    Attributes:
        batch_size: samples in this rank's batch, padding included.
        count: those of them that are not padding; they come first.
        total: samples on all ranks that are not padding.
        was_used: whether a model has asked for batch statistics.
    """

    def __init__(self, world: World = ALONE, exact: ExactSums | None = None, *, native: bool = False) -> None:
        super().__init__()
        self.exact = exact
        self.world, self.native = world, native
        self.batch_size = self.count = self.total = 0
        self.was_used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `batch_norm` where torch's own would be wrong or slow, and pass everything else on."""
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if self.exact and self.exact.replaces(func, self.batch_size, args, kwargs):
            return self.exact.call(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        self.was_used |= training
        world, is_batch = self.world, x.shape[0] == self.batch_size
        padded = is_batch and self.count < self.batch_size
        if not training or (self.native and not padded and not world.is_joined):
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        count = self.count if padded else x.shape[0]
        total = count
        if world.is_joined:
            # A model may normalise something else than its batch, of another length on every rank.
            total = self.total if is_batch else int(world.all_reduce(torch.tensor([count], device=x.device)))
        channels = x.shape[1]
        n = total * (x.numel() // (x.shape[0] * channels))
        if n < 2:
            # One value has no variance. A lone sample at the end of an epoch goes by what the others left behind.
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        scale = weight.float() if weight is not None else x.new_ones(channels, dtype=torch.float32)
        shift = bias.float() if bias is not None else x.new_zeros(channels, dtype=torch.float32)
        exact = self.exact if is_batch else None
        y, mean, var = _Normalise.apply(x.float(), scale, shift, eps, count, total, world, exact)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                # As torch: the running variance is the unbiased one.
                running_var.lerp_((var * (n / (n - 1))).to(running_var.dtype), momentum)
        return y.to(x.dtype)


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * scale + shift (Ioffe and Szegedy, arXiv 1502.03167)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        count: int,
        total: int,
        world: World,
        exact: ExactSums | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = _Rows(x)
        values = rows.of(x)
        counted = values[: rows.number(count)]
        n = rows.per_channel(total)
        mean = (world.all_reduce(rows.sums(exact, counted)) / n).float()
        centred = values - rows.tiled(mean)
        squares = centred[: len(counted)].square()
        var = (world.all_reduce(rows.sums(exact, squares)) / n).float()
        inverse = torch.rsqrt(var + eps)
        y = rows.empty_like(x)
        torch.addcmul(rows.tiled(shift), centred, rows.tiled(inverse * scale), out=rows.of(y))
        ctx.save_for_backward(centred, inverse, scale)
        ctx.rows, ctx.count, ctx.n, ctx.world, ctx.exact = rows, count, n, world, exact
        ctx.ids = id(scale), id(shift)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        centred, inverse, scale = ctx.saved_tensors
        rows, n = ctx.rows, ctx.n
        grads = rows.of(grad_y)
        counted = grads[: rows.number(ctx.count)]
        centred_counted = centred[: len(counted)]
        # This rank's share of the gradients of shift and scale; the ranks' shares are added up with all gradients.
        exact = ctx.exact
        own = torch.stack([rows.sums(exact, counted), rows.sums(exact, counted * centred_counted) * inverse])
        grad_shift, grad_scale = ctx.world.all_reduce(own).float()
        factor = scale * inverse
        grad_x = torch.addcmul(rows.tiled(-factor * grad_shift / n), counted, rows.tiled(factor))
        grad_x.addcmul_(centred_counted, rows.tiled(-factor * grad_scale * inverse / n))
        if len(counted) < len(grads):
            # Padding reads the statistics but does not enter them.
            grad_x = torch.cat([grad_x, grads[len(counted) :] * rows.tiled(factor)])
        if exact is None:
            return rows.back(grad_x), own[1], own[0], None, None, None, None, None
        of_scale, of_shift = exact.rounded(own[1], ctx.ids[0]), exact.rounded(own[0], ctx.ids[1])
        return rows.back(grad_x), of_scale, of_shift, None, None, None, None, None


class _Rows:
    """An image batch seen as a matrix whose columns, folded, are channels: a view in channels_last order."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape = x.movedim(1, -1).shape
        self.channels = self.shape[-1]
        self.tiles = self.shape[-2] if x.ndim > 2 and self.channels < FEW_CHANNELS else 1
        self.per_sample = self.shape.numel() // (self.shape[0] * self.channels * self.tiles)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, C, ...] as a matrix [rows, tiles * C]."""
        return x.movedim(1, -1).reshape(-1, self.tiles * self.channels)

    def back(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix as [B, C, ...] in channels_last order."""
        return matrix.view(self.shape).movedim(-1, 1)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return room for [B, C, ...] in channels_last order; no view, so that an in-place activation may follow."""
        strides = torch.empty(self.shape, device="meta").movedim(-1, 1).stride()
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)

    def number(self, samples: int) -> int:
        """Return how many rows that many samples fill."""
        return samples * self.per_sample

    def per_channel(self, samples: int) -> int:
        """Return how many values of each channel that many samples hold."""
        return samples * self.per_sample * self.tiles

    def channel_sum(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the sum of each channel, [C]."""
        return matrix.sum(0).view(self.tiles, self.channels).sum(0)

    def sums(self, exact: ExactSums | None, matrix: torch.Tensor) -> torch.Tensor:
        """Return the sum of each channel, [C]; float64 where it is exact."""
        if exact is None:
            return self.channel_sum(matrix)
        return exact.over_blocks(lambda block: [self.channel_sum(matrix[block])], self.per_sample)[0]

    def tiled(self, per_channel: torch.Tensor) -> torch.Tensor:
        """Return values per channel [C] repeated to a row of the matrix."""
        return per_channel.repeat(self.tiles)
