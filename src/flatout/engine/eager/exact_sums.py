"""Sums over the samples of a batch whose bits depend neither on the number of CPU ranks nor on that of threads.

Opt-in by the recipe's `exact_sums`. Training is chaotic: after a difference in the last bit, a ReLU soon decides
otherwise, and after an epoch the weights agree to a hundredth. Floating-point addition depends on its order, so the
global batch is cut where the share of a rank could begin, for any of `RANKS`; every piece is summed by a call of its
own, the same one on every rank, on one thread; and the sums of the pieces are added in float64, where 24-bit numbers of
similar size add up exactly in any order. What a convolution or a linear layer computes per sample has the same bits in
batches of any length, except very short ones, which are lengthened (observed with oneDNN and MKL; neither promises it).

The gradient of a weight with more numbers than its layer's inputs and output gradients is not summed by pieces: every
rank receives those of the whole batch and computes the gradient of some outputs by the call that one rank would make.

Shape letters: B this rank's share of the batch, I inputs, O outputs of a linear layer.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.nn import functional

from flatout.data.order import part
from flatout.dist.world import World
from flatout.errors import InputError
from flatout.recipe import Recipe

# Numbers of ranks among which the batch may be divided without a change in any bit.
RANKS = (1, 2, 3, 4)
# Kernels take shortcuts for batches shorter than this, and for the rows that remain of such groups.
ROWS = 16
CONV_SAMPLES = 2
# Elements that vectorised loops process at a time; the rest are computed by another exp and log.
VECTOR = 64
# Bytes, as torch aligns its tensors.
ALIGNMENT = 64
# Outputs of a linear layer from which its weight's gradient can be computed in parts.
MANY_OUTPUTS = 16 * max(RANKS)
# Weights of a convolution above which its kernels start too slowly to be called for every piece.
MOST_WEIGHTS = 1 << 18

aten = torch.ops.aten

Answer = TypeVar("Answer")


def exact_sums(model: torch.nn.Module, recipe: Recipe, world: World, threads: int, precision: str) -> "ExactSums":
    """Return the exact sums of a model.

    Raises:
        InputError: the device, the recipe or the model does not permit them; the message names the reason.
    """
    large = [
        name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 4 and p.numel() > MOST_WEIGHTS
    ]
    reasons = {
        f"device {world.device.type}; only CPUs sum exactly": world.device.type != "cpu",
        f"{world.size} ranks; at most {max(RANKS)} are supported": world.size > max(RANKS),
        f"precision = {precision!r}; it must be 'fp32'": precision != "fp32",
        "norm = 'per-device' depends on the number of devices": recipe.norm != "global",
        "shard = 'full' adds up in torch's own order": recipe.shard == "full",
        f"micro_batch = {recipe.micro_batch} sums in another order": recipe.micro_batch > 0,
        f"the convolution {', '.join(large[:1])} has more than {MOST_WEIGHTS:,} weights": bool(large),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"exact_sums = true is not available: {reason}; set exact_sums = false")
    return ExactSums(world, threads, recipe.batch_size)


class ExactSums:
    """Sums over the samples of one rank's share of a batch, and the layers whose gradients are such sums.

    Args:
        world: the ranks.
        threads: compute threads of this rank.
        batch_size: the most samples in a global batch.

    Attributes:
        residues: by id of a parameter, the rounding error of its gradient in float32, float32 of its shape.
    """

    def __init__(self, world: World, threads: int, batch_size: int) -> None:
        self.world = world
        self._batch_size = batch_size
        self.residues: dict[int, torch.Tensor] = {}
        self.share = slice(0, 0)
        self.global_batch = 0
        self._blocks: dict[int, list[slice]] = {}
        self._threads = threads
        self._pool = _one_thread_each(threads - 1) if threads > 1 else None

    def begin(self, global_batch: int) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Prepare for a step of so many samples in all; return functions of torch with their replacements."""
        if global_batch != self.global_batch:
            self._blocks.clear()
        self.global_batch = global_batch
        self.share = part(global_batch, self.world.rank, self.world.size)
        self.residues.clear()
        return {
            functional.conv2d: self._conv2d,
            functional.linear: self._linear,
            functional.binary_cross_entropy_with_logits: self._binary_cross_entropy,
        }

    def blocks(self, per_sample: int = 1) -> list[slice]:
        """Return the pieces of this rank's share: slices of rows, `per_sample` rows for each sample."""
        if per_sample not in self._blocks:
            b, own = self.global_batch, self.share
            cuts = {part(b, rank, ranks).start for ranks in RANKS for rank in range(ranks)}
            cuts = sorted({own.start, own.stop} | {c for c in cuts if own.start < c < own.stop})
            ends = [per_sample * (c - own.start) for c in cuts]
            self._blocks[per_sample] = [slice(*pair) for pair in pairwise(ends)]
        return self._blocks[per_sample]

    def over_blocks(
        self, of: Callable[[slice], Sequence[torch.Tensor]], per_sample: int = 1, *, is_long: bool = False
    ) -> list[torch.Tensor]:
        """Return the sums in float64 of what `of` returns for each piece; long work is divided among the threads."""
        results = self._each(of, self.blocks(per_sample), is_long=is_long)
        return [torch.stack(parts).sum(0, dtype=torch.float64) for parts in zip(*results, strict=True)]

    def by_blocks(self, of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return the rows that `of` returns, called once for each piece."""
        rows = self._each(of, self.blocks(), is_long=False)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _each(self, of: Callable[[slice], Answer], pieces: list[slice], *, is_long: bool) -> list[Answer]:
        """Return what `of` returns for each piece, each call on one thread."""
        if self._pool is None:
            return [of(piece) for piece in pieces]
        threads, rows = self._threads, pieces[-1].stop - pieces[0].start
        groups: list[list[slice]] = [[] for _ in range(threads if is_long else 1)]
        for piece in pieces:
            groups[len(groups) * (piece.start - pieces[0].start) // rows].append(piece)

        def each_of(group: list[slice]) -> list[Answer]:
            return [of(piece) for piece in group]

        futures = [self._pool.submit(each_of, group) for group in groups[1:]]
        torch.set_num_threads(1)
        try:
            answers = each_of(groups[0])
        finally:
            torch.set_num_threads(threads)
        return [*answers, *(answer for future in futures for answer in future.result())]

    def rounded(self, total: torch.Tensor, parameter: int) -> torch.Tensor:
        """Return the gradient of a parameter, given by its id, in float32; its rounding error becomes a residue."""
        high = total.float()
        if self.world.is_joined:
            low = (total - high).float()
            known = self.residues.get(parameter)
            self.residues[parameter] = low if known is None else known + low
        return high

    def gathers(self, weight: torch.Tensor) -> bool:
        """Whether a weight [O, I] is so large that the layer's inputs and output gradients are gathered instead."""
        if weight.ndim != 2:
            return False
        outputs, inputs = weight.shape
        return outputs >= MANY_OUTPUTS and len(RANKS) * outputs * inputs > self._batch_size * (inputs + outputs)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, [global batch, n]."""
        if not self.world.is_joined:
            return rows
        whole = rows.new_zeros((self.global_batch, rows.shape[1]))
        whole[self.share] = rows
        return self.world.all_reduce(whole)

    def _replaces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the weight's gradient of a layer, called so, is a sum over the samples of the batch."""
        if kwargs or len(args) < 2:
            return False
        x, weight, *settings = args
        return (
            len(x) == self.share.stop - self.share.start
            and x.ndim == weight.ndim
            and x.dtype == weight.dtype == torch.float32
            and weight.requires_grad
            and not any(isinstance(setting, str) for setting in settings)
        )

    def _conv2d(self, *args: Any, **kwargs: Any) -> Any:
        return _Convolution.apply(self, *args) if self._replaces(args, kwargs) else functional.conv2d(*args, **kwargs)

    def _linear(self, *args: Any, **kwargs: Any) -> Any:
        if not self._replaces(args, kwargs):
            return functional.linear(*args, **kwargs)
        return _Linear.apply(self, *args, *[None] * (3 - len(args)))

    def _binary_cross_entropy(self, logits: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Compute rows that do not depend on how many there are; without a reduction, the step's own loss."""
        if kwargs.get("reduction") != "none":
            return functional.binary_cross_entropy_with_logits(logits, target, **kwargs)
        longer = (_lengthened(logits, VECTOR), _lengthened(target, VECTOR))
        return functional.binary_cross_entropy_with_logits(*longer, **kwargs)[: len(logits)]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exact: ExactSums,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        ctx.exact, ctx.ids = exact, (id(weight), id(bias))
        ctx.settings = (_pair(stride), _pair(padding), _pair(dilation), False, [0, 0], groups)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)

        def convolved(x: torch.Tensor) -> torch.Tensor:
            return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)

        if _is_product(weight):
            return exact.by_blocks(lambda block: convolved(_aligned(x[block])))
        return convolved(_lengthened(x, CONV_SAMPLES))[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,), exact, (x, weight) = grads, ctx.exact, ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)

        def backward(grad: torch.Tensor, x: torch.Tensor, mask: list[bool]) -> Any:
            return aten.convolution_backward(grad, x, weight, ctx.bias_sizes, *ctx.settings, mask)

        grad_x = grad_weight = grad_bias = None
        _, of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        of_x_alone = [True, False, False]
        if of_x and _is_product(weight):
            grad_x = exact.by_blocks(lambda block: backward(_aligned(grad[block]), x[block], of_x_alone)[0])
        elif of_x:
            longer = _lengthened(grad, CONV_SAMPLES)
            grad_x = backward(longer, _lengthened(x, CONV_SAMPLES), of_x_alone)[0][: len(x)]
        if of_weight:
            mask = [False, True, bool(of_bias)]
            sums = exact.over_blocks(
                lambda block: backward(grad[block], x[block], mask)[1 : 2 + bool(of_bias)], is_long=True
            )
            grad_weight = exact.rounded(sums[0], ctx.ids[0])
            grad_bias = exact.rounded(sums[1], ctx.ids[1]) if of_bias else None
        return None, grad_x, grad_weight, grad_bias, None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: ExactSums, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.exact, ctx.ids = exact, (id(weight), id(bias))
        ctx.save_for_backward(x, weight)
        if exact.gathers(weight):
            return functional.linear(_lengthened(x, ROWS), weight, bias)[: len(x)]
        return exact.by_blocks(lambda block: functional.linear(_aligned(x[block]), weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,), exact, (x, weight) = grads, ctx.exact, ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = grad_bias = None
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        if of_x and exact.gathers(weight):
            grad_x = (_lengthened(grad, ROWS) @ weight)[: len(grad)]
        elif of_x:
            grad_x = exact.by_blocks(lambda block: _aligned(grad[block]) @ weight)
        if of_weight and exact.gathers(weight):
            grad_weight = _in_parts(exact, exact.gather(grad), exact.gather(x))
        elif of_weight:
            grad_weight = exact.rounded(
                exact.over_blocks(lambda b: [_aligned(grad[b]).t() @ _aligned(x[b])])[0], ctx.ids[0]
            )
        if of_bias:
            grad_bias = exact.rounded(exact.over_blocks(lambda b: [grad[b].sum(0)])[0], ctx.ids[1])
        return None, grad_x, grad_weight, grad_bias


def _is_product(weight: torch.Tensor) -> bool:
    """Whether the kernel is 1 x 1: a matrix product, whose bits depend on the number of rows."""
    return weight.shape[2:] == (1, 1)


def _in_parts(exact: ExactSums, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient [O, I] for this rank's part of the outputs, zero elsewhere."""
    if not exact.world.is_joined:
        return grad.t() @ x
    total = x.new_zeros((grad.shape[1], x.shape[1]))
    own = part(grad.shape[1], exact.world.rank, exact.world.size)
    torch.mm(grad[:, own].t(), x, out=total[own])
    return total


def _lengthened(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows with the first one repeated up to a multiple of `multiple` rows."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else _aligned(rows)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows at an aligned address; the bits of MKL's results depend on that."""
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _one_thread_each(threads: int) -> ThreadPoolExecutor:
    """Return threads that compute without further threads; OpenMP keeps its number of threads for each thread."""
    before, all_there = torch.get_num_threads(), threading.Barrier(threads)

    def alone() -> None:
        # The first call of the getter sets a thread's number to the process's, so it comes before the setter.
        torch.get_num_threads()
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(threads, initializer=alone)
    for wait in [pool.submit(all_there.wait) for _ in range(threads)]:
        wait.result()
    torch.set_num_threads(before)
    return pool
