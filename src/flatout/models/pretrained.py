"""Load published or given weights into a model: from the hub, an installed package, a file or a folder."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.config import Recipe
from flatout.config.settings import shown
from flatout.models.build import create_timm, quiet, seeded
from flatout.models.convert.match import candidates, has_other_strides, layers_of, to_timm_names, trace
from flatout.models.convert.readers import SourceCheckpoint, find_file, read_file
from flatout.models.hub import FIX, find_installed, find_weights
from flatout.models.layers import head_modules
from flatout.models.weights import Differences, Tensors, described, differences
from flatout.utils.errors import InputError, first_line

# The deviation of the weights of a fresh last layer on loaded ones.
_FRESH_DEVIATION = 0.01
# The batch count of batch norm, which is missing in files older than PyTorch 0.4.1, and not used here.
_COUNT = ".num_batches_tracked"
_PREFIX = re.compile(r"(module|model|net|_orig_mod)\.")


def load_pretrained(model: nn.Module, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Load the recipe's weights into its model. A last layer of another size gets small random weights.

    Those are the published weights of `recipe.model`, from a cache, the hub or a package (`hub.find_weights`); or, if
    `recipe.weights` is set, a file in any format that `convert.readers` knows, or a folder with one, such as a run.
    timm adapts weights of its networks to another image size. `report` receives messages on downloads and loaded
    weights.

    Raises:
        WeightsUnavailable: published weights are in no cache and no package, and cannot be downloaded.
        InputError: there are no such weights, they cannot be read, would execute code, are damaged, or do not fit;
            tensors that do not fit are named with both shapes. The model is not changed then.
    """
    if recipe.weights:
        path = find_file(Path(recipe.weights))
        source = _resized(model, recipe, read_file(path), path)
        fitted = fit(model, source, path, recipe.image_sides, report)
    else:
        fitted = _load_published(model, recipe, report)
    if not fitted.head_fits:
        _start_small(model, fitted, recipe.seed)


def _load_published(model: nn.Module, recipe: Recipe, report: Callable[[str], None]) -> "Fitted":
    path = find_weights(recipe.model, report=report)
    installed = find_installed(recipe.model)
    if installed and installed.path != path:
        installed = None
    try:
        source = read_file(path)
        if recipe.model.startswith("timm:"):
            tensors = to_timm_names(model, source.tensors) if installed else source.tensors
            outputs = _timm_config(model)["num_classes"]
            source = SourceCheckpoint("torch", _adapt(model, recipe, tensors, outputs, path))
        return fit(model, source, path, recipe.image_sides, report)
    except InputError as error:
        if installed:
            raise InputError(f"{error}; the file is of {installed.origin}: {installed.fix}; or {FIX}") from error
        # The Hugging Face cache has a link there; removing only the link would keep the damaged file.
        fix = f"if the file is wrong, remove {path.resolve()} to download the weights of {recipe.model}"
        raise InputError(f"{error}; {fix}; or {FIX}") from error


def _timm_config(model: nn.Module) -> Mapping[str, Any]:
    return model.pretrained_cfg  # type: ignore[return-value]


def _start_small(model: nn.Module, fitted: "Fitted", seed: int) -> None:
    """Initialise last layers of heads that were not loaded with small weights and no bias.

    Some networks of timm's start with logits of several units, from which the first steps diverge.
    """
    generator = torch.Generator().manual_seed(seed)
    for prefix, head in head_modules(model).items():
        linear = [(name, m) for name, m in head.named_modules(prefix=prefix) if isinstance(m, nn.Linear | nn.Conv2d)]
        for name, layer in linear[-1:]:
            if f"{name}.weight" in fitted.names:
                continue
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * _FRESH_DEVIATION)
                if layer.bias is not None:
                    layer.bias.zero_()


# ---- timm's networks of other sizes ----------------------------------------------------------------------------------


def _resized(model: nn.Module, recipe: Recipe, source: SourceCheckpoint, path: Path) -> SourceCheckpoint:
    """Adapt weights of a timm network to the image size, if they do not fit."""
    if not recipe.model.startswith("timm:") or source.framework != "torch":
        return source
    own = model.state_dict()
    tensors = _strip_prefixes(source.tensors, own, _without_head(own, model))
    if not _misfits(model, tensors):
        return source
    try:
        return SourceCheckpoint("torch", _adapt(model, recipe, tensors, _outputs_in(tensors, model), path))
    except InputError:
        return source  # the tensors that do not fit are named later


def _outputs_in(tensors: Tensors, model: nn.Module) -> int:
    """Infer the number of outputs from weights."""
    names = [name for prefix in head_modules(model) for name in tensors if name.startswith(f"{prefix}.")]
    last = [name for name in names if name.endswith(".weight") and tensors[name].ndim > 1]
    config = _timm_config(model)
    outputs = len(tensors[last[-1]]) if last else config["num_classes"]
    return outputs - (config.get("label_offset") or 0) * (outputs == config["num_classes"] + 1)


def _adapt(model: nn.Module, recipe: Recipe, tensors: Tensors, outputs: int, path: Path) -> dict[str, Any]:
    """Adapt the weights of a timm network to the image size and channels of a model.

    A second model is created, since timm adapts weights only on creation. It has as many outputs as the weights: with
    others, timm would accept the weights of any network.
    """
    try:
        with seeded(0), quiet():
            published = create_timm(recipe, outputs, tensors)
    except Exception as error:  # timm's functions for one network may raise anything on the tensors of another
        problems = described(_misfits(model, tensors)) or first_line(error)
        size = f"image_size = {shown(recipe.image_size)} (published: {_timm_config(model)['input_size'][-1]})"
        raise InputError(f"the weights {path} do not fit {recipe.model} with {size}: {problems}") from error
    return published.state_dict()


