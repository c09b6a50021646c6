"""Device-specific parts of the torch engine: its other modules never compare `device.type`."""

import contextlib
import ctypes
import math
import os
import resource
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.data.batches import EVALUATION_BATCH
from flatout.engine.devices import choose_precision, cpu_threads
from flatout.utils.errors import InputError
from flatout.utils.host import available_memory, processor_flags

if TYPE_CHECKING:
    from torch import nn

    from flatout.config import Recipe

# Share of the free memory for images; the rest is for the model, its activations and other programs.
MEMORY_SHARE = 0.5
PRECISIONS = {
    "fp32": "32-bit floats",
    "tf32": "32-bit floats, matrix products and convolutions in TF32",
    "bf16": "bfloat16 with 32-bit weights",
}
# bfloat16 is chosen if it makes a step faster by at least this factor.
BF16_WORTH = 1.2
# From this number of multiply-adds per image on, a GPU computes in bfloat16.
BF16_OPERATIONS = 10_000_000
# From this number of multiply-adds in a run on, its step is tuned: about five minutes of ResNet-50 on an H100, of which
# tuned steps save a minute and a half (benchmarks/results/gpu.json). For a run of given length, its seconds.
TUNED_OPERATIONS, TUNED_SECONDS = 5e15, 600.0
# Values of ONEDNN_MAX_CPU_ISA with which torch's CPU kernels convert bfloat16 instead of computing in it.
_LIMITS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}


class Accelerator:
    """A device of any kind, such as an Apple GPU; subclasses are specific to CPUs and to NVIDIA's GPUs."""

    # It uses the cores and memory of the host; otherwise operations are queued, and reading a result synchronises.
    is_host = False
    has_memory = False  # its own, with asynchronous copies from pinned host memory
    can_capture = False  # steps, as a graph
    can_compile = False  # models, by torch's compiler
    has_batch_norm = False  # torch has the kernels of its SyncBatchNorm
    evaluation_batch = EVALUATION_BATCH  # the largest
    precision, threads, ranks_here = "fp32", 1, 1  # number format, compute threads, ranks of the host; after `prepare`
    is_tuned = False  # likewise: libraries may choose their algorithms by measuring them

    def __init__(self, device: torch.device) -> None:
        self.device, self._earlier_peak = device, 0
        self.wide_float = torch.float32 if device.type == "mps" else torch.float64  # for long sums

    @property
    def name(self) -> str:
        """The name of the hardware, for the log."""
        return self.device.type.upper()

    def prepare(self, precision: str, undo: contextlib.ExitStack, *, ranks_here: int, is_tuned: bool) -> None:
        """Prepare for training in a recipe's `precision`; `undo` restores the settings of the process."""
        self.precision = self.choose_precision(precision)
        self.threads = cpu_threads(ranks_here) if self.is_host else torch.get_num_threads()
        self.ranks_here, self.is_tuned = ranks_here, is_tuned
        self.adapt_process(undo)

    def choose_precision(self, wanted: str) -> str:
        """Resolve a recipe's `precision` to a number format; one that must be emulated is refused."""
        return choose_precision(wanted, self.precisions(), f"{self.device.type} here")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def describe(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.device.type}: {threads if self.is_host else self.name}, {PRECISIONS[self.precision]}"

    @property
    def raises_out_of_memory(self) -> bool:
        """Otherwise the system kills the process."""
        return self.has_memory

    def precisions(self) -> list[str]:
        """Those that the hardware supports, the default first."""
        return ["fp32"]

    def adapt_process(self, undo: contextlib.ExitStack) -> None:
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        if not self.is_host:
            module = torch.get_device_module(self.device)
            undo.callback(module.set_rng_state, module.get_rng_state())

    def seed(self, seed: int) -> None:
        """Seed torch's default generators of the host and of this device only."""
        torch.default_generator.manual_seed(seed)
        if not self.is_host:
            torch.get_device_module(self.device).manual_seed(seed)

    def pinned(self, array: np.ndarray) -> Tensor:
        """Return a small array as a tensor of the host, from which it can be copied to the device asynchronously."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.has_memory else tensor

    def free_bytes(self) -> int:
        if not self.has_memory:
            return available_memory()
        # What torch keeps of freed tensors is free.
        kept = torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)
        return torch.accelerator.get_memory_info(self.device)[0] + kept

    def placement(self, nbytes: int, wanted: str) -> str:
        """Choose where to keep `nbytes` of images: on the `device` if they fit, else in `memory`, else on `disk`.

        Every rank of a host keeps its own copy, so each may use its share of the host's memory.
        """
        if wanted != "auto":
            return wanted
        if nbytes <= MEMORY_SHARE * self.free_bytes() / (self.ranks_here if self.is_host else 1):
            return "device"
        fits = not self.is_host and nbytes <= MEMORY_SHARE * available_memory() / self.ranks_here
        return "memory" if fits else "disk"

    def allocate(self, count: int, like: Tensor, wanted: str) -> Tensor | np.ndarray:
        """Allocate `count` rows shaped like those of `like` [B, ...], where `placement` chooses; arrays are float32.

        The file on disk is unnamed, so nothing remains of it however the process ends.
        """
        shape = (count, *like.shape[1:])
        where = self.placement(count * like[0].nbytes, wanted)
        if where == "device":
            return torch.empty(shape, dtype=like.dtype, device=self.device)
        if where == "memory":
            return np.empty(shape, np.float32)
        needed = 4 * math.prod(shape)
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the array
        try:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            raise InputError(
                f"{tempfile.gettempdir()}: no space for {needed / 2**30:.1f} GiB of cached features "
                f"({error.strerror}); set TMPDIR to a larger disk"
            ) from None
        # By its path, as it is read past the map.
        rows = np.memmap(f"/dev/fd/{file.fileno()}", np.float32, "r+", shape=shape)
        weakref.finalize(rows, file.close)
        return rows

    def reset_peak(self, *, keep: bool = False) -> None:
        """Measure from here on; `peak_bytes` may keep the peak so far."""
        if self.has_memory:
            self._earlier_peak = (self.peak_bytes() or 0) if keep else 0
            torch.accelerator.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        if not self.has_memory:
            return None
        return max(self._earlier_peak, torch.accelerator.max_memory_allocated(self.device))

    def empty_cache(self) -> None:
        if self.has_memory:
            torch.accelerator.empty_cache()

    def has_room_for_graph(self) -> bool:
        """Whether a graph can keep the memory of a step, the peak since its reset, beside that of eager steps."""
        held = torch.accelerator.memory_allocated(self.device)
        return 2 * (torch.accelerator.max_memory_allocated(self.device) - held) <= self.free_bytes()

    def buffers(self, count: int) -> "Buffers":
        """Return a function that provides empty buffers of a shape and type, the last `count` of which are in use."""
        return lambda shape, dtype: HostBuffer(torch.empty(shape, dtype=dtype), self.device)

    def refusing_to_wait(self) -> contextlib.AbstractContextManager[object]:
        """Inside, waiting for the device raises RuntimeError, as in a capture, but without harm."""
        return contextlib.nullcontext()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the operations of a step without running them. Graphs of one accelerator share their memory."""
        raise NotImplementedError


