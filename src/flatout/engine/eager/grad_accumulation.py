"""When a batch does not fit: find out before the first step, and compute it in several passes."""

import math
import sys
from collections.abc import Callable

import torch

from flatout.errors import TrainingFailed, is_out_of_memory

# Adam's two, and one for the gradients of all ranks.
COPIES_OF_WEIGHTS = 3


def is_limited(device: torch.device) -> bool:
    """Return whether running out of memory is something that a process can notice, rather than be killed for."""
    if device.type != "cpu":
        return device.type == "cuda"
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def largest_pass(attempt: Callable[[int], None], share: int) -> int:
    """Return the most samples that one pass can take, `share` or a half, a quarter of it and so on; 0 for none.

    Args:
        attempt: computes a pass over so many samples.
        share: the samples of this rank in a step.
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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def no_room(share: int, *, whole: bool) -> TrainingFailed:
    """Return the error for a model that does not even compute its smallest pass."""
    what = f"the {share} samples of a device, which batch normalisation needs together," if whole else "one sample"
    return TrainingFailed(
        f"out of memory: {what} take more memory than there is; "
        "use more devices, a smaller batch_size or image_size, or shard = 'full'"
    )
