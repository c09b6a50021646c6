"""Keras's files: `.h5` (whole models and weights), `.weights.h5` and `.keras`.

Layers are never made: of a model's description, only names, sizes and the epsilon of batch normalisation are taken. The
code of Lambda layers is never looked at.
"""

import io
import json
import resource
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from flatout.convert.hdf5 import Group, json_of, opened
from flatout.convert.problems import damaged
from flatout.errors import InputError

_WHAT = "a Keras model"
_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"
# A member of a zip file may be compressed, which weights hardly can be.
_MAX_RATIO = 20
_MAX_CONFIG_BYTES = 64 << 20
# In `.weights.h5`, the variables of a layer are numbered in the order in which it makes them.
_NORM = {4: ("gamma", "beta", "moving_mean", "moving_variance"), 2: ("moving_mean", "moving_variance")}
_NORM_OF_THREE = {True: ("gamma", "moving_mean", "moving_variance"), False: ("beta", "moving_mean", "moving_variance")}
_SKIPPED = ("optimizer", "optimizer_weights", "seed_generator", "metrics", "top_level_model_weights")


class Arrays(NamedTuple):
    """The weights of a file; see `foreign.Foreign`."""

    arrays: dict[str, np.ndarray]
    epsilons: dict[str, float]
    channels_first: bool
    image: tuple[int, int, int] | None


