"""A data set decoded once: plain NumPy files that anyone can map.

A pack is a folder of `images.npy`, `labels.npy` and `pack.json` (see `pack_files`); `build` makes and finds packs.
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatout.data import pack_files
from flatout.data.source import describe
from flatout.data.splits import SPLITS
from flatout.errors import InputError, first_line
from flatout.settings import Size, sides


class Progress(Protocol):
    """Whatever shows progress to the user."""

    def update(self, done: int, total: int, unit: str = "images") -> None:
        """Show how much is done; called often."""

    def note(self, text: str) -> None:
        """Show one sentence."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """How images become a pack; the fields are those of a recipe."""

    size: Size
    channels: int
    resize: str
    on_bad_image: str
    max_bad_share: float
    bits: int = 0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images."""
        return *sides(self.size), self.channels


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Decoded images with their labels; `task`, `labels`, `classes`, `splits`, `kind` and `notes` as in `Source`.

    Attributes:
        folder: its folder; None where it is in memory or has no name.
        images: uint8 or uint16 [N, H, W, C], mapped from the file, read-only.
        groups: as `Source.group_numbers`.
        resize: how images got their shape, as `data.resize`.
        skipped: file -> reason of the bad images that were left out.
        was_cached: whether it was found in the cache.
        is_decoded: whether the images were decoded from files, by the cache or for this run.
        build_seconds: the time it took to build, now or then.
        fingerprint: a digest of images, labels and splits; the class names are not part of it.
    """

    folder: Path | None
    images: np.ndarray
    labels: np.ndarray
    task: str = "single-label"
    classes: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    groups: np.ndarray | None = None
    resize: str
    kind: str
    notes: tuple[str, ...]
    skipped: dict[str, str]
    was_cached: bool
    is_decoded: bool = False
    build_seconds: float
    fingerprint: str

    @property
    def bits(self) -> int:
        """Bits per pixel and channel, 8 or 16."""
        return 8 * self.images.itemsize

    def describe(self) -> str:
        """Return one line about the data."""
        return describe(self.kind, self.classes, self.splits, self.task)


def open_pack(folder: Path, verify: bool = True) -> Pack:
    """Open a pack; `verify` compares CRCs of the images (of up to 2 GiB all, beyond that of blocks spread evenly).

    Raises:
        InputError: it is damaged, or was written by a newer flatout; names the file and the fix.
    """
    try:
        return _opened(folder, *pack_files.read_pack(folder, verify))
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"its content is not that of a pack: {type(error).__name__}: {first_line(error)}"
        raise pack_files.damaged(folder / pack_files.DESCRIPTION, what) from None


def _opened(folder: Path, about: dict[str, Any], images: np.ndarray, labels: np.ndarray) -> Pack:
    splits = {name: (start, stop) for name, (start, stop) in about["splits"].items()}
    bounds = [0, *(stop for _, stop in splits.values())]
    if list(splits) != [name for name in SPLITS if name in splits] or list(splits.values()) != list(pairwise(bounds)):
        raise ValueError(f"splits {splits}")
    if bounds[-1] != len(labels) or "train" not in splits:
        raise ValueError(f"splits {splits} of {len(labels):,} images")
    if not all(isinstance(text, str) for key in ("classes", "notes") for text in about[key]):
        raise ValueError(f"classes {about['classes']}, notes {about['notes']}")
    if labels.dtype == np.int64 and (labels.min() < 0 or labels.max() >= len(about["classes"])):
        raise ValueError(f"a label outside the {len(about['classes'])} classes")
    return Pack(
        folder=folder,
        images=images,
        labels=labels,
        task=about.get("task", "single-label"),
        classes=tuple(about["classes"]),
        splits=splits,
        groups=None if about.get("groups") is None else np.array(about["groups"], np.int64),
        resize="squash" if about["resize"] == "stretch" else about["resize"],  # its name in format 1
        kind=about["kind"],
        notes=tuple(about["notes"]),
        skipped=about["skipped"],
        was_cached=True,
        is_decoded=about.get("is_decoded", False),
        build_seconds=about["build_seconds"],
        fingerprint=fingerprint_of(labels, splits, [crc32 for _, crc32 in about["blocks"]]),
    )


def fingerprint_of(labels: np.ndarray, splits: dict[str, tuple[int, int]], crc32s: list[int]) -> str:
    """Return the fingerprint of a pack, from the CRC-32s of its blocks of images."""
    about = json.dumps([splits, crc32s]).encode()
    return hashlib.blake2b(about + labels.tobytes(), digest_size=16).hexdigest()