class HostBuffer:
    """Memory of the host, `tensor`, from which batches are copied to a device."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor, self._device = tensor, device

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Tensor]:
        """Provide a copy on the device for the work that is queued inside the block."""
        yield self.tensor.to(self._device)


Buffers = Callable[[tuple[int, ...], torch.dtype], HostBuffer]


class PinnedBuffer(HostBuffer):
    """Pinned memory and its copy on a GPU, made on a stream of copies beside the steps."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(tensor, stream.device)
        self._stream, self._copied, self._used = stream, torch.cuda.Event(), torch.cuda.Event()
        self._copy: Tensor | None = None

    def wait(self) -> None:
        """Wait for the last copy: otherwise the host would run ahead of a slow GPU, and pin more and more memory."""
        self._copied.synchronize()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Tensor]:
        compute = torch.cuda.current_stream()
        if self._copy is None:
            self._copy = torch.empty_like(self.tensor, device=self._device)
            self._used.record(compute)  # by tensors that had this memory before
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self.tensor, non_blocking=True)
        self._copied.record(self._stream)
        compute.wait_event(self._copied)
        yield self._copy
        self._used.record(compute)


class CPU(Accelerator):
    """The cores of the host."""

    is_host = True

    @property
    def raises_out_of_memory(self) -> bool:
        """Only if the address space is limited (`ulimit -v`)."""
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY

    def precisions(self) -> list[str]:
        is_limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _LIMITS_WITHOUT_BF16
        has_bf16 = processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"}
        return ["fp32", "bf16"] if has_bf16 and not is_limited else ["fp32"]

    def adapt_process(self, undo: contextlib.ExitStack) -> None:
        super().adapt_process(undo)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self.threads)
        # Arithmetic on denormal numbers takes hundreds of cycles. A product tests whether they are flushed.
        is_flushed = not torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item()
        undo.callback(torch.set_flush_denormal, is_flushed)
        torch.set_flush_denormal(True)
        _keep_freed_memory(undo)


