"""A data set decoded once: plain NumPy files that anyone can map, found again by content and settings.

A pack is a folder of `images.npy`, `labels.npy` and `pack.json` (see `pack_files`). `load_pack` finds it in the cache
or makes it; `build_pack` makes one for keeping; `open_pack` opens one.
"""

import errno
import json
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatout.data import bad_images, pack_files
from flatout.data.decode import RESIZE_METHOD, BadImage, decode_image, resize_images
from flatout.data.digests import combined_digest, digest_files
from flatout.data.pack_files import DamagedPack
from flatout.data.source import Found, Source, describe
from flatout.errors import InputError

UPDATE_SECONDS = 0.1

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Progress(Protocol):
    """Whatever shows a person how far the work has come."""

    def update(self, done: int, total: int, unit: str = "images") -> None:
        """Say how much is done; called at most about ten times a second."""
        ...

    def note(self, text: str) -> None:
        """Say one sentence."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """How images become a pack.

    Attributes:
        size: height and width in pixels.
        channels: 1 or 3.
        resize: "stretch" or "crop", see `decode_image`.
        on_bad_image: "stop", or "skip" to leave out what cannot be decoded.
        max_bad_share: the largest share of bad images that "skip" accepts.
    """

    size: int
    channels: int
    resize: str
    on_bad_image: str
    max_bad_share: float

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images."""
        return self.size, self.size, self.channels


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Decoded images with their labels, in the order train, valid, test.

    Attributes:
        folder: where it lies; None where it is only in memory.
        images: uint8 [N, H, W, C], mapped from the file, read-only.
        labels: int64 [N], indices into `classes`.
        classes: class names.
        splits: name -> (start, stop), contiguous; "train" is always there.
        resize: how images were made square, "stretch" or "crop".
        kind: what the data was recognised as.
        notes: what a person should know about how the data was read.
        skipped: file -> reason of the bad images that were left out.
        was_cached: whether it was there already.
        build_seconds: the time it took to build, now or then.
    """

    folder: Path | None
    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    resize: str
    kind: str
    notes: tuple[str, ...]
    skipped: dict[str, str]
    was_cached: bool
    build_seconds: float

    def describe(self) -> str:
        """Return one line that says what the data is."""
        return describe(self.kind, self.classes, self.splits)


def cache_folder() -> Path:
    """Return the folder for what can be made again: FLATOUT_CACHE, or else `flatout` in the user's cache folder."""
    if own := os.environ.get("FLATOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def load_pack(data: Found | Source, settings: PackSettings, *, cache: Path | None, report: Progress) -> Pack:
    """Return the data as a pack: the user's own, one from the cache, or one made now.

    Cached packs are found by the content of the files and the settings that decide pixels, wherever the files lie.
    A cached pack that is damaged is made again. Without a cache the pack lives in a temporary folder, removed when the
    images are no longer used or the process ends. Arrays that are as wanted already and came from no file stay in
    memory.

    Raises:
        InputError: the data cannot be read; images are bad (all are named); the disk is full; a pack of the user's is
            damaged or does not fit the settings.
    """
    report = _Throttled(report)
    if isinstance(data, Found) and data.kind == "pack":
        return _fitting(open_pack(data.path), settings)
    inputs = data.inputs if isinstance(data, Found) else ()
    if not inputs or cache is None:
        source = data if isinstance(data, Source) else data.read()
        if source.images is not None and source.images.shape[1:] == settings.image_shape:
            return _in_memory(source, source.images, settings)
        if cache is None:
            return _in_temporary_folder(source, settings, report)
        key = _key_of_source(source, settings, _memo(cache), report)
        return _from_cache(key, lambda: source, settings, cache, report)
    assert isinstance(data, Found)
    return _from_cache(_key_of_inputs(data, settings, _memo(cache), report), data.read, settings, cache, report)


def build_pack(data: Found | Source, settings: PackSettings, folder: Path, report: Progress) -> Pack:
    """Make a pack in a new folder. If the process is killed, the same call goes on where it ended.

    Raises:
        InputError: the folder exists; the data is a pack already, or as for `load_pack`.
    """
    report = _Throttled(report)
    if isinstance(data, Found) and data.kind == "pack":
        raise InputError(f"{data.path}: is a pack already; give the data that it was made from")
    _refuse_existing(folder)
    source = data if isinstance(data, Source) else data.read()
    key = _key_of_source(source, settings, None, report)
    with _locked(folder, report):
        _refuse_existing(folder)
        try:
            return _build(source, settings, key, folder, report)
        except InputError:
            shutil.rmtree(_partial(folder), ignore_errors=True)
            raise
        finally:
            _lock_file(folder).unlink(missing_ok=True)


def open_pack(folder: Path, verify: bool = True) -> Pack:
    """Open a pack; `verify` compares CRCs of the images (of up to 2 GiB all, beyond that of blocks spread evenly).

    Raises:
        InputError: it is damaged, or was written by a newer flatout; names the file and the mend.
    """
    description, images, labels = pack_files.read_pack(folder, verify)
    return Pack(
        folder=folder,
        images=images,
        labels=labels,
        classes=tuple(description["classes"]),
        splits={name: (start, stop) for name, (start, stop) in description["splits"].items()},
        resize=description["resize"],
        kind=description["kind"],
        notes=tuple(description["notes"]),
        skipped=description["skipped"],
        was_cached=True,
        build_seconds=description["build_seconds"],
    )


def _fitting(pack: Pack, settings: PackSettings) -> Pack:
    """Return the pack if it is what the settings ask for."""
    size, _, channels = pack.images.shape[1:]
    has, wants = (size, channels, pack.resize), (settings.size, settings.channels, settings.resize)
    if has != wants:
        names = ("image_size", "channels", "data.resize")
        mend = " ".join(f"--set {n}={h}" for n, h, w in zip(names, has, wants, strict=True) if h != w)
        raise InputError(
            f"{pack.folder}: holds images of {size} x {size} pixels, {channels} channels, made square by "
            f"{pack.resize!r}, but the recipe wants {settings.size} x {settings.size} pixels, {settings.channels} "
            f"channels, {settings.resize!r}; use {mend}, or make another pack with flatout pack"
        )
    return pack


def _in_memory(source: Source, images: np.ndarray, settings: PackSettings) -> Pack:
    return Pack(
        folder=None,
        images=images,
        labels=source.labels,
        classes=source.classes,
        splits=source.splits,
        resize=settings.resize,
        kind=source.kind,
        notes=source.notes,
        skipped={},
        was_cached=False,
        build_seconds=0.0,
    )


def _in_temporary_folder(source: Source, settings: PackSettings, report: Progress) -> Pack:
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    try:
        pack = _build(source, settings, "", folder / "pack", report)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # The images outlive the pack where only they are kept.
    weakref.finalize(pack.images, shutil.rmtree, folder, ignore_errors=True)
    return pack


# The cache


def _memo(cache: Path) -> Path:
    return cache / "digests.sqlite"


def _deciding(settings: PackSettings) -> bytes:
    """Return what decides pixels, beside the data: not what is done about bad images, which a hit is judged by anew."""
    decides = [pack_files.FORMAT_VERSION, settings.size, settings.channels, settings.resize, RESIZE_METHOD]
    return json.dumps(decides).encode()


def _key_of_inputs(found: Found, settings: PackSettings, memo: Path, report: Progress) -> str:
    from flatout import __version__  # other versions may read the same files another way

    names = [found.kind, __version__, *(path.name for path in found.inputs)]
    return combined_digest(
        [_deciding(settings), json.dumps(names).encode(), *digest_files(found.inputs, memo=memo, report=report)]
    )


def _key_of_source(source: Source, settings: PackSettings, memo: Path | None, report: Progress) -> str:
    table = [source.labels.tobytes(), json.dumps([source.classes, source.splits]).encode()]
    if source.files is not None:
        return combined_digest([_deciding(settings), *table, *digest_files(source.files, memo=memo, report=report)])
    assert source.images is not None
    shape = repr(source.images.shape).encode()
    return combined_digest(chain([_deciding(settings), *table, shape], (image.tobytes() for image in source.images)))


def _from_cache(key: str, read: Callable[[], Source], settings: PackSettings, cache: Path, report: Progress) -> Pack:
    target = cache / "packs" / key
    pack = _open_cached(target, report)
    if pack is None:
        with _locked(target, report):
            pack = _open_cached(target, report)  # the process that held the lock may have made it
            if pack is None:
                shutil.rmtree(target, ignore_errors=True)
                # What an InputError about bad images leaves is kept: `skip` goes on from it without decoding again.
                return _build(read(), settings, key, target, report)
    _judge(pack.skipped, len(pack.labels) + len(pack.skipped), settings)
    return pack


def _open_cached(target: Path, report: Progress) -> Pack | None:
    """Return the pack if it is there and whole. It is there whole or not at all, as it gets its name last."""
    if not target.exists():
        return None
    try:
        return open_pack(target)
    except DamagedPack as error:
        report.note(f"a cached pack is made again, for it was damaged: {error}")
        return None


def _lock_file(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


@contextmanager
def _locked(target: Path, report: Progress) -> Iterator[None]:
    """Hold the right to make one pack. The system takes it from a process that is killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_file(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _lock_file(target).touch()  # where that is impossible, the lock would wait for ever
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report.note("another process is making this pack; waiting for it")
            lock.acquire()
    except OSError as error:
        raise _not_writable(target.parent, error) from None
    try:
        yield
    finally:
        lock.release()


# Building


def _build(source: Source, settings: PackSettings, key: str, target: Path, report: Progress) -> Pack:
    """Make the pack beside its place, then put it there.

    Raises:
        InputError: images are bad (what is decoded stays in `_partial(target)`); the disk is full (nothing stays).
    """
    import torch  # noqa: F401 - takes seconds to load, which are no part of the rate of packing

    started = time.perf_counter()
    partial = _partial(target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        blocks, bad = pack_files.write_images(
            partial,
            key=key,
            count=len(source),
            image_shape=settings.image_shape,
            fill=_fill(source, settings),
            report=report,
        )
        files = source.files or ()
        skipped = {str(files[index]): reason for index, reason in sorted(bad.items())}
        _judge(skipped, len(source), settings)
        kept = bad_images.without(source, bad) if bad else source
        description = {
            **_description(kept, settings, skipped),
            "key": key,
            "blocks": [[block.stop, block.crc32] for block in blocks],
            "build_seconds": time.perf_counter() - started,
        }
        pack_files.publish(partial, target, kept.labels, description)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno in _DISK_FULL:
            needed = len(source) * int(np.prod(settings.image_shape))
            free = shutil.disk_usage(target.parent).free
            raise InputError(
                f"{target.parent}: the disk is full, or a limit reached: {len(source):,} images need {needed:,} bytes "
                f"and {free:,} are free; make room, or set FLATOUT_CACHE to a folder on a larger disk"
            ) from None
        raise _not_writable(target.parent, error) from None
    return replace(open_pack(target, verify=False), was_cached=False)


def _description(source: Source, settings: PackSettings, skipped: dict[str, str]) -> dict[str, Any]:
    from flatout import __version__

    return {
        "flatout_version": __version__,
        "kind": source.kind,
        "path": None if source.path is None else str(source.path),
        "images": len(source),
        "size": settings.size,
        "channels": settings.channels,
        "resize": settings.resize,
        "resize_method": RESIZE_METHOD,
        "classes": list(source.classes),
        "splits": source.splits,
        "notes": list(source.notes),
        "skipped": skipped,
    }


def _fill(source: Source, settings: PackSettings) -> pack_files.Fill:
    how = {"size": settings.size, "channels": settings.channels, "resize": settings.resize}

    def from_files(start: int, stop: int, out: np.ndarray) -> dict[int, str]:
        assert source.files is not None
        bad = {}
        for index in range(start, stop):
            try:
                out[index - start] = decode_image(source.files[index], **how)
            except BadImage as error:
                bad[index] = error.reason
        return bad

    def from_arrays(start: int, stop: int, out: np.ndarray) -> dict[int, str]:
        assert source.images is not None
        out[:] = resize_images(source.images[start:stop], **how)
        _let_go(source.images)
        return {}

    return from_files if source.images is None else from_arrays


def _let_go(images: np.ndarray) -> None:
    """Have pages read through a map no longer count as memory of this process; touching them brings them back."""
    if isinstance(images, np.memmap) and images.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        images._mmap.madvise(mmap.MADV_DONTNEED)  # pyright: ignore[reportAttributeAccessIssue]


def _judge(skipped: dict[str, str], total: int, settings: PackSettings) -> None:
    bad_images.judge(skipped, total, on_bad_image=settings.on_bad_image, max_bad_share=settings.max_bad_share)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise InputError(f"{folder}: exists; choose another --out, or delete it")


def _not_writable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"{folder}: cannot be written ({error.strerror}); choose another folder (for the cache: set FLATOUT_CACHE, "
        "or use --no-cache)"
    )


class _Throttled:
    """Passes progress on at most ten times a second, and when a task is done."""

    def __init__(self, report: Progress) -> None:
        self.note = report.note
        self._update = report.update
        self._next = time.monotonic() + UPDATE_SECONDS

    def update(self, done: int, total: int, unit: str = "images") -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + UPDATE_SECONDS
            self._update(done, total, unit)
