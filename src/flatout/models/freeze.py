"""Which parameters train: freezing by layer count or by name, and the mode that frozen layers run in."""

import fnmatch
import re

from torch import nn

from flatout.errors import InputError
from flatout.models.head import head_modules

_CONTAINERS = (nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# The source files, in torch and in timm, of the parameterless modules that are not counted as layers.
_UNCOUNTED_SOURCES = ("activation", "drop", "flatten")


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
    if not spec:
        frozen: dict[str, nn.Parameter] = {}
    elif spec.startswith("all-but-last"):
        frozen = _all_but_last(model, spec)
    else:
        frozen = _matching(model, spec)
    if all(name in frozen or not parameter.requires_grad for name, parameter in model.named_parameters()):
        raise InputError(f"freeze = {spec!r}: leaves no parameter to train; freeze fewer")
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def _all_but_last(model: nn.Module, spec: str) -> dict[str, nn.Parameter]:
    count = re.fullmatch(r"all-but-last-(\d+)", spec)
    if not count:
        raise InputError(f"freeze = {spec!r}: must be all-but-last-N with a whole number N, such as all-but-last-4")
    heads = head_modules(model).values()
    in_heads = {module for head in heads for module in head.modules()}
    layers = [module for module in model.modules() if module not in in_heads and _is_layer(module)]
    training = layers[max(0, len(layers) - int(count[1])) :]
    kept = {id(p) for head in heads for p in head.parameters()} | {
        id(p) for layer in training for p in layer.parameters(recurse=False)
    }
    frozen = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in kept}
    if not frozen:
        raise InputError(
            f"freeze = {spec!r}: freezes nothing, since the model has {len(layers)} layers before its head"
        )
    return frozen


def _is_layer(module: nn.Module) -> bool:
    """Whether a module counts as a layer: it holds parameters or buffers itself, or is a leaf such as a pooling."""
    holds = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    is_leaf = not any(True for _ in module.children())
    source = type(module).__module__.rpartition(".")[2]
    return holds or (is_leaf and not isinstance(module, _CONTAINERS) and not source.startswith(_UNCOUNTED_SOURCES))


def _matching(model: nn.Module, spec: str) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    frozen = {}
    for pattern in (part.strip() for part in spec.split(",")):
        matched = {name: p for name, p in parameters.items() if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            is_module = pattern and any(name.startswith(f"{pattern}.") for name in parameters)
            hint = f"did you mean '{pattern}.*'?" if is_module else f"names look like {next(iter(parameters), '')!r}"
            raise InputError(f"freeze = {spec!r}: the pattern {pattern!r} matches no parameter; {hint}")
        frozen |= matched
    return {name: p for name, p in parameters.items() if name in frozen}


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have parameters, all of them frozen, containers as well as what they contain."""
    found = []
    for module in model.modules():
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if trains and not any(trains):
            found.append(module)
    return found


def set_train_mode(model: nn.Module) -> None:
    """Put a model in training mode, but its frozen modules in evaluation mode.

    A frozen batch norm must not move its statistics, and what a frozen block computes must not vary with dropout.
    """
    model.train()
    for module in frozen_modules(model):
        module.eval()
