"""Wait, on all ranks together, for images that are decoded during the first epoch."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from flatout.data.arrival import POLL_SECONDS
from flatout.data.feed import Samples
from flatout.data.order import Batch
from flatout.errors import DiskFull, InputError
from flatout.recipe import Recipe

if TYPE_CHECKING:
    from flatout.dist.world import World


def arrived(samples: Samples, batches: Iterable[Batch], recipe: Recipe, world: "World") -> Iterator[Batch]:
    """Yield the batches of all ranks, those of a window (see `Batch.ahead`) when its images are there on every host.

    Raises:
        InputError, DiskFull: images cannot be decoded, on any host.
        Stopped: a rank was told to stop.
    """
    if recipe.data.decode != "during":
        yield from batches
        return
    windows: list[np.ndarray] = []
    for number, batch in enumerate(batches):
        if batch.ahead:
            # The last one is not used yet.
            *needed, following = [*windows, *batch.ahead]
            windows = [following]
            _wait(samples, np.concatenate(needed), world)
        elif number == 0:
            _wait(samples, batch.samples, world)
        yield batch


def wait_for_all(samples: Samples, recipe: Recipe, world: "World") -> None:
    """Return when all images of a split are there on every host; raises as `arrived`."""
    if recipe.data.decode == "during":
        _wait(samples, np.arange(len(samples)), world)


def _wait(samples: Samples, positions: np.ndarray, world: "World") -> None:
    rows = samples.rows[positions]
    while True:
        # As many calls on all ranks: which host has which images is known to each after the same one.
        answers = world.all_gather_object(_are_there(samples, rows))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        if all(answers):
            return
        world.control.check_stop()
        world.heartbeat.keep_alive()
        time.sleep(POLL_SECONDS)


def _are_there(samples: Samples, rows: np.ndarray) -> bool | Exception:
    arrival = samples.arrival
    try:
        return arrival is None or arrival.has(rows)
    except (InputError, DiskFull) as error:
        return error
