"""Add up the gradients of all ranks, bucket by bucket, while the backward pass still computes the others.

As torch's DistributedDataParallel does (Li et al., "PyTorch Distributed", VLDB 2020), with these differences: gradients
are summed, since the loss is divided by the weight of the whole global batch; they may travel through shared memory;
the step's counts travel along with them; and a parameter that a step does not use stays without a gradient, as it does
on one device.
"""

import time

import torch
from torch import nn

from flatout.dist.world import Bucket, World
from flatout.engine.eager.exact_sums import ExactSums

# The last parameters' gradients come first. A bucket is sent when the last of its gradients is there.
BUCKET_BYTES = 16 << 20
ALIGNMENT = 16


class OwnGradients:
    """The gradients of a rank that is alone.

    Attributes:
        is_last_pass: whether the next backward pass is the last of its step; gradients of all passes are summed first.
    """

    is_last_pass = True

    def begin(self) -> None:
        """Prepare for the backward passes of a step."""

    def finish(self, extra: torch.Tensor) -> torch.Tensor:
        """Replace every gradient by its sum over the ranks; return the sums of `extra`, [extras]."""
        return extra


class SlicedGradients:
    """The gradients of a model that `sharding.shard` has cut into slices, and that torch's FSDP2 adds up."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    @property
    def is_last_pass(self) -> bool:
        """See `OwnGradients`."""
        return self._is_last_pass

    @is_last_pass.setter
    def is_last_pass(self, is_last: bool) -> None:
        self._is_last_pass = is_last
        self._model.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]

    def begin(self) -> None:
        """See `OwnGradients`."""

    def finish(self, extra: torch.Tensor) -> torch.Tensor:
        """See `OwnGradients`."""
        return self._world.all_reduce(extra)


class _Part:
    """Some parameters whose gradients travel together, then a mark for each that has one, then the extra numbers."""

    def __init__(self, parameters: list[torch.nn.Parameter], offsets: list[int], end: int, dtype: torch.dtype) -> None:
        self.parameters, self.offsets, self.end, self.dtype = parameters, offsets, end, dtype
        self.awaited: set[int] = set()
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a bucket, each in the shape and the memory order of its parameter."""
        views = self._views.get(flat.data_ptr())
        if views is None:
            start = flat.storage_offset()
            places = zip(self.parameters, self.offsets, strict=True)
            views = [flat.as_strided(p.shape, p.stride(), start + offset) for p, offset in places]
            self._views[flat.data_ptr()] = views
        return views

    def marks(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece of a bucket with a mark for each parameter."""
        return flat[self.end : self.end + len(self.parameters)]


class SharedGradients:
    """The gradients of a model of which every rank has a whole copy.

    Args:
        parameters: those that are trained, in the model's order, on one device.
        world: the ranks.
        extras: how many more numbers are added up with them in each step.
        exact: knows what rounding took off the gradients; they travel in float64 then.
        is_async: reading a value would wait for the device.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        world: World,
        extras: int,
        exact: ExactSums | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        self._world, self._extras, self._is_async = world, extras, is_async
        self._exact = exact
        self._parts = _partition(parameters[::-1], exact)
        self._buckets = _make_buckets(self._parts, world, extras)
        self._place = {id(p): (i, k) for i, part in enumerate(self._parts) for k, p in enumerate(part.parameters)}
        self._started = 0
        self.is_last_pass = True
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """See `OwnGradients`. Gradients leave in the pass for which `is_last_pass` is true."""
        self._started = 0
        for part in self._parts:
            part.awaited = set(range(len(part.parameters)))

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.is_last_pass:
            return
        assert parameter.grad is not None
        index, k = self._place[id(parameter)]
        part = self._parts[index]
        self._put(parameter, part.views(self._buckets[index].input)[k])
        part.awaited.discard(k)
        # Every rank must send in the same order, whatever the order in which its gradients come. The last bucket waits
        # for `finish`, which adds the extra numbers.
        while self._started < len(self._parts) - 1 and not self._parts[self._started].awaited:
            self._send()

    def _put(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Copy a gradient into its place in a bucket."""
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        residue = self._exact.residues.get(id(parameter)) if self._exact else None
        if residue is not None and view.dtype == torch.float64:
            view.add_(residue)

    def _send(self) -> None:
        part, bucket = self._parts[self._started], self._buckets[self._started]
        marks = part.marks(bucket.input).fill_(1)
        for k in part.awaited:
            # A parameter that the step did not use, or one whose gradient came in an earlier pass alone.
            gradient, view = part.parameters[k].grad, part.views(bucket.input)[k]
            if gradient is None:
                view.zero_()
                marks[k] = 0
            else:
                self._put(part.parameters[k], view)
        bucket.start()
        self._started += 1

    def finish(self, extra: torch.Tensor) -> torch.Tensor:
        """See `OwnGradients`."""
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
        # Reading which parameters other ranks used would wait for an asynchronous device. This rank's use counts there;
        # it differs from theirs only in models whose structure depends on the batch.
        present = [p.grad is not None for p in part.parameters] if self._is_async else part.marks(total).tolist()
        for parameter, view, has_gradient in zip(part.parameters, part.views(total), present, strict=True):
            parameter.grad = view.to(parameter.dtype) if has_gradient else None


GradientSum = OwnGradients | SharedGradients | SlicedGradients


def _partition(parameters: list[torch.nn.Parameter], exact: ExactSums | None) -> list[_Part]:
    groups: list[list[torch.nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not groups or parameter.nbytes > room or _dtype(parameter, exact) != _dtype(groups[-1][-1], exact):
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(parameter)
        room -= parameter.nbytes
    parts = []
    for group in groups:
        offsets, end = [], 0
        for parameter in group:
            offsets.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        parts.append(_Part(group, offsets, end, _dtype(group[0], exact)))
    if parts[-1].dtype.itemsize < torch.float32.itemsize:
        # The extra numbers are sums and counts: a narrow float would round them.
        parts.append(_Part([], [], 0, torch.float32))
    return parts


def _dtype(parameter: torch.Tensor, exact: ExactSums | None) -> torch.dtype:
    """Return in which type a gradient travels: float64 where its sum is to be exact."""
    if exact is None or parameter.dtype != torch.float32 or exact.gathers(parameter):
        return parameter.dtype
    return torch.float64


def _make_buckets(parts: list[_Part], world: World, extras: int) -> list[Bucket]:
    """Return a bucket for each part; those of one dtype share one piece of memory."""
    buckets: dict[int, Bucket] = {}
    dtypes = [part.dtype for part in parts]
    sizes = [part.end + len(part.parameters) for part in parts]
    sizes[-1] += extras
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, other in enumerate(dtypes) if other == dtype]
        buckets |= dict(zip(chosen, world.buckets([sizes[i] for i in chosen], dtype), strict=True))
    return [buckets[i] for i in range(len(parts))]
