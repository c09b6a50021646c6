"""Published or given weights into a model: from the hub, a file or a folder.

Nothing read here can execute code: files are safetensors, or torch checkpoints read with `weights_only=True`.
"""

import contextlib
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError, first_line
from flatout.models.layers import head_modules
from flatout.models.load import create_timm, seeded
from flatout.models.weights import Tensors, mismatches, read_weights
from flatout.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

_FILES_IN_A_FOLDER = ("weights.safetensors", "model.safetensors", "pytorch_model.bin")
_PREFIX = re.compile(r"(module|model|net|_orig_mod)\.")
_NESTED_KEYS = ("state_dict", "model", "model_state_dict")
_FIX = "give --weights FILE, or --no-pretrained to start from random weights"


def load_pretrained(model: "nn.Module", recipe: Recipe, report: Callable[[str], None]) -> None:
    """Load the weights that a recipe names into its model. A head of another size keeps its fresh weights.

    Those are the published weights of `recipe.model` (downloaded once, then cached); or, if `recipe.weights` is set, a
    safetensors file, a torch checkpoint, or a folder with one, such as a run folder. `report` takes a sentence on what
    was loaded.

    Raises:
        InputError: there are no such weights, they cannot be downloaded or read, would execute code, are damaged, or do
            not fit; tensors that do not fit are named with both shapes. The model is not changed then.
    """
    if recipe.weights:
        path = _find(Path(recipe.weights))
        where = str(path)
        tensors = read_weights(path)[0] if path.suffix == ".safetensors" else _read_checkpoint(path)
    elif recipe.model.startswith("timm:"):
        where, tensors = _timm_weights(model, recipe)
    elif recipe.model == "vgg16":
        where, tensors = _vgg16_weights()
    else:
        raise InputError(f"no weights are published for the model {recipe.model}; {_FIX}")
    _fit(model, tensors, where, report)


def _vgg16_weights() -> tuple[str, Tensors]:
    from torch import hub

    from flatout.models.nets import VGG16_IMAGENET_URL as URL

    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "check_hash": True}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # torch.hub reports on stdout, which belongs to --json
            return URL, hub.load_state_dict_from_url(URL, progress=sys.stderr.isatty(), **options)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # RuntimeError: what came has another hash
        raise InputError(f"could not download {URL} ({first_line(error)}); {_FIX}") from error


def _timm_weights(model: "nn.Module", recipe: Recipe) -> tuple[str, Tensors]:
    """Return the weights of a second model: timm fits embeddings and channels only on creation."""
    name = recipe.model
    config: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    source = config.get("hf_hub_id") or config.get("url")
    if not source:
        raise InputError(f"no weights are published for the model {name}; {_FIX}")
    num_outputs: int = model.num_classes  # type: ignore[assignment]
    try:
        with seeded(0), contextlib.redirect_stdout(sys.stderr):
            published = create_timm(recipe, num_outputs, pretrained=True)
    except OSError as error:
        raise InputError(f"could not download {source} for {name} ({first_line(error)}); {_FIX}") from error
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the weights {source} do not load into {name} ({first_line(error)}); {_FIX}") from error
    tensors = published.state_dict()
    if config["num_classes"] != num_outputs:  # then the second model's head is as fresh as the first's
        heads = tuple(f"{head}." for head in head_modules(published))
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}
    return source, tensors


def _fit(model: "nn.Module", tensors: Tensors, where: str, report: Callable[[str], None]) -> None:
    """Load tensors into a model, all or nothing; only the head may be missing, more, or of another shape."""
    own = model.state_dict()
    tensors = _strip_prefixes(tensors, own)
    heads = tuple(head_modules(model))
    prefixes = tuple(f"{head}." if head else "" for head in heads)
    body, own_body = ({n: t for n, t in state.items() if not n.startswith(prefixes)} for state in (tensors, own))
    # Files older than PyTorch 0.4.1 lack the batch count of batch norm, which is not used here.
    counts = {name for name in own_body if name.endswith(".num_batches_tracked") and name not in body}
    problems = mismatches({n: t for n, t in own_body.items() if n not in counts}, body)
    head, own_head = tensors.keys() - body.keys(), own.keys() - own_body.keys()
    head_fits = head == own_head and all(tensors[name].shape == own[name].shape for name in head)
    loaded = {name: tensor for name, tensor in tensors.items() if head_fits or name in body}
    if problems or not loaded:
        problems = problems or "none of their tensors has its shapes"
        raise InputError(f"the weights {where} do not fit the model: {problems}")
    model.load_state_dict(loaded, strict=False)
    fresh = f"the head ({', '.join(heads)}) starts fresh, since the file has none of its size"
    report(f"Weights from {where}: {len(loaded)} tensors; {'the head included' if head_fits else fresh}.")


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


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"--weights {path}: there is no such file or folder")
    for name in _FILES_IN_A_FOLDER:
        if (path / name).is_file():
            return path / name
    raise InputError(f"--weights {path}: the folder holds none of {', '.join(_FILES_IN_A_FOLDER)}; name the file")


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
