"""The training state as tensors by name, independent of the number of ranks; and the average of weights.

`model.NAME` holds parameters and buffers under their plain names, `optimizer.NAME.KEY` the optimizer state of a trained
parameter, including Python numbers. In a sharded model these are DTensors, of which a rank has one shard.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.distributed.world import World
from flatout.engine import optim
from flatout.utils.errors import InputError

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of this rank's part of the training state; see `Engine.snapshot`."""

    tensors: Tensors
    weights_only: bool


class TrainingState:
    """What training changes: a model, the optimizer of its `parameters`, and the average of its weights, if any."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        average: "WeightAverage | None",
    ) -> None:
        self._model, self._optimizer, self._parameters, self._average = model, optimizer, parameters, average

    def tensors(self, *, weights_only: bool = False) -> Tensors:
        """Return its tensors, not copied."""
        named = dict(self._average.tensors) if self._average else {}
        named |= {f"model.{name}": value.detach() for name, value in self._model.state_dict().items()}
        places = {} if weights_only else self._places()
        for name, (owner, key) in places.items():
            # float64 preserves Python floats.
            value = owner[key]
            named[name] = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return named

    def _places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return the place (dictionary, key) of each optimizer state, by the name in checkpoints."""
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        found = {}
        for name, parameter in self._parameters.items():
            own = self._optimizer.state.get(parameter, {})
            # Some optimizers of timm count the steps of a whole group.
            for owner, keys in ((groups[parameter], {"step"} & groups[parameter].keys()), (own, own)):
                found |= {f"optimizer.{name}.{key}": (owner, key) for key in keys if owner[key] is not None}
        return found

    def _assign_numbers(self, tensors: Tensors) -> None:
        """Overwrite optimizer state that consists of Python numbers, which are immutable."""
        for name, (owner, key) in self._places().items():
            if isinstance(owner[key], int | float):
                owner[key] = type(owner[key])(tensors[name].item())

    def restore(self, snapshot: Snapshot) -> None:
        """Overwrite this rank's part of the tensors; without optimizer state in a whole snapshot, forget it."""
        for name, value in self.tensors(weights_only=snapshot.weights_only).items():
            if name in snapshot.tensors:
                local(value).copy_(snapshot.tensors[name])
        if any(name.startswith("optimizer.") for name in snapshot.tensors):
            self._assign_numbers(snapshot.tensors)
        elif not snapshot.weights_only:
            self._optimizer.state.clear()
            for group in self._optimizer.param_groups:
                group.pop("step", None)

    def load(self, state: Tensors, world: World) -> None:
        """Overwrite the tensors with rank 0's `state`; missing optimizer state is created."""
        targets = self.tensors()
        shapes = world.broadcast_object({name: (value.shape, value.dtype) for name, value in state.items()})
        found = {name: tuple(shape) for name, (shape, _) in shapes.items() if name.startswith("model.")}
        expected = {name: tuple(target.shape) for name, target in targets.items() if name.startswith("model.")}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise InputError(
                    f"the checkpoint does not fit the model: {name.removeprefix('model.')} has shape "
                    f"{found.get(name)}; the model needs {expected.get(name)}"
                )
        if any(name.startswith("optimizer.") and name not in targets for name in shapes):
            optim.create_state(self._optimizer)
            targets = self.tensors()
            for name, parameter in self._parameters.items():
                # A parameter that never had a gradient.
                if not any(kept.startswith(f"optimizer.{name}.") for kept in shapes):
                    self._optimizer.state.pop(parameter, None)
        for name, (shape, dtype) in shapes.items():
            if name in targets:
                _receive(state.get(name), targets[name], shape, dtype, world)
        self._assign_numbers(targets)


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.to_local() if is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]


def gathered(named: Mapping[str, Tensor], locals: Mapping[str, Tensor] | None, world: World) -> Tensors:
    """Return whole copies on the CPU, on rank 0; of `locals`, earlier results of `local`, if given."""
    state = {}
    for name in named if locals is None else locals:
        value = named[name] if locals is None else _with_local(named[name], locals[name])
        # One tensor at a time: a device never holds the whole model.
        whole = value.full_tensor() if is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]
        if world.is_main:
            state[name] = whole.to("cpu", copy=True).contiguous()
    return state


def _receive(value: Tensor | None, target: Tensor, shape: torch.Size, dtype: torch.dtype, world: World) -> None:
    if is_sharded(target):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        whole = torch.empty(shape, dtype=dtype) if value is None else value
        target.copy_(distribute_tensor(whole.to(target.device), target.device_mesh, target.placements))
        return
    if value is not None:
        target.copy_(value)
    world.broadcast([target])


def is_finite(named: Mapping[str, Tensor]) -> Tensor:
    """Whether those of this rank are, bool [] on the device, without synchronising."""
    floats = [local(value) for value in named.values() if value.is_floating_point()]
    floats = [value for value in floats if value.numel() and value.device == floats[0].device]
    return nn.utils.get_total_norm(floats, norm_type=float("inf")).isfinite()


def is_sharded(value: Tensor) -> bool:
    """Whether it is a DTensor, whose module takes half a second to import."""
    return hasattr(value, "full_tensor")


def _with_local(like: Tensor, value: Tensor) -> Tensor:
    if not is_sharded(like):
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
    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self._weights.items():
            value.copy_(tensors[name])
