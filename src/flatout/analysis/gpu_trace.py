"""The operations and the memory of one step of a network on a GPU, traced on tensors without data.

The step runs on torch's `meta` device, which computes shapes and dtypes alone, so a trace takes about a second on any
machine. Two things of CUDA that `meta` lacks are replaced: autocast, and attention as one operation.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatout.config import Recipe
from flatout.engine.optim import build
from flatout.engine.torch.accelerator import BF16_OPERATIONS
from flatout.models.build import build_model, check_name, create_timm, quiet
from flatout.models.layers import freeze, set_dropout
from flatout.tasks import task_of
from flatout.utils.errors import InputError, first_line

if TYPE_CHECKING:
    from flatout.analysis.plan import Work

# What CUDA's autocast computes in 16 bits and in fp32; other functions take their arguments as they are. Source:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
_AUTOCAST = {
    "half": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d linear prelu matmul __matmul__ __rmatmul__ mm bmm"
    " addmm addbmm baddbmm einsum scaled_dot_product_attention",
    "full": "exp log log1p log2 pow __pow__ __rpow__ reciprocal rsqrt cumsum cumprod sum prod norm cosine_similarity"
    " normalize softmax log_softmax layer_norm group_norm rms_norm cross_entropy nll_loss mse_loss huber_loss softplus"
    " binary_cross_entropy_with_logits",
}
_AUTOCAST_OF = {name: which for which, names in _AUTOCAST.items() for name in names.split()}
# CUDA's caching allocator rounds sizes up to a multiple of this many bytes.
ALLOCATION_BYTES = 512

# Operations by what decides their efficiency; those that are not listed are elementwise.
_KINDS = {
    "norm": "native_batch_norm native_batch_norm_backward native_layer_norm native_layer_norm_backward"
    " native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "reduction": "sum mean var amax cumsum linalg_vector_norm _softmax _safe_softmax _log_softmax"
    " _softmax_backward_data _log_softmax_backward_data",
    "move": "clone _to_copy copy_ cat stack index roll constant_pad_nd select_backward slice_backward",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


class Call(NamedTuple):
    """The kernel of an operation; equal ones are counted.

    `kind` is `conv`, `depthwise`, each also with `-dgrad` or `-wgrad` (the gradient of images or weights), `matmul`,
    `attention`, `norm`, `reduction`, `pool`, `move`, `elementwise` or `update`. A convolution or product is `batch`
    products of [m, k] and [k, n].
    """

    kind: str
    bytes: int  # read and written
    largest: int  # bytes of the largest tensor
    flops: float = 0.0  # two for a multiply-add
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    half: bool = False  # whether the result has 16 bits


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A step of `batch` images: its calls with their numbers, and the most bytes of tensors alive at once."""

    batch: int
    calls: dict[Call, int]
    parameters: int
    peak_bytes: int


def trace(
    model: nn.Module, shape: Sequence[int], loss: Callable[..., Any], *, train: bool, half: bool = True, states: int = 1
) -> Trace:
    """Run a step of a network on the device `meta` and record what it does.

    `shape` is that of the images, [N, C, H, W]; `loss` takes the logits [N, K]; `half` is 16-bit autocast; the
    optimizer keeps `states` numbers for each parameter. Without `train` it is the forward pass of evaluation.
    """
    recorder = _Recorder()
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.hold(tensor)
    with torch.set_grad_enabled(train), recorder, _CudaFunctions(half):
        images = torch.empty(shape, device="meta")
        logits = model.train(train)(images)
        if train:
            loss(logits).backward()
    model.zero_grad()
    peak, calls = recorder.peak, recorder.calls
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if train:
        # A fused optimizer reads weights, gradients and states, and writes weights and states.
        size = 4 * parameters
        peak += size * states
        calls[Call(kind="update", bytes=size * (3 + 2 * states), largest=size)] += 1
    return Trace(batch=shape[0], calls=dict(calls), parameters=parameters, peak_bytes=peak)


class _CudaFunctions(TorchFunctionMode):
    """Autocast and fused attention of CUDA."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half = half
        # Autocast keeps the 16-bit copy of each weight for the whole step.
        self.copies: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.half and name in _AUTOCAST_OF:
            cast = self._to_half if _AUTOCAST_OF[name] == "half" else _to_full
            args, kwargs = map(cast, args), {key: cast(value) for key, value in kwargs.items()}
        return (_attention if func is functional.scaled_dot_product_attention else func)(*args, **kwargs)

    def _to_half(self, value: object) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._to_half(item) for item in value]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(torch.bfloat16)
        if value not in self.copies:
            self.copies[value] = value.to(torch.bfloat16)
        return self.copies[value]


def _to_full(value: object) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *more: Any, **options: Any) -> Tensor:
    if query.ndim != 4 or options.get("enable_gqa"):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, *more, **options)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    # Dropout and causality change no shape.
    return attend(query, key, value, attn_mask, torch.is_grad_enabled())[0]


class _Recorder(TorchDispatchMode):
    """Records the kernels that operations start, and the bytes of tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self.live = self.peak = 0
        self.held: set[int] = set()

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.held:
            size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
            self.held.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        given = {tensor.untyped_storage()._cdata for tensor in ins}
        is_view = not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in given for tensor in outs)
        for tensor in outs:
            self.hold(tensor)
        name = func.overloadpacket.__name__
        if outs and not is_view and not name.startswith(("empty", "new_empty", "detach", "lift")):
            self.calls.update(_calls(name, args, [*ins, *outs], outs[0].itemsize == 2))
        return out


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]


