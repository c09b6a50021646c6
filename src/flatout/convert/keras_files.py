"""Keras's files, read in a process of their own: on damaged ones, the HDF5 library may crash or never end."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from flatout.convert.foreign import Foreign, tensor_of
from flatout.errors import InputError

_CODE = "import sys; sys.path[:] = {path!r}; from flatout.convert.keras_arrays import main; main()"


def read(path: Path) -> Foreign:
    """Return the weights of a `.h5`, `.weights.h5` or `.keras` file.

    Raises:
        InputError: h5py is not installed, or the file is damaged, holds no weights, or refers to others.
    """
    content = read_apart(path)
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length])
    if "error" in found:
        raise InputError(found["error"])
    epsilons, channels_first, image = found["about"]
    tensors, position = {}, 8 + length
    for name, (kind, shape) in found["places"].items():
        array = np.frombuffer(content, kind, math.prod(shape), position).reshape(shape)
        tensors[name] = tensor_of(array)
        position += array.nbytes
    return Foreign("keras", tensors, epsilons, channels_first, image and tuple(image))


def read_apart(path: Path) -> bytes:
    """Return what `keras_arrays.main` writes."""
    words = [sys.executable, "-P", "-c", _CODE.format(path=sys.path), str(path)]
    # Threads of NumPy's would take address space, which is limited.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=False)
    if not done.returncode:
        return done.stdout
    if -done.returncode in (signal.SIGKILL, signal.SIGXCPU):
        reason = "HDF5 does not end on it"
    else:
        reason = "HDF5 crashes on it" if done.returncode < 0 else "it takes too much memory"
    raise InputError(f"{path}: cannot be read as a file of Keras ({reason}); it is damaged")
