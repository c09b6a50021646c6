"""Where the images of a split live, and how batches of them reach a device."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from flatout.data.feed import Samples, prefetch
from flatout.data.order import Batch, part
from flatout.engine.eager import device_setup as hardware


@dataclass(kw_only=True, eq=False)
class Source:
    """What the network reads of a split: images, or the output of its frozen prefix.

    Attributes:
        samples: the split on the host.
        images: [N, ...] on the device; None while they are streamed from the host.
        labels: int64 [N] on the device.
        transforms: the epoch's augmentation table on the device, if any.
    """

    samples: Samples
    images: torch.Tensor | None
    labels: torch.Tensor
    transforms: torch.Tensor | None = None


@dataclass(kw_only=True, eq=False)
class Inputs:
    """This rank's share of a batch on its way into a step: tensors on the device, `images` only if they are streamed.

    Attributes:
        batch: the share.
        total: samples in the batches of all ranks that are not padding.
        total_weight: [], the sum of their weights, by which the loss is divided.
    """

    batch: Batch
    samples: torch.Tensor
    weights: torch.Tensor
    total: int
    total_weight: torch.Tensor
    images: torch.Tensor | None

    def clone(self) -> "Inputs":
        """Return a copy that stays as it is when the original is used again."""
        return replace(
            self,
            samples=self.samples.clone(),
            weights=self.weights.clone(),
            total_weight=self.total_weight.clone(),
            images=None if self.images is None else self.images.clone(),
        )

    def part(self, number: int, parts: int) -> "Inputs":
        """Return some of the share's samples, for one of several passes."""
        if parts == 1:
            return self
        chosen = part(len(self.batch.samples), number, parts)
        return replace(
            self,
            batch=self.batch.part(number, parts),
            samples=self.samples[chosen],
            weights=self.weights[chosen],
            images=None if self.images is None else self.images[chosen],
        )


def place(samples: Samples, device: torch.device, wanted: str, *, ranks_here: int) -> Source:
    """Bring a split to the device if it fits, else leave it in memory or on disk."""
    labels = torch.from_numpy(samples.labels).to(device)
    where = hardware.placement(samples.nbytes, device, wanted, ranks_here=ranks_here)
    if where == "disk":
        return Source(samples=samples, images=None, labels=labels)
    shape = samples.images.shape[1:]
    in_memory = samples.read(np.arange(len(samples)), np.empty((len(samples), *shape), samples.images.dtype))
    if where == "device":
        return Source(samples=samples, images=torch.from_numpy(in_memory).to(device), labels=labels)
    held = Samples(images=in_memory, rows=np.arange(len(samples)), labels=samples.labels)
    return Source(samples=held, images=None, labels=labels)


def stream(placed: Source, batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Yield the images of batches on the device, read ahead of time from the host."""
    read = _pinned_reader(placed.samples) if device.type == "cuda" else _reader(placed.samples)
    for batch, images in prefetch(lambda batch: (batch, read(batch.samples)), batches):
        yield batch, images.to(device, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a small array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _reader(samples: Samples) -> Callable[[np.ndarray], torch.Tensor]:
    shape, dtype = samples.images.shape[1:], samples.images.dtype
    return lambda positions: torch.from_numpy(samples.read(positions, np.empty((len(positions), *shape), dtype)))


def _pinned_reader(samples: Samples) -> Callable[[np.ndarray], torch.Tensor]:
    """Read into page-locked memory, from which a copy to the device overlaps with its work."""

    def read(positions: np.ndarray) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, samples.images.dtype)).dtype
        batch = torch.empty((len(positions), *samples.images.shape[1:]), dtype=dtype, pin_memory=True)
        samples.read(positions, batch.numpy())
        return batch

    return read
