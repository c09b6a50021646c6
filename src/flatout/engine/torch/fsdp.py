"""A model sharded over the ranks by torch's FSDP2: parameters, gradients and optimizer state.

All ranks must call the model equally often; one without samples calls it with any batch, even an empty one.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054 (stage 3); Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flatout.distributed.world import World
from flatout.engine.torch.gradients import Gradients
from flatout.utils.errors import InputError

# Fractions of all parameters. A module with more than the first is divided into several units if it has submodules; one
# with less than the second is gathered with its parent, since many small gathers take longer than few.
LARGEST_UNIT = 1 / 8
SMALLEST_UNIT = 1 / 256


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard a model, equal on all ranks, over the default process group, in place; its units go to the device in turn.

    Gradients are summed over the ranks. From then on, only the model itself may be called, not its submodules.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise InputError(
                f"shard = 'full': the parameter {name} is a single number, which cannot be sharded; "
                "make it a tensor of shape [1], or train without shard"
            )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in _units(model):
        unit.to(device)
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                # FSDP2 refuses other memory formats, such as channels_last.
                parameter.data = parameter.data.contiguous()
        unit.register_forward_hook(_give_no_view)
        # The outermost unit frees its parameters, too: between calls, only shards are in memory.
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        # gloo can only sum.
        sharded.set_force_sum_reduction_for_comms(True)


def _give_no_view(module: nn.Module, arguments: object, output: object) -> object:
    """Copy outputs that are views: an in-place operation on a view would remove the hook of FSDP's backward pass."""
    if isinstance(output, torch.Tensor) and output.requires_grad and output._is_view():
        return output.clone()
    return tuple(_give_no_view(module, arguments, part) for part in output) if type(output) is tuple else output


class FSDPGradients(Gradients):
    """The gradients of a sharded model, which torch's FSDP2 reduces and scatters."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    def begin_backward(self, *, is_last: bool) -> None:
        self._model.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]

    def all_reduce(self, extra: torch.Tensor) -> torch.Tensor:
        return self._world.all_reduce(extra)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, innermost first; the last is the model."""
    holders = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(holders)) < len(holders):
        # Parameters that several modules share must be in one unit: the model.
        return [model]
    total, units = _count(model), list[nn.Module]()

    def choose(module: nn.Module) -> int:
        """Return the number of parameters left to the parent."""
        left = _count(module)
        # Module lists are never called, and sequences are sometimes iterated over from outside.
        is_called = type(module).forward is not nn.Module.forward and type(module) is not nn.Sequential
        # Attention uses the parameters of its submodules without calling them.
        is_divisible = not is_called or (left > LARGEST_UNIT * total and not isinstance(module, nn.MultiheadAttention))
        if is_divisible:
            left = _count(module, recurse=False) + sum(choose(child) for child in module.children())
        if module is not model and (left < SMALLEST_UNIT * total or not is_called):
            return left
        units.append(module)
        return 0

    choose(model)
    return units


def _count(module: nn.Module, *, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse))
