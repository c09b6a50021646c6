"""torch optimizers of a recipe, in their fastest form."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.recipe import Optimizer

_ANSWER = "__dynamo_disable"


def build(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    scales: Mapping[str, float] | None = None,
    *,
    capturable: bool,
) -> torch.optim.Optimizer:
    """Return the torch optimizer of a recipe's section, fused where torch has that.

    Args:
        optimizer: the section.
        parameters: what to train by name, all on one device.
        scales: what the learning rate of each parameter is multiplied by; None for 1. Those of equal scale are a group.
        capturable: whether steps are recorded in a CUDA graph. The learning rate of a group is then a tensor on the
            device, so that it can change.
    """
    assert parameters
    device = next(iter(parameters.values())).device
    grouped: dict[float, list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        grouped.setdefault(scales[name] if scales else 1.0, []).append(parameter)
    groups: list[dict[str, Any]] = [{"params": members, "lr_scale": scale} for scale, members in grouped.items()]
    for group in groups:
        group["lr"] = torch.tensor(optimizer.lr, device=device) if capturable else optimizer.lr
    options: dict[str, Any] = {"weight_decay": optimizer.weight_decay}
    options["fused"] = device.type in (("cpu",) if optimizer.name == "adagrad" else ("cpu", "cuda", "mps"))
    if optimizer.name in ("sgd", "momentum"):
        options |= {key: getattr(optimizer, key) for key in ("momentum", "dampening", "nesterov")}
        return torch.optim.SGD(groups, **options)
    options["eps"] = optimizer.eps
    if optimizer.name == "adagrad":
        return torch.optim.Adagrad(groups, **options)
    cls = torch.optim.Adam if optimizer.name == "adam" else torch.optim.AdamW
    return cls(groups, betas=(optimizer.betas[0], optimizer.betas[1]), capturable=capturable, **options)


def can_capture(optimizer: Optimizer) -> bool:
    """Return whether torch's implementation may run inside a CUDA graph."""
    return optimizer.name != "adagrad"


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Change the learning rate of every group, times the group's own scale, in place where it is a tensor."""
    for group in optimizer.param_groups:
        scaled = learning_rate * group["lr_scale"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without torch's wrapper for profiler marks, hooks and differentiability.

    The wrapper imports torch's compiler, as the methods in `keep_compiler_out` do.
    """
    return functools.partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), optimizer)


def keep_compiler_out() -> Callable[[], None]:
    """Keep torch's optimizers from importing torch's compiler; return a function that undoes this.

    Their methods import torch._dynamo only to exclude themselves from compiled code, which takes a second of every
    start (`_disable_dynamo` in torch/_compile.py, 2.11 to 2.15). Each caches the excluded function in an attribute of
    the undecorated one; here that is the function itself. In other versions of torch this has no effect.
    """
    methods = (getattr(torch.optim.Optimizer, name) for name in ("add_param_group", "zero_grad"))
    plain = [method.__wrapped__ for method in methods if hasattr(method, "__wrapped__")]
    if "torch._dynamo" in sys.modules:
        plain = []
    for function in plain:
        setattr(function, _ANSWER, function)

    def undo() -> None:
        for function in plain:
            if getattr(function, _ANSWER, None) is function:
                delattr(function, _ANSWER)

    return undo
