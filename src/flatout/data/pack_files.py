"""The files of a pack: written block by block, and checked when read.

images.npy  uint8 or uint16 [N, H, W, C]
labels.npy  int64 [N]; of several labels uint8 [N, K], of numbers float32 [N]
pack.json   what the images are and how they were made, with CRC-32s of blocks of rows, of the labels, of itself
"""

import errno
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError, first_line
from flatout.host import usable_cores
from flatout.settings import Size, sides, typed

if TYPE_CHECKING:
    from flatout.data.pack import Progress

IMAGES, LABELS, DESCRIPTION = "images.npy", "labels.npy", "pack.json"
# Format 1 had square images of 8 bits.
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
# By task; packs that were written without a task have one label for each image.
LABEL_TYPES = {"single-label": np.int64, "multi-label": np.uint8, "regression": np.float32}

# Memory while packing is two blocks.
BLOCK_BYTES = 16 << 20

# Checking all of a pack of hundreds of gigabytes would delay each start by minutes. Beyond this many bytes, blocks over
# the whole file are checked: enough to find a file that was cut short, overwritten, or lies on a failing disk.
CHECKED_BYTES = 2 << 30

# Samples for one thread at a time: few enough that all threads end a block together.
_SAMPLES_PER_TASK = 16

Fill = Callable[[range, np.ndarray], dict[int, str]]


class DamagedPack(InputError):
    """A pack whose files are not what was written."""


# Writing


