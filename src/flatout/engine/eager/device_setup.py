"""Prepare a torch device for training, and decide by size where arrays are kept."""

import contextlib
import os
import tempfile
import weakref
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from flatout.distributed.environment import wanted_threads
from flatout.engine.eager.accelerator import Accelerator
from flatout.errors import InputError
from flatout.host import available_memory, physical_cores

# Share of the free memory that images may take; the rest is for the model, its activations and other programs.
MEMORY_SHARE = 0.5
PRECISIONS = {
    "fp32": "32-bit floats",
    "tf32": "32-bit floats, matrix products and convolutions in TF32",
    "bf16": "bfloat16 with 32-bit weights",
}
# bfloat16 is chosen where a step becomes faster by at least this factor.
BF16_WORTH = 1.2

Place = Literal["device", "memory", "disk"]


@dataclass(frozen=True, kw_only=True)
class DeviceSetup:
    """A device that is prepared for training: the number format, and the threads that compute."""

    accelerator: Accelerator
    precision: str
    threads: int

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the model runs."""
        return autocast(self.accelerator, self.precision)

    def describe(self) -> str:
        """Return a sentence for the log."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        where = threads if self.accelerator.is_host else self.accelerator.name
        return f"{self.accelerator.device.type}: {where}, {PRECISIONS[self.precision]}"


def prepare(
    accelerator: Accelerator, precision: str, undo: contextlib.ExitStack, *, ranks_here: int = 1
) -> DeviceSetup:
    """Prepare a device for training; `undo` restores the settings of the process.

    Raises:
        InputError: the hardware lacks the precision asked for.
    """
    precision = choose_precision(accelerator, precision)
    threads = cpu_threads(ranks_here) if accelerator.is_host else torch.get_num_threads()
    accelerator.adapt_process(undo, precision, threads)
    return DeviceSetup(accelerator=accelerator, precision=precision, threads=threads)


def choose_precision(accelerator: Accelerator, wanted: str) -> str:
    """Return the number format that a recipe's `precision` means on a device.

    Raises:
        InputError: the hardware lacks it; emulated formats would be many times slower.
    """
    available = accelerator.precisions()
    if wanted not in ("auto", *available):
        raise InputError(
            f"precision = {wanted!r}: {accelerator.device.type} here has only {', '.join(available)}; "
            "use --set precision=auto"
        )
    return available[0] if wanted == "auto" else wanted


def autocast(accelerator: Accelerator, precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a model computes in a number format."""
    if precision == "bf16":
        return torch.autocast(accelerator.device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def cpu_threads(ranks_here: int = 1) -> int:
    """Return the threads of one of several processes on this host: OMP_NUM_THREADS, or an equal share of the cores.

    Several processes take no more than their shares: with more threads than cores, those that wait for each other are
    several times slower.
    """
    share = max(1, physical_cores() // ranks_here)
    wanted = wanted_threads() or share
    return wanted if ranks_here == 1 else min(wanted, share)


def placement(nbytes: int, accelerator: Accelerator, wanted: str, *, ranks_here: int = 1) -> Place:
    """Return where `nbytes` of images are kept: on the device if they fit, else in memory, else on disk.

    Every rank of a host keeps its own copy, so each may use its share of the host's memory.
    """
    if wanted in ("device", "memory", "disk"):
        return wanted  # pyright: ignore[reportReturnType]
    free = accelerator.free_bytes() / (ranks_here if accelerator.is_host else 1)
    if nbytes <= MEMORY_SHARE * free:
        return "device"
    if not accelerator.is_host and nbytes <= MEMORY_SHARE * available_memory() / ranks_here:
        return "memory"
    return "disk"


def allocate(
    count: int, like: torch.Tensor, accelerator: Accelerator, wanted: str, *, ranks_here: int = 1
) -> torch.Tensor | np.ndarray:
    """Return room for `count` rows shaped as those of `like` [B, ...]: on the device, in memory or in a mapped file.

    The file is float32 whatever `like` is. It has no name, so nothing remains of it however the process ends.

    Raises:
        InputError: neither memory nor the disk of temporary files has enough space.
    """
    shape = (count, *like.shape[1:])
    where = placement(count * like[0].nbytes, accelerator, wanted, ranks_here=ranks_here)
    if where == "device":
        return torch.empty(shape, dtype=like.dtype, device=accelerator.device)
    if where == "memory":
        return np.empty(shape, np.float32)
    needed = 4 * int(np.prod(shape))
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the array
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, needed)
        os.ftruncate(file.fileno(), needed)
    except OSError as error:
        raise InputError(
            f"{tempfile.gettempdir()}: no space for {needed / 2**30:.1f} GiB of cached features ({error.strerror}); "
            "set TMPDIR to a larger disk"
        ) from None
    rows = np.memmap(f"/dev/fd/{file.fileno()}", np.float32, "r+", shape=shape)
    weakref.finalize(rows, file.close)
    return rows
