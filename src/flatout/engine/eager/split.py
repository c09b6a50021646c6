"""Where the images of a split live, and how batches of them reach a device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from flatout.data.feed import Samples, prefetch
from flatout.data.order import Batch, part
from flatout.engine.eager.accelerator import Accelerator
from flatout.engine.eager.device_setup import placement


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

    @property
    def constants(self) -> tuple[int, int, int]:
        """The Python numbers of the batch, which become constants of a recorded step."""
        return len(self.batch.samples), self.batch.count, self.total

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def clone(self) -> "Inputs":
        """Return a copy with memory of its own."""
        return replace(self, **{name: tensor.clone() for name, tensor in self._tensors().items()})

    def copy_(self, other: "Inputs") -> None:
        """Overwrite the tensors with those of a batch of the same constants."""
        for name, tensor in self._tensors().items():
            tensor.copy_(getattr(other, name))

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


def place(samples: Samples, accelerator: Accelerator, wanted: str, *, ranks_here: int) -> Source:
    """Bring a split to the device if it fits, else leave it in memory or on disk."""
    labels = torch.from_numpy(samples.labels).to(accelerator.device)
    where = placement(samples.nbytes, accelerator, wanted, ranks_here=ranks_here)
    if where == "disk":
        return Source(samples=samples, images=None, labels=labels)
    shape = samples.images.shape[1:]
    in_memory = samples.read(np.arange(len(samples)), np.empty((len(samples), *shape), samples.images.dtype))
    if where == "device":
        return Source(samples=samples, images=torch.from_numpy(in_memory).to(accelerator.device), labels=labels)
    held = Samples(images=in_memory, rows=np.arange(len(samples)), labels=samples.labels)
    return Source(samples=held, images=None, labels=labels)


def stream(source: Source, batches: Iterable[Batch], accelerator: Accelerator) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Yield the images of batches on the device, read ahead of time from the host."""
    samples = source.samples
    dtype = torch.from_numpy(np.empty(0, samples.images.dtype)).dtype

    def read(batch: Batch) -> tuple[Batch, torch.Tensor]:
        images = accelerator.pinned((len(batch.samples), *samples.images.shape[1:]), dtype)
        samples.read(batch.samples, images.numpy())
        return batch, images

    for batch, images in prefetch(read, batches):
        yield batch, images.to(accelerator.device, non_blocking=True)
