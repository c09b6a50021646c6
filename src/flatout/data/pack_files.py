"""The files of a pack: written block by block, so that a killed process can continue, and checked when read.

images.npy     uint8 or uint16 [N, H, W, C]
labels.npy     int64 [N]; of several labels uint8 [N, K], of numbers float32 [N]
pack.json      what the images are and how they were made, with CRC-32s of blocks of rows, of the labels, of itself
journal.jsonl  while a pack is being written: a line for each block that has reached the disk
"""

import errno
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.arrival import Arrival
from flatout.errors import InputError, first_line
from flatout.host import usable_cores
from flatout.settings import Size, sides, typed

if TYPE_CHECKING:
    from flatout.data.pack import Progress

IMAGES, LABELS, DESCRIPTION, JOURNAL = "images.npy", "labels.npy", "pack.json", "journal.jsonl"
# Format 1 had square images of 8 bits.
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
# By task; packs that were written without a task have one label for each image.
LABEL_TYPES = {"single-label": np.int64, "multi-label": np.uint8, "regression": np.float32}

# Memory while packing is two blocks; at most as much is decoded again after a kill.
BLOCK_BYTES = 16 << 20

# Checking all of a pack of hundreds of gigabytes would delay each start by minutes. Beyond this many bytes, blocks over
# the whole file are checked: enough to find a file that was cut short, overwritten, or lies on a failing disk.
CHECKED_BYTES = 2 << 30

# Samples for one thread at a time: few enough that all threads end a block together.
_SAMPLES_PER_TASK = 16

Fill = Callable[[Sequence[int] | np.ndarray, np.ndarray], dict[int, str]]


class DamagedPack(InputError):
    """A pack whose files are not what was written."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A line of the journal: samples and rows so far, and CRC-32 and bad samples (index -> reason) of the block.

    Samples are counted in the order in which they are decoded.
    """

    samples: int
    rows: int
    crc32: int
    bad: dict[str, str]


# Writing


def write_images(
    folder: Path,
    *,
    key: str,
    count: int,
    image_shape: tuple[int, int, int],
    bits: int = 8,
    fill: Fill,
    report: "Progress",
    arrival: Arrival | None = None,
) -> tuple[list[Block], dict[int, str]]:
    """Write `folder/images.npy` from `count` samples, on all cores, continuing where an earlier process was killed.

    Blocks are written with ordinary writes: through a map, a full disk would kill the process, and the pages would
    count as its memory. Returns the blocks, and index -> reason of the bad samples, which `fill` returns and which are
    left out.

    With `arrival`, samples are decoded in its order, each into its own row, and announced there; bad ones keep their
    rows, and nothing is announced from the first of them on.
    """
    dtype = type_of(bits)
    header, row_bytes = npy_header((count, *image_shape), dtype), int(np.prod(image_shape)) * dtype.itemsize
    order: Sequence[int] | np.ndarray = range(count)
    wanted: dict[str, Any] = {"key": key}
    if arrival is not None:
        order = arrival.order
        wanted |= {"order": zlib.crc32(order.data), "task": arrival.task, "bits": bits}

    def places(first: int, last: int) -> list[tuple[int, int]]:
        """Return offset and length in the file of each run of rows, which are counted as they are written."""
        runs = [(first, last)]
        if arrival is not None:
            rows = arrival.order[first:last]
            runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)]
        return [(len(header) + first * row_bytes, (last - first) * row_bytes) for first, last in runs]

    done = _read_journal(folder, wanted, places)
    bad = {index: reason for block in done for index, reason in block.bad.items()}
    start, rows = (done[-1].samples, done[-1].rows) if done else (0, 0)
    with (
        (folder / IMAGES).open("r+b" if done else "w+b") as file,
        (folder / JOURNAL).open("a", encoding="utf-8") as journal,
        _decoding_threads() as pool,
    ):
        _reserve(file, len(header) + count * row_bytes)
        file.write(header)
        file.truncate(len(header) + count * row_bytes)
        _sync(file)
        if arrival is not None:
            arrival.begin(folder / IMAGES, 0 if bad else start)
        for stop, images, bad_here in _decoded(pool, fill, order, start, (image_shape, dtype), report):
            content, at = images.reshape(-1).data, 0
            for offset, length in places(rows, rows + len(images)):
                file.seek(offset)
                file.write(content[at : at + length])
                at += length
            _sync(file)
            rows += len(images)
            done.append(Block(samples=stop, rows=rows, crc32=zlib.crc32(content), bad=bad_here))
            journal.write(json.dumps(asdict(done[-1])) + "\n")
            _sync(journal)
            bad |= bad_here
            if arrival is not None and not bad:
                arrival.announce(stop)
        file.seek(0)
        file.write(npy_header((rows, *image_shape), dtype))
        file.truncate(len(header) + rows * row_bytes)
        _sync(file)
    blocks = done if arrival is None else _blocks_of(folder / IMAGES, count, len(header), row_bytes)
    return blocks, {int(index): reason for index, reason in bad.items()}


