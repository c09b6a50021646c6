"""Give a pack to the other processes of this host: everything but the images, and the file that they map."""

import dataclasses
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
    """

    pack: Pack
    images: Path

    def open(self) -> Pack:
        """Return the pack, its images mapped."""
        return dataclasses.replace(self.pack, images=np.load(self.images, mmap_mode="r"))


def hand_over(pack: Pack, folder: Path) -> Handover:
    """Prepare a pack for other processes; images that are only in memory are written into `folder`.

    The pack must live for as long as the others use it, since a temporary one goes with its images.
    """
    nothing = np.empty((0, *pack.images.shape[1:]), pack.images.dtype)
    if isinstance(pack.images, np.memmap) and pack.images.filename:
        return Handover(pack=dataclasses.replace(pack, images=nothing), images=Path(pack.images.filename))
    path = folder / "images.npy"
    np.save(path, pack.images)
    return Handover(pack=dataclasses.replace(pack, images=nothing), images=path)
