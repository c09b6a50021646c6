"""Share a pack with the other processes of this host: everything but the images, and the file that they map."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.data.pack import Pack

if TYPE_CHECKING:
    from flatout.distributed.world import World


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPack:
    """A pack without its images, and the .npy file of these; `in_memory` if that exists only while it is shared."""

    pack: Pack
    images: str
    in_memory: bool = False

    def open(self) -> Pack:
        """Return the pack, its images mapped."""
        images = np.load(self.images, mmap_mode="r")
        # A plain array is read through the map, a `memmap` by the file's name.
        return dataclasses.replace(self.pack, images=np.asarray(images) if self.in_memory else images)


@contextlib.contextmanager
def share(pack: Pack) -> Iterator[SharedPack]:
    """Share a pack with other processes of this host while the context lasts.

    Images in memory are copied to a file; on Linux it has no name, so that a killed process leaves nothing behind.
    """
    nothing = np.empty((0, *pack.images.shape[1:]), pack.images.dtype)
    rest = dataclasses.replace(pack, images=nothing)
    if isinstance(pack.images, np.memmap) and pack.images.filename:
        yield SharedPack(pack=rest, images=str(pack.images.filename))
        return
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            file = stack.enter_context(os.fdopen(os.memfd_create("flatout-images"), "wb"))
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            path = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-")), "images.npy"))
            file = stack.enter_context(Path(path).open("wb"))
        np.save(file, pack.images)
        file.flush()
        yield SharedPack(pack=rest, images=path, in_memory=True)


def load_once_per_host(world: "World", load: Callable[[], Pack]) -> Pack:
    """Return a pack on every rank: the first rank of each host loads it, and the others map the same images."""
    pack = load() if world.local_rank == 0 else None
    if world.is_joined:
        with share(pack) if pack else contextlib.nullcontext() as own:
            shared = world.all_gather_object(own)[world.rank - world.local_rank]
            assert shared is not None
            pack = pack or shared.open()
            world.barrier()  # others may still be opening the file
    assert pack is not None
    return pack
