"""Tensors on disk: safetensors files that appear whole or not at all, and notice damage when they are read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError, one_line
from flatout.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = Mapping[str, "torch.Tensor"]
# By kind, then by the name of the tensor.
Differences = dict[str, dict[str, Any]]

_DIGEST_KEY = "blake2b"


def save_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors, with a digest that `read_weights` checks.

    They are written contiguous, from wherever they are; one shared under two names is written twice. Errors are those
    of `write_atomically`.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    assert _DIGEST_KEY not in metadata
    plain = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()
    }

    def write(temporary: Path) -> None:
        try:
            content = save(plain, {**metadata, _DIGEST_KEY: _digest(plain, metadata)})
        except SafetensorError as error:  # its own type
            raise OSError(str(error)) from error
        temporary.write_bytes(_in_fixed_order(content))

    write_atomically(path, write)


def _in_fixed_order(content: bytes) -> bytes:
    """Return safetensors with sorted metadata: the library writes it in another order in every process.

    Equal weights then are equal files. The format: eight bytes with the length of a JSON header, the header, the data.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, content[8 + length :]))


def read_weights(path: Path) -> tuple[dict[str, "torch.Tensor"], dict[str, str]]:
    """Read a safetensors file: its tensors, on the CPU, and its metadata. Where it has our digest, that must match.

    Raises:
        InputError: it cannot be read, or its bytes are not those that `save_tensors` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read as safetensors ({one_line(error)}); it is damaged or something else"
        ) from None
    digest = metadata.pop(_DIGEST_KEY, None)
    if digest is not None and digest != _digest(tensors, metadata):
        raise InputError(f"{path}: is damaged: its bytes are not those that were saved (BLAKE2b digests); use a copy")
    return tensors, metadata


def _digest(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Return the BLAKE2b digest of the metadata and of every tensor's name, type, shape and bytes, in order of name."""
    import torch

    digest = hashlib.blake2b(json.dumps(dict(metadata), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_exactly(model: "nn.Module", tensors: Tensors, where: object) -> None:
    """Load tensors into a model, all or nothing; names and shapes must be equal."""
    if found := differences(model.state_dict(), tensors):
        raise InputError(f"{where}: does not fit the model: {described(found)}", found)
    model.load_state_dict(tensors)


def differences(own: Tensors, tensors: Tensors) -> Differences:
    """Return the tensors of a file that do not fit a model's, with shapes, by kind; kinds without any are left out.

    "misshapen" are in both, "missing" in the model alone, "unexpected" in the file alone.
    """
    shapes, given = ({name: list(t.shape) for name, t in state.items()} for state in (own, tensors))
    both = [name for name in shapes if name in given and shapes[name] != given[name]]
    found: Differences = {
        "misshapen": {name: {"file": given[name], "model": shapes[name]} for name in both},
        "missing": {name: shape for name, shape in shapes.items() if name not in given},
        "unexpected": {name: shape for name, shape in given.items() if name not in shapes},
    }
    return {kind: named for kind, named in found.items() if named}


def described(found: Differences, most: int = 4) -> str:
    """Return the number of tensors of each kind, and the first of them with their shapes."""
    parts = []
    for kind, named in found.items():
        lines = [
            f"{one_line(name)} is {shape['file']} in the file but {shape['model']} in the model"
            if kind == "misshapen"
            else f"{one_line(name)} {shape}"
            for name, shape in list(named.items())[:most]
        ]
        lines += [f"and {len(named) - most} more"] if len(named) > most else []
        parts.append(f"{len(named)} {kind} ({', '.join(lines)})")
    is_shortened = any(len(named) > most for named in found.values())
    return "; ".join(parts) + ("; flatout convert --json lists all of them" if is_shortened else "")
