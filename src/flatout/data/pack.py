"""A decoded data set: a folder of plain NumPy files that can be memory-mapped.

`images.npy` uint8 or uint16 [N, H, W, C]; `labels.npy` int64 [N], multi-label uint8 [N, K], regression float32 [N];
`pack.json` description and settings, with CRC-32s of blocks of rows, of the labels, and of itself.
"""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Data
from flatout.config.settings import Size, sides
from flatout.data.batches import prefetch
from flatout.data.cache import Progress
from flatout.data.source import ImageDataset
from flatout.utils.errors import InputError, first_line
from flatout.utils.host import usable_cores

if TYPE_CHECKING:
    from flatout.distributed.world import World

IMAGES, LABELS, DESCRIPTION = "images.npy", "labels.npy", "pack.json"
FORMAT_VERSION = 2
LABEL_TYPES = {"single-label": np.int64, "multi-label": np.uint8, "regression": np.float32}
BLOCK_BYTES = 16 << 20  # of images, per CRC-32
# Checking hundreds of gigabytes would delay each start by minutes. Beyond this many bytes, evenly spaced blocks are
# checked: enough to find a file that is truncated, overwritten, or on a failing disk.
CHECKED_BYTES = 2 << 30
_SAMPLES_PER_TASK, _TASK_BYTES = 16, 4 << 20  # of one thread; packing takes three times the bytes for each core

Fill = Callable[[range, np.ndarray], dict[int, str]]


class DamagedPack(InputError):
    """A pack whose files have changed since they were written."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: is damaged ({what}); delete {path.parent} and pack the data again")


@dataclass(frozen=True, kw_only=True)
class PackSettings(Data):
    """The `data` section of a recipe, and the size and channels of the images."""

    size: Size
    channels: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images."""
        return *sides(self.size), self.channels


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack(ImageDataset):
    """A data set of decoded images: its `path` is None if it is in memory or unnamed, its `groups` are int64 [N]."""

    images: np.ndarray = field()  # uint8 or uint16 [N, H, W, C], mapped from the file, read-only
    resize: str
    skipped: dict[str, str] = field(default_factory=dict)  # file -> reason of the bad images that were left out
    skipped_rows: dict[int, str] = field(default_factory=dict)  # the same by their position in the data
    was_cached: bool = False
    is_decoded: bool = False  # from files, by the cache or for this run
    build_seconds: float = 0.0  # even if cached
    fingerprint: str  # of images, labels and splits; the class names are not part of it

    @property
    def bits(self) -> int:
        return 8 * self.images.itemsize

    def labels_among(self, classes: tuple[str, ...], where: object) -> np.ndarray:
        """Return the labels as indices into `classes`, matched by name; `where` is the data as the user named it."""
        if unknown := [name for name in self.classes if name not in classes]:
            place = where if isinstance(where, str | Path) else "the data"
            raise InputError(f"{place}: class {unknown[0]!r} is not among the model's classes: {', '.join(classes)}")
        if self.task == "regression":
            return self.labels
        places = np.array([classes.index(name) for name in self.classes], np.int64)
        if self.task == "single-label":
            return places[self.labels]
        labels = np.zeros((len(self.labels), len(classes)), self.labels.dtype)
        labels[:, places] = self.labels
        return labels


def fingerprint_of(labels: np.ndarray, splits: dict[str, tuple[int, int]], crc32s: list[int]) -> str:
    """Return the fingerprint of a pack, from the CRC-32s of its blocks of images."""
    about = json.dumps([splits, crc32s]).encode()
    return hashlib.blake2b(about + labels.tobytes(), digest_size=16).hexdigest()


