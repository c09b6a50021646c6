"""Sums over the samples of a batch whose bits depend neither on the number of CPU ranks nor on that of threads.

Opt-in by the recipe's `exact_sums`. Training is chaotic: after a difference in the last bit, a ReLU soon decides
otherwise, and after an epoch the weights agree to a hundredth. Floating-point addition depends on its order, so the
global batch is cut where the share of a rank could begin, for any of `RANKS`; every piece is summed by a call of its
own, the same one on every rank, on one thread; and the sums of the pieces are added in float64, where 24-bit numbers of
similar size add up exactly in any order. What a convolution or a linear layer computes per sample has the same bits in
batches of any length, except very short ones, which are lengthened (observed with oneDNN and MKL; neither promises it).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from flatout.data.order import part
from flatout.dist.world import World
from flatout.errors import InputError
from flatout.recipe import Recipe

# Numbers of ranks among which the batch may be divided without a change in any bit.
RANKS = (1, 2, 3, 4)
# Convolution kernels take shortcuts for shorter batches.
CONV_SAMPLES = 2
# Elements that vectorised loops process at a time; the rest are computed by another exp and log.
VECTOR = 64
# Bytes, as torch aligns its tensors.
ALIGNMENT = 64
# Weights of a convolution above which its kernels start too slowly to be called for every piece.
MOST_WEIGHTS = 1 << 18

aten = torch.ops.aten

Answer = TypeVar("Answer")


def exact_sums(model: nn.Module, recipe: Recipe, world: World, precision: str) -> "ExactSums":
    """Return the exact sums of a model.

    Raises:
        InputError: the device, the recipe or the model does not permit them; the message names the reason.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    large = [name for name, p in trained if p.ndim == 4 and p.numel() > MOST_WEIGHTS]
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    reasons = {
        f"only CPUs sum exactly, not {world.device.type}": world.device.type != "cpu",
        f"{world.size} ranks; at most {max(RANKS)} are supported": world.size > max(RANKS),
        f"precision = {precision!r}; it must be 'fp32'": precision != "fp32",
        "norm = 'per-device' depends on the number of devices": recipe.norm == "per-device",
        "shard = 'full' adds up in torch's own order": recipe.shard == "full",
        f"optimizer.name = {recipe.optimizer.name!r} may add up in torch's own order": recipe.optimizer.is_of_library,
        f"micro_batch = {recipe.micro_batch} sums in another order": recipe.micro_batch > 0,
        "dropout draws on each rank for its own samples (dropout = 0 turns it off)": drops and world.size > 1,
        f"the convolution {', '.join(large[:1])} has more than {MOST_WEIGHTS:,} weights": bool(large),
    }
    for reason, applies in reasons.items():
        if applies:
            raise unavailable(reason)
    return ExactSums(world)


def unavailable(reason: str) -> InputError:
    """Return the error for a run whose sums cannot be exact."""
    return InputError(f"exact_sums = true is not available: {reason}; set exact_sums = false")


