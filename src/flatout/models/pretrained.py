"""Load published or given weights into a model: from the hub, an installed package, a file or a folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.config import Recipe
from flatout.config.settings import shown
from flatout.models.build import create_timm, default_shape, quiet, seeded
from flatout.models.convert.match import Candidate, candidates, has_other_strides, layers_of, to_timm_names, trace
from flatout.models.convert.readers import SourceCheckpoint, find_file, read_file
from flatout.models.hub import FIX, find_installed, find_weights
from flatout.models.layers import head_modules
from flatout.models.weights import Differences, Tensors, described, differences
from flatout.utils.errors import InputError

# The deviation of the weights of a fresh last layer on loaded ones.
_FRESH_DEVIATION = 0.01
# The batch count of batch norm, which other frameworks do not have, and which is not used here.
_COUNT = ".num_batches_tracked"


def load_pretrained(model: nn.Module, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Load the recipe's weights into its model. A last layer of another size gets small random weights.

    Those are the published weights of `recipe.model` (`hub.find_weights`), or the file or folder `recipe.weights`, in
    any format that `convert.readers` knows. If they do not fit, the model is not changed.
    """
    path = find_file(Path(recipe.weights)) if recipe.weights else find_weights(recipe.model, report=report)
    try:
        source = _adapted(model, recipe, read_file(path))
        _, fresh = fit(model, source, path, recipe.image_sides, report)
    except InputError as error:
        if recipe.weights:
            raise
        size = f"image_size = {shown(recipe.image_size)}, published: {shown(default_shape(recipe.model)[1])}"
        # The Hugging Face cache has a link there; removing only the link would keep the damaged file.
        fix = f"if the file is wrong, remove {path.resolve()} to download the weights of {recipe.model}"
        if (installed := find_installed(recipe.model)) and installed.path == path:
            fix = f"the file is of {installed.origin}: {installed.fix}"
        raise InputError(f"{error} ({size}); {fix}; or {FIX}") from error
    _start_small(model, fresh, recipe.seed)


def _adapted(model: nn.Module, recipe: Recipe, source: SourceCheckpoint) -> SourceCheckpoint:
    """Adapt the weights of a timm network to the image size and channels of a model.

    A second model is created, since timm adapts weights only on creation. It has as many outputs as the weights: with
    others, timm would accept the weights of any network.
    """
    if not recipe.model.startswith("timm:") or source.framework != "torch":
        return source
    tensors = to_timm_names(model, _without_prefix(source.tensors, model))
    if recipe.weights and not _misfits(model, tensors):
        return source
    names = [name for prefix in head_modules(model) for name in tensors if name.startswith(f"{prefix}.")]
    last = [name for name in names if name.endswith(".weight") and tensors[name].ndim > 1]
    config: Any = model.pretrained_cfg
    outputs = len(tensors[last[-1]]) if recipe.weights and last else config["num_classes"]
    if outputs == config["num_classes"] + 1:
        outputs -= config.get("label_offset") or 0
    try:
        with seeded(0), quiet():
            return SourceCheckpoint("torch", create_timm(recipe, outputs, tensors).state_dict())
    except Exception:  # timm's functions for one network may raise anything on the tensors of another
        return source  # the tensors that do not fit are named later


@torch.no_grad()
def _start_small(model: nn.Module, fresh: list[str], seed: int) -> None:
    """Initialise last layers of heads that are `fresh` with small weights and no bias.

    Some networks of timm's start with logits of several units, from which the first steps diverge.
    """
    generator = torch.Generator().manual_seed(seed)
    for prefix, head in head_modules(model).items():
        linear = [(name, m) for name, m in head.named_modules(prefix=prefix) if isinstance(m, nn.Linear | nn.Conv2d)]
        for name, layer in linear[-1:]:
            if name in fresh:
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * _FRESH_DEVIATION)
                if layer.bias is not None:
                    layer.bias.zero_()


# ---- fitting a file to a model ---------------------------------------------------------------------------------------


