"""Readers of weights in the formats of torch, Paddle and Keras; TensorFlow's is `tensorflow`.

Nothing read here can execute code: torch files are read with `weights_only=True`, Paddle's pickles may only refer to
NumPy's constructors, and Keras layers are never built from their description, so Lambda layers are never run.
"""

import argparse
import io
import json
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, Literal

import numpy as np
import torch

from flatout.models.convert import tensorflow
from flatout.models.weights import Tensors, damaged, natural, read_weights
from flatout.utils.errors import InputError, one_line

_IN_A_FOLDER = (
    *("weights.safetensors", "model.safetensors", "pytorch_model.bin"),
    *("variables/variables.index", "model.weights.h5"),
)
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# The start of torch's files that are not zip files: a pickle of this number.
_TORCH_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
# Common keys of a model's weights in larger checkpoints.
_NESTED_KEYS = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "params")


@dataclass(frozen=True)
class SourceCheckpoint:
    """The weights of a file."""

    framework: Literal["torch", "paddle", "keras"]  # determines the layout; keras includes TensorFlow
    tensors: dict[str, torch.Tensor]  # by name, `layer.kernel`, in the order of the layers if the file has one
    epsilons: dict[str, float] = field(default_factory=dict)  # of batch normalisation, by layer, if the file has them
    channels_last: bool = False  # whether flattened feature maps were; Keras can be set to [C, H, W]
    image: tuple[int, int, int] | None = None  # height, width and channels, if the file has them


# ---- finding the file and its reader ---------------------------------------------------------------------------------


def find_file(path: Path) -> Path:
    """Find a file of weights: the path itself, a file in a folder, or the `.index` of a checkpoint's prefix."""
    if path.is_file():
        prefix, is_data, _ = path.name.partition(".data-")
        return path.with_name(f"{prefix}.index") if is_data else path
    index = Path(f"{path}.index")
    if index.is_file():
        return index
    if not path.is_dir():
        raise InputError(f"--weights {path}: there is no such file or folder")
    if found := next((path / name for name in _IN_A_FOLDER if (path / name).is_file()), None):
        return found
    checkpoints = sorted(path.glob("*.index"))
    if len(checkpoints) != 1:
        what = f"holds none of {', '.join(_IN_A_FOLDER)}, and {len(checkpoints)} checkpoints (*.index)"
        raise InputError(f"{path}: the folder {what}; name the file")
    return checkpoints[0]


def read_file(path: Path) -> SourceCheckpoint:
    """Read the weights of a file in any format, recognised by its first or last bytes.

    Raises:
        InputError: it cannot be read, is damaged, or would execute code.
    """
    if path.suffix in (".pdiparams", ".pdmodel"):
        raise InputError(f"{path}: is part of a program for inference; save paddle's model.state_dict() as .pdparams")
    try:
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(max(0, file.seek(0, 2) - 8))
            end = file.read(8)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        tensors = read_weights(path)[0]
        # The format has no order.
        return SourceCheckpoint("torch", {name: tensors[name] for name in sorted(tensors, key=natural)})
    if path.suffix == ".index" or end == tensorflow.MAGIC:
        return SourceCheckpoint("keras", tensorflow.read_variables(path), channels_last=True)
    if start.startswith(_HDF5) or path.suffix in (".h5", ".hdf5"):
        return _read_hdf5(path, path, None)
    if path.suffix == ".keras" or _KERAS_WEIGHTS in _zip_sizes(path):
        return _read_keras(path)
    is_pickle = start[:1] == b"\x80" and _TORCH_MAGIC not in start
    is_paddle = path.suffix == ".pdparams" or (is_pickle and path.suffix not in _TORCH_SUFFIXES)
    return _read_paddle(path) if is_paddle else _read_torch(path)


