"""Gradient accumulation: a batch that does not fit into memory is computed in micro-batches, found by trial."""

import math
from collections.abc import Callable

from flatout.distributed.world import World
from flatout.engine.eager.accelerator import Accelerator
from flatout.engine.eager.batch_norm import BatchNorm
from flatout.errors import TrainingFailed, is_out_of_memory

# Memory reserved during a trial, in copies of the weights: two for Adam, one for the all-reduce of the gradients.
COPIES_OF_WEIGHTS = 3


def count_micro_batches(
    trial: Callable[[int, bool], None],
    share: int,
    wanted: int,
    batch_norm: BatchNorm,
    world: World,
    accelerator: Accelerator,
) -> tuple[int, bool]:
    """Return the number of micro-batches of every rank, and whether activations must be offloaded to host memory.

    Args:
        trial: computes a micro-batch of so many samples, activations offloaded or not.
        share: samples of this rank in a batch.
        wanted: the recipe's `micro_batch`; 0 for as many samples as fit.
        batch_norm: whether it was used is known after a trial; it needs all samples of a rank together.
        world: the ranks; all compute as many micro-batches as the one with the least memory needs.

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
