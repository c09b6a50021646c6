"""Any torch module that torch can export, as a pure JAX function.

`torch.export` records what the module does with a batch of fixed size, as a graph of a few hundred ATen operations;
torchax knows a JAX lowering for each. Here the graph is walked once while JAX traces it, so XLA compiles the very model
that the torch engine runs. What torchax does otherwise than flatout needs is in `xla/lowerings.py`.

Shape letters: B batch.
"""

import operator
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.engine.xla.lowerings import OWN, Call, Counted, Keys, is_plain_pool, max_pool
from flatout.errors import InputError

aten = torch.ops.aten

Array = jax.Array | np.ndarray
Arrays = Mapping[str, Array]

# What runs in bfloat16 where that is asked for: the operations that matrix units compute.
_PRODUCTS = frozenset({aten.convolution, aten.addmm, aten.mm, aten.bmm, aten.baddbmm})


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
        results: Any = program.graph.output_node().args[0]
        self._results = [result.name for result in results]
        self.output_shapes = [tuple(r.meta["val"].shape) for r in results if r.name not in self._mutated]
        self._lowerings = {node: _lowering(node, name) for node in self._steps}

    def __call__(
        self,
        parameters: Arrays,
        buffers: Arrays,
        *inputs: Array,
        key: jax.Array | None = None,
        counted: Counted | None = None,
    ) -> tuple[Any, dict[str, Any]]:
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
        for place, given in zip(self._user_inputs, inputs, strict=True):
            values[str(place)] = given
        call = Call(Keys(key), counted, self._batch)
        with warnings.catch_warnings():
            # torch counts in 64 bits, JAX in 32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            self._walk(call, values)
        new_buffers = dict(buffers)
        outputs = []
        for name in self._results:
            if name in self._mutated:
                buffer = self._mutated[name]
                new_buffers[buffer] = values[name].astype(buffers[buffer].dtype)
            else:
                outputs.append(values[name])
        return (outputs[0] if len(outputs) == 1 else tuple(outputs)), new_buffers

    def _walk(self, call: Call, values: dict[str, Any]) -> None:
        """Compute every node of the graph; `values` holds the inputs by name and takes the results."""
        for node in self._steps:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            lowering = self._lowerings[node]
            if self._is_bf16 and _packet(node.target) in _PRODUCTS:
                args = [_narrowed(argument) for argument in args]
            values[node.name] = lowering(call, *args, **kwargs)


# --- lowerings ------------------------------------------------------------------------------------------------------


def _lowering(node: torch.fx.Node, name: str) -> Callable[..., Any]:
    """Return what computes a node of the graph: a function of (call, *arguments)."""
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
            f"model {name}: {_where(node)} uses {target}, which has no equivalent for --engine xla; "
            "use --engine torch, or another operation"
        )
    function = found.func
    if found.needs_env:
        return lambda call, *args, **kwargs: function(*args, env=call.keys, **kwargs)
    return lambda call, *args, **kwargs: function(*args, **kwargs)


def _narrowed(argument: Any) -> Any:
    is_wide = getattr(argument, "dtype", None) == jnp.float32
    return argument.astype(jnp.bfloat16) if is_wide else argument


# --- the graph ------------------------------------------------------------------------------------------------------


def _export(module: nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> torch.export.ExportedProgram:
    import_lowerings()
    from torchax.decompositions import DECOMPOSITIONS

    kept = set(OWN)
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
    torchax.device_module.is_available = lambda: False  # pyright: ignore[reportAttributeAccessIssue]


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


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def _to_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()
