"""Published or given weights into a model: from the hub, a file or a folder.

Nothing read here can execute code: files are safetensors, or torch checkpoints read with `weights_only=True`.
"""

import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError, first_line
from flatout.models.hub import FIX, find_weights
from flatout.models.layers import head_modules
from flatout.models.load import create_timm, seeded
from flatout.models.weights import Tensors, mismatches, read_weights
from flatout.recipe import Recipe
from flatout.settings import shown

if TYPE_CHECKING:
    from torch import nn

_FILES_IN_A_FOLDER = ("weights.safetensors", "model.safetensors", "pytorch_model.bin")
_PREFIX = re.compile(r"(module|model|net|_orig_mod)\.")
_NESTED_KEYS = ("state_dict", "model", "model_state_dict")


def load_pretrained(model: "nn.Module", recipe: Recipe, report: Callable[[str], None]) -> None:
    """Load the weights that a recipe names into its model. A head of another size keeps its fresh weights.

    Those are the published weights of `recipe.model`, from a cache or downloaded (`hub.find_weights`); or, if
    `recipe.weights` is set, a safetensors file, a torch checkpoint, or a folder with one, such as a run folder.
    `report` takes sentences on what was downloaded and loaded.

    Raises:
        WeightsUnavailable: published weights are in no cache and cannot be downloaded.
        InputError: there are no such weights, they cannot be read, would execute code, are damaged, or do not fit;
            tensors that do not fit are named with both shapes. The model is not changed then.
    """
    if recipe.weights:
        path = find_file(Path(recipe.weights))
        _fit(model, _read(path), path, report)
        return
    path = find_weights(recipe.model, report=report)
    try:
        tensors = _read(path)
        if recipe.model.startswith("timm:"):
            tensors = _adapt(model, recipe, tensors, path)
        _fit(model, tensors, path, report)
    except InputError as error:
        # The Hugging Face cache has a link there; without the link alone, the same file would be found again.
        fix = f"if the file is wrong, remove {path.resolve()} to download the weights of {recipe.model}"
        raise InputError(f"{error}; {fix}; or {FIX}") from error


def _adapt(model: "nn.Module", recipe: Recipe, tensors: Tensors, path: Path) -> Tensors:
    """Return published weights as a model of timm's has them, with this image size and these channels.

    A second model is created, since timm adapts weights only on creation. It has the published head: with another one,
    timm would accept the weights of any network.
    """
    config: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    try:
        with seeded(0):
            published = create_timm(recipe, config["num_classes"], tensors)
    except Exception as error:  # timm's functions for one network may raise anything on the tensors of another
        problems = _misfits(model, tensors) or first_line(error)
        size = f"image_size = {shown(recipe.image_size)} (published: {config['input_size'][-1]})"
        raise InputError(f"the weights {path} do not fit {recipe.model} with {size}: {problems}") from error
    adapted = published.state_dict()
    if config["num_classes"] == model.num_classes:
        return adapted
    return _without_head(adapted, model)


def _without_head(tensors: Tensors, model: "nn.Module") -> Tensors:
    prefixes = tuple(f"{head}." if head else "" for head in head_modules(model))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _misfits(model: "nn.Module", tensors: Tensors) -> str:
    """Return how tensors differ from a model's in names and shapes, the head left out; empty if they do not."""
    own, body = _without_head(model.state_dict(), model), _without_head(tensors, model)
    # Files older than PyTorch 0.4.1 lack the batch count of batch norm, which is not used here.
    return mismatches({n: t for n, t in own.items() if n in body or not n.endswith(".num_batches_tracked")}, body)


def _fit(model: "nn.Module", tensors: Tensors, path: Path, report: Callable[[str], None]) -> None:
    """Load tensors into a model, all or nothing; only the head may be missing, more, or of another shape."""
    own = model.state_dict()
    tensors = _strip_prefixes(tensors, own)
    body, own_body = _without_head(tensors, model), _without_head(own, model)
    problems = _misfits(model, tensors)
    head, own_head = tensors.keys() - body.keys(), own.keys() - own_body.keys()
    head_fits = head == own_head and all(tensors[name].shape == own[name].shape for name in head)
    loaded = {name: tensor for name, tensor in tensors.items() if head_fits or name in body}
    if problems or not loaded:
        problems = problems or "none of their tensors has its shapes"
        raise InputError(f"the weights {path} do not fit the model: {problems}")
    model.load_state_dict(loaded, strict=False)
    fresh = f"the head ({', '.join(head_modules(model))}) starts fresh, since the file has none of its size"
    report(f"Weights from {path}: {len(loaded)} tensors; {'the head included' if head_fits else fresh}.")


def _strip_prefixes(tensors: Tensors, own: Iterable[str]) -> Tensors:
    """Undo what torch.compile, data-parallel wrappers and Lightning modules did to names that the model lacks.

    Where all weights of the model lie under one such prefix, other tensors (of a loss, of metrics) are left out.
    """
    known = set(own)
    stripped, others = {}, {}
    for name, tensor in tensors.items():
        plain = name if name in known else name.replace("_orig_mod.", "")
        while plain not in known and (prefix := _PREFIX.match(plain)):
            plain = plain[prefix.end() :]
        (stripped if plain in known or _PREFIX.match(name) else others)[plain] = tensor
    return stripped if known <= stripped.keys() and not known & tensors.keys() else {**others, **stripped}


def find_file(path: Path) -> Path:
    """Return a file of weights, or the one in a folder; for messages, the path is what --weights names."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"--weights {path}: there is no such file or folder")
    for name in _FILES_IN_A_FOLDER:
        if (path / name).is_file():
            return path / name
    raise InputError(f"--weights {path}: the folder holds none of {', '.join(_FILES_IN_A_FOLDER)}; name the file")


def _read(path: Path) -> Tensors:
    return read_weights(path)[0] if path.suffix == ".safetensors" else _read_checkpoint(path)


def _read_checkpoint(path: Path) -> Tensors:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, KeyError) as error:
        code = re.search(r"GLOBAL ([\w.]+)|TorchScript", str(error))
        # torch's own text advises to load without the protection, so it is not passed on.
        reason = f"cannot be read as a torch checkpoint ({type(error).__name__}); it is damaged, or not one"
        if code:
            reason = (
                f"holds code ({code[1] or code[0]}) besides tensors, and loading it would execute that, so it is "
                "refused; save the tensors alone, as safetensors or with torch.save(model.state_dict(), FILE)"
            )
        raise InputError(f"{path}: {reason}") from None
    nested = (content[key] for key in _NESTED_KEYS if isinstance(content, dict) and isinstance(content.get(key), dict))
    state = next(nested, content)
    if not isinstance(state, dict) or not state or not all(isinstance(t, torch.Tensor) for t in state.values()):
        found = f"the keys {list(state)[:6]}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise InputError(f"{path}: holds no state dict (names with tensors), but {found}")
    return dict(state)