def crc32s_of(images: np.ndarray) -> list[int]:
    """Return the CRC-32s of an array's blocks, as a pack of it has them."""
    rows = max(1, BLOCK_BYTES // images[:1].nbytes)
    with ThreadPoolExecutor(usable_cores()) as pool:
        blocks = (images[start : start + rows] for start in range(0, len(images), rows))
        return list(pool.map(lambda block: zlib.crc32(np.ascontiguousarray(block).reshape(-1).data), blocks))


# Writing


def write_images(
    folder: Path, count: int, image_shape: tuple[int, int, int], bits: int, fill: Fill, report: Progress
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Write `folder/images.npy` from `count` samples, on all cores, without the bad ones, which `fill` returns.

    Return the number of rows so far and the CRC-32 of each block; and index -> reason of the bad samples.
    """
    import torch

    dtype = np.dtype(f"u{bits // 8}")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count, *image_shape)}
    row_bytes = int(np.prod(image_shape)) * dtype.itemsize
    block_rows, step = max(1, BLOCK_BYTES // row_bytes), max(1, min(_SAMPLES_PER_TASK, _TASK_BYTES // row_bytes))
    blocks_of_rows = [range(count)[start : start + block_rows] for start in range(0, count, block_rows)]
    spans = [block[start : start + step] for block in blocks_of_rows for start in range(0, len(block), step)]

    def decode(span: range) -> tuple[range, np.ndarray, dict[int, str]]:
        images = np.empty((len(span), *image_shape), dtype)
        bad = fill(span, images)
        return span, np.delete(images, [index - span.start for index in bad], axis=0) if bad else images, bad

    blocks: list[tuple[int, int]] = []
    all_bad: dict[int, str] = {}
    rows, crc32, threads = 0, 0, torch.get_num_threads()
    # Decoding threads must not start torch threads.
    pool = ThreadPoolExecutor(usable_cores(), "flatout-pack", torch.set_num_threads, (1,))
    try:
        with (folder / IMAGES).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for span, images, bad in prefetch(decode, spans, depth=3 * usable_cores(), pool=pool):
                content = images.reshape(-1).data
                file.write(content)
                rows, crc32 = rows + len(images), zlib.crc32(content, crc32)
                all_bad |= bad
                if span.stop % block_rows == 0 or span.stop == count:
                    blocks.append((rows, crc32))
                    crc32 = 0
                report.update(span.stop, count)
            file.seek(0)  # the length of the header does not depend on the number of rows
            np.lib.format.write_array_header_1_0(file, header | {"shape": (rows, *image_shape)})
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    return blocks, all_bad


def publish(partial: Path, target: Path, labels: np.ndarray, description: Mapping[str, object]) -> None:
    """Add labels and description to written images and rename the folder, so that it is either complete or missing."""
    np.save(partial / LABELS, labels)
    description = {**description, "format_version": FORMAT_VERSION, "labels_crc32": zlib.crc32(labels.data)}
    text = json.dumps({**description, "crc32": _json_crc32(description)}, indent=1)
    (partial / DESCRIPTION).write_text(text, encoding="utf-8")
    for path in partial.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    partial.rename(target)


def _json_crc32(description: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


# Reading


def open_pack(folder: Path, verify: bool = True) -> Pack:
    """Open a pack; `verify` checks the CRCs of the images (up to 2 GiB all, beyond that evenly spaced blocks)."""
    file = folder / DESCRIPTION
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if (version := about["format_version"]) != FORMAT_VERSION:
            fix = "update flatout, or pack the data again"
            raise InputError(f"{file}: has format {version}, this flatout reads {FORMAT_VERSION}; {fix}")
        _expect(about.pop("crc32") == _json_crc32(about))
        task, blocks, itemsize = about.get("task", "single-label"), about["blocks"], about.get("bits", 8) // 8
        splits = {name: (start, stop) for name, (start, stop) in about["splits"].items()}
        file = folder / LABELS
        labels = np.load(file)
        _expect(labels.dtype == LABEL_TYPES[task] and zlib.crc32(labels.data) == about["labels_crc32"])
        file = folder / IMAGES
        images = map_images(file)
        _expect(images.dtype == f"u{itemsize}" and len(images) == about["images"] and images.flags.c_contiguous)
        if verify:
            _verify_images(file, blocks, images[:1].nbytes)
        return Pack(
            path=folder,
            images=images,
            labels=labels,
            task=task,
            classes=tuple(about["classes"]),
            splits=splits,
            groups=None if about.get("groups") is None else np.array(about["groups"], np.int64),
            notes=tuple(about["notes"]),
            skipped_rows={int(row): reason for row, reason in about.get("skipped_rows", {}).items()},
            was_cached=True,
            is_decoded=about.get("is_decoded", False),
            **{key: about[key] for key in ("kind", "resize", "skipped", "build_seconds")},
            fingerprint=fingerprint_of(labels, splits, [crc32 for _, crc32 in blocks]),
        )
    except InputError:
        raise
    except Exception as error:  # NumPy raises nearly every built-in error on a damaged header
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise InputError(f"{file}: cannot be read: {error.strerror}") from None
        raise DamagedPack(file, first_line(error)) from None


def _expect(is_unchanged: bool) -> None:
    if not is_unchanged:
        raise ValueError("its content has changed")


def map_images(path: str | Path) -> np.ndarray:
    """Map an .npy file, read-only. On Linux it stays readable after removal, also by other processes."""
    if not Path("/proc/self/fd").is_dir():
        return np.load(path, mmap_mode="r")
    file = os.open(path, os.O_RDONLY)
    # A str, because np.load resolves a Path.
    images = np.load(f"/proc/{os.getpid()}/fd/{file}", mmap_mode="r")
    weakref.finalize(images, os.close, file)
    return images


def _verify_images(path: Path, blocks: list[list[int]], row_bytes: int) -> None:
    header_bytes = path.stat().st_size - blocks[-1][0] * row_bytes
    starts = [0, *(stop for stop, _ in blocks)]
    checked = np.linspace(0, len(blocks) - 1, min(len(blocks), max(1, CHECKED_BYTES // BLOCK_BYTES))).astype(int)

    def verify(number: int) -> None:
        start, (stop, crc32) = starts[number], blocks[number]
        with path.open("rb") as file:
            file.seek(header_bytes + start * row_bytes)
            if zlib.crc32(file.read((stop - start) * row_bytes)) != crc32:
                raise DamagedPack(path, f"images {start:,} to {stop - 1:,} have changed")

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(verify, checked))


# Sharing


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPack:
    """A pack's fields but its images, and their .npy file; with `in_memory`, that exists only while it is shared."""

    fields: dict[str, Any]
    images: str
    in_memory: bool = False

    def open(self) -> Pack:
        images = map_images(self.images)
        # A plain array is read through the map, a `memmap` from the file.
        return Pack(**self.fields, images=np.asarray(images) if self.in_memory else images)


@contextlib.contextmanager
def share(pack: Pack) -> Iterator[SharedPack]:
    """Share a pack with other processes of this host while the context lasts: images in memory through a file."""
    fields = {name: value for name, value in vars(pack).items() if name != "images"}
    if isinstance(pack.images, np.memmap) and pack.images.filename:
        yield SharedPack(fields=fields, images=str(pack.images.filename))
        return
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):  # leaves nothing behind if the process is killed
            file = stack.enter_context(os.fdopen(os.memfd_create("flatout-images"), "wb"))
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            path = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-")), IMAGES))
            file = stack.enter_context(Path(path).open("wb"))
        np.save(file, pack.images)
        file.flush()
        yield SharedPack(fields=fields, images=path, in_memory=True)


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
