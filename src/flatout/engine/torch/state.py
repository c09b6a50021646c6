"""The training state as tensors by name, independent of the number of ranks; and the average of weights.

`model.NAME` holds parameters and buffers under their plain names, `optimizer.NAME.KEY` the optimizer state of a trained
parameter, including Python numbers. In a sharded model these are DTensors, of which a rank has one shard.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from flatout.distributed.world import World
from flatout.engine import optim
from flatout.utils.errors import InputError

Tensors = dict[str, torch.Tensor]


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, weights_only: bool
) -> Tensors:
    """Return what training changes, not copied."""
    named = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    return named if weights_only else named | _optimizer_tensors(optimizer, parameters)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Tensors:
    # float64 preserves Python floats.
    kept = {name: owner[key] for name, (owner, key) in _places(optimizer, parameters).items()}
    return {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
        for name, value in kept.items()
    }


def _places(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the place (dictionary, key) of each optimizer state, by the name in checkpoints."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        own = optimizer.state.get(parameter, {})
        # Some optimizers of timm count the steps of a whole group.
        for owner, keys in ((groups[parameter], {"step"} & groups[parameter].keys()), (own, own)):
            found |= {f"optimizer.{name}.{key}": (owner, key) for key in keys if owner[key] is not None}
    return found


def assign_numbers(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Overwrite optimizer state that consists of Python numbers, which are immutable."""
    for name, (owner, key) in _places(optimizer, parameters).items():
        if isinstance(owner[key], int | float):
            owner[key] = type(owner[key])(tensors[name].item())


def clear(optimizer: torch.optim.Optimizer) -> None:
    """Forget what an optimizer keeps."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return value.to_local() if _is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]


def gathered(named: Mapping[str, torch.Tensor], locals: Mapping[str, torch.Tensor] | None, world: World) -> Tensors:
    """Return whole copies on the CPU, on rank 0; of `locals`, earlier results of `local`, if given."""
    state = {}
    for name in named if locals is None else locals:
        value = named[name] if locals is None else _with_local(named[name], locals[name])
        # One tensor at a time: a device never holds the whole model.
        whole = value.full_tensor() if _is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]
        if world.is_main:
            state[name] = whole.to("cpu", copy=True).contiguous()
    return state


def load(
    state: Mapping[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    world: World,
) -> None:
    """Overwrite `targets`, the training state, with rank 0's `state`; missing optimizer state is created."""
    shapes = world.broadcast_object({name: (value.shape, value.dtype) for name, value in state.items()})
    found = {name: tuple(shape) for name, (shape, _) in shapes.items() if name.startswith("model.")}
    expected = {name: tuple(target.shape) for name, target in targets.items() if name.startswith("model.")}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise InputError(
                f"the checkpoint does not fit the model: {name.removeprefix('model.')} has shape {found.get(name)}; "
                f"the model needs {expected.get(name)}"
            )
    if any(name.startswith("optimizer.") and name not in targets for name in shapes):
        optim.create_state(optimizer)
        targets = targets | _optimizer_tensors(optimizer, parameters)
        for name, parameter in parameters.items():
            # A parameter that never had a gradient.
            if not any(kept.startswith(f"optimizer.{name}.") for kept in shapes):
                optimizer.state.pop(parameter, None)
    for name, (shape, dtype) in shapes.items():
        if name in targets:
            _receive(state.get(name), targets[name], shape, dtype, world)
    assign_numbers(optimizer, parameters, targets)


def _receive(
    value: torch.Tensor | None, target: torch.Tensor, shape: torch.Size, dtype: torch.dtype, world: World
) -> None:
    if _is_sharded(target):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        whole = torch.empty(shape, dtype=dtype) if value is None else value
        target.copy_(distribute_tensor(whole.to(target.device), target.device_mesh, target.placements))
        return
    if value is not None:
        target.copy_(value)
    world.broadcast([target])


def is_finite(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Whether those of this rank are, bool [] on the device, without synchronising."""
    floats = [local(value) for value in named.values() if value.is_floating_point()]
    floats = [value for value in floats if value.numel() and value.device == floats[0].device]
    return nn.utils.get_total_norm(floats, norm_type=float("inf")).isfinite()


def _is_sharded(value: torch.Tensor) -> bool:
    # A DTensor, without importing its module, which takes half a second.
    return hasattr(value, "full_tensor")


def _with_local(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not _is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    value = value.to(like.device)
    return DTensor.from_local(value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


class WeightAverage:
    """The average of a model's parameters and buffers, `tensors`; of a sharded model, this rank's part.

    The decay in step t is at most (1 + t) / (10 + t), as in TensorFlow's ExponentialMovingAverage. `steps` is t at the
    start. If `is_async`, few large operations are faster than one for each tensor.
    """

    def __init__(self, model: nn.Module, decay: float, steps: int, *, is_async: bool) -> None:
        self._decay, self._is_async = decay, is_async
        self._weights = {f"ema.{name}": value.detach() for name, value in model.state_dict().items()}
        self.tensors = {name: value.clone() for name, value in self._weights.items()}
        device = next(iter(self.tensors.values())).device
        self._steps = self.tensors["ema_steps"] = torch.full((), float(steps), device=device)

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        share = 1 - torch.clamp((1 + self._steps) / (10 + self._steps), max=self._decay)
        pairs = [(local(self.tensors[name]), local(value)) for name, value in self._weights.items()]
        for average, value in pairs:
            if not value.is_floating_point():
                average.copy_(value)
        averages, values = zip(*((a, v) for a, v in pairs if v.is_floating_point()), strict=True)
        if self._is_async:
            # torch.optim's own way to a few large operations; `_foreach_lerp_` would need the share on the host.
            changes = torch._foreach_sub(values, averages)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(changes, share)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(averages, changes)  # pyright: ignore[reportPrivateImportUsage]
        else:
            for average, value in zip(averages, values, strict=True):
                average.lerp_(value, share.to(value.dtype))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        kept = {name: value.clone() for name, value in self._weights.items()}
        self._copy(self.tensors)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in self._weights.items():
            value.copy_(tensors[name])