def _zip_sizes(path: Path) -> dict[str, int]:
    """Read the unpacked sizes of the members of a zip file; empty if it is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: info.file_size for info in archive.infolist()}
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return {}


def _unnested(content: object) -> object:
    if not isinstance(content, dict):
        return content
    return next((content[key] for key in _NESTED_KEYS if isinstance(content.get(key), dict)), content)


def _shown(content: object) -> str:
    """Describe what a file holds in place of weights."""
    return one_line(f"the keys {list(content)[:6]}" if isinstance(content, dict) else f"a {type(content).__name__}")


def _check_bytes(path: Path, tensors: Tensors, size: int) -> None:
    """Refuse tensors with more numbers than the file has, as possible with strides of 0."""
    if sum(t.numel() * t.element_size() for t in tensors.values()) > 2 * size + 1024:
        raise InputError(f"{path}: its tensors have more numbers than the file; it is damaged or hostile")


def _to_tensor(array: np.ndarray) -> torch.Tensor:
    """Copy an array to a tensor, in the byte order of this machine."""
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    if native.dtype in (np.uint16, np.uint32, np.uint64):
        native = native.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(native)).reshape(array.shape)


# ---- torch and Lightning ---------------------------------------------------------------------------------------------

# Frequent in the settings that Lightning saves with the weights. Creating them does nothing.
_HARMLESS = [
    (argparse.Namespace, "argparse.Namespace"),
    *((PurePath, f"pathlib{module}.{kind}Path") for module in ("", "._local") for kind in ("Posix", "Windows")),
]


def _read_torch(path: Path) -> SourceCheckpoint:
    if sum(_zip_sizes(path).values()) > path.stat().st_size:
        raise InputError(f"{path}: its members are compressed or overlap, which torch never writes; it is not read")
    try:
        # Content that torch cannot read ends in an error.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises anything on damaged files
        # torch's message recommends loading without protection, so it is not shown.
        if code := re.search(r"GLOBAL ([\w.]+)|TorchScript", str(error)):
            raise InputError(
                f"{path}: holds code ({one_line(code[1] or code[0])[:120]}) besides tensors, which is never executed; "
                "save the tensors alone, as safetensors or with torch.save(model.state_dict(), FILE)"
            ) from None
        raise damaged(path, "a torch checkpoint", type(error).__name__) from None
    state = _unnested(content)
    if not isinstance(state, dict) or not state or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise InputError(f"{path}: holds no state dict (names with tensors), but {_shown(state)}")
    _check_bytes(path, state, path.stat().st_size)
    return SourceCheckpoint("torch", {str(name): tensor for name, tensor in state.items()})


# ---- Paddle ----------------------------------------------------------------------------------------------------------
# `.pdparams` are pickles of a dict from names to NumPy arrays: `_build_saved_state_dict` in Paddle's
# `python/paddle/framework/io.py`, `_unpack_saved_dict` in `io_utils.py`.

_CONSTRUCTORS = {
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),  # bytes in protocol 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((builtins, name) for builtins in ("builtins", "__builtin__") for name in ("tuple", "bytes")),
    *((f"{core}.multiarray", name) for core in ("numpy.core", "numpy._core") for name in ("_reconstruct", "scalar")),
    *((f"{core}.numeric", "_frombuffer") for core in ("numpy.core", "numpy._core")),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> object:
        """Look up an allowed constructor; refuse everything else."""
        if (module_name, global_name) not in _CONSTRUCTORS:
            raise pickle.UnpicklingError(f"it holds code ({module_name}.{global_name}), which is not run")
        return super().find_class(module_name, global_name)


def _read_paddle(path: Path) -> SourceCheckpoint:
    try:
        content = path.read_bytes()
        for opcode, argument, _ in pickletools.genops(content):
            # Python's unpickler allocates all memo entries up to this one.
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(content):
                raise ValueError("it has a memo larger than the file")
        with warnings.catch_warnings(action="ignore"):  # old names of NumPy's modules
            loaded = _unnested(_ArrayUnpickler(io.BytesIO(content), encoding="latin1").load())
        tensors = {}
        for name, value in loaded.items() if isinstance(loaded, dict) else ():
            # Tensors that are not parameters of the outermost dict are pairs of their name and the array.
            array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
            if isinstance(array, np.ndarray):
                tensors[str(name).replace("/", ".")] = _paddle_tensor(array)
    except Exception as error:  # a pickle can make the constructors raise anything
        raise damaged(path, "Paddle parameters", error if str(error) else type(error).__name__) from None
    if not tensors:
        raise InputError(f"{path}: holds no parameters (names with arrays), but {_shown(loaded)}")
    _check_bytes(path, tensors, len(content))
    return SourceCheckpoint("paddle", tensors)


def _paddle_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"an array of type {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:  # Paddle's bfloat16
        return torch.from_numpy(array.astype("<u2").view(np.int16).copy()).view(torch.bfloat16).reshape(array.shape)
    return _to_tensor(array)


# ---- Keras -----------------------------------------------------------------------------------------------------------
# `.h5` (whole models and weights), `.weights.h5`, and `.keras`: a zip file with a description and a `.weights.h5`.

_KERAS_WEIGHTS, _KERAS_CONFIG = "model.weights.h5", "config.json"
# Members of a zip file may be compressed, but weights hardly compress.
_MAX_RATIO = 20
# In `.weights.h5`, a layer's variables are numbered in the order of creation.
_NORM = ("gamma", "beta", "moving_mean", "moving_variance")
_SKIPPED = {"optimizer", "optimizer_weights", "seed_generator", "metrics", "top_level_model_weights"}


def _read_keras(path: Path) -> SourceCheckpoint:
    sizes = _zip_sizes(path)
    for name in (_KERAS_CONFIG, _KERAS_WEIGHTS):
        if sizes.get(name, 0) > _MAX_RATIO * path.stat().st_size:
            raise InputError(f"{path}: {name} unpacks to {sizes[name]:,} bytes, too many for this file")
    try:
        with zipfile.ZipFile(path) as archive:
            config, weights = archive.read(_KERAS_CONFIG), io.BytesIO(archive.read(_KERAS_WEIGHTS))
    except Exception as error:  # zipfile and its decompressors raise errors of many types
        raise damaged(path, "a Keras model", type(error).__name__) from None
    return _read_hdf5(path, weights, config)


def _read_hdf5(path: Path, file: Path | IO[bytes], config: bytes | None) -> SourceCheckpoint:
    """Read the weights of an HDF5 file; `config` is the model's description in JSON, if it is not in the file."""
    try:
        import h5py
    except ImportError:
        raise InputError(f"{path}: files of Keras need the package h5py: pip install 'flatout[convert]'") from None
    try:
        with h5py.File(file, "r") as content:
            # Soft and external links are not followed, so all objects are in this file.
            objects: dict[str, Any] = {}
            content.visititems(objects.__setitem__)
            description = json.loads(config or content.attrs.get("model_config") or "{}")
            configs = {config["name"]: config for config in _layer_configs(description)}
            root = "model_weights/" if "model_weights" in objects else ""
            names = _texts(objects.get("model_weights", content).attrs, "layer_names")
            found = _listed(objects, root, names) if names else _numbered(objects, configs)
            tensors = {name: _dataset_tensor(dataset) for name, dataset in found}
            if not tensors:
                raise _Refused("it holds no weights of layers")
            _check_bytes(path, tensors, content.id.get_filesize())
            given = {name: config.get("epsilon") for name, config in configs.items()}
            epsilons = {name: float(e) for name, e in given.items() if isinstance(e, int | float) and 0 <= e < 1}
            is_last = all(config.get("data_format") != "channels_first" for config in configs.values())
            return SourceCheckpoint("keras", tensors, epsilons, is_last, _image_shape(configs.values(), is_last))
    except InputError:
        raise
    except Exception as error:  # h5py raises errors of many types
        raise damaged(path, "a Keras model", error if isinstance(error, _Refused) else type(error).__name__) from None