class CUDA(Accelerator):
    """An NVIDIA GPU."""

    has_memory = can_capture = can_compile = has_batch_norm = True
    # Smaller ones take as long as the launches of their kernels.
    evaluation_batch = 2048
    _pool: Any = None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def precisions(self) -> list[str]:
        has_tf32 = torch.cuda.get_device_capability(self.device) >= (8, 0)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ["tf32"] * has_tf32 + ["fp32"] + ["bf16"] * has_bf16

    def adapt_process(self, undo: contextlib.ExitStack) -> None:
        # All work is queued on a separate stream: the default stream cannot be captured, and autograd accumulates a
        # parameter's gradient on the stream that was current when it first saw the parameter.
        undo.enter_context(torch.cuda.device(self.device))
        undo.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        super().adapt_process(undo)
        cudnn, has_tf32 = torch.backends.cudnn, self.precision != "fp32"
        # Without measuring, cuDNN's choice is 3 % slower for fashion-cnn on an H100, but a second earlier.
        for setting, wanted in (("benchmark", self.is_tuned), ("allow_tf32", has_tf32)):
            undo.callback(setattr, cudnn, setting, getattr(cudnn, setting))
            setattr(cudnn, setting, wanted)
        # Not `fp32_precision`, after which torch's compiler cannot read this setting.
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if has_tf32 else "highest")

    def buffers(self, count: int) -> Buffers:
        stream, ring = torch.cuda.Stream(self.device), deque[PinnedBuffer](maxlen=count)

        def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> PinnedBuffer:
            if len(ring) < count:
                ring.append(PinnedBuffer(torch.empty(shape, dtype=dtype, pin_memory=True), stream))
            else:
                ring.rotate(-1)
                ring[-1].wait()
            return ring[-1]

        return buffer

    @contextlib.contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # The prefetching thread may allocate pinned memory during capture, so only this thread's calls are checked.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                step()
        except BaseException:
            # Up to torch 2.11 the generator stays in the state of a capture, and every later dropout raises an error.
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the `Accelerator` of a torch device."""
    return {"cpu": CPU, "cuda": CUDA}.get(device.type, Accelerator)(device)


def _keep_freed_memory(undo: contextlib.ExitStack) -> None:
    """Make glibc keep freed blocks: mapping and zeroing activations again takes a seventh of a small network's step."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        undo.callback(libc.malloc_trim, 0)
        # M_MMAP_MAX and M_TRIM_THRESHOLD. glibc cannot report the previous values: its defaults are restored.
        for option, value, default in ((-4, 0, 65536), (-1, 2**31 - 1, 128 * 1024)):
            undo.callback(libc.mallopt, option, default)
            libc.mallopt(option, value)


def precision_of_gpu(formats: Sequence[str], model: "nn.Module", recipe: "Recipe") -> tuple[str, int] | None:
    """Return the number format for a model on a GPU with TF32, and the model's multiply-adds per image; else None.

    bfloat16 is faster if there is much to compute, but adds conversions to small networks, whose kernels take as long
    as their launches.
    """
    if formats[0] != "tf32" or "bf16" not in formats:
        return None
    operations = multiply_adds(model, recipe.image_sides, recipe.channels)
    return "bf16" if operations >= BF16_OPERATIONS else "tf32", operations


def is_worth_tuning(operations: int, images: int, seconds: float | None) -> bool:
    """Return whether a run of `images`, counted in every epoch, or of `seconds` gains more by tuning than it takes.

    `operations` are the multiply-adds of its network per image.
    """
    if seconds is not None:
        return operations >= BF16_OPERATIONS and seconds >= TUNED_SECONDS
    return operations * images >= TUNED_OPERATIONS


def multiply_adds(model: "nn.Module", image_sides: tuple[int, int], channels: int) -> int:
    """Return the multiply-adds of convolutions and matrix products for one image, on the host."""
    was_training = model.training
    with _MultiplyAdds() as counter, torch.no_grad():
        model.eval()(torch.zeros(1, channels, *image_sides))
    model.train(was_training)
    return counter.found


class _MultiplyAdds(TorchFunctionMode):
    """Counts what `torch.utils.flop_counter` does, which imports torch's compiler: seconds of every start."""

    PRODUCTS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
    found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, given = func(*args, **kwargs), [*args, *kwargs.values()]
        if func in (torch.conv1d, torch.conv2d, torch.conv3d, functional.linear):
            self.found += result.numel() * given[1][0].numel()
        elif func in self.PRODUCTS:
            self.found += result.numel() * given[0].shape[-1]
        elif func is functional.scaled_dot_product_attention:
            query, key = given[:2]
            self.found += key.shape[-2] * (query.numel() + result.numel())
        return result
