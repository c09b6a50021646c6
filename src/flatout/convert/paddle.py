"""Paddle's `.pdparams`: pickles of a dict from names to NumPy arrays.

Formats: `_build_saved_state_dict` in Paddle's `python/paddle/framework/io.py`, `_unpack_saved_dict` in `io_utils.py`.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.convert.foreign import NESTED_KEYS, Foreign, tensor_of
from flatout.convert.pickles import finished, load
from flatout.convert.problems import damaged
from flatout.errors import InputError

_WHAT = "Paddle parameters"
# Parameter names of static graphs beside those of the layers.
_NAMES = "StructuredToParameterName@@"
# Protocols 2 and 3 take parameters of over 4 GB in parts: name -> {"OriginShape": (...), "slices": [names]}.
_PARTS = "UnpackBigParamInfor@@"


def read(path: Path) -> Foreign:
    """Return the parameters.

    Raises:
        InputError: the file is damaged, or holds anything but arrays, text and numbers in dicts.
    """
    try:
        # Mapped, so that no length in the file makes anyone take more memory than the file has bytes.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            loaded = load(path, content)  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged(path, _WHAT, getattr(error, "strerror", None) or "it is empty") from None
    if isinstance(loaded, dict):
        nested = (loaded[key] for key in NESTED_KEYS if isinstance(loaded.get(key), dict))
        loaded = next(nested, loaded)
    try:
        arrays = _arrays(loaded)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, _WHAT, type(error).__name__) from None
    if not arrays:
        found = f"the keys {list(loaded)[:6]!r:.200}" if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
        raise InputError(f"{path}: holds no parameters (names with arrays), but {found}")
    return Foreign("paddle", {name.replace("/", "."): _tensor(array) for name, array in arrays.items()})


def _arrays(loaded: Any) -> dict[str, np.ndarray]:
    if not isinstance(loaded, dict):
        return {}
    # Tensors that are not parameters of the outermost dict are pairs of their name and the array.
    pairs = {name: v[1] if isinstance(v, tuple) and len(v) == 2 else v for name, v in loaded.items()}
    arrays = {str(name): v for name, value in pairs.items() if isinstance(v := finished(value), np.ndarray)}
    parts = loaded.get(_PARTS) or {}
    for name, about in parts.items():
        slices = [arrays.pop(part) for part in about["slices"]]
        arrays[str(name)] = np.concatenate([part.reshape(-1) for part in slices]).reshape(about["OriginShape"])
    return arrays


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor; Paddle's bfloat16 is NumPy's uint16."""
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.astype("<u2").view(np.int16).copy()).view(torch.bfloat16).reshape(array.shape)
    return tensor_of(array)
