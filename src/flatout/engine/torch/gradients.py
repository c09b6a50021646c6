"""Gradients, accumulated over micro-batches and summed over the ranks: of models that are replicated or sharded.

A sharded model's parameters, gradients and optimizer state are divided among the ranks by torch's FSDP2. All ranks must
call it equally often; one without samples calls it with any batch, even an empty one.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054 (stage 3); Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

import time
from itertools import accumulate

import torch
from torch import Tensor, nn

from flatout.distributed.world import World
from flatout.engine.torch.state import is_sharded
from flatout.utils.errors import InputError

BUCKET_BYTES = 16 << 20
ALIGNMENT = 16
# Fractions of all parameters. A module with more than the first is divided into several units if it has submodules; one
# with less than the second is gathered with its parent, since many small gathers take longer than few.
LARGEST_UNIT = 1 / 8
SMALLEST_UNIT = 1 / 256


class Gradients:
    """The gradients of a single rank."""

    def begin_backward(self, *, is_last: bool) -> None:
        """Called before each backward pass; until the last of a step, gradients accumulate."""

    def all_reduce(self, extra: Tensor) -> Tensor:
        """Replace every gradient by its sum over the ranks; return the sums of `extra`, [extras]."""
        return extra

    def close(self) -> None:
        """Remove hooks from the parameters."""


class _Part:
    """The layout of a bucket: gradients, a mark for each parameter that has one, then the extra numbers."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters, self.dtype = parameters, dtype
        lengths = (-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters)
        *self.offsets, self.end = accumulate(lengths, initial=0)
        self.awaited: set[int] = set()
        self._views: dict[int, list[Tensor]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        if flat.data_ptr() not in self._views:
            start, places = flat.storage_offset(), zip(self.parameters, self.offsets, strict=True)
            # Each in the memory order of its parameter.
            views = [flat.as_strided(p.shape, p.stride(), start + offset) for p, offset in places]
            self._views[flat.data_ptr()] = views
        return self._views[flat.data_ptr()]

    def marks(self, flat: Tensor) -> Tensor:
        return flat[self.end : self.end + len(self.parameters)]


class BucketedAllReduce(Gradients):
    """The gradients of a replicated model. Buckets are sent during the backward pass of the last micro-batch.

    `extras` values are summed with them in each step; `is_async`: reading a value would wait for the device.
    """

    def __init__(self, parameters: list[nn.Parameter], world: World, extras: int, *, is_async: bool = False) -> None:
        self._world, self._extras, self._is_async = world, extras, is_async
        # The last parameters' gradients are computed first. A bucket is sent when it is complete.
        self._parts = _partition(parameters[::-1])
        sizes = [(part.end + len(part.parameters), part.dtype) for part in self._parts]
        self._buckets = world.buckets([*sizes[:-1], (sizes[-1][0] + extras, sizes[-1][1])])
        self._place = {id(p): (i, k) for i, part in enumerate(self._parts) for k, p in enumerate(part.parameters)}
        self._started, self._is_last = 0, True
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]

    def begin_backward(self, *, is_last: bool) -> None:
        self._started, self._is_last = 0, is_last
        for part in self._parts:
            part.awaited = set(range(len(part.parameters)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: Tensor) -> None:
        if not self._is_last:
            return
        assert parameter.grad is not None
        index, k = self._place[id(parameter)]
        part = self._parts[index]
        part.views(self._buckets[index].input)[k].copy_(parameter.grad)
        part.awaited.discard(k)
        # All ranks send in the same order, whatever the order of their gradients. `all_reduce` adds the extra numbers
        # to the last bucket and sends it.
        while self._started < len(self._parts) - 1 and not self._parts[self._started].awaited:
            self._send()

    def _send(self) -> None:
        part, bucket = self._parts[self._started], self._buckets[self._started]
        marks = part.marks(bucket.input).fill_(1)
        for k in part.awaited:
            # The step did not use the parameter, or only in an earlier micro-batch.
            gradient, view = part.parameters[k].grad, part.views(bucket.input)[k]
            if gradient is None:
                view.zero_()
                marks[k] = 0
            else:
                view.copy_(gradient)
        bucket.start()
        self._started += 1

    def all_reduce(self, extra: Tensor) -> Tensor:
        while self._started < len(self._parts) - 1:
            self._send()
        self._buckets[-1].input[-self._extras :] = extra
        self._send()
        began = time.perf_counter()
        with self._world.translate_errors("all_reduce of gradients"):
            for bucket in self._buckets:
                bucket.add()
            totals = [bucket.finish() for bucket in self._buckets]
        self._world.seconds += time.perf_counter() - began
        for part, total in zip(self._parts, totals, strict=True):
            # On an asynchronous device, reading the marks would synchronise, so this rank's use of a parameter decides;
            # other ranks differ only in models whose structure depends on the batch.
            own = part.parameters
            present = [p.grad is not None for p in own] if self._is_async else part.marks(total).tolist()
            for parameter, view, has_gradient in zip(own, part.views(total), present, strict=True):
                parameter.grad = view if has_gradient else None
        return totals[-1][-self._extras :]


def _partition(parameters: list[nn.Parameter]) -> list[_Part]:
    groups: list[list[nn.Parameter]] = []
    free = 0
    for parameter in parameters:
        if not groups or parameter.nbytes > free or parameter.dtype != groups[-1][-1].dtype:
            groups.append([])
            free = BUCKET_BYTES
        groups[-1].append(parameter)
        free -= parameter.nbytes
    parts = [_Part(group, group[0].dtype) for group in groups]
    if parts[-1].dtype.itemsize < torch.float32.itemsize:
        # A narrower type would round the extra numbers, which are sums and counts.
        parts.append(_Part([], torch.float32))
    return parts


class FSDPGradients(Gradients):
    """Shards a model; torch's FSDP2 sums its gradients over the ranks and scatters them."""

    def __init__(self, model: nn.Module, world: World) -> None:
        shard(model, world.device)
        self._model, self._world = model, world

    def begin_backward(self, *, is_last: bool) -> None:
        self._model.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]

    def all_reduce(self, extra: Tensor) -> Tensor:
        return self._world.all_reduce(extra)


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard a model, equal on all ranks, in place over the default process group; its submodules must not be called."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise InputError(
                f"shard = 'full': the parameter {name} is a single number, which cannot be sharded; "
                "make it a tensor of shape [1], or train without shard"
            )
    # These modules take a second to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for unit in _units(model):
        unit.to(device)
        for parameter in unit.parameters():
            if not is_sharded(parameter):
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
    if isinstance(output, Tensor) and output.requires_grad and output._is_view():
        return output.clone()
    return tuple(_give_no_view(module, arguments, part) for part in output) if type(output) is tuple else output


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, innermost first; the last is the model."""
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
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
