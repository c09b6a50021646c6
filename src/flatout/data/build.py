"""Build a pack from the user's data, or find it in the cache by content and settings."""

import json
import mmap
import os
import shutil
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from flatout import __version__
from flatout.config import Recipe
from flatout.config.settings import collapse_size, shown
from flatout.data import cache as caches
from flatout.data import pack as packs
from flatout.data.cache import NotWritable, Progress, combined_digest, digest_files
from flatout.data.decode import LIMIT as PIXELS_LIMIT
from flatout.data.decode import RESIZE_METHOD, decode_image, read_headers
from flatout.data.pack import DESCRIPTION, FORMAT_VERSION, IMAGES, LABELS, DamagedPack, Pack, PackSettings, open_pack
from flatout.data.pixels import BadImage, resize_images, with_bits
from flatout.data.source import DataSource, ImageDataset
from flatout.utils.errors import InputError
from flatout.utils.files import lock


def load(found: DataSource | ImageDataset, recipe: Recipe, *, cache: bool, report: Progress) -> Pack:
    """Return the pack that a recipe asks for, from the cache if possible."""
    data = recipe.data
    settings = PackSettings(**vars(data), size=collapse_size(recipe.stored_sides), channels=recipe.channels)
    pack = load_pack(found, settings, cache=caches.cache_folder() if cache else None, report=report)
    if data.group_column and pack.groups is None:
        raise InputError(f"data.group_column = {data.group_column!r}: {pack.kind} have no columns; remove it")
    if not data.class_names or data.class_names == pack.classes:
        return pack
    if pack.classes != tuple(map(str, range(len(pack.classes)))):
        report.note("data.class_names is not used: the data names its classes itself")
        return pack
    if len(data.class_names) != len(pack.classes):
        what = f"names {len(data.class_names)} classes, but the data has {len(pack.classes)}"
        raise InputError(f"data.class_names {what}; --set data.class_names=[] takes the data's own")
    return replace(pack, classes=data.class_names)


def load_pack(data: DataSource | ImageDataset, settings: PackSettings, *, cache: Path | None, report: Progress) -> Pack:
    """Return the data as a pack: the user's own, a cached one, a new one, or arrays in memory that fit as they are.

    If the cache cannot be written, the pack is a temporary file that disappears with the process.
    """
    if isinstance(data, DataSource) and data.kind == "pack":
        return _fitting(replace(open_pack(data.path), is_decoded=False), settings)
    if isinstance(data, DataSource) and (cache is None or not data.inputs):
        data = data.read()
    if isinstance(data, ImageDataset) and data.images is not None:
        has_bits = settings.bits in (0, 8 * data.images.itemsize)
        if data.images.shape[1:] == settings.image_shape and has_bits:
            return _of_arrays(data, settings)
    if cache is not None:
        try:
            return _from_cache(data, settings, cache, report)
        except NotWritable as error:
            report.note(f"the cache cannot be used, so the decoded images are not kept: {error}")
    return _in_temporary_folder(data.read(), settings, report)


def build_pack(data: DataSource | ImageDataset, settings: PackSettings, folder: Path, report: Progress) -> Pack:
    """Make a pack in a new folder."""
    if isinstance(data, DataSource) and data.kind == "pack":
        raise InputError(f"{data.path}: is a pack already; give the data that it was packed from")
    if folder.exists():
        raise InputError(f"{folder}: exists; choose another --out, or delete it")
    partial_pack = folder.with_name(folder.name + ".partial")
    if {path.name for path in partial_pack.glob("*")} - {IMAGES, LABELS, DESCRIPTION}:  # not of a killed process
        raise InputError(f"{partial_pack}: exists; choose another --out, or delete it")
    return _build(data.read(), settings, folder, report)


def _fitting(pack: Pack, settings: PackSettings) -> Pack:
    height, width, channels = pack.images.shape[1:]
    has = {
        "image_size": shown(collapse_size((height, width))),
        "channels": channels,
        "data.resize": pack.resize,
        "data.bits": pack.bits,
    }
    if [*has.values()] != [shown(settings.size), settings.channels, settings.resize, settings.bits or pack.bits]:
        fix = " ".join(f"--set {key}={value}".replace(", ", ",") for key, value in has.items())
        raise InputError(f"{pack.path}: does not fit the recipe; use {fix}, or make another pack with flatout pack")
    return pack