class ExactSums:
    """Sums over the samples of one rank's share of a batch, and the layers whose gradients are such sums.

    Attributes:
        residues: by id of a parameter, the rounding error of its gradient in float32, float32 of its shape.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.residues: dict[int, torch.Tensor] = {}
        self._batch, self._share = 0, slice(0, 0)
        self._pieces: dict[int, list[slice]] = {}
        self._exact: set[int] = set()

    def begin(self, batch: int) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Prepare for a global batch of so many samples; return functions of torch with their replacements."""
        if batch != self._batch:
            self._batch, self._share = batch, part(batch, self.world.rank, self.world.size)
            self._pieces.clear()
        self.residues.clear()
        return {
            functional.conv2d: self._conv2d,
            functional.linear: self._linear,
            functional.binary_cross_entropy_with_logits: self._binary_cross_entropy,
        }

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Check after a backward pass that all gradients were summed exactly.

        Raises:
            InputError: some were computed by another kind of layer.
        """
        for name, parameter in parameters.items():
            if parameter.grad is not None and id(parameter) not in self._exact:
                raise unavailable(
                    f"{name} belongs to no 2-D convolution, batch normalisation or linear layer on [B, n]"
                )

    def pieces(self, per_sample: int = 1) -> list[slice]:
        """Return the pieces of this rank's share: slices of rows, `per_sample` rows for each sample."""
        if per_sample not in self._pieces:
            own = self._share
            cuts = {part(self._batch, rank, ranks).start for ranks in RANKS for rank in range(ranks)}
            cuts = sorted({own.start, own.stop} | {c for c in cuts if own.start < c < own.stop})
            ends = [per_sample * (c - own.start) for c in cuts]
            self._pieces[per_sample] = [slice(*pair) for pair in pairwise(ends)]
        return self._pieces[per_sample]

    def sums(self, of: Callable[[slice], Sequence[torch.Tensor]], per_sample: int = 1) -> list[torch.Tensor]:
        """Return the sums in float64 of what `of` returns for each piece."""
        results = _each(of, self.pieces(per_sample))
        return [torch.stack(parts).sum(0, dtype=torch.float64) for parts in zip(*results, strict=True)]

    def rows(self, of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return the rows that `of` returns, called once for each piece."""
        return torch.cat(_each(of, self.pieces()))

    def rounded(self, total: torch.Tensor, parameter: int) -> torch.Tensor:
        """Return the gradient of a parameter, given by its id, in float32; its rounding error becomes a residue."""
        high = total.float()
        self._exact.add(parameter)
        if self.world.is_joined:
            self.residues[parameter] = self.residues.get(parameter, 0) + (total - high).float()
        return high

    def _replaces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the weight's gradient of a layer, called so, is a sum over the samples of the batch."""
        if kwargs or len(args) < 2:
            return False
        x, weight, *settings = args
        return (
            len(x) == self._share.stop - self._share.start
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
            return exact.rows(lambda piece: convolved(_aligned(x[piece])))
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
            grad_x = exact.rows(lambda piece: backward(_aligned(grad[piece]), x[piece], of_x_alone)[0])
        elif of_x:
            longer = _lengthened(grad, CONV_SAMPLES)
            grad_x = backward(longer, _lengthened(x, CONV_SAMPLES), of_x_alone)[0][: len(x)]
        if of_weight:
            mask = [False, True, bool(of_bias)]
            sums = exact.sums(lambda piece: backward(grad[piece], x[piece], mask)[1 : 2 + bool(of_bias)])
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
        return exact.rows(lambda piece: functional.linear(_aligned(x[piece]), weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,), exact, (x, weight) = grads, ctx.exact, ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = grad_bias = None
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        if of_x:
            grad_x = exact.rows(lambda piece: _aligned(grad[piece]) @ weight)
        if of_weight:
            sums = exact.sums(lambda piece: [_aligned(grad[piece]).t() @ _aligned(x[piece])])
            grad_weight = exact.rounded(sums[0], ctx.ids[0])
        if of_bias:
            grad_bias = exact.rounded(exact.sums(lambda piece: [grad[piece].sum(0)])[0], ctx.ids[1])
        return None, grad_x, grad_weight, grad_bias


def _is_product(weight: torch.Tensor) -> bool:
    """Whether the kernel is 1 x 1: a matrix product, whose bits depend on the number of rows."""
    return weight.shape[2:] == (1, 1)


def _lengthened(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows with the first one repeated up to a multiple of `multiple` rows."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else _aligned(rows)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows at an aligned address; the bits of MKL's results depend on that."""
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _each(of: Callable[[slice], Answer], pieces: list[slice]) -> list[Answer]:
    """Return what `of` returns for each piece, computed on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [of(piece) for piece in pieces]
    finally:
        torch.set_num_threads(threads)
