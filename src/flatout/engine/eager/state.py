"""The engine's state as plain tensors that tell nothing of the ranks, whole or cut into slices on the device."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from flatout.errors import InputError


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return a whole copy of everything that training changes, on the CPU; of a sharded model all ranks must call it.

    Args:
        model: as it is trained.
        optimizer: of `parameters`.
        parameters: the trained parameters of the model by name.

    Returns:
        What `Engine.state` describes: `model.NAME` and `optimizer.NAME.KEY`.
    """
    return {name: _whole(value) for name, value in _named(model, optimizer, parameters)}


def _named(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict().items():
        yield f"model.{name}", value
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield f"optimizer.{name}.{key}", torch.as_tensor(value)


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if _is_slice(value) else value  # pyright: ignore[reportAttributeAccessIssue]
    return whole.detach().to("cpu", copy=True).contiguous()


def load_full_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Continue from a state that `full_state`, on any number of ranks, or any other engine returned.

    Every rank takes its slices of the state that it is given, without asking the others.

    Raises:
        InputError: the state is of another model.
    """
    targets = model.state_dict()
    weights = {}
    for name, value in state.items():
        if name.startswith("model."):
            name = name.removeprefix("model.")
            weights[name] = _as(value, targets[name]) if name in targets else value
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"the checkpoint does not fit the model: {error}") from None
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        for key, value in state.items():
            if key.startswith(prefix):
                key = key.removeprefix(prefix)
                # What is kept for each weight is cut as the weights are. The only other thing is the count of steps.
                optimizer.state[parameter][key] = (
                    _as(value, parameter)
                    if value.shape == parameter.shape
                    else value.to(_step_device(optimizer, parameter), copy=True)
                )


def _is_slice(value: torch.Tensor) -> bool:
    # A DTensor, without importing what defines it, which takes half a second.
    return hasattr(value, "full_tensor")


def _as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor, where and as another one lies that has its shape: cut into slices or not."""
    if value.shape != like.shape:
        return value
    if _is_slice(like):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    # In the memory order of the weights: fused optimizers go through both as they lie.
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def _step_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.device:
    # Torch keeps step counts on the CPU unless the step is fused or captured on the device.
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return parameter.device if on_device else torch.device("cpu")