def _of_arrays(source: ImageDataset, settings: PackSettings) -> Pack:
    # A view of a mapped file must not be read by the file's name: its rows may lie elsewhere.
    images = np.asarray(source.images)
    fields = vars(source) | {"path": None, "images": images, "groups": source.group_numbers, "unpacked": None}
    fingerprint = packs.fingerprint_of(source.labels, source.splits, packs.crc32s_of(images))
    return Pack(**fields, resize=settings.resize, fingerprint=fingerprint)


def _in_temporary_folder(source: ImageDataset, settings: PackSettings, report: Progress) -> Pack:
    """Return a pack in an unnamed file, where supported, so that a killed process leaves nothing behind."""
    with ExitStack() as stack:
        folder, owner = caches.temporary_folder()
        stack.callback(os.close, owner)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        pack = _build(source, settings, folder / "pack", report)
        if not str(getattr(pack.images, "filename", "")).startswith("/proc/"):  # where it can be read without a name
            weakref.finalize(pack.images, stack.pop_all().close)
    return replace(pack, path=None)


# The cache


def _key(data: DataSource | ImageDataset, settings: PackSettings, memo: Path, report: Progress) -> str:
    """Return the digest of everything that determines the pack, except how bad images are treated."""
    wanted = [FORMAT_VERSION, settings.size, settings.channels, settings.resize, settings.bits, RESIZE_METHOD]
    wanted += [name for name in ("pillow_heif", "imagecodecs") if find_spec(name)]  # which read more images
    wanted += [limit] if (limit := os.environ.get(PIXELS_LIMIT)) else []
    parts = [json.dumps(wanted).encode()]
    if isinstance(data, DataSource):
        # Other versions may read the same files in another way.
        task = [] if data.task == "auto" else [data.task]
        root = Path(data.path)
        outside = -2 if "{" in str(root.parent) else -1  # the folders of a pattern may be splits
        relative = (p.relative_to(root) if root in p.parents else Path(*p.parts[outside:]) for p in data.inputs)
        names = map(str, relative)
        parts.append(json.dumps([data.kind, __version__, data.options, *task, *names]).encode())
        return combined_digest(chain(parts, digest_files(data.inputs, memo=memo, report=report)))
    parts += [data.labels.tobytes(), json.dumps([data.classes, data.splits]).encode()]
    parts += [] if (groups := data.group_numbers) is None else [b"groups", groups.tobytes()]
    if data.files is not None:
        return combined_digest(chain(parts, digest_files(data.files, memo=memo, report=report)))
    images = np.asarray(data.images)
    return combined_digest(chain(parts, [f"{images.dtype}{images.shape}".encode()], map(np.ndarray.tobytes, images)))


def _from_cache(data: DataSource | ImageDataset, settings: PackSettings, cache: Path, report: Progress) -> Pack:
    task = data.task if isinstance(data, DataSource) else "auto"
    # A run with automatic bits and task may have made the same pack.
    for bits, kind in dict.fromkeys([(0, "auto"), (settings.bits, task)]):
        usual = replace(data, task=kind) if isinstance(data, DataSource) else data
        target = cache / "packs" / _key(usual, replace(settings, bits=bits), cache / "digests", report)
        pack = _open_cached(target, report)
        if pack and settings.bits in (0, pack.bits) and task in ("auto", pack.task):
            break
    else:
        with caches.making(target, "making this pack", report):
            pack = _open_cached(target, report)  # the process that held the lock may have made it
            if pack is None:
                shutil.rmtree(target, ignore_errors=True)
                pack = _in_use(_build(data.read(), settings, target, report))
        caches.make_room(cache, report)
    if isinstance(data, ImageDataset):
        # The pack may have been made from the same files in another folder, or named in another way.
        kept = data.without(pack.skipped_rows) if pack.skipped_rows else data
        skipped = {data.file_name(row): reason for row, reason in pack.skipped_rows.items()}
        pack = replace(pack, kind=kept.kind, notes=kept.notes, skipped=skipped or pack.skipped)
    count = len(pack.skipped_rows) or len(pack.skipped)
    _judge(pack.skipped, count, len(pack.labels) + count, settings)
    return pack


def _open_cached(target: Path, report: Progress) -> Pack | None:
    try:
        if not target.exists():
            return None
        pack = _in_use(open_pack(target))
    except DamagedPack as error:
        report.note(f"rebuilding the damaged cached pack: {error}")
        return None
    except OSError as error:
        raise NotWritable(target.parent, error) from None
    with suppress(OSError):  # only records the last use
        os.utime(target)
    return pack


