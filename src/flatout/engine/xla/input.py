"""Where the images of a split lie for XLA, and how batches of them are made ready on the host.

Shape letters: N samples, B batch, H height, W width, C channels.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flatout.data.feed import Samples
from flatout.data.order import Batch
from flatout.engine.eager.device_setup import MEMORY_SHARE
from flatout.engine.xla.mesh import Layout
from flatout.host import available_memory


@dataclass(kw_only=True, eq=False)
class Placed:
    """One split.

    Attributes:
        samples: the split on the host.
        table: uint8 [N, H, W, C], whole on every device; None where batches are read from the host.
        labels: int32 [N], on the host.
        transforms: the epoch's augmentation table, on the host.
    """

    samples: Samples
    table: jax.Array | None
    labels: np.ndarray
    transforms: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """This process's part of a batch on the host; the arrays are those of `step.Inputs`."""

    batch: Batch
    images: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    transforms: np.ndarray | None


def place(samples: Samples, layout: Layout, devices: list[Any], wanted: str) -> Placed:
    """Bring a split's images to every device if they fit there, else into memory, else leave them on disk.

    Simulated devices have the host's memory: their batches are read from there.
    """
    table = None
    if devices[0].platform != "cpu" and wanted in ("auto", "device"):
        free = min(_free_bytes(device) for device in devices)
        if wanted == "device" or samples.nbytes <= MEMORY_SHARE * free:
            table = layout.put_whole(_read_all(samples), layout.whole)
    if table is None and wanted != "disk" and samples.nbytes <= MEMORY_SHARE * available_memory():
        samples = Samples(images=_read_all(samples), rows=np.arange(len(samples)), labels=samples.labels)
    return Placed(samples=samples, table=table, labels=samples.labels.astype(np.int32))


def prepare(
    placed: Placed, batch: Batch, size: int, own: slice, *, is_training: bool, class_weights: np.ndarray | None = None
) -> Prepared:
    """Read a part of a batch.

    Args:
        placed: the split.
        batch: the batch of all processes.
        size: samples that all devices share evenly; what is missing is padding, copies of the batch's first sample.
        own: which of them are this process's.
        is_training: whether augmentation and class weights apply.
        class_weights: float32 [classes]; None for none.
    """
    missing = size - len(batch.samples)
    samples = np.concatenate([batch.samples, np.full(missing, batch.samples[0])])[own]
    weights = np.concatenate([batch.weights, np.zeros(missing, np.float32)])[own]
    if class_weights is not None and is_training:
        weights = weights * class_weights[placed.labels[samples]]
    if placed.table is not None:
        images = samples.astype(np.int32)
    else:
        shape, dtype = placed.samples.images.shape[1:], placed.samples.images.dtype
        images = placed.samples.read(samples, np.empty((len(samples), *shape), dtype))
    transforms = placed.transforms[samples] if is_training and placed.transforms is not None else None
    return Prepared(batch=batch, images=images, labels=placed.labels[samples], weights=weights, transforms=transforms)


def _read_all(samples: Samples) -> np.ndarray:
    shape = (len(samples), *samples.images.shape[1:])
    return samples.read(np.arange(len(samples)), np.empty(shape, samples.images.dtype))


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
