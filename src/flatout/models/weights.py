"""Weights on disk: published ones into a model, a trained model's into a file that notices damage.

Nothing read here can execute code: files are safetensors, or torch checkpoints read with `weights_only=True`.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError
from flatout.models.head import head_modules
from flatout.models.load import create_timm, list_names, seeded

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = dict[str, "torch.Tensor"]

_DIGEST_KEY = "blake2b"
_FILES_IN_A_FOLDER = ("weights.safetensors", "model.safetensors", "pytorch_model.bin")
_NESTED_KEYS = ("state_dict", "model", "model_state_dict")
_MEND = "give --weights FILE, or --no-pretrained to start from random weights"


def load_pretrained(
    model: "nn.Module", name: str, *, weights: str, image_size: int, channels: int, report: Callable[[str], None]
) -> None:
    """Load published or given weights into a model that `build` made. A head of another size keeps its fresh weights.

    Args:
        model: changed in place.
        name: the name that it was built by.
        weights: "" for the published weights of `name` (downloaded once, then cached); else a safetensors file, a torch
            checkpoint, or a folder that holds one, a run folder included.
        image_size: height and width in pixels that it was built for.
        channels: input channels that it was built for.
        report: is told in a sentence what was loaded.

    Raises:
        InputError: there are no such weights, they could not be downloaded or read, would execute code, are damaged, or
            do not fit; the tensors that do not fit are named with both shapes.
    """
    if weights:
        path = _find(Path(weights))
        tensors = read_weights(path)[0] if path.suffix == ".safetensors" else _read_checkpoint(path)
        _fit(model, tensors, str(path), report)
    elif name.startswith("timm:"):
        _load_timm(model, name, image_size, channels, report)
    elif name == "vgg16":
        _load_vgg16(model, report)
    else:
        kind = "a small net" if name in list_names() else "not a model of flatout's"
        raise InputError(f"no weights are published for {name} ({kind}); {_MEND}")


def _load_vgg16(model: "nn.Module", report: Callable[[str], None]) -> None:
    import torch

    from flatout.models import vgg

    try:
        tensors = torch.hub.load_state_dict_from_url(
            vgg.IMAGENET_URL, map_location="cpu", weights_only=True, check_hash=True, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: the file that came has another hash
        raise InputError(f"could not download {vgg.IMAGENET_URL} ({_first_line(error)}); {_MEND}") from error
    _fit(model, tensors, vgg.IMAGENET_URL, report)


def _load_timm(model: "nn.Module", name: str, image_size: int, channels: int, report: Callable[[str], None]) -> None:
    """Take the weights of a second model: timm fits position embeddings and input channels only as it creates one."""
    config: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    if not (config.get("url") or config.get("hf_hub_id")):
        raise InputError(f"no weights are published for {name}; {_MEND}")
    num_outputs: int = model.num_classes  # type: ignore[assignment]
    source = config.get("hf_hub_id") or config["url"]
    try:
        with seeded(0):
            published = create_timm(name, num_outputs, image_size, channels, pretrained=True)
    except OSError as error:
        raise InputError(f"could not download {source} for {name} ({_first_line(error)}); {_MEND}") from error
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the weights {source} do not load into {name} ({_first_line(error)}); {_MEND}") from error
    tensors = published.state_dict()
    if config["num_classes"] != num_outputs:
        heads = tuple(f"{head}." for head in head_modules(published))
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}
    _fit(model, tensors, source, report)


def _fit(model: "nn.Module", tensors: Tensors, where: str, report: Callable[[str], None]) -> None:
    """Load tensors into a model, all or nothing; only the head may be missing, extra or of another shape."""
    own = model.state_dict()
    tensors = _strip_prefixes(tensors, own)
    heads = tuple(head_modules(model))

    def in_head(name: str) -> bool:
        return any(head == "" or name.startswith(f"{head}.") for head in heads)

    def has_another_shape(name: str) -> bool:
        return name in own and own[name].shape != tensors[name].shape

    body, own_body = ({n for n in names if not in_head(n)} for names in (tensors, own))
    # Batch norm counts its batches since PyTorch 0.4.1 only; older files lack the count, which nothing here reads.
    missing = {name for name in own_body - body if not name.endswith(".num_batches_tracked")}
    problems = [
        f"{name} is {list(tensors[name].shape)} in the file but {list(own[name].shape)} in the model"
        for name in sorted(filter(has_another_shape, body))
    ]
    problems += [f"{name} {list(own[name].shape)} is not in the file" for name in sorted(missing)]
    problems += [
        f"{name} {list(tensors[name].shape)} is in the file but not in the model" for name in sorted(body - own_body)
    ]
    if problems:
        raise InputError(f"the weights {where} do not fit the model: {_shortened(problems)}")
    own_head, head = own.keys() - own_body, tensors.keys() - body
    head_fits = own_head == head and not any(map(has_another_shape, head))
    loaded = {name: tensor for name, tensor in tensors.items() if head_fits or name in body}
    model.load_state_dict(loaded, strict=False)
    shown = ", ".join(heads)
    fate = (
        "its head included"
        if head_fits
        else f"the head ({shown}) starts fresh, since the weights have none of its size"
    )
    report(f"Weights from {where}: {len(loaded)} tensors, {fate}.")


def _strip_prefixes(tensors: Tensors, own: Iterable[str]) -> Tensors:
    """Undo what torch.compile (`_orig_mod.`) and data-parallel wrappers (`module.`) did to names the model lacks."""
    known = set(own)
    stripped = {}
    for name, tensor in tensors.items():
        plain = name if name in known else name.replace("_orig_mod.", "")
        while plain not in known and plain.startswith("module."):
            plain = plain.removeprefix("module.")
        stripped[plain] = tensor
    return stripped


def _shortened(problems: list[str], most: int = 6) -> str:
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join(problems[:most] + more)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"--weights {path}: there is no such file or folder")
    for name in _FILES_IN_A_FOLDER:
        if (path / name).is_file():
            return path / name
    raise InputError(
        f"--weights {path}: the folder holds none of {', '.join(_FILES_IN_A_FOLDER)}; name the file itself"
    )


def _read_checkpoint(path: Path) -> Tensors:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, KeyError) as error:
        code = re.search(r"Unsupported (?:global|class|operand)[^\n]*?([\w.]+\.[\w.]+)", str(error))
        if code or ("weights_only" in str(error) and "TorchScript" in str(error)):
            named = f" ({code[1]})" if code else ""
            raise InputError(
                f"{path}: holds Python code{named} besides tensors, which loading would execute, so it is refused; "
                "save the state dict alone, as safetensors or with torch.save(model.state_dict(), FILE)"
            ) from None
        raise InputError(f"{path}: cannot be read as a torch checkpoint ({_first_line(error)})") from None
    for key in _NESTED_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(t, torch.Tensor) for t in content.values()):
        found = f"the keys {list(content)[:6]}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise InputError(f"{path}: holds no state dict (names with tensors), but {found}")
    return dict(content)


def save_weights(path: Path, model: "nn.Module", metadata: Mapping[str, str]) -> None:
    """Write a model's parameters and buffers as safetensors, with a digest that `read_weights` checks.

    Names are plain (no `_orig_mod.` of torch.compile); tensors are contiguous, on the CPU; those shared under two names
    are written twice. The file appears whole or not at all, also when the process is killed; an older one is replaced.

    Raises:
        InputError: it cannot be written, say because the disk is full; nothing is left behind then.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    assert _DIGEST_KEY not in metadata
    tensors = {
        name.replace("_orig_mod.", ""): t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in model.state_dict().items()
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, {**metadata, _DIGEST_KEY: _digest(tensors, metadata)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: the weights could not be written ({_first_line(error)})") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read_weights(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file: its tensors, on the CPU, and its metadata. Where it has our digest, that must match.

    Raises:
        InputError: it cannot be read, or its bytes are not those that `save_weights` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
    except (OSError, SafetensorError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as safetensors ({_first_line(error)}); it is damaged or something else"
        ) from None
    digest = metadata.pop(_DIGEST_KEY, None)
    if digest is not None and digest != _digest(tensors, metadata):
        raise InputError(
            f"{path}: is damaged: its content is not what was saved (the BLAKE2b digests differ); use a copy"
        )
    return tensors, metadata


def _digest(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Return the BLAKE2b digest of the metadata and of every tensor's name, type, shape and bytes, in order of name."""
    import torch

    digest = hashlib.blake2b(json.dumps(dict(metadata), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
