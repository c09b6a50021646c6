"""A torch module, or a Keras model, as a pure JAX function.

`torch.export` records the module's operations for a batch of fixed size; each is computed by torchax's JAX lowering or
by ours: batch normalisation that ignores padding, max pooling, dropout from a key.

Shape letters: B batch, C channels, H height, W width.
"""

import functools
import operator
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.models.keras import KerasModule, counting
from flatout.utils.errors import InputError, first_line

aten = torch.ops.aten


class SampleMask(NamedTuple):
    """The real samples of a batch, and the number of its equal parts with separate batch statistics."""

    mask: jax.Array  # float32 [B], 0 for padding
    groups: int = 1


class Call:
    """What the operations of one call of a model share: the samples that count, and the key of random numbers."""

    def __init__(self, batch: int, mask: SampleMask | None, key: jax.Array | None) -> None:
        self.batch, self.mask, self._key = batch, mask, key

    def get_and_rotate_prng_key(self, generator: object = None) -> jax.Array:
        """Return a new key for each random operation; torchax's lowerings call this, too."""
        if self._key is None:
            raise TypeError("the module draws random numbers: pass a key")
        self._key, key = jax.random.split(self._key)
        return key


def _batch_norm(
    call: Call,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    """Normalise by the statistics of the real samples (Ioffe and Szegedy, arXiv 1502.03167), as the torch engine does.

    The results are those of `aten._native_batch_norm_legit_functional`, the last two the new running statistics.
    """
    assert training
    samples = call.mask if call.mask and len(x) == call.batch else SampleMask(jnp.ones(len(x), jnp.float32))
    groups = samples.groups

    def normalise(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
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
            # One value has no variance: a single sample at the end of an epoch is normalised by the running statistics.
            is_lone = n < 2
            mean, var = jnp.where(is_lone, running_mean, mean), jnp.where(is_lone, running_var, var)
            new_mean, new_var = jnp.where(is_lone, running_mean, new_mean), jnp.where(is_lone, running_var, new_var)
            centred = wide - _per_channel(mean, x.ndim)
        scale = jax.lax.rsqrt(var + eps)
        y = centred * _per_channel(scale if weight is None else scale * weight, x.ndim)
        y = y if bias is None else y + _per_channel(bias, x.ndim)
        return y.astype(x.dtype), new_mean, new_var

    if groups == 1:
        y, new_mean, new_var = normalise(x, samples.mask)
        return y, None, None, new_mean, new_var
    parts, masks = x.reshape(groups, -1, *x.shape[1:]), samples.mask.reshape(groups, -1)
    y, new_mean, new_var = jax.vmap(normalise)(parts, masks)
    return y.reshape(x.shape), None, None, new_mean.mean(0), new_var.mean(0)


def _per_channel(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape(1, -1, *[1] * (ndim - 2))


def max_pool(call: Call, x: jax.Array, *window: object) -> tuple[jax.Array, None]:
    """Return the maxima of 2 x 2 windows; as in torch, the first of equal values gets the gradient.

    XLA searches the windows again for the gradient; on CPUs, four slices are several times faster.
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
    return [x[..., row::2, column::2] for row in (0, 1) for column in (0, 1)]


def is_plain_pool(node: torch.fx.Node) -> bool:
    """Whether a max pooling has non-overlapping 2 x 2 windows, and its indices are unused."""
    x, kernel, *rest = cast(list[Any], node.args)
    stride, padding, dilation, ceil = (*rest, *([[], [0, 0], [1, 1], False][len(rest) :]))
    is_even = all(length % 2 == 0 for length in x.meta["val"].shape[-2:])
    return (
        list(kernel) == [2, 2] == list(stride or kernel)
        and not np.any(padding)
        and bool(np.all(np.equal(dilation, 1)))
        and (is_even or not ceil)
        and all(user.args[1] == 0 for user in node.users)
    )


def _native_dropout(call: Call, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, None]:
    if not train or p == 0:
        return x, None
    kept = jax.random.bernoulli(call.get_and_rotate_prng_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0), None


OWN: dict[object, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten.native_dropout: _native_dropout,
}


Array = jax.Array | np.ndarray
Arrays = Mapping[str, Array]

# The folders of torch and of this module.
_NOT_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
# The operations of matrix units, which run in bfloat16 if requested.
_PRODUCTS = frozenset({aten.convolution, aten.addmm, aten.mm, aten.bmm, aten.baddbmm})


class Function:
    """A torch module, in its present mode, as a pure function of JAX arrays, for batches like the examples `inputs`.

    Raises InputError if the module cannot be exported, with file and line, or uses an operation without a lowering.
    """

    def __init__(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], *, name: str, precision: str = "fp32"
    ) -> None:
        self._batch = len(inputs[0])
        self._is_bf16 = precision == "bf16"
        program = _export(module, inputs, name)
        names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
        signature = program.graph_signature
        every = dict(module.named_parameters(remove_duplicate=False))
        every |= dict(module.named_buffers(remove_duplicate=False))
        states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        # Shared weights have several names in the graph and one here.
        self._states = {place: names[id(every[target])] for place, target in states.items()}
        self._constants = {
            place: program.constants[target].detach().cpu().numpy()  # pyright: ignore[reportAttributeAccessIssue]
            for place, target in signature.inputs_to_lifted_tensor_constants.items()
        }
        self._user_inputs = list(signature.user_inputs)
        self._mutated = {output: names[id(every[t])] for output, t in signature.buffers_to_mutate.items()}
        self._steps = [node for node in program.graph.nodes if node.op == "call_function"]
        results: Any = program.graph.output_node().args[0]
        self._results = [result.name for result in results]
        self._lowerings = {node: _lowering(node, name) for node in self._steps}

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        *inputs: Array,
        key: jax.Array | None = None,
        mask: SampleMask | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Return the module's result, and its new buffers; `key` determines dropout, `mask` batch statistics."""
        values: dict[str, Any] = dict(self._constants)
        for place, name in self._states.items():
            values[place] = parameters[name] if name in parameters else buffers[name]
        for place, given in zip(self._user_inputs, inputs, strict=True):
            values[str(place)] = given
        call = Call(self._batch, mask, key)
        with warnings.catch_warnings():
            # torch counts in 64 bits, JAX in 32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            for node in self._steps:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
                if self._is_bf16 and _packet(node.target) in _PRODUCTS:
                    args = [a.astype(jnp.bfloat16) if getattr(a, "dtype", None) == jnp.float32 else a for a in args]
                values[node.name] = self._lowerings[node](call, *args, **kwargs)
        new = {buffer: values[name].astype(buffers[buffer].dtype) for name, buffer in self._mutated.items()}
        outputs = tuple(values[name] for name in self._results if name not in self._mutated)
        return (outputs[0] if len(outputs) == 1 else outputs), {**buffers, **new}


def _lowering(node: torch.fx.Node, name: str) -> Callable[..., Any]:
    """Return the function of (call, *arguments) that computes a node of the graph."""
    from torchax.ops.ops_registry import all_aten_ops

    target = node.target
    if target is operator.getitem:
        return lambda call, *args: operator.getitem(*args)
    if _packet(target) in OWN:
        return OWN[_packet(target)]
    if _packet(target) is aten.max_pool2d_with_indices and is_plain_pool(node):
        return max_pool
    found = all_aten_ops.get(target) or all_aten_ops.get(_packet(target))  # pyright: ignore[reportArgumentType]
    if found is None or not found.is_jax_function:
        raise InputError(
            f"model {name}: {_where(node)} uses {target}, which --engine xla does not support; "
            "use --engine torch, or another operation"
        )
    function, needs_keys = found.func, found.needs_env
    return lambda call, *args, **kwargs: function(*args, **kwargs, **({"env": call} if needs_keys else {}))


def _export(module: nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> torch.export.ExportedProgram:
    import_lowerings()
    from torchax.decompositions import DECOMPOSITIONS

    table = {target: how for target, how in DECOMPOSITIONS.items() if _packet(target) not in OWN}
    table = {**torch.export.default_decompositions(), **table}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # torch's warnings about exports help users less than the exception.
            program = torch.export.export(module, inputs, strict=False)
            return program.run_decompositions(table)
    except Exception as error:
        said = f"cannot be compiled by XLA: {first_line(error)}{_line_of(error)}"
        raise InputError(f"model {name}: {said}; use --engine torch") from error


def import_lowerings() -> None:
    """Import only the lowerings of torchax.

    Importing it also registers an accelerator "jax", whose missing streams break torch's optimizers, and switches off
    torch's fast attention. Both are undone, so that the torch engine works in the same process.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    import torchax.ops.jaten
    import torchax.ops.jtorch

    torch.backends.mha.set_fastpath_enabled(fastpath)
    torchax.device_module.is_available = lambda: False  # pyright: ignore[reportAttributeAccessIssue]


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error, for a message."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_NOT_USERS, "<"))]
    return f" (at {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _where(node: torch.fx.Node) -> str:
    """Return the layer of a node, for a message."""
    layers = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = layers[-1] if layers else ("", "")
    return f"layer {path} ({str(kind).rpartition('.')[2]})" if path else "its forward"


def _packet(target: object) -> Any:
    return getattr(target, "overloadpacket", target)


class KerasFunction:
    """A Keras model as a pure function of JAX arrays, random numbers included; see `Function`."""

    def __init__(
        self, module: KerasModule, inputs: tuple[torch.Tensor, ...], *, name: str, precision: str = "fp32"
    ) -> None:
        self._network, self._is_training = module.network(precision=precision), module.training
        shapes = {n: jax.ShapeDtypeStruct(t.shape, t.numpy().dtype) for n, t in module.state_dict().items()}
        images = jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)
        try:
            *_, losses = jax.eval_shape(self._call, shapes, images, jax.random.key(0))
        except Exception as error:  # user-defined layers may raise anything
            raise InputError(f"model {name}: fails under XLA: {type(error).__name__}: {first_line(error)}") from error
        if losses:
            raise InputError(f"model {name}: adds terms to the loss (add_loss, regularizers), which is not supported")

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        images_BCHW: jax.Array,
        *,
        key: jax.Array | None = None,
        mask: SampleMask | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Return the logits [B, K], and the new buffers."""
        if mask is not None and mask.groups > 1 and buffers:
            raise InputError("norm = 'per-device': Keras models normalise by the whole batch; use norm = 'global'")
        with counting(None if mask is None else mask.mask > 0):
            logits, others, _ = self._call({**parameters, **buffers}, images_BCHW, key)
        new = {n: others[n].astype(buffer.dtype) if n in others else buffer for n, buffer in buffers.items()}
        return logits, new

    def _call(
        self, values: Arrays, images_BCHW: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]:
        """Return logits, new values of the variables that are not trained, and the model's own losses."""
        model, trainable, others = self._network
        generators = others.count(None)
        # Keras requires every generator's state, even if unused.
        keys = jax.random.split(jax.random.key(0) if key is None else key, max(1, generators))
        seeds = iter(jax.random.key_data(keys))
        logits, after, losses = model.stateless_call(
            [values[name] for name in trainable],
            [next(seeds) if name is None else values[name] for name in others],
            images_BCHW.transpose(0, 2, 3, 1),
            training=self._is_training,
            return_losses=True,
        )
        return logits, {n: value for n, value in zip(others, after, strict=True) if n is not None}, losses
