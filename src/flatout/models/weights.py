"""Tensors on disk: atomic safetensors files with a digest that detects damage."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.utils.errors import InputError, one_line
from flatout.utils.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = Mapping[str, "torch.Tensor"]
Differences = dict[str, dict[str, Any]]  # by kind, then by the name of the tensor
_DIGEST_KEY = "blake2b"
_MAX_LISTED = 4


def save_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors, with a digest that `read_weights` checks; shared ones are written twice.

    The library orders metadata at random, so that equal weights would be different files.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    ordered = sorted(plain.items(), key=lambda named: (-named[1].element_size(), named[0]))
    about = {**metadata, _DIGEST_KEY: digest_of(plain, metadata)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(about.items()))}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        kind = str(tensor.dtype).removeprefix("torch.")  # bfloat16 is BF16, float8_e4m3fn is F8_E4M3
        dtype = re.sub("complex|float|uint|int", lambda found: found[0][0], kind).upper().removesuffix("FN")
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(_bytes_of(tensor) for _, tensor in ordered)

    write_atomically(path, write)


def read_weights(path: Path) -> tuple[dict[str, "torch.Tensor"], dict[str, str]]:
    """Read the tensors, on the CPU, and the metadata of a safetensors file; damage is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise damaged(path, "safetensors", error) from None
    digest = metadata.pop(_DIGEST_KEY, None)
    if digest is not None and digest != digest_of(tensors, metadata):
        raise InputError(f"{path}: is damaged: its bytes are not those that were saved (BLAKE2b digests); use a copy")
    return tensors, metadata


def digest_of(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Compute a digest of names, types, shapes and bytes of tensors, and of metadata."""
    digest = hashlib.blake2b(json.dumps(dict(metadata), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def damaged(path: Path, what: str, reason: object) -> InputError:
    """Make the error for a damaged file."""
    return InputError(f"{path}: cannot be read as {what} ({one_line(reason)}); it is damaged or something else")


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `conv2d_10` after `conv2d_9`, and `conv2d` before `conv2d_1`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def load_exactly(model: "nn.Module", tensors: Tensors, where: object) -> None:
    """Load tensors into a model, all or nothing; names and shapes must be equal."""
    if found := differences(model.state_dict(), tensors):
        raise InputError(f"{where}: does not fit the model: {described(found)}", found)
    model.load_state_dict(tensors)


def differences(own: Tensors, tensors: Tensors) -> Differences:
    """List the tensors of a file that do not fit a model's, with shapes, by kind; empty kinds are left out.

    "misshapen" are in both, "missing" only in the model, "unexpected" only in the file.
    """
    shapes, given = ({name: list(t.shape) for name, t in state.items()} for state in (own, tensors))
    both = [name for name in shapes if name in given and shapes[name] != given[name]]
    found: Differences = {
        "misshapen": {name: {"file": given[name], "model": shapes[name]} for name in both},
        "missing": {name: shape for name, shape in shapes.items() if name not in given},
        "unexpected": {name: shape for name, shape in given.items() if name not in shapes},
    }
    return {kind: named for kind, named in found.items() if named}


def described(found: Differences) -> str:
    """Describe differences: the number of tensors of each kind, and the first of them with their shapes."""
    parts = []
    for kind, named in found.items():
        lines = [
            f"{one_line(name)} is {shape['file']} in the file but {shape['model']} in the model"
            if kind == "misshapen"
            else f"{one_line(name)} {shape}"
            for name, shape in list(named.items())[:_MAX_LISTED]
        ]
        lines += [f"and {len(named) - _MAX_LISTED} more"] if len(named) > _MAX_LISTED else []
        parts.append(f"{len(named)} {kind} ({', '.join(lines)})")
    is_shortened = any(len(named) > _MAX_LISTED for named in found.values())
    return "; ".join(parts) + ("; flatout convert --json lists all of them" if is_shortened else "")
