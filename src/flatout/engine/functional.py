"""Any torch module that torch can export, as a pure JAX function.

`torch.export` records what the module does with a batch of fixed size, as a graph of a few hundred ATen operations;
torchax knows a JAX lowering for each. Here the graph is walked once while JAX traces it, so XLA compiles the very model
that the torch engine runs. Four things are not left to torchax: batch normalisation, whose padding must enter no
statistics, random numbers, which come from a JAX key, bfloat16, and messages.

Shape letters: B batch, C channels.
"""

import functools
import operator
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.errors import InputError

aten = torch.ops.aten

Arrays = Mapping[str, jax.Array]

# What runs in bfloat16 where that is asked for: the operations that matrix units compute.
_PRODUCTS = frozenset({aten.convolution, aten.addmm, aten.mm, aten.bmm, aten.baddbmm})


class Counted(NamedTuple):
    """Which samples of a batch are real.

    Attributes:
        mask: float32 [B], 1 for a sample that counts and 0 for padding.
        groups: into how many parts the batch falls for batch statistics; 1 for those of the whole batch.
    """

    mask: jax.Array
    groups: int = 1


class Function:
    """A torch module as a pure function of JAX arrays, for batches of one size.

    Args:
        module: in training or in evaluation mode, as it is to be run; it is not changed.
        inputs: example inputs of the right shapes and types; their first dimension is the batch.
        name: what to call the module in messages.
        precision: "bf16" to compute products in bfloat16; anything else leaves numbers as they are.

    Attributes:
        parameters: names of its parameters, each once.
        buffers: names of its buffers.
        output_shapes: the shape of each array that it returns.

    Raises:
        InputError: the module cannot be exported, or uses an operation without a lowering; the message names file and
            line, or the operation and its layer.
    """

    def __init__(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], *, name: str, precision: str = "fp32"
    ) -> None:
        self.parameters = [n for n, _ in module.named_parameters()]
        self.buffers = [n for n, _ in module.named_buffers()]
        self._batch = len(inputs[0])
        self._is_bf16 = precision == "bf16"
        program = _export(module, inputs, name)
        names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
        signature = program.graph_signature
        every = dict(_with_duplicates(module))
        states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        # Shared weights have several names in the graph and one here.
        self._states = {place: names[id(every[target])] for place, target in states.items()}
        self._constants = {
            place: _to_numpy(program.constants[target])
            for place, target in signature.inputs_to_lifted_tensor_constants.items()
        }
        self._user_inputs = list(signature.user_inputs)
        self._mutated = {output: names[id(every[t])] for output, t in signature.buffers_to_mutate.items()}
        self._steps = [node for node in program.graph.nodes if node.op == "call_function"]
        results = program.graph.output_node().args[0]
        self._results = [_name(argument) for argument in results]
        self.output_shapes = [tuple(r.meta["val"].shape) for r in results if r.name not in self._mutated]
        self._lowerings = {node: _lowering(node, name) for node in self._steps}

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        *inputs: jax.Array,
        key: jax.Array | None = None,
        counted: Counted | None = None,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return what the module returns, and its buffers afterwards.

        Args:
            parameters: by name.
            buffers: by name; whole numbers may be int32.
            inputs: shaped as the examples.
            key: decides what dropout drops; None only for a module without randomness.
            counted: which samples enter batch statistics; None for all.
        """
        values: dict[str, Any] = dict(self._constants)
        for place, name in self._states.items():
            values[place] = parameters[name] if name in parameters else buffers[name]
        values.update(zip(self._user_inputs, inputs, strict=True))
        call = _Call(_Keys(key), counted, self._batch)
        with warnings.catch_warnings():
            # torch counts in 64 bits, JAX in 32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            self._walk(call, values)
        results = [values[name] for name in self._results]
        new_buffers = dict(buffers)
        outputs = []
        for name, result in zip(self._results, results, strict=True):
            if name in self._mutated:
                buffer = self._mutated[name]
                new_buffers[buffer] = result.astype(buffers[buffer].dtype)
            else:
                outputs.append(result)
        return (outputs[0] if len(outputs) == 1 else tuple(outputs)), new_buffers

    def _walk(self, call: "_Call", values: dict[str, Any]) -> None:
        """Compute every node of the graph; `values` holds the inputs by name and takes the results."""
        for node in self._steps:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            lowering = self._lowerings[node]
            if self._is_bf16 and _packet(node.target) in _PRODUCTS:
                args = [_narrowed(argument) for argument in args]
            values[node.name] = lowering(call, *args, **kwargs)


class _Keys:
    """Hands out a fresh key for each random operation, as torchax's lowerings ask for it."""

    def __init__(self, key: jax.Array | None) -> None:
        self._key = key

    def get_and_rotate_prng_key(self, generator: object = None) -> jax.Array:
        if self._key is None:
            raise TypeError("the module draws random numbers: pass a key")
        self._key, key = jax.random.split(self._key)
        return key