# ---- fitting a file to a model ---------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """Loaded weights: the names of the model's tensors, and how the file's were found.

    pairs: the model's layer -> the file's, if names differ.
    """

    names: list[str]
    head_fits: bool
    how: str
    pairs: dict[str, str]


def fit(
    model: nn.Module,
    source: SourceCheckpoint,
    path: Path,
    sides: tuple[int, int],
    report: Callable[[str], None],
) -> Fitted:
    """Load the weights of a file into a model, all or nothing; only layers of the head may be missing or misshapen.

    Args:
        model: from `build_model`, on the CPU.
        sides: height and width of the model's images.
        report: receives a message on the loaded weights.

    Raises:
        InputError: they do not fit; missing, unexpected and misshapen tensors are named.
    """
    if has_other_strides(model, [layer.name for layer in layers_of(source)]):
        raise InputError(
            f"the weights {path} are of Keras's ResNet, whose strides are in other layers than this model's; "
            "use the model keras-resnet50, keras-resnet101 or keras-resnet152"
        )
    best: tuple[int, Differences, Any] | None = None
    for how, tensors, pairs in _ways(model, source, sides):
        problems = _misfits(model, tensors)
        if not problems and not _loadable(model, tensors):
            problems = differences(model.state_dict(), tensors)
        count = sum(map(len, problems.values()))
        if best is None or count < best[0]:
            best = count, problems, (how, tensors, pairs)
        if not problems:
            break
    assert best is not None
    _, problems, (how, tensors, pairs) = best
    if problems:
        details = {"matched": how, "layers": pairs, **problems}
        raise InputError(f"the weights {path} do not fit the model: {described(problems)}", details)
    loaded = _loadable(model, tensors)
    model.load_state_dict(loaded, strict=False)
    own = model.state_dict()
    body = _without_head(own, model)
    fresh = dict.fromkeys(_layer(n) for n in own if n not in body and n not in loaded and not n.endswith(_COUNT))
    head_fits = not fresh
    about = f"the head ({', '.join(fresh)}) starts fresh, since the file has none of its size"
    matched = f", matched {how}" if pairs else ""
    report(f"Weights from {path}: {len(loaded)} tensors{matched}; {'the head included' if head_fits else about}.")
    return Fitted(list(loaded), head_fits, how, pairs)


def _ways(
    model: nn.Module, source: SourceCheckpoint, sides: tuple[int, int]
) -> Iterator[tuple[str, Tensors, dict[str, str]]]:
    """Yield ways to give the file's tensors the model's names: those of torch first as they are."""
    own = model.state_dict()
    if source.framework == "torch":
        yield "by name", _strip_prefixes(source.tensors, own, _without_head(own, model)), {}
    channels = next((w.shape[1] for w in own.values() if w.ndim == 4), 3)
    yield from candidates(source, model, trace(model, channels, *sides), head_modules(model))


def _without_head(tensors: Tensors, model: nn.Module) -> dict[str, Any]:
    prefixes = tuple(f"{head}." if head else "" for head in head_modules(model))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _misfits(model: nn.Module, tensors: Tensors) -> Differences:
    """List how tensors differ from a model's in names and shapes, the head left out."""
    own, body = _without_head(model.state_dict(), model), _without_head(tensors, model)
    return differences({n: t for n, t in own.items() if n in body or not n.endswith(_COUNT)}, body)


def _loadable(model: nn.Module, tensors: Tensors) -> dict[str, Any]:
    """Select the tensors to load: all except those of head layers of another size.

    So hidden layers of a head are loaded, even if the classes of the last layer differ.
    """
    own = model.state_dict()
    body, own_body = _without_head(tensors, model), _without_head(own, model)
    head = (tensors.keys() | own.keys()) - body.keys() - own_body.keys()
    theirs, ours = ({name: tuple(state[name].shape) for name in head & state.keys()} for state in (tensors, own))
    others = {_layer(name) for name in head if theirs.get(name) != ours.get(name) and not name.endswith(_COUNT)}
    return {name: t for name, t in tensors.items() if name in body or (name in ours and _layer(name) not in others)}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _strip_prefixes(tensors: Tensors, own: Iterable[str], body: Collection[str]) -> Tensors:
    """Strip the prefixes of torch.compile, data-parallel wrappers and Lightning modules from names.

    If all weights of the model, or of its body, have one prefix, other tensors (of a loss, of metrics) are left out.
    """
    known = set(own)
    first = next(iter(body), "")
    prefixes = [name.removesuffix(first) for name in tensors if name.endswith(f".{first}")]
    prefixes = [prefix for prefix in prefixes if all(f"{prefix}{name}" in tensors for name in body)]
    if len(prefixes) == 1 and not known & tensors.keys():
        return {n.removeprefix(prefixes[0]): t for n, t in tensors.items() if n.startswith(prefixes[0])}
    stripped, others = {}, {}
    for name, tensor in tensors.items():
        plain = name if name in known else name.replace("_orig_mod.", "")
        while plain not in known and (prefix := _PREFIX.match(plain)):
            plain = plain[prefix.end() :]
        (stripped if plain in known or _PREFIX.match(name) else others)[plain] = tensor
    return stripped if known <= stripped.keys() and not known & tensors.keys() else {**others, **stripped}