def write_images(
    folder: Path, *, count: int, image_shape: tuple[int, int, int], bits: int = 8, fill: Fill, report: "Progress"
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Write `folder/images.npy` from `count` samples, on all cores.

    Blocks are written with ordinary writes: through a map, a full disk would kill the process, and the pages would
    count as its memory.

    Returns:
        The number of rows so far and the CRC-32 of each block; and index -> reason of the bad samples, which `fill`
        returns and which are left out.
    """
    dtype = type_of(bits)
    header, row_bytes = npy_header((count, *image_shape), dtype), int(np.prod(image_shape)) * dtype.itemsize
    blocks: list[tuple[int, int]] = []
    bad: dict[int, str] = {}
    rows = 0
    with (folder / IMAGES).open("w+b") as file, _decoding_threads() as pool:
        _reserve(file, len(header) + count * row_bytes)
        file.write(header)
        for images, bad_here in _decoded(pool, fill, count, image_shape, dtype, report):
            content = images.reshape(-1).data
            file.write(content)
            rows += len(images)
            blocks.append((rows, zlib.crc32(content)))
            bad |= bad_here
        file.truncate()
        file.seek(0)
        file.write(npy_header((rows, *image_shape), dtype))
        _sync(file)
    return blocks, bad


def publish(partial: Path, target: Path, labels: np.ndarray, description: dict[str, Any]) -> None:
    """Add labels and description to written images and rename the folder, so that it is complete or missing."""
    with (partial / LABELS).open("wb") as file:
        np.save(file, labels)
        _sync(file)
    description = {**description, "format_version": FORMAT_VERSION, "labels_crc32": zlib.crc32(labels.data)}
    with (partial / DESCRIPTION).open("w", encoding="utf-8") as file:
        json.dump({**description, "crc32": _json_crc32(description)}, file, indent=1)
        _sync(file)
    _sync_folder(partial)
    partial.rename(target)
    _sync_folder(target.parent)


def type_of(bits: int) -> np.dtype:
    """Return the type of pixels of so many bits, 8 or 16."""
    return np.dtype(f"u{bits // 8}")


def npy_header(shape: Sequence[int], dtype: np.dtype) -> bytes:
    """Return the header of a .npy file; its length does not depend on the first axis."""
    header = io.BytesIO()
    fields = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def crc32s_of(images: np.ndarray) -> list[int]:
    """Return the CRC-32s of an array's blocks, which are those of a pack of it."""
    rows = max(1, BLOCK_BYTES // images[:1].nbytes)
    with ThreadPoolExecutor(usable_cores()) as pool:
        blocks = (images[start : start + rows] for start in range(0, len(images), rows))
        return list(pool.map(lambda block: zlib.crc32(np.ascontiguousarray(block).reshape(-1).data), blocks))


def _decoded(
    pool: ThreadPoolExecutor, fill: Fill, count: int, shape: tuple[int, ...], dtype: np.dtype, report: "Progress"
) -> Iterator[tuple[np.ndarray, dict[int, str]]]:
    """Yield rows without bad samples, and these, of the blocks; while one is used the next is decoded."""
    block_rows = max(1, min(BLOCK_BYTES // (int(np.prod(shape)) * dtype.itemsize), count))
    step = max(1, min(_SAMPLES_PER_TASK, block_rows // usable_cores()))
    buffers = [np.empty((block_rows, *shape), dtype) for _ in range(2)]

    def submit(first: int, buffer: np.ndarray) -> list[Future[dict[int, str]]]:
        last = min(first + block_rows, count)
        spans = [range(a, min(a + step, last)) for a in range(first, last, step)]
        return [pool.submit(fill, span, buffer[span.start - first : span.stop - first]) for span in spans]

    tasks = submit(0, buffers[0])
    for number, first in enumerate(range(0, count, block_rows)):
        buffer, stop = buffers[number % 2], min(first + block_rows, count)
        following = submit(stop, buffers[(number + 1) % 2])
        bad: dict[int, str] = {}
        for index, task in enumerate(tasks):
            bad |= task.result()
            report.update(min(first + (index + 1) * step, stop), count)
        rows = buffer[: stop - first]
        yield np.delete(rows, [i - first for i in bad], axis=0) if bad else rows, bad
        tasks = following


@contextmanager
def _decoding_threads() -> Iterator[ThreadPoolExecutor]:
    """Lend a thread for each core, in which torch uses no more threads. On an error, what has not begun is dropped."""
    import torch

    threads = torch.get_num_threads()
    # Set in each of them: training may run meanwhile with a number of its own.
    pool = ThreadPoolExecutor(usable_cores(), "flatout-pack", torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


def _reserve(file: io.BufferedRandom, size_bytes: int) -> None:
    """Have the system set the room aside, where it can, so that a full disk is known at once."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _sync(file: io.IOBase) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk; only then a rename is lasting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def read_pack(folder: Path, verify: bool) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Return description, images (mapped) and labels of a pack, checked; the CRCs of images only with `verify`."""
    description = _read_description(folder / DESCRIPTION)
    images_path, labels_path = folder / IMAGES, folder / LABELS
    try:
        labels = np.load(path := labels_path)
        images = np.load(path := images_path, mmap_mode="r")
    except Exception as error:  # NumPy raises nearly every built-in error on a damaged header
        raise damaged(path, first_line(error)) from None
    if (
        labels.dtype != LABEL_TYPES.get(description.get("task", "single-label"))
        or zlib.crc32(labels.data) != description["labels_crc32"]
    ):
        raise damaged(labels_path, "its content has changed")
    try:
        height, width = sides(typed(description["size"], Size, "size"))
    except InputError as error:
        raise damaged(folder / DESCRIPTION, str(error)) from None
    shape = (description["images"], height, width, description["channels"])
    dtype = type_of(description.get("bits", 8))
    if images.dtype != dtype or images.shape != shape or not images.flags.c_contiguous:
        raise damaged(images_path, f"{images.dtype} {images.shape} instead of {dtype} {shape}")
    if images_path.stat().st_size != len(npy_header(shape, dtype)) + images.nbytes or len(labels) != len(images):
        raise damaged(images_path, "its size has changed")
    stops = [0, *(stop for stop, _ in description["blocks"])]
    if stops != sorted(stops) or stops[-1] != len(images):
        raise ValueError(f"blocks that are not those of {len(images):,} images")
    if verify:
        _verify_images(images_path, description["blocks"], images[:1].nbytes)
    return description, images, labels


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version, crc32 = description["format_version"], description.pop("crc32")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    if version not in READABLE_VERSIONS:
        raise InputError(f"{path}: has format {version}, this flatout reads {FORMAT_VERSION}; update flatout")
    if crc32 != _json_crc32(description):
        raise damaged(path, "its content has changed")
    return description


def _verify_images(path: Path, blocks: list[list[int]], row_bytes: int) -> None:
    header_bytes = path.stat().st_size - blocks[-1][0] * row_bytes
    starts = [0, *(stop for stop, _ in blocks)]
    checked = np.linspace(0, len(blocks) - 1, min(len(blocks), max(1, CHECKED_BYTES // BLOCK_BYTES))).astype(int)

    def is_intact(number: int) -> bool:
        start, (stop, crc32) = starts[number], blocks[number]
        with path.open("rb") as file:
            file.seek(header_bytes + start * row_bytes)
            return zlib.crc32(file.read((stop - start) * row_bytes)) == crc32

    with ThreadPoolExecutor(usable_cores()) as pool:
        for number, intact in zip(checked, pool.map(is_intact, checked), strict=True):
            if not intact:
                raise damaged(path, f"images {starts[number]:,} to {blocks[number][0] - 1:,} have changed")


def _json_crc32(description: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


def damaged(path: Path, what: str) -> DamagedPack:
    """Return the error of a file of a pack."""
    return DamagedPack(f"{path}: is damaged ({what}); delete {path.parent} and pack the data again")