class _Call(NamedTuple):
    keys: _Keys
    counted: Counted | None
    batch: int


# --- lowerings ------------------------------------------------------------------------------------------------------


def _lowering(node: torch.fx.Node, name: str) -> Callable[..., Any]:
    """Return what computes a node of the graph: a function of (call, *arguments)."""
    from torchax.ops.ops_registry import all_aten_ops

    target = node.target
    if target is operator.getitem:
        return lambda call, *args: operator.getitem(*args)
    if _packet(target) in _OWN:
        return _OWN[_packet(target)]
    if _packet(target) is aten.max_pool2d_with_indices and _is_plain_pool(node):
        return _max_pool
    found = all_aten_ops.get(target) or all_aten_ops.get(_packet(target))  # pyright: ignore[reportArgumentType]
    if found is None or not found.is_jax_function:
        raise InputError(
            f"model {name}: {_where(node)} uses {target}, which has no equivalent for --engine xla; "
            "use --engine torch, or another operation"
        )
    function = found.func
    if found.needs_env:
        return lambda call, *args, **kwargs: function(*args, env=call.keys, **kwargs)
    return lambda call, *args, **kwargs: function(*args, **kwargs)


def _batch_norm(
    call: _Call,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    """Normalise by the samples that count (Ioffe and Szegedy, arXiv 1502.03167): as the torch engine does.

    Returns:
        y, None, None, and the running statistics afterwards, as `aten._native_batch_norm_legit_functional`.
    """
    assert training
    counted = call.counted if len(x) == call.batch else None
    mask = counted.mask if counted else jnp.ones(len(x), jnp.float32)
    groups = counted.groups if counted else 1

    def group(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        axes = (0, *range(2, x.ndim))
        wide, weights = x.astype(jnp.float32), mask.reshape(-1, *[1] * (x.ndim - 1))
        per_sample = x[0, 0].size
        n = mask.sum() * per_sample
        mean = (wide * weights).sum(axes) / jnp.maximum(n, 1)
        centred = wide - _per_channel(mean, x.ndim)
        var = (jnp.square(centred) * weights).sum(axes) / jnp.maximum(n, 1)
        new_mean = running_mean + momentum * (mean - running_mean)
        new_var = running_var + momentum * (var * (n / jnp.maximum(n - 1, 1)) - running_var)
        if per_sample == 1 or groups > 1:
            # One value has no variance. A lone sample at the end of an epoch goes by what the others left behind.
            is_lone = n < 2
            mean, var = jnp.where(is_lone, running_mean, mean), jnp.where(is_lone, running_var, var)
            new_mean, new_var = jnp.where(is_lone, running_mean, new_mean), jnp.where(is_lone, running_var, new_var)
            centred = wide - _per_channel(mean, x.ndim)
        scale = jax.lax.rsqrt(var + eps)
        y = centred * _per_channel(scale if weight is None else scale * weight, x.ndim)
        y = y if bias is None else y + _per_channel(bias, x.ndim)
        return y.astype(x.dtype), new_mean, new_var

    if groups == 1:
        y, new_mean, new_var = group(x, mask)
        return y, None, None, new_mean, new_var
    y, new_mean, new_var = jax.vmap(group)(x.reshape(groups, -1, *x.shape[1:]), mask.reshape(groups, -1))
    return y.reshape(x.shape), None, None, new_mean.mean(0), new_var.mean(0)


def _per_channel(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape(1, -1, *[1] * (ndim - 2))


def _max_pool(call: _Call, x: jax.Array, *window: Any) -> tuple[jax.Array, None]:
    """Return the maxima of 2 x 2 windows side by side; where equal, the first has the gradient, as in torch.

    XLA finds the gradient of a maximum by a search through windows; on CPUs four slices save a seventh of a step.
    """
    x = x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
    return jax.lax.platform_dependent(x, cpu=_max_of_slices, default=_max_of_windows), None


def _max_of_windows(x: jax.Array) -> jax.Array:
    shape = (*[1] * (x.ndim - 2), 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, shape, shape, "VALID")


@jax.custom_vjp
def _max_of_slices(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _corners(x))


def _max_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _max_of_slices(x)
    return y, (x, y)


def _max_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    x, y = kept
    is_open, parts = jnp.ones(y.shape, bool), []
    for corner in _corners(x):
        is_first = is_open & (corner == y)
        is_open &= ~is_first
        parts.append(jnp.where(is_first, grad, 0))
    rows = [jnp.stack(pair, -1).reshape(*y.shape[:-1], x.shape[-1]) for pair in (parts[:2], parts[2:])]
    return (jnp.stack(rows, -2).reshape(x.shape),)


_max_of_slices.defvjp(_max_forward, _max_backward)


def _corners(x: jax.Array) -> list[jax.Array]:
    """Return the four places of all 2 x 2 windows, row by row."""
    return [x[..., row::2, column::2] for row in (0, 1) for column in (0, 1)]


def _is_plain_pool(node: torch.fx.Node) -> bool:
    """Whether a max pooling has windows of 2 x 2 side by side, and nobody asks where the maxima were."""
    x, kernel, *rest = node.args
    stride, padding, dilation, ceil = (*rest, *([[], [0, 0], [1, 1], False][len(rest) :]))
    height, width = x.meta["val"].shape[-2:]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    is_even = height % 2 == width % 2 == 0
    return (
        list(kernel) == [2, 2]  # pyright: ignore[reportArgumentType]
        and list(stride or kernel) == [2, 2]  # pyright: ignore[reportArgumentType]
        and not any(np.ravel(padding))
        and all(np.ravel(dilation) == 1)
        and (is_even or not ceil)
        and all(user.args[1] == 0 for user in node.users)
    )


def _native_dropout(call: _Call, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, None]:
    if not train or p == 0:
        return x, None
    kept = jax.random.bernoulli(call.keys.get_and_rotate_prng_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0), None


_OWN: dict[object, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten.native_dropout: _native_dropout,
}


def _narrowed(argument: Any) -> Any:
    is_wide = getattr(argument, "dtype", None) == jnp.float32
    return argument.astype(jnp.bfloat16) if is_wide else argument


# --- the graph ------------------------------------------------------------------------------------------------------


def _export(module: nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> torch.export.ExportedProgram:
    import_lowerings()
    from torchax.decompositions import DECOMPOSITIONS

    kept = set(_OWN)
    table = {target: how for target, how in DECOMPOSITIONS.items() if _packet(target) not in kept}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What torch tells of an export is for its makers; the exception says what the user can mend.
            program = torch.export.export(module, inputs, strict=False)
            return program.run_decompositions().run_decompositions(table)
    except Exception as error:
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"model {name}: cannot be compiled by XLA: {what}{_line_of(error)}; --engine torch runs it as it is"
        ) from error


def import_lowerings() -> None:
    """Import torchax for its lowerings alone.

    Importing it also tells torch of an accelerator "jax", which torch's optimizers then ask for streams that it has
    not, and changes how torch computes attention. Both are undone, so that the torch engine works beside this one.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    import torchax.ops.jaten
    import torchax.ops.jtorch

    torch.backends.mha.set_fastpath_enabled(fastpath)
    torchax.device_module.is_available = lambda: False


def _line_of(error: BaseException) -> str:
    """Return where in the user's code an error arose, as words; empty where that is not known."""
    own = (_own_folder(torch.__file__), _own_folder(__file__), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f" (at {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _own_folder(file: str) -> str:
    return f"{Path(file).parent}{os.sep}"


def _where(node: torch.fx.Node) -> str:
    """Return the layer that a node comes from, and its line, as words."""
    layers = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = layers[-1] if layers else ("", "")
    layer = f"layer {path} ({str(kind).rpartition('.')[2]})" if path else "its forward"
    trace = (line.strip() for line in (node.meta.get("stack_trace") or "").splitlines())
    places = [line for line in trace if line.startswith("File ") and _own_folder(torch.__file__) not in line]
    return f"{layer}, {places[-1].partition(', in ')[0]}," if places else layer


def _with_duplicates(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _name(argument: Any) -> str:
    assert isinstance(argument, torch.fx.Node)
    return argument.name


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def _to_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()
