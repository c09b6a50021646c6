"""Give a pack to the other processes of this host: everything but the images, and the file that they map."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.data.pack import Pack


@dataclass(frozen=True, kw_only=True, eq=False)
class Handover:
    """A pack on its way to another process.

    Attributes:
        pack: with its images left out.
        images: a .npy file of them, uint8 [N, H, W, C].
        in_memory: whether the file is there for this alone, and has no name that lasts.
    """

    pack: Pack
    images: Path
    in_memory: bool = False

    def open(self) -> Pack:
        """Return the pack, its images mapped."""
        images = np.load(self.images, mmap_mode="r")
        # As a plain array it is read through the map, as a map by its name.
        return dataclasses.replace(self.pack, images=np.asarray(images) if self.in_memory else images)


@contextlib.contextmanager
def handed_over(pack: Pack) -> Iterator[Handover]:
    """Offer a pack to other processes of this host while the context lasts.

    Images that are only in memory are copied to a file there: one without a name in the file system, where Linux has
    that, so that nothing stays behind whatever is killed.
    """
    nothing = np.empty((0, *pack.images.shape[1:]), pack.images.dtype)
    rest = dataclasses.replace(pack, images=nothing)
    if isinstance(pack.images, np.memmap) and pack.images.filename:
        yield Handover(pack=rest, images=Path(pack.images.filename))
        return
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            file = stack.enter_context(os.fdopen(os.memfd_create("flatout-images"), "wb"))
            path = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-"))
            path = Path(folder) / "images.npy"
            file = stack.enter_context(path.open("wb"))
        np.save(file, pack.images)
        file.flush()
        yield Handover(pack=rest, images=path, in_memory=True)
