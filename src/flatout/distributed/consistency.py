"""Checks before the first step that all hosts of a run have the same versions, recipe and data."""

import hashlib
import platform
import socket
import zlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout import __version__
from flatout.config import FREE_KEYS, Recipe
from flatout.data.batches import Split
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.distributed.world import World

# Bytes of images to compare; if there are more, evenly spaced images.
COMPARED_BYTES, BYTES_AT_ONCE = 2**28, 2**24


def agree(world: "World", recipe: Recipe, pack: "Pack") -> None:
    """Check that all ranks have the same versions, recipe and data.

    Raises:
        InputError: one differs. The message names it and the difference, and is the same on all ranks.
    """
    fixes = {"version": "install the same version on all hosts", "data": "give all hosts the same data"}
    facts: dict[tuple[str, str], Any] = {("version", name): version(name) for name in ("torch", "numpy", "safetensors")}
    facts |= {("version", "flatout"): __version__, ("version", "Python"): platform.python_version()}
    free = {*FREE_KEYS, "data.path"} - {"epochs", "early_stopping", "micro_batch", "precision", "shard"}
    facts |= {("recipe", key): value for key, value in recipe.flat().items() if key not in free}
    if world.local_size < world.size:
        # The ranks of one host read the same file.
        facts |= {("data", name): value for name, value in data_facts(pack, recipe).items()}
    everyone = world.all_gather_object((socket.gethostname(), facts))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for (kind, name), value in other.items():
            if value != first[kind, name]:
                raise InputError(
                    f"rank {rank} (host {host}) has {kind} {name} = {value!r}, but rank 0 (host {first_host}) has "
                    f"{first[kind, name]!r}: {fixes.get(kind, 'start all hosts with the same recipe and flags')}"
                )


def data_facts(pack: "Pack", recipe: Recipe) -> dict[str, Any]:
    """Return facts that identify the data: classes, split sizes, and checksums of labels and images."""
    return {
        "classes": list(pack.classes),
        "splits": {name: stop - start for name, (start, stop) in pack.splits.items()},
        "labels (digest)": hashlib.blake2b(pack.labels.tobytes(), digest_size=8).hexdigest(),
        "images (checksum)": _checksum(pack),
    }


def _checksum(pack: "Pack") -> int:
    image_bytes, checksum = pack.images[:1].nbytes, 0
    rows = np.linspace(0, len(pack.images) - 1, min(len(pack.images), max(1, COMPARED_BYTES // image_bytes)))
    samples = Split(images=pack.images, rows=rows.astype(np.int64), labels=pack.labels[rows.astype(np.int64)])
    for positions in np.array_split(np.arange(len(rows)), -(-len(rows) * image_bytes // BYTES_AT_ONCE)):
        # Read rather than mapped: mapped pages count as memory of the process.
        images = samples.images_at(positions)
        checksum = zlib.crc32(images.data, checksum)
    return checksum
