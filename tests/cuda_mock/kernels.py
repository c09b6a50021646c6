"""Kernels for the mock: the CPU's, on the same memory.

Device memory of the mock is host memory, so a CPU kernel can compute what a CUDA kernel should have. It is queued on
the current stream behind the call that the mock counts: it runs at once, or when a slow device reaches it, or whenever
the graph that was being recorded is replayed. A recorded step thus computes real numbers, in the memory that torch's
allocator gave it.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_mock.device import preloaded
from tests.engine.test_batch_norm import GPUKernels

aten = torch.ops.aten


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *numbers: Any) -> Any:
    # cuDNN's reserved memory is the fourth result.
    return *aten.native_batch_norm(x, weight, bias, mean, var, *numbers), None


def _batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_var: Any, eps: float, _: Any
) -> Any:
    wanted = [True, True, True]
    return aten.native_batch_norm_backward(grad, x, weight, mean, var, saved_mean, saved_var, True, eps, wanted)


# Calls that only CUDA has.
ON_HOST: dict[Any, Callable[..., Any]] = {
    aten.cudnn_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    **{getattr(aten, name).default: getattr(GPUKernels, name) for name in vars(GPUKernels) if name.startswith("batch")},
}
# Calls without a kernel.
NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.record_stream.default,
}


class Kernels(TorchDispatchMode):
    """While entered, calls on CUDA tensors compute what they would on a GPU; leaving raises what a kernel raised."""

    def __init__(self) -> None:
        super().__init__()
        self._computations: dict[int, Callable[[], None]] = {}
        self._errors: list[Exception] = []
        self._library = preloaded()
        # The mock keeps the address of this callback.
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_long)(self._compute)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled, and importing torch's compiler to say so takes seconds."""
        return False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.synchronize()
        if self._errors:
            raise self._errors[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in NO_KERNEL:
            return result
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = all(tensor.untyped_storage().data_ptr() in memory for tensor in outputs)
        computes = not is_view or func._schema.is_mutable or func.namespace == "c10d"
        if computes and any(tensor.is_cuda for tensor in inputs + outputs):
            self._queue(func, _sources(args), _sources(kwargs), [_on_host(tensor) for tensor in outputs])
            if not all(tensor.is_cuda or tensor.is_pinned() for tensor in outputs):
                torch.cuda.current_stream().synchronize()
        return result

    def _queue(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        def compute() -> None:
            with torch.no_grad():
                result = ON_HOST.get(func, func)(*args, **kwargs)  # pyright: ignore[reportOptionalCall]
                if func.namespace == "c10d":
                    result[-1].wait()
                # A recorded tensor is in place already; cuDNN's reserved memory has no counterpart.
                for output, computed in zip(outputs, _tensors(result), strict=False):
                    if output.data_ptr() != computed.data_ptr():
                        output.copy_(computed)

        number = len(self._computations) + 1
        self._computations[number] = compute
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._library.mock_run(stream, self._callback, ctypes.c_long(number))

    def _compute(self, number: int) -> None:
        try:
            self._computations[number]()
        except Exception as error:  # ctypes would print it and go on
            self._errors.append(error)


# Recursions of their own: those of torch.utils._pytree take longer than the kernels.
def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [] if tree.is_meta else [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for branch in branches for tensor in _tensors(branch)]


def _sources(tree: Any) -> Any:
    """Return what a CPU kernel takes in place of arguments; pageable memory is read when a call is issued."""
    if isinstance(tree, torch.Tensor):
        return _on_host(tree) if tree.is_cuda or tree.is_pinned() else tree.clone()
    if isinstance(tree, dict):
        return {name: _sources(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(_sources, tree))
    return torch.device("cpu") if isinstance(tree, torch.device) else tree


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same memory, which it does not keep from being reused."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    block = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(block, dtype=tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
