"""A CPU stand-in for CUDA graphs: a tape of the aten calls of one step, replayed into the same memory.

As a graph does, the tape leaves memory and random state as they were while it records, keeps Python numbers as
constants, and refuses what would wait for the device. On replay, random operations draw from the generator's current
state. What it cannot show: streams, the reuse of freed memory, and kernels that refuse to be captured.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flatout.engine.torch.accelerator import CPU, Accelerator

aten = torch.ops.aten
# Calls whose result, or the size of it, the host must know.
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Methods that read a CPU tensor's memory without an aten call.
READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__, torch.Tensor.item}


class HostSynchronisation(AssertionError):
    """A recorded step waits for the device."""


class _NoReading(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            raise HostSynchronisation(f"the step calls {func.__name__}")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records while it is entered; stands in for `torch.cuda.CUDAGraph` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._own: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        # Indexing has a result of known size unless an index is a mask. A tensor made of Python numbers is copied from
        # the host, and a constant besides.
        is_indexing = func.overloadpacket is aten.index and all(t.dtype != torch.bool for t in inputs[1:])
        if (WAITING & set(func.tags) and not is_indexing) or func.overloadpacket is aten.lift_fresh:
            raise HostSynchronisation(f"the step calls {func}")
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        outputs = [tensor.detach() for tensor in _tensors(result)]
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() not in self._before:
                self._own.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = all(tensor.untyped_storage().data_ptr() in known for tensor in outputs)
        if not is_view or func._schema.is_mutable or func.namespace == "c10d":
            # Lists may change after the call, tensors may not: they are the memory that is replayed into.
            self._calls.append((func, *tree_map(lambda leaf: leaf, (args, kwargs)), outputs))
        return result

    def record(self, step: Callable[[], None]) -> "Tape":
        """Record a step; afterwards the memory that it did not allocate is as before, and its own is worthless."""
        generator = torch.get_rng_state()
        with _NoReading(), self:
            step()
        torch.set_rng_state(generator)
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        for tensor in self._own.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return self

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                result[-1].wait()
            for recorded, computed in zip(outputs, _tensors(result), strict=True):
                if recorded.data_ptr() != computed.data_ptr():
                    recorded.copy_(computed)

    def reset(self) -> None:
        self._calls.clear()
        self._own.clear()


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results; those without memory (meta) are left out."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]


class FakeAccelerator(Accelerator):
    """A device that behaves as a GPU does for the engine, on the CPU; it counts the steps that it records."""

    can_capture = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.recorded = 0

    def precisions(self) -> list[str]:
        return ["fp32", "bf16"]

    def adapt_process(self, undo: contextlib.ExitStack, precision: str, threads: int) -> None:
        CPU(self.device).adapt_process(undo, precision, threads)

    def seed(self, seed: int) -> None:
        CPU(self.device).seed(seed)

    def has_room_for_graph(self) -> bool:
        return True

    def capture(self, step: Callable[[], None]) -> Any:
        tape = Tape().record(step)
        self.recorded += 1
        return tape