def _blocks_of(path: Path, count: int, header_bytes: int, row_bytes: int) -> list[Block]:
    """Return the blocks of a finished file, as they are when it is written row after row."""
    rows = max(1, min(BLOCK_BYTES // row_bytes, count))
    blocks = []
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        crc32 = _crc32_of(path, [(header_bytes + start * row_bytes, (stop - start) * row_bytes)])
        assert crc32 is not None
        blocks.append(Block(samples=stop, rows=stop, crc32=crc32, bad={}))
    return blocks


def unfinished(partial: Path) -> dict[str, Any]:
    """Return task and bits of a pack that a run trained on while it was being written; empty where there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError), (partial / JOURNAL).open(encoding="utf-8") as journal:
        header = json.loads(journal.readline())
        return {"task": header["task"], "bits": header["bits"]}
    return {}


def publish(partial: Path, target: Path, labels: np.ndarray, description: dict[str, Any]) -> None:
    """Add labels and description to written images and rename the folder, so that it is complete or missing."""
    with (partial / LABELS).open("wb") as file:
        np.save(file, labels)
        _sync(file)
    description = {**description, "format_version": FORMAT_VERSION, "labels_crc32": zlib.crc32(labels.data)}
    with (partial / DESCRIPTION).open("w", encoding="utf-8") as file:
        json.dump({**description, "crc32": _json_crc32(description)}, file, indent=1)
        _sync(file)
    (partial / JOURNAL).unlink()
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
    pool: ThreadPoolExecutor,
    fill: Fill,
    order: Sequence[int] | np.ndarray,
    start: int,
    image: tuple[tuple[int, ...], np.dtype],
    report: "Progress",
) -> Iterator[tuple[int, np.ndarray, dict[str, str]]]:
    """Yield (stop, rows, bad samples) of blocks of `order` from `start` on; while one is used the next is decoded.

    `image` is the shape of an image and its type. Of samples in the order of the file, the rows are without bad ones.
    """
    (shape, dtype), count = image, len(order)
    block_rows = max(1, min(BLOCK_BYTES // (int(np.prod(shape)) * dtype.itemsize), count))
    step = max(1, min(_SAMPLES_PER_TASK, block_rows // usable_cores()))
    buffers = [np.empty((block_rows, *shape), dtype) for _ in range(2)]

    def submit(first: int, buffer: np.ndarray) -> list[Future[dict[int, str]]]:
        last = min(first + block_rows, count)
        spans = [(a, min(a + step, last)) for a in range(first, last, step)]
        return [pool.submit(fill, order[a:b], buffer[a - first : b - first]) for a, b in spans]

    tasks = submit(start, buffers[0])
    for number, first in enumerate(range(start, count, block_rows)):
        buffer, stop = buffers[number % 2], min(first + block_rows, count)
        following = submit(stop, buffers[(number + 1) % 2])
        bad: dict[int, str] = {}
        for index, task in enumerate(tasks):
            bad |= task.result()
            report.update(min(first + (index + 1) * step, stop), count)
        rows = buffer[: stop - first]
        if bad and isinstance(order, range):
            rows = np.delete(rows, [i - first for i in bad], axis=0)
        yield stop, rows, {str(i): reason for i, reason in bad.items()}
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


def _read_journal(
    folder: Path, wanted: dict[str, Any], places: Callable[[int, int], list[tuple[int, int]]]
) -> list[Block]:
    """Return the blocks of the same pack that are unchanged on the disk, and leave only these in the journal.

    `wanted` is the first line of the journal of that pack, and `places` returns offset and length of rows in the file.
    """
    done: list[Block] = []
    # An error means another journal, or the line that was being written when the process was killed.
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        is_same = json.loads(lines[0]) == wanted
        for line in lines[1:] if is_same else ():
            block = Block(**json.loads(line))
            start = done[-1].rows if done else 0
            if _crc32_of(folder / IMAGES, places(start, block.rows)) != block.crc32:
                break
            done.append(block)
    kept = "".join(json.dumps(entry) + "\n" for entry in [wanted, *map(asdict, done)])
    (folder / JOURNAL).write_text(kept, encoding="utf-8")
    return done


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
        return _crc32_of(path, [(header_bytes + start * row_bytes, (stop - start) * row_bytes)]) == crc32

    with ThreadPoolExecutor(usable_cores()) as pool:
        for number, intact in zip(checked, pool.map(is_intact, checked), strict=True):
            if not intact:
                raise damaged(path, f"images {starts[number]:,} to {blocks[number][0] - 1:,} have changed")


def _crc32_of(path: Path, places: Sequence[tuple[int, int]]) -> int | None:
    """Return the CRC-32 of parts of a file, (offset, length) each, one after another; None where one is missing."""
    crc32 = 0
    try:
        with path.open("rb") as file:
            for offset, length in places:
                file.seek(offset)
                content = file.read(length)
                if len(content) < length:
                    return None
                crc32 = zlib.crc32(content, crc32)
    except FileNotFoundError:
        return None
    return crc32


def _json_crc32(description: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


def damaged(path: Path, what: str) -> DamagedPack:
    """Return the error of a file of a pack."""
    return DamagedPack(f"{path}: is damaged ({what}); delete {path.parent} and pack the data again")
