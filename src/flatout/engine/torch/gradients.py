"""Gradients: summed over the ranks, accumulated over micro-batches, or sharded by FSDP2."""

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from flatout.distributed.shared_memory import Bucket
from flatout.distributed.world import World
from flatout.engine.torch.accelerator import Accelerator
from flatout.engine.torch.batch_norm import BatchNorm
from flatout.utils.errors import TrainingFailed, is_out_of_memory

BUCKET_BYTES = 16 << 20
ALIGNMENT = 16


class LocalGradients:
    """The gradients of a single rank.

    Attributes:
        is_last_micro_batch: whether the next backward pass is the last of its step; until then, gradients accumulate.
    """

    is_last_micro_batch = True

    def begin(self) -> None:
        """Prepare a step's backward passes."""

    def all_reduce(self, extra: torch.Tensor) -> torch.Tensor:
        """Replace every gradient by its sum over the ranks; return the sums of `extra`, [extras]."""
        return extra

    def close(self) -> None:
        """Remove the hooks from the parameters."""


class FSDPGradients:
    """The gradients of a model that `fsdp.shard` has sharded; torch's FSDP2 reduces and scatters them."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    @property
    def is_last_micro_batch(self) -> bool:
        return self._is_last

    @is_last_micro_batch.setter
    def is_last_micro_batch(self, is_last: bool) -> None:
        self._is_last = is_last
        self._model.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]

    def begin(self) -> None:
        """See `LocalGradients`."""

    def all_reduce(self, extra: torch.Tensor) -> torch.Tensor:
        return self._world.all_reduce(extra)

    def close(self) -> None:
        """See `LocalGradients`."""


class _Part:
    """The layout of a bucket: gradients, a mark for each parameter that has one, then the extra numbers."""

    def __init__(self, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.offsets, self.end = [], 0
        for parameter in parameters:
            self.offsets.append(self.end)
            self.end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.awaited: set[int] = set()
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients in a bucket, each in the shape and memory order of its parameter."""
        views = self._views.get(flat.data_ptr())
        if views is None:
            start = flat.storage_offset()
            offsets = zip(self.parameters, self.offsets, strict=True)
            views = [flat.as_strided(p.shape, p.stride(), start + offset) for p, offset in offsets]
            self._views[flat.data_ptr()] = views
        return views

    def marks(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the marks in a bucket, one for each parameter."""
        return flat[self.end : self.end + len(self.parameters)]


class BucketedAllReduce:
    """The gradients of a replicated model.

    Args:
        parameters: the trained ones, in the model's order, on one device.
        extras: the number of values that are summed with them in each step.
        is_async: whether reading a value would wait for the device.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        world: World,
        extras: int,
        *,
        is_async: bool = False,
    ) -> None:
        self._world, self._extras, self._is_async = world, extras, is_async
        # The last parameters' gradients are computed first. A bucket is sent when it is complete.
        self._parts = _partition(parameters[::-1])
        self._buckets = _make_buckets(self._parts, world, extras)
        self._place = {id(p): (i, k) for i, part in enumerate(self._parts) for k, p in enumerate(part.parameters)}
        self._started = 0
        self.is_last_micro_batch = True
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]

    def begin(self) -> None:
        """See `LocalGradients`. Buckets are sent during the backward pass of the last micro-batch."""
        self._started = 0
        for part in self._parts:
            part.awaited = set(range(len(part.parameters)))

    def close(self) -> None:
        """See `LocalGradients`."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.is_last_micro_batch:
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
            self._take(part, total)
        return totals[-1][-self._extras :]

    def _take(self, part: _Part, total: torch.Tensor) -> None:
        # On an asynchronous device, reading the marks would synchronise, so this rank's use of a parameter decides;
        # other ranks differ only in models whose structure depends on the batch.
        present = [p.grad is not None for p in part.parameters] if self._is_async else part.marks(total).tolist()
        for parameter, view, has_gradient in zip(part.parameters, part.views(total), present, strict=True):
            parameter.grad = view if has_gradient else None


Gradients = LocalGradients | BucketedAllReduce | FSDPGradients


def _partition(parameters: list[torch.nn.Parameter]) -> list[_Part]:
    groups: list[list[torch.nn.Parameter]] = []
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


def _make_buckets(parts: list[_Part], world: World, extras: int) -> list[Bucket]:
    """Return a bucket for each part; those of one type share one block of memory."""
    buckets: dict[int, Bucket] = {}
    dtypes = [part.dtype for part in parts]
    sizes = [part.end + len(part.parameters) for part in parts]
    sizes[-1] += extras
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, other in enumerate(dtypes) if other == dtype]
        buckets |= dict(zip(chosen, world.buckets([sizes[i] for i in chosen], dtype), strict=True))
    return [buckets[i] for i in range(len(parts))]


# Memory reserved during a trial, in copies of the weights: two for Adam, one for the all-reduce.
COPIES_OF_WEIGHTS = 3


def count_micro_batches(
    trial: Callable[[int, bool], None],
    share: int,
    wanted: int,
    batch_norm: BatchNorm,
    world: World,
    accelerator: Accelerator,
) -> tuple[int, bool]:
    """Return the number of micro-batches, and whether activations must be offloaded to host memory.

    Args:
        trial: computes a micro-batch of a given size, with activations offloaded or not.
        share: samples of this rank in a batch.
        wanted: the recipe's `micro_batch`; 0 for the most samples that fit.
        batch_norm: needs all samples of a rank together; a trial shows whether it is used.
        world: the ranks; the one with the least memory determines the number.

    Raises:
        TrainingFailed: not even the smallest micro-batch fits.
    """

    def fitting(offload: bool) -> int:
        samples = min(wanted or share, share)
        while samples:
            try:
                trial(samples, offload)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                error.__traceback__ = None
                samples = 0 if samples == 1 else math.ceil(samples / 2)
            accelerator.empty_cache()
        needed = world.all_gather_object(math.ceil(share / samples) if samples else 0)
        return max(needed) if min(needed) else 0

    count, offload = fitting(False), False
    if batch_norm.was_used and count != 1 and not wanted and accelerator.has_memory:
        count, offload = fitting(True), True
    if count == 0 or (batch_norm.was_used and count > 1 and not wanted):
        whole = f"the {share} samples of a device, which batch normalisation needs together"
        raise TrainingFailed(
            f"out of memory: no room for {whole if batch_norm.was_used else 'one sample'}; "
            "use more devices, a smaller batch_size or image_size, or shard = 'full'"
        )
    return count, offload
