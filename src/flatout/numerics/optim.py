"""torch optimizers of a recipe, in their fastest form."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flatout.recipe import Optimizer

_ANSWER = "__dynamo_disable"


def build(optimizer: Optimizer, parameters: Iterable[torch.Tensor], *, capturable: bool) -> torch.optim.Optimizer:
    """Return the torch optimizer of a recipe's section, fused where torch has that.

    Args:
        optimizer: the section.
        parameters: what to train, all on one device.
        capturable: whether steps are recorded in a CUDA graph. The learning rate is then a tensor on the device, so
            that it can change.
    """
    parameters = list(parameters)
    assert parameters
    device = parameters[0].device
    lr = torch.tensor(optimizer.lr, device=device) if capturable else optimizer.lr
    options: dict[str, Any] = {"lr": lr, "weight_decay": optimizer.weight_decay}
    options["fused"] = device.type in (("cpu",) if optimizer.name == "adagrad" else ("cpu", "cuda", "mps"))
    if optimizer.name in ("sgd", "momentum"):
        options |= {key: getattr(optimizer, key) for key in ("momentum", "dampening", "nesterov")}
        return torch.optim.SGD(parameters, **options)
    options["eps"] = optimizer.eps
    if optimizer.name == "adagrad":
        return torch.optim.Adagrad(parameters, **options)
    cls = torch.optim.Adam if optimizer.name == "adam" else torch.optim.AdamW
    return cls(parameters, betas=(optimizer.betas[0], optimizer.betas[1]), capturable=capturable, **options)


def can_capture(optimizer: Optimizer) -> bool:
    """Return whether torch's implementation may run inside a CUDA graph."""
    return optimizer.name != "adagrad"


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Change the learning rate of every group, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


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