def main() -> None:
    """Write the weights of the file that the first argument names to standard output; see `keras_files.read`."""
    path = Path(sys.argv[1])
    size = path.stat().st_size
    limit(10 + size // 20_000_000, (2 << 30) + 8 * size)
    sys.stdout.buffer.writelines(encoded(path))
    sys.stdout.buffer.flush()


def limit(seconds: int, memory: int) -> None:
    """End this process when it has used so many seconds of CPU time; let it have no more memory, in bytes."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def encoded(path: Path) -> Iterator[bytes | memoryview]:
    """Yield the weights of a file, or the message of the error: the length of a JSON text, the text, the numbers."""
    arrays: dict[str, np.ndarray] = {}
    try:
        found = read(path)
        arrays = found.arrays
        places = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        about = json.dumps({"places": places, "about": found[1:]}).encode()
    except InputError as error:
        about = json.dumps({"error": str(error)}).encode()
    yield len(about).to_bytes(8, "little") + about
    yield from (np.ascontiguousarray(array).data for array in arrays.values())


def read(path: Path) -> Arrays:
    """Return the weights of a file of Keras.

    Raises:
        InputError: h5py is not installed, or the file is damaged, holds no weights, or refers to others.
    """
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    return _read_keras(path) if is_zip or path.suffix == ".keras" else _read_h5(path)


def _read_h5(path: Path) -> Arrays:
    """Return the weights of a `.h5` file, of either kind.

    Raises:
        InputError: h5py is not installed, or the file is damaged, holds no weights, or refers to others.
    """
    with opened(path) as file:
        config = file.attribute("model_config")
        about = _About(json_of(path, config, "model_config") if isinstance(config, str) else None)
        weights = file.get("model_weights") or file
        assert isinstance(weights, Group)
        names = weights.texts("layer_names")
        return _arrays(path, dict(_legacy(weights, names)) if names else dict(_numbered(file, about)), about)


def _read_keras(path: Path) -> Arrays:
    """Return the weights of a `.keras` file: a zip file with the description and a `.weights.h5`.

    Raises:
        InputError: as `read`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            config = _member(path, archive, _CONFIG, _MAX_CONFIG_BYTES)
            weights = _member(path, archive, _WEIGHTS, _MAX_RATIO * path.stat().st_size)
    except InputError:
        raise
    except Exception as error:  # zipfile and its decompressors raise errors of many types
        raise damaged(path, _WHAT, type(error).__name__) from None
    about = _About(json_of(path, config.read(), _CONFIG))
    with opened(path, weights) as file:
        return _arrays(path, dict(_numbered(file, about)), about)


def _member(path: Path, archive: zipfile.ZipFile, name: str, most: int) -> IO[bytes]:
    info = archive.getinfo(name)
    if info.file_size > min(most, _MAX_RATIO * path.stat().st_size):
        raise InputError(f"{path}: {name} unpacks to {info.file_size:,} bytes, too many for this file")
    with archive.open(info) as file:
        return io.BytesIO(file.read(info.file_size))


class _About:
    """What is taken from a model's description: the order of layers, epsilons, and where channels are."""

    def __init__(self, config: Any) -> None:
        self.order: dict[str, int] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.channels_first = False
        self.image: tuple[int, int, int] | None = None
        self._collect(config)

    def _collect(self, value: Any, depth: int = 0) -> None:
        if depth > 200:
            return
        if isinstance(value, list):
            for item in value:
                self._collect(item, depth + 1)
        elif isinstance(value, dict):
            config = value.get("config")
            if isinstance(config, dict) and isinstance(config.get("name"), str):
                self.order.setdefault(config["name"], len(self.order))
                self.configs[config["name"]] = config
                self.channels_first |= config.get("data_format") == "channels_first"
                shape = config.get("batch_shape", config.get("batch_input_shape"))
                if self.image is None and isinstance(shape, list) and len(shape) == 4:
                    height, width, channels = shape[1:]
                    if all(isinstance(size, int) and 0 < size < 100_000 for size in shape[1:]):
                        self.image = height, width, channels
            for item in value.values():
                self._collect(item, depth + 1)

    @property
    def epsilons(self) -> dict[str, float]:
        found = {name: config.get("epsilon") for name, config in self.configs.items()}
        return {name: float(e) for name, e in found.items() if isinstance(e, int | float) and 0 <= e < 1}


def _arrays(path: Path, arrays: dict[str, np.ndarray], about: _About) -> Arrays:
    if not arrays:
        raise InputError(f"{path}: holds no weights of layers")
    image = about.image
    if image and about.channels_first:
        image = image[1], image[2], image[0]
    return Arrays(arrays, about.epsilons, about.channels_first, image)


def _legacy(weights: Group, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights that the attributes `layer_names` and `weight_names` list, in that order."""
    for name in names:
        layer = weights.get(name)
        if not isinstance(layer, Group):
            raise damaged(weights.path, _WHAT, f"the layer {name!r:.80} is missing")
        for weight in layer.texts("weight_names"):
            array = layer.get(weight)
            if not isinstance(array, np.ndarray):
                raise damaged(weights.path, _WHAT, f"the weight {weight!r:.80} is missing")
            own, _, role = weight.partition(":")[0].rpartition("/")
            if "seed_generator" not in weight:
                yield f"{own}/{role}".strip("/").replace("/", "."), array


def _numbered(file: Group, about: _About) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a `.weights.h5`; in the order of the description if there is one."""
    layers = list(_layers(file))
    layers.sort(key=lambda layer: about.order.get(layer[0].rpartition(".")[2], len(about.order)))
    for name, arrays in layers:
        shapes = [array.ndim for array in arrays]
        last = name.rpartition(".")[2]
        config = about.configs.get(last, {})
        if len(arrays) in (2, 3, 4) and set(shapes) == {1}:
            roles = _NORM_OF_THREE[bool(config.get("scale"))] if len(arrays) == 3 else _NORM[len(arrays)]
        elif len(arrays) <= 2 and shapes[0] >= 2:
            roles = ("kernel", "bias")
        else:
            roles = tuple(f"variable_{i}" for i in range(len(arrays)))
        yield from ((f"{name}.{role}", array) for role, array in zip(roles, arrays, strict=False))


def _layers(group: Group) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield name and variables of each layer: the numbers in the groups called `vars`."""
    for name in group.names():
        if name in _SKIPPED:
            continue
        inner = group.get(name)
        if not isinstance(inner, Group):
            continue
        if name == "vars":
            arrays = [array for key in inner.names() if isinstance(array := inner.get(key), np.ndarray)]
            parts = [part for part in group.name.split("/") if part not in ("layers", "_layer_checkpoint_dependencies")]
            # Recent versions of Keras write the name of the layer, too; attributes of a user's class have better ones.
            is_numbered = group.name.rpartition("/")[0].rpartition("/")[2] == "layers"
            own = inner.attribute("name") if is_numbered else None
            last = own if isinstance(own, str) and own else (parts or ["layer"])[-1]
            if arrays:
                yield ".".join([*parts[:-1], last.replace(".", "_")]), arrays
        else:
            yield from _layers(inner)