def fit(
    model: nn.Module, source: SourceCheckpoint, path: Path, sides: tuple[int, int], report: Callable[[str], None]
) -> tuple[Candidate, list[str]]:
    """Load the weights of a file into a model, all or nothing; return how, and the head's layers that it does not have.

    Only those may be missing or misshapen.
    """
    if has_other_strides(model, [layer.name for layer in layers_of(source)]):
        raise InputError(
            f"the weights {path} are of Keras's ResNet, whose strides are in other layers than this model's; "
            "use the model keras-resnet50, keras-resnet101 or keras-resnet152"
        )
    tried: list[tuple[Differences, Candidate]] = []
    for candidate in _ways(model, source, sides):
        problems = _misfits(model, candidate.tensors)
        if not problems and not _loadable(model, candidate.tensors):
            problems = differences(model.state_dict(), candidate.tensors)
        tried.append((problems, candidate))
        if not problems:
            break
    problems, best = min(tried, key=lambda one: sum(map(len, one[0].values())))
    if problems:
        details = {"matched": best.how, "layers": best.pairs, **problems}
        raise InputError(f"the weights {path} do not fit the model: {described(problems)}", details)
    loaded = _loadable(model, best.tensors)
    model.load_state_dict(loaded, strict=False)
    body = _without_head(model.state_dict(), model)
    missing = [n for n in model.state_dict() if n not in body and n not in loaded and not n.endswith(_COUNT)]
    fresh = [*dict.fromkeys(map(_layer, missing))]
    about = f"the head ({', '.join(fresh)}) starts fresh, since the file has none of its size"
    matched = f", matched {best.how}" if best.pairs else ""
    report(f"Weights from {path}: {len(loaded)} tensors{matched}; {about if fresh else 'the head included'}.")
    return best, fresh


def _ways(model: nn.Module, source: SourceCheckpoint, sides: tuple[int, int]) -> Iterator[Candidate]:
    """Yield ways to give the file's tensors the model's names: those of torch first as they are."""
    if source.framework == "torch":
        yield Candidate("by name", dict(_without_prefix(source.tensors, model)), {})
    channels = next((w.shape[1] for w in model.state_dict().values() if w.ndim == 4), 3)
    yield from candidates(source, model, trace(model, channels, *sides), head_modules(model))


def _without_head(tensors: Tensors, model: nn.Module) -> dict[str, torch.Tensor]:
    prefixes = tuple(f"{head}." if head else "" for head in head_modules(model))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _misfits(model: nn.Module, tensors: Tensors) -> Differences:
    """List how tensors differ from a model's in names and shapes, the head left out."""
    own, body = _without_head(model.state_dict(), model), _without_head(tensors, model)
    return differences({n: t for n, t in own.items() if n in body or not n.endswith(_COUNT)}, body)


def _loadable(model: nn.Module, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Select the tensors to load: all except those of head layers of another size; so hidden ones are loaded."""
    own, body = model.state_dict(), _without_head(tensors, model)
    head = (tensors.keys() | own.keys()) - body.keys() - _without_head(own, model).keys()
    theirs, ours = ({name: tuple(state[name].shape) for name in head & state.keys()} for state in (tensors, own))
    others = {_layer(name) for name in head if theirs.get(name) != ours.get(name) and not name.endswith(_COUNT)}
    return {name: t for name, t in tensors.items() if name in body or (name in ours and _layer(name) not in others)}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _without_prefix(tensors: Tensors, model: nn.Module) -> Tensors:
    """Strip the prefix of all names that a wrapper gives them, and leave out tensors without it, such as of a loss."""
    own = model.state_dict()
    if own.keys() & tensors.keys():
        return tensors
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    body = [name for name in _without_head(own, model) if not name.endswith(_COUNT)]
    prefixes = [name.removesuffix(body[0]) for name in plain if body and name.endswith(body[0])]
    prefix = next((one for one in prefixes if all(f"{one}{name}" in plain for name in body)), "")
    return {name.removeprefix(prefix): tensor for name, tensor in plain.items() if name.startswith(prefix)}
