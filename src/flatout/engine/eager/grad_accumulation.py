"""When a batch does not fit: find out before the first step, and compute it in several passes."""

import math
from collections.abc import Callable

from flatout.engine.eager.accelerator import Accelerator
from flatout.errors import TrainingFailed, is_out_of_memory

# Adam's two, and one for the gradients of all ranks.
COPIES_OF_WEIGHTS = 3


def largest_pass(attempt: Callable[[int], None], share: int, accelerator: Accelerator) -> int:
    """Return the most samples that one pass can take, `share` or a half, a quarter of it and so on; 0 for none.

    Args:
        attempt: computes a pass over so many samples.
        share: the samples of this rank in a step.
        accelerator: the device.
    """
    samples = share
    while samples:
        try:
            attempt(samples)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
            samples = 0 if samples == 1 else math.ceil(samples / 2)
        else:
            return samples
        accelerator.empty_cache()
    return 0


def no_room(share: int, *, whole: bool) -> TrainingFailed:
    """Return the error for a model that does not even compute its smallest pass."""
    what = f"the {share} samples of a device, which batch normalisation needs together," if whole else "one sample"
    return TrainingFailed(
        f"out of memory: {what} take more memory than there is; "
        "use more devices, a smaller batch_size or image_size, or shard = 'full'"
    )
