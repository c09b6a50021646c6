"""Where the images of a split lie for XLA, and how batches are prepared on the host, ahead of the devices.

Shape letters: N samples, T steps of one dispatch, B batch, H height, W width, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flatout.data.feed import Samples
from flatout.data.order import Batch
from flatout.distributed.world import World
from flatout.engine.eager.device_setup import MEMORY_SHARE
from flatout.engine.xla.mesh import MeshSharding
from flatout.engine.xla.step import Inputs
from flatout.host import available_memory
from flatout.numerics.augment import Transforms

_PER_SAMPLE = ("images", "targets", "weights", "transforms", "partners")


@dataclass(frozen=True, kw_only=True, eq=False)
class HostBatches:
    """This process's part of the consecutive batches of one dispatch.

    Attributes:
        batches: the batches of all processes.
        images, targets, weights, transforms, partners: as in `step.Inputs`, with a dimension T in front.
    """

    batches: Sequence[Batch]
    images: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    transforms: Transforms | None
    partners: tuple[np.ndarray, np.ndarray, Transforms] | None

    def inputs(self, step: int | slice, learning_rates: Sequence[float], seeds: Sequence[int]) -> Inputs:
        """Return one step of T, with its learning rate and seed; or all of them, by a slice."""
        rates, words = np.array(learning_rates, np.float32), np.array(seeds, np.uint64)
        halves = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
        is_one = isinstance(step, int)
        return Inputs(
            **{name: jax.tree.map(lambda array: array[step], getattr(self, name)) for name in _PER_SAMPLE},
            learning_rate=rates[0] if is_one else rates,
            seed=halves[0] if is_one else halves,
        )


def place(samples: Samples, sharding: MeshSharding, wanted: str, world: World) -> tuple[Samples, jax.Array | None]:
    """Copy a split's images to every device if they fit there; else to host memory; else leave them on disk.

    Simulated devices share the host's memory, so their batches are read from there.

    Returns:
        The split on the host; and its images on the devices, uint8 or uint16 [N, H, W, C], or None.
    """
    is_resident = wanted == "device"
    if wanted == "auto" and sharding.devices[0].platform != "cpu":
        # All hosts run the same program, so the host with the least free memory decides.
        free = min(world.all_gather_object(min(map(_free_bytes, sharding.local_devices))))
        is_resident = samples.nbytes <= MEMORY_SHARE * free
    if is_resident:
        return samples, sharding.put_state(_read_all(samples), sharding.replicated)
    if wanted != "disk" and samples.nbytes <= MEMORY_SHARE * available_memory():
        samples = Samples(images=_read_all(samples), rows=np.arange(len(samples)), labels=samples.labels)
    return samples, None


def read_batches(
    samples: Samples,
    batches: Sequence[Batch],
    size: int,
    own: slice,
    *,
    is_resident: bool,
    targets: np.ndarray,
    transforms: Transforms | None = None,
    sample_weights: np.ndarray | None = None,
) -> HostBatches:
    """Read this process's part of some batches.

    Args:
        batches: the batches of all processes.
        size: samples that all devices share equally; copies of a batch's first sample fill it up.
        own: which of them are this process's.
        is_resident: whether the images lie on the devices, so that their row numbers suffice.
        targets: of all samples, as `Task.targets` returns them.
        transforms: the epoch's augmentation tables.
        sample_weights: as `Task.sample_weights` returns them.
    """
    rows = np.stack([np.append(b.samples, np.full(size - len(b.samples), b.samples[0])) for b in batches])[:, own]
    weights = np.stack([np.append(b.weights, np.zeros(size - len(b.weights))) for b in batches])[:, own]

    def at(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return images, targets and transforms of some samples [T, B]."""
        images = rows.astype(np.int32)
        if not is_resident:
            images = np.empty((*rows.shape, *samples.images.shape[1:]), samples.images.dtype)
            for positions, out in zip(rows, images, strict=True):
                samples.read(positions, out)
        own = targets[rows].astype(np.int32 if targets.dtype == np.int64 else np.float32)
        return images, own, transforms and {n: t[rows] for n, t in transforms.items()}

    images, own_targets, own_transforms = at(rows)
    return HostBatches(
        batches=batches,
        images=images,
        targets=own_targets,
        weights=(weights if sample_weights is None else weights * sample_weights[rows]).astype(np.float32),
        transforms=own_transforms,
        partners=at(transforms["partner"][rows]) if transforms and "partner" in transforms else None,
    )


def _read_all(samples: Samples) -> np.ndarray:
    return samples.images_at(np.arange(len(samples)))


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
