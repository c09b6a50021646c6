"""torch optimizers from a recipe, in their fastest form."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flatout.recipe import Optimizer

if TYPE_CHECKING:
    import torch


def build(optimizer: Optimizer, parameters: "Iterable[torch.Tensor]", *, capturable: bool) -> "torch.optim.Optimizer":
    """Return the torch optimizer, fused where torch has that.

    Args:
        optimizer: the recipe's section.
        parameters: what to train, all on one device.
        capturable: whether the steps are to be recorded in a CUDA graph: the learning rate is then a tensor on the
            device, so that it can still change.
    """
    import torch

    parameters = list(parameters)
    assert parameters
    device = parameters[0].device
    lr = torch.tensor(optimizer.lr, device=device) if capturable else optimizer.lr
    weight_decay, eps, momentum = optimizer.weight_decay, optimizer.eps, optimizer.momentum
    assert eps is not None
    assert momentum is not None
    fused = device.type in ("cpu", "cuda", "mps")
    if optimizer.name in ("sgd", "momentum"):
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=momentum,
            dampening=optimizer.dampening,
            nesterov=optimizer.nesterov,
            weight_decay=weight_decay,
            fused=fused,
        )
    if optimizer.name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay, eps=eps, fused=device.type == "cpu")
    betas = (optimizer.betas[0], optimizer.betas[1])
    cls = torch.optim.Adam if optimizer.name == "adam" else torch.optim.AdamW
    return cls(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused, capturable=capturable)


def can_capture(optimizer: Optimizer) -> bool:
    """Return whether torch's implementation may run inside a CUDA graph."""
    return optimizer.name != "adagrad"


def set_learning_rate(optimizer: "torch.optim.Optimizer", learning_rate: float) -> None:
    """Change the learning rate of every group, in place where it is a tensor."""
    import torch

    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
