"""What a training run leaves in the process that called it: nothing, also where it failed."""

import ctypes
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.utils.errors import InputError

LARGE = 64 << 20


def is_mapped() -> bool:
    """Return whether glibc maps a large block by itself, as it does unless told otherwise."""

    class Counts(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())

    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.mallinfo2.restype = [ctypes.c_void_p], Counts
    before = libc.mallinfo2().hblks
    block = libc.malloc(LARGE)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before


def state() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "NumPy's random state": np.random.get_state()[1].tolist(),  # pyright: ignore
        "Python's random state": random.getstate(),
        "threads": torch.get_num_threads(),
        "denormal numbers": torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item(),
        "cuDNN's choice of algorithms": cudnn.benchmark,
        # Torch's compiler reads these; after the newer `fp32_precision`, they raise errors.
        "formats": (torch.get_float32_matmul_precision(), cudnn.allow_tf32),
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "allocator": not sys.platform.startswith("linux") or is_mapped(),
        "variables": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        "folder": Path.cwd(),
    }


@pytest.fixture(autouse=True)
def allocator_as_usual() -> None:
    """Undo what an engine of another test, not closed, has set; see `accelerator._keep_freed_memory`."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 65536)
        libc.mallopt(-1, 128 * 1024)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def data(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8), rng.integers(0, 3, count)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.shape[0] == 16:
            raise RuntimeError("the model fails in training")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("devices", ["cpu", "auto"])
def test_fit_leaves_the_process_as_it_was(devices: str, threads: None, tmp_path: Path) -> None:
    model, samples = net(), data()
    before = state()
    run = flatout.fit(model, samples, out=tmp_path / "run", epochs=2, batch_size=16, devices=devices, quiet=True)
    run.evaluate(samples)
    run.predict(samples[0][:2])
    after = state()
    assert {name: value for name, value in after.items() if value != before[name]} == {}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("model", "changes", "error"),
    [(Fails(), {}, RuntimeError), (net(), {"precision": "tf32"}, InputError)],
    ids=["in a step", "before the first"],
)
def test_errors_leave_the_process_as_it_was(
    model: nn.Module, changes: dict[str, Any], error: type[Exception], threads: None, tmp_path: Path
) -> None:
    samples, before = data(), state()
    with pytest.raises(error):
        flatout.fit(model, samples, out=tmp_path / "r", epochs=1, batch_size=16, devices="cpu", quiet=True, **changes)
    assert {name: value for name, value in state().items() if value != before[name]} == {}
