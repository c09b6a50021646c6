"""The output of a frozen prefix for a whole split, computed once and kept where it fits."""

from collections.abc import Iterable

import numpy as np
import torch

from flatout.data.feed import Samples
from flatout.dist.world import World
from flatout.engine.eager.accelerator import Accelerator
from flatout.engine.eager.device_setup import allocate
from flatout.engine.eager.split import Source


def collect_features(
    outputs: Iterable[torch.Tensor], placed: Source, wanted: str, world: World, accelerator: Accelerator
) -> Source:
    """Place what every rank computes for its part of a split, for all ranks.

    Args:
        outputs: this rank's, [B, C, ...] each, of every `world.size`-th batch of the split; as many on each rank.
        placed: the split.
        wanted: `data.placement`.
        world: the ranks.
        accelerator: of the device.
    """
    features: np.ndarray | torch.Tensor | None = None
    count, start = len(placed.samples), 0
    for output in outputs:
        # Rows are kept in the order in which the convolutions read them.
        for rows in world.all_gather(output.movedim(1, -1)):
            if features is None:
                features = allocate(count, rows, accelerator, wanted, ranks_here=world.local_size)
            here = rows[: max(0, count - start)]
            if isinstance(features, torch.Tensor):
                features[start : start + len(here)] = here
            elif len(here):
                features[start : start + len(here)] = here.float().cpu().numpy()
            start += len(rows)
    assert features is not None
    if isinstance(features, torch.Tensor):
        return Source(samples=placed.samples, images=features, labels=placed.labels)
    samples = Samples(images=features, rows=np.arange(len(features)), labels=placed.samples.labels)
    return Source(samples=samples, images=None, labels=placed.labels)
