"""The operations and the memory of one step of a network on a GPU, traced on tensors without data.

The step runs on torch's `meta` device: shapes and dtypes are computed, numbers are not, so a trace takes about a second and almost no
memory on any machine. Two things differ from CUDA on `meta` and are replaced: autocast and fused attention.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# What CUDA's autocast computes in half precision and in fp32; all else takes its arguments as they are. Source:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
_HALF_NAMES = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d linear prelu matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm"
    " einsum scaled_dot_product_attention"
)
_FULL_NAMES = (
    "exp log log1p log2 pow __pow__ __rpow__ reciprocal rsqrt cumsum cumprod sum prod norm cosine_similarity normalize softmax"
    " log_softmax layer_norm group_norm rms_norm cross_entropy nll_loss mse_loss softplus binary_cross_entropy_with_logits huber_loss"
)
_HALF, _FULL = frozenset(_HALF_NAMES.split()), frozenset(_FULL_NAMES.split())
# CUDA's caching allocator rounds sizes up to this many bytes.
ALLOCATION = 512

# Operations by the kind that decides their efficiency.
_NORMS = ("native_batch_norm", "native_layer_norm", "native_group_norm", "_native_batch_norm", "_fused_rms_norm")
_REDUCTIONS = (
    "sum",
    "mean",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "softmax",
    "var",
    "amax",
    "cumsum",
    "linalg_vector_norm",
)
_MOVES = (
    "clone",
    "_to_copy",
    "copy_",
    "cat",
    "stack",
    "index",
    "roll",
    "constant_pad_nd",
    "select_backward",
    "slice_backward",
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation of a step; equal ones are counted.

    Attributes:
        kind: one of `KINDS`.
        flops: floating-point operations; two for a multiply-add.
        bytes: read and written, each tensor once.
        largest: bytes of the largest tensor.
        batch, m, n, k: of the matrix products that a convolution or a product is computed as, 0 for others: `batch`
            products of [m, k] and [k, n].
        half: whether it computes in 16 bits.
    """

    kind: str
    flops: float
    bytes: int
    largest: int
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    half: bool = False


