"""Batch normalisation over the samples of all ranks, without padding.

A training step replaces `functional.batch_norm`, so that any model is covered. Torch's kernels, which cannot leave
samples out, are used where they compute the same and are fast: they take from a half to a fifth of the time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.distributed.world import ALONE, World
from flatout.utils.errors import InputError

# With fewer channels than this, the reduction runs over image rows instead of pixels, so that it vectorises.
FEW_CHANNELS = 64
# On CPUs torch's kernel is fast if all or most channels fill vectors of this length; otherwise it is up to ten times
# slower. Measured with torch 2.14, with AVX2 and AVX-512.
VECTOR = 16


class BatchNorm:
    """Replaces `functional.batch_norm`; `world` are the ranks whose samples are normalised together.

    For a single value per channel, the running statistics are used and not changed.
    """

    def __init__(self, world: World = ALONE, *, on_host: bool = True, has_kernels: bool = False) -> None:
        self.world, self.on_host, self.has_kernels = world, on_host, has_kernels
        self.batch_size = self.count = self.total = 0
        self.is_padded = False
        self.micro_batch = 0  # the recipe's, if a share is computed in several
        self.was_used = False  # whether a model has asked for batch statistics
        self.normalised_others = False  # whether for those of something other than its batch

    def begin(self, batch_size: int, count: int, total: int, *, is_padded: bool) -> None:
        """Prepare for a forward pass of `batch_size` samples, of which the first `count` are no padding.

        All ranks together have `total` without padding, and normalise alike: `is_padded` if any of them has padding.
        """
        self.batch_size, self.count, self.total, self.is_padded = batch_size, count, total, is_padded

    def __call__(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        self.was_used |= training
        if training and self.micro_batch:
            raise InputError(
                f"micro_batch = {self.micro_batch}: the model uses batch normalisation, which needs all samples of a "
                "device together; leave micro_batch out"
            )
        world, is_batch, channels = self.world, x.shape[0] == self.batch_size, x.shape[1]
        self.normalised_others |= training and not is_batch
        is_plain = not (is_batch and self.is_padded)
        count = self.count if is_batch else x.shape[0]
        total = count
        if training and world.is_joined:
            # A model may normalise something other than its batch, with a different length on every rank.
            total = self.total if is_batch else int(world.all_reduce(torch.tensor([count], device=x.device)))
        n = total * (x.numel() // (x.shape[0] * channels))
        # One value has no variance. Not `&=`, which the compiler of torch 2.11 cannot write out.
        training = training and n >= 2
        is_fast = not self.on_host or channels % VECTOR == 0 or channels >= FEW_CHANNELS
        if not training or (is_plain and is_fast and not world.is_joined):
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if is_plain and self.has_kernels:
            statistics = (running_mean, running_var, momentum)
            return _NormaliseOnGPU.apply(x, weight, bias, eps, statistics, world)  # pyright: ignore[reportReturnType]
        scale = weight.float() if weight is not None else x.new_ones(channels, dtype=torch.float32)
        shift = bias.float() if bias is not None else x.new_zeros(channels, dtype=torch.float32)
        if is_plain and self.on_host and x.dtype in (torch.float32, torch.bfloat16):
            y, mean, var = _NormaliseByKernel.apply(x, scale, shift, eps, total, world)
        else:
            y, mean, var = _Normalise.apply(x.float(), scale, shift, eps, count, total, world)
        with torch.no_grad():
            # As in torch, the running variance is unbiased.
            for running, value in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
                if running is not None:
                    running.lerp_(value.to(running.dtype), momentum)
        return y.to(x.dtype)


class ReplacedFunctions(TorchFunctionMode):
    """While active, replaces torch functions wherever a model calls them."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function or its replacement; inside a replacement, torch's own are called."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * scale + shift (Ioffe and Szegedy, arXiv 1502.03167)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, count: int, total: int, world: World
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _Rows(x)
        values = rows.of(x)
        counted = values[: count * rows.per_sample]
        n = total * rows.per_sample * rows.tiles
        mean = (world.all_reduce(rows.sums(counted)) / n).float()
        centred = values - rows.tiled(mean)
        squares = centred[: len(counted)].square()
        var = (world.all_reduce(rows.sums(squares)) / n).float()
        inverse = torch.rsqrt(var + eps)
        y = rows.empty_like(x)
        torch.addcmul(rows.tiled(shift), centred, rows.tiled(inverse * scale), out=rows.of(y))
        ctx.save_for_backward(centred, inverse, scale)
        ctx.rows, ctx.count, ctx.n, ctx.world = rows, count, n, world
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        centred, inverse, scale = ctx.saved_tensors
        rows, n = ctx.rows, ctx.n
        grads = rows.of(grad_y)
        counted = grads[: ctx.count * rows.per_sample]
        centred_counted = centred[: len(counted)]
        # This rank's part of the gradients of shift and scale; all-reduced with the other gradients of the model.
        own = torch.stack([rows.sums(counted), rows.sums(counted * centred_counted) * inverse])
        grad_shift, grad_scale = ctx.world.all_reduce(own).float()
        factor = scale * inverse
        grad_x = torch.addcmul(rows.tiled(-factor * grad_shift / n), counted, rows.tiled(factor))
        grad_x.addcmul_(centred_counted, rows.tiled(-factor * grad_scale * inverse / n))
        if len(counted) < len(grads):
            # Padding is normalised by the statistics but does not enter them.
            grad_x = torch.cat([grad_x, grads[len(counted) :] * rows.tiled(factor)])
        return rows.back(grad_x), own[1], own[0], None, None, None, None


