"""Which layer of a classifier is its head: the last one, whose outputs are the logits."""

from torch import nn

from flatout.errors import InputError


def head_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the head of a classifier by module name: one module, or several where the model has several heads.

    That is what the model's `get_classifier()` names (timm's convention); else the linear layer registered last; else
    the last module with parameters of its own.

    Raises:
        InputError: the model has no parameters.
    """
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        named = get_classifier()
        found = named if isinstance(named, tuple | list) else (named,)
        heads = {name: module for name, module in model.named_modules() if any(module is head for head in found)}
        if any(True for head in heads.values() for _ in head.parameters()):
            return heads
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with_parameters = {
        name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    candidates = list((linear or with_parameters).items())
    if not candidates:
        raise InputError(f"the model {type(model).__name__} has no parameters, so there is nothing to train")
    return dict(candidates[-1:])
