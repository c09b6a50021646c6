"""A model's layers: which are its head, which train and how fast, and how much its dropout layers drop."""

import fnmatch
import re
from typing import Any

from torch import nn

from flatout.errors import InputError

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_CONTAINERS = (nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# The source files, in torch and in timm, of the parameterless modules that are not counted as layers.
_UNCOUNTED_SOURCES = ("activation", "drop", "flatten")


def head_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the head of a classifier by module name: one module, or several where the model has several heads.

    That is what the model's `get_classifier()` names, and the classifiers in its `pretrained_cfg` (timm's conventions);
    else the linear layer registered last; else the last module with parameters of its own.
    """
    modules = dict(model.named_modules())
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        named = get_classifier()
        found = named if isinstance(named, tuple | list) else (named,)
        heads = {name: module for name, module in modules.items() if any(module is head for head in found)}
        if any(_has_parameters(head) for head in heads.values()):
            return heads | _other_classifiers(model, heads)
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    candidates = linear or [name for name, module in modules.items() if _has_parameters(module, recurse=False)]
    if not candidates:
        raise InputError(f"the model {type(model).__name__} has no parameters, so there is nothing to train")
    return {candidates[-1]: modules[candidates[-1]]}


def _other_classifiers(model: nn.Module, heads: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the classifiers of timm's configuration apart from these heads, such as an auxiliary one."""
    config = getattr(model, "pretrained_cfg", None)
    names = config.get("classifier") if isinstance(config, dict) else None
    others = {}
    for name in (names,) if isinstance(names, str) else names or ():
        is_part = any(name == head or name.startswith(f"{head}.") or head.startswith(f"{name}.") for head in heads)
        module = dict(model.named_modules()).get(name)
        if module is not None and not is_part and _has_parameters(module):
            others[name] = module
    return others


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def freeze(model: nn.Module, spec: str) -> list[str]:
    """Stop the parameters that `spec` names from training, and return their names.

    `spec` is one of:
    - `""`: none;
    - `all-but-last-N`: all parameters but those of the head and of the last N layers before it. Layers are counted as
      Keras lists them for VGG16: convolutions, norms, poolings and linear layers count; activations, dropout, identity
      and flatten do not. So VGG16 with `all-but-last-4` trains block 5 (three convolutions and its pool) and the head;
    - comma-separated patterns of parameter names, such as `features.0.*,features.2.*`, with `*`, `?` and `[...]` as in
      a shell.

    Raises:
        InputError: `spec` freezes nothing, one of its patterns matches no parameter, or nothing is left to train.
    """
    spec = spec.strip()
    parameters = dict(model.named_parameters())
    if spec.startswith("all-but-last"):
        frozen = _all_but_last(model, spec)
    else:
        frozen = _matching(list(parameters), spec) if spec else set()
    names = [name for name in parameters if name in frozen]
    if all(name in frozen or not parameter.requires_grad for name, parameter in parameters.items()):
        raise InputError(f"freeze = {spec!r}: leaves no parameter to train; freeze fewer")
    for name in names:
        parameters[name].requires_grad_(False)
    return names


def _all_but_last(model: nn.Module, spec: str) -> set[str]:
    count = re.fullmatch(r"all-but-last-(\d+)", spec)
    if not count:
        raise InputError(f"freeze = {spec!r}: must be all-but-last-N with a whole number N, such as all-but-last-4")
    in_heads = {module for head in head_modules(model).values() for module in head.modules()}
    layers = layers_before_head(model)
    training = in_heads.union(layers[max(0, len(layers) - int(count[1])) :])
    kept = {id(parameter) for module in training for parameter in module.parameters(recurse=False)}
    frozen = {name for name, parameter in model.named_parameters() if id(parameter) not in kept}
    if not frozen:
        raise InputError(f"freeze = {spec!r}: freezes nothing; the model has {len(layers)} layers before its head")
    return frozen


def layers_before_head(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a classifier before its head, as `freeze` counts them."""
    in_heads = {module for head in head_modules(model).values() for module in head.modules()}
    return [module for module in model.modules() if module not in in_heads and _is_layer(module)]


def _is_layer(module: nn.Module) -> bool:
    """Whether a module counts as a layer: it holds parameters or buffers itself, or is a leaf such as a pooling."""
    if _has_parameters(module, recurse=False) or list(module.buffers(recurse=False)):
        return True
    source = type(module).__module__.rpartition(".")[2]
    is_leaf = not list(module.children()) and not isinstance(module, _CONTAINERS)
    return is_leaf and not source.startswith(_UNCOUNTED_SOURCES)


def _matching(names: list[str], spec: str) -> set[str]:
    frozen: set[str] = set()
    for pattern in (part.strip() for part in spec.split(",")):
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            is_module = pattern and any(name.startswith(f"{pattern}.") for name in names)
            hint = f"did you mean '{pattern}.*'?" if is_module else f"names look like {next(iter(names), '')!r}"
            raise InputError(f"freeze = {spec!r}: the pattern {pattern!r} matches no parameter; {hint}")
        frozen.update(matched)
    return frozen


def learning_rate_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return by name what the learning rate of each parameter is multiplied by: `decay` for each group behind its own.

    The groups are those of `timm.optim.param_groups_layer_decay` where the model has timm's `group_matcher`. Elsewhere,
    each module with parameters of its own begins a group, unless all of them are vectors, as in a norm: these belong to
    the layer before. The head is the last group.
    """
    if callable(group_matcher := getattr(model, "group_matcher", None)):
        from timm.models import group_parameters

        groups: Any = group_parameters(model, group_matcher(coarse=False), reverse=True)
    else:
        groups = _groups(model)
    last = max(groups.values())
    return {name: decay ** (last - group) for name, group in groups.items()}


def _groups(model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's group, from the first layer to the head."""
    heads = head_modules(model)
    in_heads = [name for prefix, head in heads.items() for name, _ in head.named_parameters(prefix)]
    groups, number = {}, 0
    for prefix, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(prefix, recurse=False) if name not in in_heads}
        number += any(parameter.ndim > 1 for parameter in own.values())
        groups |= dict.fromkeys(own, number)
    return groups | dict.fromkeys(in_heads, number + 1)


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have parameters, all of them frozen, containers as well as what they contain."""
    trains = {module: [p.requires_grad for p in module.parameters()] for module in model.modules()}
    return [module for module, flags in trains.items() if flags and not any(flags)]


def set_train_mode(model: nn.Module, norm: str = "global") -> None:
    """Put a model in training mode, but its frozen modules in evaluation mode; all batch norms if norm = "frozen".

    A frozen batch norm must not move its statistics, and what a frozen block computes must not vary with dropout.
    """
    model.train()
    for module in frozen_modules(model):
        module.eval()
    if norm == "frozen":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def set_dropout(model: nn.Module, share: float) -> None:
    """Let every dropout layer drop that share, 0 to 1; -1 leaves each as the model has it.

    Only torch's dropout modules and those derived from them are found. What a model drops in its forward pass by
    `nn.functional.dropout`, and stochastic depth, keep their own shares.
    """
    if share == -1:
        return
    layers = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    if not layers and share > 0:
        raise InputError(f"dropout = {share:g}: {type(model).__name__} has no dropout layer; leave the key out")
    for layer in layers:
        layer.p = share
