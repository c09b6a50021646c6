"""Gradients: accumulated over micro-batches and summed over the ranks. For sharded models see `fsdp`."""

import time

import torch
from torch import nn

from flatout.distributed.world import World

BUCKET_BYTES = 16 << 20
ALIGNMENT = 16


class Gradients:
    """The gradients of a single rank."""

    def begin_backward(self, *, is_last: bool) -> None:
        """Called before each backward pass; until the last of a step, gradients accumulate."""

    def all_reduce(self, extra: torch.Tensor) -> torch.Tensor:
        """Replace every gradient by its sum over the ranks; return the sums of `extra`, [extras]."""
        return extra

    def close(self) -> None:
        """Remove hooks from the parameters."""


class _Part:
    """The layout of a bucket: gradients, a mark for each parameter that has one, then the extra numbers."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.offsets, self.end = [], 0
        for parameter in parameters:
            self.offsets.append(self.end)
            self.end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.awaited: set[int] = set()
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if flat.data_ptr() not in self._views:
            start, places = flat.storage_offset(), zip(self.parameters, self.offsets, strict=True)
            # Each in the memory order of its parameter.
            views = [flat.as_strided(p.shape, p.stride(), start + offset) for p, offset in places]
            self._views[flat.data_ptr()] = views
        return self._views[flat.data_ptr()]

    def marks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.end : self.end + len(self.parameters)]


class BucketedAllReduce(Gradients):
    """The gradients of a replicated model. Buckets are sent during the backward pass of the last micro-batch.

    `extras` values are summed with them in each step; `is_async`: reading a value would wait for the device.
    """

    def __init__(self, parameters: list[nn.Parameter], world: World, extras: int, *, is_async: bool = False) -> None:
        self._world, self._extras, self._is_async = world, extras, is_async
        # The last parameters' gradients are computed first. A bucket is sent when it is complete.
        self._parts = _partition(parameters[::-1])
        sizes = [part.end + len(part.parameters) for part in self._parts]
        sizes[-1] += extras
        self._buckets = world.buckets([(n, part.dtype) for n, part in zip(sizes, self._parts, strict=True)])
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

    def _arrived(self, parameter: torch.Tensor) -> None:
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

    def all_reduce(self, extra: torch.Tensor) -> torch.Tensor:
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