def _calls(name: str, args: Sequence[Any], tensors: Sequence[Tensor], half: bool) -> Iterator[Call]:
    """Yield the kernels of an operation; `tensors` are its arguments, then its results."""
    if name == "convolution":
        yield _convolution("", args[0], args[1], tensors[-1], args[8])
    elif name == "convolution_backward":
        for is_wanted, which in zip(args[10], ("-dgrad", "-wgrad"), strict=False):
            if is_wanted:
                yield _convolution(which, args[1], args[2], args[0], args[9])
    elif name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
        batch, (m, k), n = math.prod(left.shape[:-2]), left.shape[-2:], right.shape[-1]
        yield _call("matmul", tensors, flops=2.0 * batch * m * n * k, batch=batch, m=m, n=n, k=k, half=half)
    elif "scaled_dot_product" in name:
        # Two products, five for the gradient; the mask is read as it is stored.
        is_gradient = name.endswith("backward")
        query, key = args[1:3] if is_gradient else args[:2]
        flops = (10.0 if is_gradient else 4.0) * query.numel() * key.shape[2]
        yield _call("attention", tensors, flops=flops, half=half)
    else:
        yield _call("pool" if "pool" in name else _KIND_OF.get(name, "elementwise"), tensors, half=half)


def _convolution(which: str, images: Tensor, weight: Tensor, out: Tensor, groups: int) -> Call:
    """Return a convolution, or one of its gradients, as the products of an implicit GEMM."""
    taps, (filters, channels) = math.prod(weight.shape[2:]), (weight.shape[0] // groups, weight.shape[1])
    ins, outs = images.numel() // images.shape[1], out.numel() // out.shape[1]
    if out.shape[1] != weight.shape[0]:
        # A transposed convolution is the gradient of one whose images are the result.
        ins, outs = outs, ins
    sizes = {"": (outs, filters, channels * taps), "-dgrad": (ins, channels, filters * taps)}
    m, n, k = sizes.get(which, (filters, channels * taps, outs))
    kind = ("depthwise" if channels == 1 and groups > 1 else "conv") + which
    flops = 2.0 * groups * outs * filters * channels * taps
    half = out.itemsize == 2
    return _call(kind, (images, weight, out), flops=flops, batch=groups, m=m, n=n, k=k, half=half)


def _call(kind: str, tensors: Sequence[Tensor], **figures: Any) -> Call:
    # An expanded tensor is smaller than its shape.
    sizes = [min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors]
    return Call(kind=kind, bytes=sum(sizes), largest=max(sizes), **figures)


def tracer_of(work: "Work", *, inference: bool, allow_code: bool) -> Callable[[bool, int], Trace]:
    """Return a cached function of half precision and batch that traces a step of a job."""
    recipe, task = work.recipe, task_of(work.recipe)
    network, states = _network(work, allow_code), _optimizer_states(recipe)

    @functools.cache
    def traced(half: bool, batch: int) -> Trace:
        labels = task.targets(task.blank_labels(batch, work.classes))
        targets = torch.from_numpy(labels).to("meta")
        shape = (batch, recipe.channels, *recipe.image_sides)

        def loss(logits: Tensor) -> Tensor:
            return task.per_sample(logits, targets).mean()

        try:
            return trace(network, shape, loss, train=not inference, half=half, states=states)
        except Exception as error:  # a network may raise anything
            raise InputError(
                f"model = {recipe.model!r}: cannot be traced without data ({type(error).__name__}: "
                f"{first_line(error)}); flatout bench measures it on a machine with the GPU"
            ) from error

    return traced


def usual_precision(traces: Callable[[bool, int], Trace], batch: int, *, inference: bool) -> str:
    """Return the number format that a run chooses on GPUs since Ampere."""
    step = traces(False, batch)
    # A training step computes three times as much as its forward pass.
    operations = sum(call.flops * times for call, times in step.calls.items()) / (2 if inference else 6) / batch
    return "bf16" if operations >= BF16_OPERATIONS else "tf32"


def _network(work: "Work", allow_code: bool) -> nn.Module:
    recipe = work.recipe
    if not recipe.model.startswith("timm:"):
        return build_model(recipe, work.classes, allow_code=allow_code).to("meta")
    check_name(recipe.model)
    try:
        with quiet(), torch.device("meta"):
            network = create_timm(recipe, task_of(recipe).num_outputs(work.classes))
    except Exception as error:  # so may its constructor
        raise InputError(
            f"model = {recipe.model!r}: cannot be built for images of {recipe.image_sides} pixels ({first_line(error)})"
        ) from error
    freeze(network, recipe.freeze)
    set_dropout(network, recipe.dropout)
    return network


def _optimizer_states(recipe: Recipe) -> int:
    """Return how many numbers the optimizer keeps for each parameter, from a step on a small one."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build(recipe.optimizer, {"weight": parameter}, capturable=False)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in kept)
