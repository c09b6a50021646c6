"""A model whose parameters, gradients and optimizer state are cut into slices, one for each rank: torch's FSDP2.

A rank keeps one slice of every parameter, cut along its first dimension, and the optimizer's state of that slice. The
model is a nest of units. A unit's slices are gathered from all ranks just before it computes, in the forward and again
in the backward pass, and let go of right after; the gradients of a unit are added up, and each rank keeps those of its
slice. Buffers, such as the statistics of batch normalisation, stay whole on every rank.

Gathering takes every rank: all must call the model equally often, training and evaluating. A rank that has no samples
left calls it with whatever there is, even with an empty batch, and the others need nothing from it but its slices.

Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054 (stage 3); Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flatout import recipe
from flatout.errors import InputError
from flatout.numerics import optim

# Shares of all parameters. A module of more than the first is not gathered in one piece if it has parts; one of less
# than the second is gathered with what is around it: many small gathers take longer than few.
LARGEST_UNIT = 1 / 8
SMALLEST_UNIT = 1 / 256


def shard(model: nn.Module, device: torch.device) -> None:
    """Cut the parameters of a model into slices over the ranks of the default process group, in place.

    The ranks must hold equal values: each keeps its slice of its own. The parameters are replaced by others of the same
    names, so the optimizer comes afterwards. The model may still be on the host: its units go to the device one after
    the other, and the whole of it never lies there. Gradients are summed over the ranks, not averaged: what is
    differentiated must already be divided by the weight of the whole batch. Only the model itself may be called from
    now on, none of its parts.

    Raises:
        InputError: a parameter has no dimension along which to cut it.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise InputError(
                f"shard = 'full': the parameter {name} is a single number, which cannot be cut into slices; "
                "make it a tensor of shape [1], or train without shard"
            )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in _units(model):
        unit.to(device)
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                # Slices are of rows: other orders, such as channels_last, are refused.
                parameter.data = parameter.data.contiguous()
        unit.register_forward_hook(_give_no_view)
        # The outermost unit too lets go of its parameters: between two calls, the model always holds slices alone.
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        # Dividing by one is left out; gloo has no other reduction than a sum.
        sharded.set_force_sum_reduction_for_comms(True)


def _give_no_view(module: nn.Module, arguments: object, output: object) -> object:
    """Copy what a unit returns if it is a view.

    FSDP marks the output to know when to gather for the backward pass; an in-place operation on a view loses the mark.
    """
    if isinstance(output, torch.Tensor) and output.requires_grad and output._is_view():
        return output.clone()
    return tuple(_give_no_view(module, arguments, part) for part in output) if type(output) is tuple else output


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, from the inside out; the model itself is the last."""
    holders = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(holders)) < len(holders):
        # What several modules share must lie in one unit: the model.
        return [model]
    total = _count(model)
    units: list[nn.Module] = []

    def choose(module: nn.Module) -> int:
        """Choose the units within a module, itself included; return how many parameters are left for what is around."""
        left = _count(module)
        # Lists of modules are never called, and sequences are now and then gone through from outside.
        is_called = type(module).forward is not nn.Module.forward and type(module) is not nn.Sequential
        # Attention reads the parameters of its parts without calling them.
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


def build_optimizer(section: recipe.Optimizer, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the torch optimizer for slices: in its fused form where torch has that for them, which is for Adam alone.

    Others take each of their operations for all slices together. None can be recorded in a CUDA graph.
    """
    optimizer = optim.build(section, parameters, capturable=False)
    if not isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, True
    return optimizer
