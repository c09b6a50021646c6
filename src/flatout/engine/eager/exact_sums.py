"""Sums over the samples of a batch whose bits do not depend on how many CPU ranks or threads share the batch.

Training is chaotic: where two runs differ in the last bit, a ReLU soon decides otherwise, and after an epoch their
weights agree to a hundredth. So the same recipe gives the same weights on any number of ranks only if every sum over
samples has the same bits, which floating-point addition in another order has not. Therefore the global batch is cut
where a share of it could begin, for any of `RANKS`; every piece is summed by a call of its own, the same one wherever
it runs, on one thread; and the pieces' sums are added in float64, where 24-bit numbers of like size add up exactly, in
any order. What a convolution or a linear layer computes per sample has the same bits in batches of any length, but for
very short ones, which are lengthened (seen with oneDNN and MKL; nothing promises it).

A weight with more numbers than its layer's inputs and output gradients is not worth so many sums of its size: there
every rank gets those of the whole batch, and computes the gradient of some outputs with the very call that one would.

Shape letters: B this rank's share of the batch, I inputs, O outputs of a linear layer.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.nn import functional

from flatout.data.order import part
from flatout.dist.world import World

# Numbers of ranks among which the batch may be shared without a change in any bit.
RANKS = (1, 2, 3, 4)
# Kernels take shortcuts for batches shorter than this, and for rows left over from such groups.
ROWS = 16
CONV_SAMPLES = 2
# Numbers that vectorised loops take at a time; those left over get another exp and log.
VECTOR = 64
# Bytes, as torch aligns its tensors.
ALIGNMENT = 64
# Outputs a linear layer must have for its weight's gradient to be computed in parts.
MANY_OUTPUTS = 16 * max(RANKS)

# A convolution with more weights than this is not summed by pieces: its kernels take too long to begin. Nor then is
# anything else in its model, since one inexact sum is enough to part.
MOST_WEIGHTS = 1 << 18

aten = torch.ops.aten

Answer = TypeVar("Answer")


class ExactSums:
    """Sums over the samples of one rank's share of a batch, and layers whose gradients are such sums.

    Args:
        world: the ranks.
        threads: how many threads this rank has.
        batch_size: the most samples in a global batch.

    Attributes:
        residues: by id of a parameter, what rounding to float32 took off its gradient, float32 of its shape.
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

    def begin(self, global_batch: int) -> None:
        """Prepare for a step of so many samples in the global batch."""
        if global_batch != self.global_batch:
            self._blocks.clear()
        self.global_batch = global_batch
        self.share = part(global_batch, self.world.rank, self.world.size)
        self.residues.clear()

    def blocks(self, per_sample: int = 1) -> list[slice]:
        """Return the pieces of this rank's share: slices of rows, `per_sample` of them for each sample."""
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
        """Return what `of` returns for each piece, added up in float64; long work is shared by this rank's threads."""
        results = self._each(of, self.blocks(per_sample), is_long=is_long)
        return [torch.stack(parts).sum(0, dtype=torch.float64) for parts in zip(*results, strict=True)]

    def by_blocks(self, of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return the rows that `of` returns for each piece, computed by a call of its own."""
        rows = self._each(of, self.blocks(), is_long=False)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _each(self, of: Callable[[slice], Answer], pieces: list[slice], *, is_long: bool) -> list[Answer]:
        """Return what `of` returns for each piece, computed by one thread each."""
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
        """Return the gradient of a parameter, given by its id, in float32; the rest of it becomes a residue."""
        high = total.float()
        if self.world.is_joined:
            low = (total - high).float()
            known = self.residues.get(parameter)
            self.residues[parameter] = low if known is None else known + low
        return high

    def gathers(self, weight: torch.Tensor) -> bool:
        """Whether the weight [O, I] of a linear layer has so many numbers that inputs and gradients travel instead."""
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

    def replaces(self, func: Any, batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a torch function, called so, sums over the samples of the batch or depends on their number."""
        if func is functional.binary_cross_entropy_with_logits:
            return len(args[0]) == batch_size and kwargs.get("reduction") == "none" and len(args) == 2
        if func not in (functional.conv2d, functional.linear) or kwargs or len(args) < 2:
            return False
        x, weight, *settings = args
        return (
            x.shape[0] == batch_size
            and x.ndim == weight.ndim
            and x.dtype == weight.dtype == torch.float32
            and weight.requires_grad
            and not any(isinstance(setting, str) for setting in settings)
        )

    def call(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do what a function does that `replaces` has said to replace."""
        if func is functional.conv2d:
            return _Convolution.apply(self, *args)  # pyright: ignore[reportReturnType]
        if func is functional.linear:
            return _Linear.apply(self, *args) if len(args) == 3 else _Linear.apply(self, *args, None)  # pyright: ignore
        logits, target = args
        logits, target = _lengthened(logits, VECTOR), _lengthened(target, VECTOR)
        return functional.binary_cross_entropy_with_logits(logits, target, **kwargs)[: len(args[0])]


def exact_sums(model: torch.nn.Module, world: World, threads: int, batch_size: int) -> ExactSums | None:
    """Return what keeps a model's sums exact; None where the device or the model does not suit."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    is_small = all(parameter.ndim != 4 or parameter.numel() <= MOST_WEIGHTS for parameter in trained)
    suits = world.device.type == "cpu" and world.size <= max(RANKS) and is_small
    return ExactSums(world, threads, batch_size) if suits else None


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
    """Whether the kernel is 1 x 1: a product of matrices, whose bits depend on their number of rows."""
    return weight.shape[2:] == (1, 1)


def _in_parts(exact: ExactSums, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient [O, I] with this rank's part of the outputs, zero elsewhere."""
    if not exact.world.is_joined:
        return grad.t() @ x
    total = x.new_zeros((grad.shape[1], x.shape[1]))
    own = part(grad.shape[1], exact.world.rank, exact.world.size)
    torch.mm(grad[:, own].t(), x, out=total[own])
    return total


def _lengthened(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows with the first repeated until there is a multiple of so many."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else _aligned(rows)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows at an address from which kernels read alike; MKL's bits depend on that."""
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _one_thread_each(threads: int) -> ThreadPoolExecutor:
    """Return threads of which each computes alone. OpenMP keeps its number of threads for each thread."""
    import threading

    before, all_there = torch.get_num_threads(), threading.Barrier(threads)

    def alone() -> None:
        # The first question gives a thread the process's number, so ask before changing it.
        torch.get_num_threads()
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(threads, initializer=alone)
    for wait in [pool.submit(all_there.wait) for _ in range(threads)]:
        wait.result()
    torch.set_num_threads(before)
    return pool
