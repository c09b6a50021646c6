"""Settle a torch device: threads, number formats, memory; and decide by size where arrays live."""

import contextlib
import ctypes
import os
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flatout.errors import InputError
from flatout.host import available_memory, physical_cores, processor_flags

# Share of the free memory that images may take; the rest is for the model, its activations and everybody else.
MEMORY_SHARE = 0.5

Place = Literal["device", "memory", "disk"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a device was settled: `precision` is what `auto` came to, `threads_before` what `restore` goes back to."""

    device: torch.device
    precision: str
    threads: int
    threads_before: int

    def restore(self) -> None:
        """Put back the threads and the arithmetic of numbers near zero, which belong to the whole process."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.threads_before)
            torch.set_flush_denormal(False)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the model runs."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def describe(self) -> list[str]:
        """Return sentences for the log."""
        words = {
            "fp32": "32-bit floats",
            "tf32": "32-bit floats, matrix products and convolutions in TF32",
            "bf16": "bfloat16 with 32-bit weights",
        }
        where = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.device.type == "cpu" else self._name()
        return [f"{self.device.type}: {where}, {words[self.precision]}"]

    def _name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "Apple GPU"


def prepare(device: torch.device, precision: str, *, ranks_here: int = 1) -> Setup:
    """Settle a device for training: once a process, before the first step.

    Raises:
        InputError: the hardware lacks the precision asked for; unsupported formats are emulated, many times slower.
    """
    available = precisions(device)
    if precision == "auto":
        precision = "tf32" if "tf32" in available else "fp32"
    if precision not in available:
        raise InputError(f"precision = {precision!r}: {device.type} here has only {', '.join(available)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        format = "ieee" if precision == "fp32" else "tf32"
        torch.backends.cuda.matmul.fp32_precision = format
        torch.backends.cudnn.conv.fp32_precision = format  # pyright: ignore[reportAttributeAccessIssue]
    threads = threads_before = torch.get_num_threads()
    if device.type == "cpu":
        threads = cpu_threads(ranks_here)
        torch.set_num_threads(threads)
        # Numbers near zero take a slow path in the processor, hundreds of cycles each.
        torch.set_flush_denormal(True)
        _keep_freed_memory()
    return Setup(device=device, precision=precision, threads=threads, threads_before=threads_before)


def precisions(device: torch.device) -> list[str]:
    """Return the number formats that the device computes in hardware."""
    found = ["fp32"]
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            found.append("tf32")
        if torch.cuda.is_bf16_supported(including_emulation=False):
            found.append("bf16")
    elif device.type == "cpu" and processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        found.append("bf16")
    return found


def cpu_threads(ranks_here: int = 1) -> int:
    """Return this rank's part of the cores it may use, without second threads of a core; OMP_NUM_THREADS overrides.

    torchrun sets that to 1 for every rank if the user has not: there, 1 means nothing.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    is_torchruns = wanted == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if wanted.isdigit() and int(wanted) > 0 and not is_torchruns:
        return int(wanted)
    return max(1, physical_cores() // ranks_here)


def _keep_freed_memory() -> None:
    """Have glibc keep freed blocks instead of handing them back to the kernel.

    The activations of a step are megabytes each and freed at its end. By default every one is mapped and zeroed page by
    page again in the next step, which took a seventh of the time of a small network's step.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def placement(nbytes: int, device: torch.device, wanted: str, *, ranks_here: int = 1) -> Place:
    """Return where `nbytes` of images live: the device if they fit, else memory, else they stay on disk.

    Every rank of a host holds them, so each may take its part of the host's memory.
    """
    if wanted in ("device", "memory", "disk"):
        return wanted  # pyright: ignore[reportReturnType]
    free = free_device_bytes(device) / (ranks_here if device.type == "cpu" else 1)
    if nbytes <= MEMORY_SHARE * free:
        return "device"
    if device.type != "cpu" and nbytes <= MEMORY_SHARE * available_memory() / ranks_here:
        return "memory"
    return "disk"


def allocate(
    count: int, like: torch.Tensor, device: torch.device, wanted: str, *, ranks_here: int = 1
) -> torch.Tensor | np.ndarray:
    """Return room for `count` rows shaped as those of `like` [B, ...]: on the device, in memory or in a mapped file.

    The file is float32 whatever `like` is; it is removed with the array, or when the process ends.

    Raises:
        InputError: neither memory nor the disk of temporary files has the room.
    """
    shape = (count, *like.shape[1:])
    where = placement(count * like[0].nbytes, device, wanted, ranks_here=ranks_here)
    if where == "device":
        return torch.empty(shape, dtype=like.dtype, device=device)
    if where == "memory":
        return np.empty(shape, np.float32)
    needed = 4 * int(np.prod(shape))
    handle, name = tempfile.mkstemp(prefix="flatout-features-")
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, needed)
        rows = np.memmap(name, np.float32, "r+" if os.fstat(handle).st_size else "w+", shape=shape)
    except OSError as error:
        Path(name).unlink()
        raise InputError(
            f"{Path(name).parent}: no room for {needed / 2**30:.1f} GiB of cached features ({error.strerror}); "
            "point TMPDIR to a larger disk"
        ) from None
    finally:
        os.close(handle)
    weakref.finalize(rows, Path(name).unlink, missing_ok=True)
    return rows


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of a device; the CPU's is the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory torch held on the device; None where that is the host's memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