KINDS = ("conv", "conv-dgrad", "conv-wgrad", "depthwise", "depthwise-dgrad", "depthwise-wgrad", "matmul", "attention")
KINDS += ("batch-norm", "norm", "reduction", "pool", "move", "elementwise", "update")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of a network.

    Attributes:
        batch: its images.
        calls: operations that start kernels, with the number of times.
        parameters: numbers that the network learns.
        peak_bytes: most bytes of tensors alive at once.
    """

    batch: int
    calls: dict[Call, int]
    parameters: int
    peak_bytes: int


def trace(
    model: nn.Module,
    shape: tuple[int, ...],
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    train: bool,
    half: bool = True,
    states: int = 1,
) -> Trace:
    """Run a step of a network on `meta` and record what it does.

    Args:
        model: on the device `meta`.
        shape: of the images, [N, C, H, W].
        loss: from the logits [N, K] to a number.
        train: forward, backward and update; otherwise only the forward pass in evaluation mode.
        half: 16-bit autocast; otherwise fp32.
        states: numbers that the optimizer keeps for each parameter.
    """
    recorder = _Recorder()
    model = model.train(train)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.hold(tensor)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(train))
        stack.enter_context(recorder)
        stack.enter_context(_CudaFunctions(half))
        images = torch.empty(shape, device="meta")
        logits = model(images)
        if train:
            loss(logits).backward()
    model.zero_grad()
    peak, calls, parameters = recorder.peak, recorder.calls, sum(parameter.numel() for parameter in trained)
    if train:
        peak += 4 * parameters * states
        calls[update(parameters, states)] += 1
    return Trace(batch=shape[0], calls=dict(calls), parameters=parameters, peak_bytes=peak)


def update(parameters: int, states: int) -> Call:
    """Return the update of a fused optimizer: weights and states are read and written, gradients are read."""
    return Call(kind="update", flops=0.0, bytes=4 * parameters * (3 + 2 * states), largest=4 * parameters)


class _CudaFunctions(TorchFunctionMode):
    """Does what CUDA does and `meta` does not: autocast, and attention as one operation."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half = half
        # Autocast keeps the 16-bit copy of each weight for the whole step.
        self.copies: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.half and (name in _HALF or name in _FULL):
            cast = self._to_half if name in _HALF else _to_full
            args = [cast(value) for value in args]
            kwargs = {key: cast(value) for key, value in kwargs.items()}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _to_half(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [self._to_half(item) for item in value]
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(torch.bfloat16)
        if value not in self.copies:
            self.copies[value] = value.to(torch.bfloat16)
        return self.copies[value]


def _to_full(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    if query.ndim != 4:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    keep = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, keep, dropout_p, is_causal)[0]


class _Recorder(TorchDispatchMode):
    """Records the calls of operations that start kernels, and the bytes of tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self.live = self.peak = 0
        self.held: set[int] = set()

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.held:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self.held.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        before = {tensor.untyped_storage()._cdata for tensor in ins}
        is_view = bool(outs) and not func._schema.is_mutable and all(t.untyped_storage()._cdata in before for t in outs)
        for tensor in outs:
            self.hold(tensor)
        name = func.overloadpacket.__name__
        if outs and not is_view and not name.startswith(("empty", "new_empty", "detach", "lift")):
            for call in _calls(name, args, ins, outs):
                self.calls[call] += 1
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _calls(name: str, args: Sequence[Any], ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> Iterable[Call]:
    """Yield the kernels of an operation."""
    if name == "convolution":
        yield _convolution(args[0], args[1], outs[0], args[8], "")
    elif name == "convolution_backward":
        gradient, images, weight, groups, wanted = *args[:3], args[9], args[10]
        for is_wanted, which in zip(wanted[:2], ("-dgrad", "-wgrad"), strict=True):
            if is_wanted:
                yield _convolution(images, weight, gradient, groups, which)
    elif name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
        batch = left.shape[0] if left.ndim == 3 else 1
        yield _product("matmul", batch, left.shape[-2], right.shape[-1], left.shape[-1], [*ins, *outs])
    elif "scaled_dot_product" in name:
        tensors = [t for t in (*ins, *outs) if t.ndim == 4]
        query, key, value = args[1:4] if name.endswith("backward") else args[:3]
        batch, (m, d), k = query.shape[0] * query.shape[1], query.shape[2:], key.shape[2]
        products = 5 if name.endswith("backward") else 2
        flops = 2 * batch * m * k * (d + value.shape[3]) / 2 * products
        yield _call("attention", tensors, flops=flops, batch=batch, m=m, n=k, k=d, half=query.itemsize == 2)
    else:
        yield _call(_kind(name), [*ins, *outs], half=all(t.itemsize <= 2 for t in outs))


def _kind(name: str) -> str:
    if name.startswith(_NORMS):
        return "batch-norm" if "batch_norm" in name else "norm"
    if "pool" in name:
        return "pool"
    if name.startswith("upsample"):
        return "move"
    plain = name.removesuffix("_backward_data")
    return "reduction" if plain in _REDUCTIONS else "move" if name in _MOVES else "elementwise"


def _convolution(images: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int, which: str) -> Call:
    """Return a convolution as the matrix products of an implicit GEMM."""
    pixels, taps = out.numel() // out.shape[1], math.prod(weight.shape[2:])
    filters, channels = weight.shape[0] // groups, weight.shape[1]
    if out.shape[1] != weight.shape[0]:  # transposed
        pixels, filters, channels = images.numel() // images.shape[1], weight.shape[1], weight.shape[0] // groups
    if which == "-wgrad":
        m, n, k = filters, channels * taps, pixels
    elif which == "-dgrad":
        m, n, k = images.numel() // images.shape[1], channels, filters * taps
    else:
        m, n, k = pixels, filters, channels * taps
    flops = 2.0 * groups * pixels * filters * channels * taps
    sizes = [_size(t) for t in (images, weight, out)]
    kind = "depthwise" if channels == 1 and groups > 1 else "conv"
    return Call(
        kind=kind + which,
        flops=flops,
        bytes=sum(sizes),
        largest=max(sizes),
        batch=groups,
        m=m,
        n=n,
        k=k,
        half=out.itemsize == 2,
    )


def _product(kind: str, batch: int, m: int, n: int, k: int, tensors: Sequence[torch.Tensor]) -> Call:
    half = tensors[-1].itemsize == 2
    return _call(kind, tensors, flops=2.0 * batch * m * n * k, batch=batch, m=m, n=n, k=k, half=half)


def _call(kind: str, tensors: Sequence[torch.Tensor], flops: float = 0.0, **figures: Any) -> Call:
    # An operation in place returns its argument: it is read and written.
    sizes = [_size(tensor) for tensor in tensors]
    return Call(kind=kind, flops=flops, bytes=sum(sizes), largest=max(sizes), **figures)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel moves for a tensor: an expanded one is smaller than its shape."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