def _in_use(pack: Pack) -> Pack:
    """Mark a cached pack as used while its images exist, so that it is not removed to make room."""
    assert pack.path is not None
    with suppress(OSError):  # some network file systems have no locks
        weakref.finalize(pack.images, os.close, lock(pack.path / DESCRIPTION, shared=True))
    return pack


# Building


def _build(source: ImageDataset, settings: PackSettings, target: Path, report: Progress) -> Pack:
    """Make the pack in a temporary folder next to `target`, then rename it."""
    import torch  # noqa: F401 - takes seconds to load, which the packing rate must not include

    started = time.perf_counter()
    bits, highest = settings.bits or bits_of(source), 0
    form: dict[str, Any] = {key: getattr(settings, key) for key in ("size", "channels", "resize")} | {"bits": bits}
    if (images := source.images) is not None:
        found = images.shape[-1]
        if found != settings.channels and {found, settings.channels} != {1, 3}:
            fix = f"but channels = {settings.channels}; use --set channels={found}"
            raise InputError(f"{source.path or 'data'}: the images have {found} channel{'s' * (found > 1)}, {fix}")
        highest = int(images.max()) if bits < 8 * images.itemsize else 0  # scales 16 bits to 8
    needed = len(source) * int(np.prod(settings.image_shape)) * bits // 8
    with caches.unfinished(target, f"{len(source):,} images need {needed:,} bytes", needed) as folder:
        fill = partial(_fill, source, form, highest)
        blocks, bad = packs.write_images(folder, len(source), settings.image_shape, bits, fill, report)
        skipped = {source.file_name(index): reason for index, reason in sorted(bad.items())}
        _judge(skipped, len(bad), len(source), settings)
        kept = source.without(bad) if bad else source
        description = {
            "flatout_version": __version__,
            "path": None if kept.path is None else str(kept.path),
            "images": len(kept),
            **form,
            "resize_method": RESIZE_METHOD,
            **{key: getattr(kept, key) for key in ("kind", "task", "classes", "splits", "notes")},
            "groups": None if (groups := kept.group_numbers) is None else groups.tolist(),
            "skipped": skipped,
            "skipped_rows": {str(index): reason for index, reason in sorted(bad.items())},
            "is_decoded": source.files is not None,
            "blocks": blocks,
            "build_seconds": time.perf_counter() - started,
        }
        packs.publish(folder, target, kept.labels, description)
        if source.unpacked is not None:
            source.unpacked.remove()
    return replace(open_pack(target, verify=False), was_cached=False)


def bits_of(source: ImageDataset) -> int:
    """Return the bits per channel: 16 if any of the sampled files has 16, else 8."""
    if source.images is not None:
        return 8 * source.images.itemsize
    return max((header.bits for header in read_headers(source.files or ())), default=8)


def _fill(source: ImageDataset, form: dict[str, Any], highest: int, samples: range, out: np.ndarray) -> dict[int, str]:
    """Write consecutive samples to `out` [n, H, W, C]; return index -> reason of the bad ones."""
    bad: dict[int, str] = {}
    if (images := source.images) is not None:
        out[:] = resize_images(with_bits(images[samples.start : samples.stop], form["bits"], highest), **form)
        if isinstance(images.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            # Drop mapped pages, which count as memory of this process; they are read again on access.
            images.base.madvise(mmap.MADV_DONTNEED)
    else:
        assert source.files is not None
        for target, index in zip(out, samples, strict=True):
            try:
                target[:] = decode_image(source.files[index], **form)
            except BadImage as error:
                bad[index] = str(error)
    return bad


def _judge(skipped: dict[str, str], count: int, total: int, settings: PackSettings) -> None:
    """Refuse `count` bad images of `total`, given as file -> reason: all for "stop", else more than `max_bad_share`."""
    lines = "\n".join(f"{file}: {reason}" for file, reason in skipped.items())
    what = f"{count:,} of {total:,} images cannot be used"
    if lines and settings.on_bad_image == "stop":
        raise InputError(f"{what}; repair or remove them, or leave them out with --on-bad-image skip:\n{lines}")
    if count / total > (allowed := settings.max_bad_share):
        raise InputError(f"{what}, more than data.max_bad_share = {allowed} allows; repair them or raise it:\n{lines}")