class _Refused(ValueError):
    """The content of an HDF5 file is not plain weights; the message is for the user."""


def _dataset_tensor(dataset: Any) -> torch.Tensor:
    properties = dataset.id.get_create_plist()
    is_elsewhere = dataset.is_virtual or properties.get_external_count()
    if is_elsewhere or properties.get_nfilters() or dataset.dtype.kind not in "biuf":
        raise _Refused(f"{dataset.name} must be plain numbers: not compressed, and not kept in another file")
    if dataset.nbytes > dataset.file.id.get_filesize():
        raise _Refused(f"{dataset.name} has more numbers than the file")
    return _to_tensor(dataset[()])


def _texts(attributes: Mapping[str, Any], name: str) -> list[str]:
    """Read an attribute that is a list of texts; Keras splits long ones into name0, name1, ..."""
    parts = [attributes[name]] if name in attributes else []
    while (part := attributes.get(f"{name}{len(parts)}")) is not None:
        parts.append(part)
    return [text.decode() if isinstance(text, bytes) else str(text) for part in parts for text in np.ravel(part)]


def _listed(objects: dict[str, Any], root: str, layers: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the weights that the attributes `layer_names` and `weight_names` list, in that order."""
    for layer in layers:
        group = objects.get(f"{root}{layer}")
        for weight in _texts(group.attrs, "weight_names") if group is not None else [""]:
            dataset = objects.get(f"{root}{layer}/{weight}")
            if dataset is None:
                raise _Refused(f"the weight {f'{layer}/{weight}'!r:.80} is missing")
            if "seed_generator" not in weight:
                yield weight.partition(":")[0].strip("/").replace("/", "."), dataset


def _numbered(objects: dict[str, Any], configs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a `.weights.h5`, the numbers in groups called `vars`; in the description's order, if any."""
    layers: dict[str, list[Any]] = {}
    for name in sorted(objects, key=lambda name: [natural(part) for part in name.split("/")]):
        *path, variables, _ = f"//{name}".split("/")
        if variables == "vars" and hasattr(objects[name], "is_virtual") and not _SKIPPED & {*path}:
            layers.setdefault(_layer_name("/".join(path).strip("/"), objects), []).append(objects[name])
    order = {name: position for position, name in enumerate(configs)}
    for name in sorted(layers, key=lambda name: order.get(last_part(name), len(order))):
        datasets, config = layers[name], configs.get(last_part(name), {})
        if 1 < len(datasets) < 5 and all(len(dataset.shape) == 1 for dataset in datasets):
            roles = [*_NORM[2 if len(datasets) == 2 else 0 :]]
            if len(datasets) == 3:
                roles.remove("beta" if config.get("scale") else "gamma")
        elif len(datasets) <= 2 and len(datasets[0].shape) >= 2:
            roles = ["kernel", "bias"]
        else:  # such as the mean, variance and count of a Normalization layer, which is not a batch norm
            roles = [f"variable_{i}" for i in range(len(datasets))]
        yield from ((f"{name}.{role}", dataset) for role, dataset in zip(roles, datasets, strict=False))


def _layer_name(path: str, objects: dict[str, Any]) -> str:
    parts = [part for part in path.split("/") if part not in ("layers", "_layer_checkpoint_dependencies")]
    last = (parts or [""])[-1] or "layer"
    # Recent versions of Keras write the name of the layer, too; attributes of a user's class are better names.
    if path.rpartition("/")[0].rpartition("/")[2] == "layers":
        last = str(objects[f"{path}/vars"].attrs.get("name") or last)
    return ".".join([*parts[:-1], last.replace(".", "_")])


def last_part(name: str) -> str:
    """Return the name without its scopes."""
    return name.rpartition(".")[2]


def _layer_configs(value: object) -> Iterator[dict[str, Any]]:
    """Yield the settings of the named layers in a model's description, in order."""
    if isinstance(value, list):
        for item in value:
            yield from _layer_configs(item)
    elif isinstance(value, dict):
        config = value.get("config")
        if isinstance(config, dict) and isinstance(config.get("name"), str):
            yield config
        yield from _layer_configs([*value.values()])


def _image_shape(configs: Iterable[Mapping[str, Any]], channels_last: bool) -> tuple[int, int, int] | None:
    """Return height, width and channels of the first layer that names them."""
    for config in configs:
        _, *sides = config.get("batch_shape", config.get("batch_input_shape")) or [0]
        if len(sides) == 3 and all(type(side) is int and 0 < side < 100_000 for side in sides):
            first, second, third = sides
            return (first, second, third) if channels_last else (second, third, first)
    return None