class _NormaliseByKernel(torch.autograd.Function):
    """`_Normalise` for batches without padding, by torch's CPU kernels.

    They lose digits in large sums, and are slow for few channels: so each position in an image row is a channel of its
    own. Then the statistics of all positions and ranks are merged, and gradients corrected by the difference.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, total: int, world: World
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _Rows(x, always_tiled=True)
        values = rows.of(x)
        # The running statistics, unchanged by this call, receive the results in float32.
        running = scale.new_zeros(values.shape[1]), scale.new_ones(values.shape[1])
        # float64 avoids cancellation in the difference of two large numbers.
        means, variances = (s.double() for s in torch.batch_norm_update_stats(values, *running, 0.0))
        moments = torch.stack([means, variances + means.square()]).view(2, rows.tiles, -1).mean(1)
        first, second = world.all_reduce(moments * (len(x) / total))
        mean, var = first.float(), (second - first.square()).clamp_(min=0).float()
        y = rows.empty_like(x)
        slope, offset, centre, spread = (rows.tiled(row) for row in (scale, shift, mean, var))
        out = rows.of(y), scale.new_empty(0), scale.new_empty(0)
        torch.native_batch_norm(values, slope, offset, centre, spread, False, 0.0, eps, out=out)
        ctx.save_for_backward(x, mean, torch.rsqrt(var + eps), scale)
        ctx.rows, ctx.total, ctx.world, ctx.eps = rows, total, world, eps
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, mean, inverse, scale = ctx.saved_tensors
        rows = ctx.rows
        values, (mean, inverse, scale) = rows.of(x), (rows.tiled(row) for row in (mean, inverse, scale))
        grad_x, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
            rows.of(grad_y), values, scale, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        of_columns = torch.stack([of_shift, of_scale])
        own = of_columns.view(2, rows.tiles, -1).sum(1)
        n = len(values) * rows.tiles / len(x) * ctx.total
        # The kernel has subtracted the mean gradients of each column; replace them by those of all.
        shift, slope = (
            (of_columns / len(values) - (ctx.world.all_reduce(own) / n).repeat(1, rows.tiles)) * scale * inverse
        )
        slope *= inverse
        shift, slope = (row.to(x.dtype) for row in (shift - mean * slope, slope))
        corrected = torch.addcmul(shift, values, slope).add_(grad_x)
        return rows.back(corrected), own[1], own[0], None, None, None


class _NormaliseOnGPU(torch.autograd.Function):
    """`_Normalise` for batches without padding, by the kernels of torch's SyncBatchNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: tuple[Tensor | None, Tensor | None, float],
        world: World,
    ) -> Tensor:
        if not x.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous()
        own, channels = torch.batch_norm_stats(x, eps), x.shape[1]
        count = own[0].new_full((1,), x.numel() // channels)
        means, inverses, counts = world.all_gather(torch.cat([*own, count])).split([channels, channels, 1], dim=1)
        counts = counts.flatten()
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, means.contiguous(), inverses.contiguous(), *statistics, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, inverse, counts.int())
        ctx.world = world
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, mean, inverse, counts = ctx.saved_tensors
        layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        grad_y = grad_y.contiguous(memory_format=layout)
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad_y, x, mean, inverse, weight, True, True, True
        )
        sums = ctx.world.all_reduce(torch.stack([sum_dy, sum_dy_xmu]))
        grad_x = torch.batch_norm_backward_elemt(grad_y, x, mean, inverse, weight, sums[0], sums[1], counts)
        # This rank's part of the gradients of weight and bias; all-reduced with the other gradients of the model.
        return grad_x, grad_weight, grad_bias, None, None, None


class _Rows:
    """An image batch as a matrix [rows, tiles * C] with repeated channels; a view in channels_last order."""

    def __init__(self, x: Tensor, *, always_tiled: bool = False) -> None:
        self.shape = x.movedim(1, -1).shape
        self.channels = self.shape[-1]
        self.tiles = self.shape[-2] if x.ndim > 2 and (always_tiled or self.channels < FEW_CHANNELS) else 1
        self.per_sample = self.shape.numel() // (self.shape[0] * self.channels * self.tiles)

    def of(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1).reshape(-1, self.tiles * self.channels)

    def back(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.shape).movedim(-1, 1)

    def empty_like(self, x: Tensor) -> Tensor:
        """Return an empty [B, C, ...] in channels_last order; not a view, since in-place activations may follow."""
        strides = torch.empty(self.shape, device="meta").movedim(-1, 1).stride()
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)

    def sums(self, matrix: Tensor) -> Tensor:
        return matrix.sum(0).view(self.tiles, self.channels).sum(0)

    def tiled(self, per_channel: Tensor) -> Tensor:
        return per_channel.repeat(self.tiles)
