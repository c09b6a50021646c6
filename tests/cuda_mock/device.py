"""The mock from Python: its counters, and processes that run with it.

A process must preload the mock before it starts, so scenarios are functions that `run` calls in a process of their own.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.world import serve_store
from tests.cuda_mock.build import ROOT, build

HOST = "127.0.0.1"

# A scenario that takes longer hangs.
SECONDS = 600


def environment(*, gpus: int = 1) -> dict[str, str]:
    """Return that of a process with the mock."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    library = build()
    own = {"LD_PRELOAD": str(library), "MOCK_GPUS": str(gpus), "PYTHONPATH": os.pathsep.join(paths)}
    # Where Triton looks for the driver.
    own["TRITON_LIBCUDA_PATH"] = str(library.parent)
    return {**os.environ, **own}


def run(module: str, name: str, *args: Any, ranks: int = 1) -> Any:
    """Return what a function of a module, whose last line calls `answer`, returns in a process with the mock.

    Arguments and result are those that JSON holds. Of several ranks, each with a device of its own, it is a list.
    """
    command = [sys.executable, "-W", "error::UserWarning", "-m", module, name, json.dumps(args)]
    shared = environment(gpus=ranks)
    store = serve_store(HOST, 0) if ranks > 1 else None
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks} if store else {}
        address = (
            {"MASTER_ADDR": HOST, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True} if store else {}
        )
        own = {key: str(value) for key, value in {**place, **address}.items()}
        processes.append(subprocess.Popen(command, env=shared | own, cwd=ROOT, stdout=-1, stderr=-1, text=True))
    answers = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=SECONDS)
            if process.returncode:
                raise AssertionError(f"{name}{args} failed with the mock:\n{errors[-4000:]}")
            answers.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return answers if ranks > 1 else answers[0]


def answer(module: dict[str, Any]) -> None:
    """Call the function that the command line names, and print what it returns."""
    name, args = sys.argv[1:]
    print(json.dumps(module[name](*json.loads(args))), flush=True)
    # Nothing is tidied up: a rank may have ended whose communicators another would wait for.
    os._exit(0)


def preloaded() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mock_counters.restype = ctypes.c_char_p
    return library


def counters() -> Counter[str]:
    """How often each kind of call was made, and the bytes of memory that are allocated now."""
    return Counter(json.loads(preloaded().mock_counters()))


def reset_counters() -> None:
    preloaded().mock_reset_counters()


@contextlib.contextmanager
def slow() -> Iterator[None]:
    """Work waits until the host synchronises, as behind a slow GPU."""
    preloaded().mock_be_slow(True)
    try:
        yield
    finally:
        preloaded().mock_be_slow(False)


def allocate(nbytes: int) -> None:
    """Allocate device memory past torch's allocator, as a library with kernels of its own may."""
    preloaded().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes))


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the current stream past torch's checks, as a library with kernels of its own may."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
    preloaded().cudaMemcpyAsync(*pointers, ctypes.c_size_t(to.nbytes), ctypes.c_int(4), stream)  # the default kind


def trace(path: Path | None) -> None:
    """Write each operation to a file from now on; None ends that."""
    preloaded().mock_trace(str(path or "").encode())
