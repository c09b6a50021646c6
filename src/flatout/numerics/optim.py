"""torch optimizers from a recipe, in their fastest form."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flatout.recipe import Optimizer

_ANSWER = "__dynamo_disable"


def build(optimizer: Optimizer, parameters: Iterable[torch.Tensor], *, capturable: bool) -> torch.optim.Optimizer:
    """Return the torch optimizer, fused where torch has that.

    Args:
        optimizer: the recipe's section.
        parameters: what to train, all on one device.
        capturable: whether the steps are to be recorded in a CUDA graph: the learning rate is then a tensor on the
            device, so that it can still change.
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
    """Return the optimizer's step without what torch wraps around it: profiler marks, hooks and differentiability.

    The wrapper imports torch's compiler only to tell it to keep out, as the methods in `keep_compiler_out` do.
    """
    return functools.partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), optimizer)


def keep_compiler_out() -> Callable[[], None]:
    """Keep torch's optimizers from importing torch's compiler, and return what undoes that.

    Their methods ask torch._dynamo to leave them out of compiled code, and import it for that alone, which takes a
    second of every start (`_disable_dynamo` in torch/_compile.py, 2.11 to 2.15). Each keeps the answer in an attribute
    of the undecorated function; here that answer is the function itself. Other versions may keep it elsewhere: then
    nothing happens but the import.
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
