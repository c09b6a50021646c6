"""From what the user names to the splits that a run trains and tests on."""

import dataclasses
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from flatout.console import Console
from flatout.data.build import load_pack
from flatout.data.cache import cache_folder
from flatout.data.feed import Samples
from flatout.data.order import measured
from flatout.data.pack import Pack, PackSettings, Progress
from flatout.data.source import DataRef, Source
from flatout.data.splits import SPLITS, divide, split_by_labels
from flatout.errors import InputError
from flatout.recipe import Data, Recipe
from flatout.settings import one_or_both

MEASURED_BYTES_AT_ONCE = 2**24


def find(
    data: Any, options: Data | None = None, task: str = "auto", *, console: Console | None = None
) -> DataRef | Source:
    """Recognise a path, download and recognise a URL, or read arrays or torch data sets given in Python.

    `task` is that of a recipe; `console` shows the progress of a download.

    Raises:
        InputError: nothing is there, it cannot be downloaded, or it is nothing that can be trained on.
        DiskFull: a download does not fit.
    """
    from flatout.data.detect import from_python, recognise
    from flatout.data.remote import download, is_remote

    if is_remote(data):
        console = console or Console()
        path, descriptor = download(data, console)
        console.finish()
        try:
            found = recognise(path, options, task)
        except InputError:
            os.close(descriptor)
            raise
        # While the data may be read, the cache does not remove it to make room.
        weakref.finalize(found, os.close, descriptor)
        return found
    return recognise(Path(data), options, task) if isinstance(data, str | Path) else from_python(data, task)


def load(found: DataRef | Source, recipe: Recipe, *, cache: bool, report: Progress) -> Pack:
    """Return the pack that a recipe asks for, from the cache if it is there.

    Raises:
        InputError: images cannot be read, the data has no groups, or data.class_names does not fit.
    """
    data = recipe.data
    settings = PackSettings(
        size=one_or_both(recipe.stored_sides),
        channels=recipe.channels,
        resize=data.resize,
        on_bad_image=data.on_bad_image,
        max_bad_share=data.max_bad_share,
        bits=data.bits,
    )
    pack = load_pack(found, settings, cache=cache_folder() if cache else None, report=report)
    if data.group_column and pack.groups is None:
        raise InputError(f"data.group_column = {data.group_column!r}: {pack.kind} have no columns; remove it")
    if not data.class_names:
        return pack
    if pack.classes != tuple(map(str, range(len(pack.classes)))):
        if data.class_names != pack.classes:
            report.note("data.class_names is not used: the data names its classes itself")
        return pack
    if len(data.class_names) != len(pack.classes):
        raise InputError(
            f"data.class_names names {len(data.class_names)} classes, but the data has {len(pack.classes)}; "
            "--set data.class_names=[] takes the data's own"
        )
    return dataclasses.replace(pack, classes=data.class_names)


def splits_of(pack: Pack, data: Data, seed: int) -> dict[str, Samples]:
    """Return the splits of a pack; a missing validation split, or both splits, are taken from the training images.

    Where `data.fold` names a fold, it is the validation split, and the other folds are the training images.
    """
    rows = {name: np.arange(start, stop) for name, (start, stop) in pack.splits.items()}
    if data.fold:
        pool, folds = folds_of(pack, data.folds, seed)
        rows |= {"train": pool[folds != data.fold], "valid": pool[folds == data.fold]}
        return _samples(pack, rows)
    wanted = {"test": data.test_fraction, "valid": data.valid_fraction}
    if len(rows) > 1:
        del wanted["test"]
    if "valid" in rows:
        wanted.clear()
    total = len(rows["train"])
    for name, fraction in wanted.items():
        # The fractions are of all training images, though the second split is taken from what the first left.
        left = rows["train"]
        groups = None if pack.groups is None else pack.groups[left]
        share = fraction * total / len(left)
        kept, taken = split_by_labels(pack.labels[left], share, seed, stream=name, groups=groups)
        if len(taken):
            rows["train"], rows[name] = left[kept], left[taken]
    return _samples(pack, rows)


def folds_of(pack: Pack, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are divided into folds, those of the training and validation images, and their folds.

    Both are int64 [N]; folds count from 1. A test split is in none.

    Raises:
        InputError: there are fewer images or groups than folds.
    """
    spans = [span for name, span in pack.splits.items() if name != "test"]
    pool = np.concatenate([np.arange(start, stop) for start, stop in spans])
    groups = None if pack.groups is None else pack.groups[pool]
    return pool, divide(pack.labels[pool], count, seed, groups)


def _samples(pack: Pack, rows: dict[str, np.ndarray]) -> dict[str, Samples]:
    rows = {name: rows[name] for name in SPLITS if name in rows}
    return {name: Samples(images=pack.images, rows=some, labels=pack.labels[some]) for name, some in rows.items()}


def measure(samples: Samples) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels scaled to 0..1, over evenly spaced images."""
    positions = measured(len(samples))
    channels, bits = samples.images.shape[-1], 8 * samples.images.itemsize
    histogram = np.zeros((channels, 2**bits), np.int64)
    at_once = max(1, MEASURED_BYTES_AT_ONCE // samples.images[:1].nbytes)
    for start in range(0, len(positions), at_once):
        chunk = positions[start : start + at_once]
        images = samples.images_at(chunk)
        for channel in range(channels):
            histogram[channel] += np.bincount(images[..., channel].ravel(), minlength=2**bits)
    levels, count = np.arange(2**bits) / (2**bits - 1), histogram[0].sum()
    mean = histogram @ levels / count
    std = np.sqrt(np.maximum(histogram @ np.square(levels) / count - np.square(mean), 0))
    # Images of 16 bits often use few of them.
    digits = 4 if bits == 8 else 7
    return tuple(round(float(m), digits) for m in mean), tuple(round(max(float(s), 0.1**digits), digits) for s in std)


def match_classes(pack: Pack, classes: tuple[str, ...], *, where: Any) -> np.ndarray:
    """Return the labels of a pack as those of `classes`, matched by name; numbers as they are.

    Raises:
        InputError: the pack has a class that is not among them.
    """
    unknown = [name for name in pack.classes if name not in classes]
    if unknown:
        place = where if isinstance(where, str | Path) else "the data"
        raise InputError(f"{place}: class {unknown[0]!r} is not among the model's classes: {', '.join(classes)}")
    places = np.array([classes.index(name) for name in pack.classes], np.int64)
    if pack.task == "regression":
        return pack.labels
    if pack.task == "multi-label":
        labels = np.zeros((len(pack.labels), len(classes)), pack.labels.dtype)
        labels[:, places] = pack.labels
        return labels
    return places[pack.labels]
