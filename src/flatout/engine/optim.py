"""The torch optimizer of a recipe, in its fastest form."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.config import OPTIMIZERS, Optimizer
from flatout.config.settings import nearest
from flatout.utils.errors import InputError, first_line

CLASSES = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
# Unsupported classes of torch and timm, with the reason.
UNSUPPORTED = {
    "LBFGS": "it computes the loss several times in a step",
    "SparseAdam": "it needs sparse gradients",
    "Adahessian": "it needs second derivatives",
    "Kron": "what it keeps cannot be written into a checkpoint",
}
_ANSWER = "__dynamo_disable"


def build(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    scales: Mapping[str, float] | None = None,
    *,
    capturable: bool,
    is_sharded: bool = False,
) -> torch.optim.Optimizer:
    """Return the torch optimizer of a recipe's section, fused if torch supports that.

    Args:
        parameters: what to train by name, all on one device.
        scales: the factor of each parameter's learning rate; None for 1. Parameters of equal scale are a group.
        capturable: whether steps are recorded in a CUDA graph. The learning rate of a group is then a tensor on the
            device, so that it can change.
    """
    if is_sharded and optimizer.is_of_library:  # may compute with whole parameters
        known = ", ".join(OPTIMIZERS)
        raise InputError(f"optimizer.name = {optimizer.name!r} is not available with shard = 'full'; use {known}")
    device = next(iter(parameters.values())).device
    grouped: dict[float, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        scale = scales[name] if scales else 1.0
        lr = torch.tensor(optimizer.lr, device=device) if capturable else optimizer.lr
        grouped.setdefault(scale, {"params": [], "lr_scale": scale, "lr": lr})["params"].append(parameter)
    groups = list(grouped.values())
    options: dict[str, Any] = {}
    if optimizer.is_of_library:
        options = {"capturable": True, "foreach": True} if capturable else {}
    elif is_sharded and not optimizer.name.startswith("adam"):  # of the fused ones, only Adam takes shards
        options["foreach"] = True
    else:
        options["fused"] = device.type in (("cpu",) if optimizer.name == "adagrad" else ("cpu", "cuda", "mps"))
        options |= {"capturable": capturable} if optimizer.name in ("adam", "adamw") else {}
    made_by = class_of(optimizer)
    try:
        return made_by(groups, **options)
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer.name = {optimizer.name!r}: {first_line(error)}") from error


def class_of(optimizer: Optimizer) -> functools.partial[torch.optim.Optimizer]:
    """Return the class of an optimizer (`NAME`, `torch:NAME`, `timm:NAME`), with the options of the section bound."""
    library, _, name = optimizer.name.rpartition(":")
    known: dict[str, Any] = CLASSES
    if library == "torch":
        known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and c is not torch.optim.Optimizer}
    elif library == "timm":
        # timm lacks the aliases that mark re-exports.
        from timm.optim import get_optimizer_class, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

        # The optimizers of Apex and bitsandbytes need these libraries.
        known = {str(n): get_optimizer_class(str(n)) for n in list_optimizers(exclude_filters=["fused*", "bnb*"])}
    if name not in known:
        raise InputError(f"{library} has no optimizer called {name!r}; {nearest(name, known)}")
    bound = functools.partial(known[name])
    if reason := UNSUPPORTED.get(bound.func.__name__):
        raise InputError(f"optimizer.name = {optimizer.name!r} is not supported: {reason}")
    taken = inspect.signature(bound).parameters
    wanted = {
        "momentum": optimizer.momentum,
        "dampening": optimizer.dampening or None,
        "nesterov": optimizer.nesterov,
        # Some classes have another default than 0.
        "weight_decay": optimizer.weight_decay if "weight_decay" in taken else optimizer.weight_decay or None,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
    }
    # Sections of known optimizers have values for all keys.
    options = {key: value for key, value in wanted.items() if value is not None and (library or key in taken)}
    for key in options.keys() - taken:
        raise InputError(f"optimizer.{key} = {options[key]!r}: {optimizer.name} has none; leave the key out")
    return functools.partial(bound, **options)


def can_capture(optimizer: Optimizer) -> bool:
    """Whether a CUDA graph may contain the implementation; timm's own read the learning rate on the host."""
    if not optimizer.is_of_library:
        return optimizer.name != "adagrad"
    cls = class_of(optimizer).func
    return cls.__module__.startswith("torch.") and "capturable" in inspect.signature(cls).parameters


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Change the learning rate of every group, times the group's own scale, in place where it is a tensor."""
    for group in optimizer.param_groups:
        scaled = learning_rate * group["lr_scale"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer by a step whose effect on the parameters is undone."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [(parameter.grad, parameter.clone()) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    plain_step(optimizer)()
    for parameter, (gradient, value) in zip(parameters, before, strict=True):
        parameter.grad = gradient
        parameter.copy_(value)


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without torch's wrapper, which imports torch's compiler; see `keep_compiler_out`."""
    return functools.partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), optimizer)


def keep_compiler_out() -> Callable[[], None]:
    """Keep torch's optimizers from importing torch's compiler, a second of every start; return a function to undo it.

    Their methods do so only to exclude themselves from compilation (`_disable_dynamo` in torch/_compile.py, 2.11 to
    2.15), and cache the excluded function in an attribute of the undecorated one; here that is the function itself.
    """
    methods = (getattr(torch.optim.Optimizer, name) for name in ("add_param_group", "zero_grad"))
    plain = [m.__wrapped__ for m in methods if hasattr(m, "__wrapped__") and "torch._dynamo" not in sys.modules]
    for function in plain:
        setattr(function, _ANSWER, function)

    def undo() -> None:
        for function in plain:
            if getattr(function, _ANSWER, None) is function:
                delattr(function, _ANSWER)

    return undo
