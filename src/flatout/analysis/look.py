"""`flatout look`: a data set before training: images, counts, sizes, outliers, and model inputs.

Shape letters: M images, V views, H height, W width, C channels.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.analysis.check import (
    EXTREME,
    FEW_IMAGES,
    Headers,
    dataset_figures,
    format_sizes,
    label_of,
    name_of,
    read_headers,
)
from flatout.config import Recipe
from flatout.data.build import bits_of
from flatout.data.decode import decode_image, read_file, read_header
from flatout.data.pixels import BadImage, resize_images
from flatout.data.source import ImageDataset
from flatout.engine import augment, pixels
from flatout.engine.devices import parse_devices
from flatout.report.page import SMOOTH_FROM_PIXELS, THUMBNAIL_PIXELS, framed, page, thumbnail, write_page
from flatout.tasks import with_task
from flatout.train.fit import join_data, recipe_changes
from flatout.train.recipes import resolve
from flatout.utils.console import Console, counted
from flatout.utils.files import check_free, make_folder
from flatout.utils.host import usable_cores
from flatout.utils.random import Stream, permutation
from flatout.utils.run_files import JsonObject, visible, write_json
from flatout.utils.style import plain

PAGE, FIGURES = "look.html", "look.json"
# Classes with pictures, and images of each; classes in the table that is always open.
CLASSES_SHOWN, IMAGES_OF_CLASS, ROWS_SHOWN = 20, 8, 20
# Regression labels are shown in this many quantiles.
RANGES = 5
OUTLIERS_SHOWN, UNREADABLE_SHOWN, SHAPES_SHOWN = 24, 100, 8
# Images as the model sees them, augmented images, and views of each; images decoded to find readable ones.
SEEN, AUGMENTED, VIEWS, TRIED = 8, 6, 8, 32
BINS = 24


# --- pictures ---------------------------------------------------------------------------------------------------------


def _decoded(
    source: ImageDataset, indices: Sequence[int], how: Callable[..., dict[str, Any]]
) -> list[np.ndarray | None]:
    """Return images, [H, W, C], as `how(height, width, channels, bits)` says; None for unreadable ones."""

    def decode(index: int) -> np.ndarray | None:
        if source.files is None:
            assert source.images is not None
            image = np.asarray(source.images[index : index + 1])
            return resize_images(image, **how(*image.shape[1:], 8 * image.itemsize))[0]
        try:
            content = read_file(source.files[index])
            header = read_header(content)
            return decode_image(content, **how(header.height, header.width, header.channels, header.bits))
        except BadImage:
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(decode, indices))


def thumbnails(source: ImageDataset, indices: Sequence[int]) -> list[np.ndarray | None]:
    """Return thumbnails uint8 [H, W, 1 or 3] with the images' aspect ratios; None for unreadable ones."""

    def fitting(height: int, width: int, channels: int, bits: int) -> dict[str, Any]:
        scale = min(1.0, THUMBNAIL_PIXELS / max(height, width))
        size = max(1, round(height * scale)), max(1, round(width * scale))
        return {"size": size, "channels": channels, "bits": bits, "resize": "squash"}

    return [None if image is None else visible(image) for image in _decoded(source, indices, fitting)]


def tile(image_HWC: np.ndarray | None) -> JsonObject:
    """Return an image for a page: a data URI, and whether it is enlarged without interpolation."""
    if image_HWC is None:
        return {"image": "", "tiny": False}
    return {"image": thumbnail(image_HWC), "tiny": max(image_HWC.shape[:2]) < SMOOTH_FROM_PIXELS}


def stored_images(source: ImageDataset, indices: Sequence[int], recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored form of readable images, [M, H, W, C], as in a pack, and their indices."""
    bits = recipe.data.bits or bits_of(source)
    how = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize, "bits": bits}
    decoded = _decoded(source, indices, lambda *_: how)
    kept = [i for i, image in zip(indices, decoded, strict=True) if image is not None]
    images = [image for image in decoded if image is not None]
    empty = np.empty((0, *recipe.stored_sides, recipe.channels), np.uint8)
    return np.stack(images) if images else empty, np.array(kept, np.int64)


def augmented(source: ImageDataset, indices: np.ndarray, recipe: Recipe, epochs: Sequence[int]) -> np.ndarray:
    """Return augmented readable training images in V epochs, uint8 [M, V, H, W, 1 or 3]."""
    mean = torch.tensor(recipe.data.mean or [0.5] * recipe.channels)
    std = torch.tensor(recipe.data.std or [0.25] * recipe.channels)
    start, stop = source.splits["train"]
    images, _ = stored_images(source, indices.tolist(), recipe)

    def apply(images: np.ndarray, tables: dict[str, np.ndarray], positions: np.ndarray) -> torch.Tensor:
        rows = {name: torch.from_numpy(table[positions]) for name, table in tables.items()}
        batch = torch.from_numpy(np.ascontiguousarray(images))
        return augment.apply(batch, rows, 1 / (255 * std), -mean / std, recipe.image_sides)

    views = []
    for epoch in epochs:
        tables = augment.epoch_transforms(recipe, epoch, stop - start) or {}
        partners, mix = tables.pop("partner", None), tables.pop("mix", None)
        batch = apply(images, tables, indices - start)
        if partners is not None and mix is not None:
            chosen = partners[indices - start].astype(np.int64)
            others, kept = stored_images(source, (chosen + start).tolist(), recipe)
            if len(kept) == len(indices):
                batch = augment.mix(batch, apply(others, tables, chosen), torch.from_numpy(mix[indices - start]))
        views.append((batch.permute(0, 2, 3, 1) * std + mean).numpy())
    shown = np.stack(views, axis=1) * (1.0 if images.itemsize == 1 else 65535 / max(1, int(images.max(initial=0))))
    return visible((shown * 255).round().clip(0, 255).astype(np.uint8))


# --- the page ---------------------------------------------------------------------------------------------------------


Group = tuple[str, int, list[int]]  # images of a class, or of a range of numbers: name, number, and examples


class Look:
    """A data set looked at: notebooks show its page; `save(DIR)` it, or read `figures` and `remarks()`.

    Images are shown for a recipe; `reasons` explain a generated one.
    """

    def __init__(self, source: ImageDataset, headers: Headers, recipe: Recipe, reasons: Sequence[str] = ()) -> None:
        self.source, self.headers, self.recipe, self.reasons = source, headers, recipe, tuple(reasons)
        self._extreme = headers.extreme().tolist()
        self.title = source.describe()

    def __repr__(self) -> str:
        return f"<Look: {self.title}>"

    @cached_property
    def figures(self) -> JsonObject:
        """Counts, sizes and outliers as plain values, as in look.json."""
        source, found = self.source, dataset_figures(self.source, self.headers)
        return {
            **found,
            "shapes": dict(list(found["shapes"].items())[:SHAPES_SHOWN]),
            "unreadable": {name_of(source, i): reason for i, reason in self.headers.unreadable.items()},
            "extreme": [name_of(source, i) for i in self._extreme],
            "recipe": self.recipe.flat(),
        }

    def remarks(self) -> list[str]:
        """Return remarks for the user before training."""
        figures, source, remarks = self.figures, self.source, [*self.source.notes]
        counts = source.class_counts("train")
        few = [f"{name} ({n:,})" for name, n in counts.items() if n < FEW_IMAGES]
        if len(figures["images"]) == 1:
            remarks.append("There is one split: training takes validation and test images from it.")
        if few:
            names = ", ".join(few[:5]) + ", …" * (len(few) > 5)
            remarks.append(f"{counted(len(few), 'class')} with fewer than {FEW_IMAGES} training images: {names}.")
        ranked = sorted((n, name) for name, n in counts.items())
        if ranked and ranked[-1][0] >= 3 * max(1, ranked[0][0]):
            (least, smallest), (most, largest) = ranked[0], ranked[-1]
            remarks.append(f"Classes are unbalanced: {most:,} images of {largest}, {least:,} of {smallest}.")
        if unreadable := len(figures["unreadable"]):
            remarks.append(f"{counted(unreadable, 'image')} cannot be read.")
        if extreme := len(figures["extreme"]):
            shapes = f"a side {EXTREME:g} times the other, or {EXTREME:g} times as large or small as usual"
            remarks.append(f"{counted(extreme, 'image')} with {shapes}.")
        return remarks

    def groups(self) -> list[Group]:
        """Return the classes that are shown with pictures: all, or some from the largest to the smallest."""
        source, (start, stop) = self.source, self.source.splits["train"]
        labels = source.labels[start:stop]
        if source.task == "regression":
            parts = np.array_split(np.argsort(labels, kind="stable"), min(RANGES, len(labels)))
            named = [(f"{labels[part[0]]:.4g} to {labels[part[-1]]:.4g}", part) for part in parts]
            return [self._group(name, start + part, number) for number, (name, part) in enumerate(named)]
        counts = np.array(list(source.class_counts("train").values()))
        order = np.flatnonzero(counts)
        if len(order) > CLASSES_SHOWN:
            order = order[np.argsort(-counts[order], kind="stable")]
            order = order[np.linspace(0, len(order) - 1, CLASSES_SHOWN).round().astype(int)]
        rows = (np.flatnonzero(labels[:, k] > 0 if labels.ndim == 2 else labels == k) for k in order)
        return [self._group(source.classes[k], start + of, k) for k, of in zip(order.tolist(), rows, strict=True)]

    def _group(self, name: str, rows: np.ndarray, number: int) -> Group:
        chosen = rows[permutation(self.recipe.seed, Stream.PICTURES, number + 1, len(rows))[:IMAGES_OF_CLASS]]
        return name, len(rows), chosen.tolist()

    def _tile(self, index: int, image: np.ndarray | None, text: str = "", quiet: str = "") -> JsonObject:
        title = f"{name_of(self.source, index)}: {label_of(self.source, index)}"
        return {**tile(image), "title": title, "text": text, "quiet": quiet}

    def content(self) -> JsonObject:
        """Return everything that the page shows, by name."""
        figures, source, groups = self.figures, self.source, self.groups()
        # One image of each group first, so that the few that are shown differ.
        turns = (chosen[i] for i in range(IMAGES_OF_CLASS) for *_, chosen in groups if i < len(chosen))
        indices = list(dict.fromkeys(turns))
        small = dict(zip(indices, thumbnails(source, indices), strict=True))
        stored, kept = stored_images(source, indices[:TRIED], self.recipe)
        visible_MHWC = visible(pixels.centre(stored[:SEEN], *self.recipe.eval_sides))
        seen = [self._tile(i, image) for i, image in zip(kept, visible_MHWC, strict=False)]
        views = []
        if self.recipe.augment.is_random and len(kept):
            views = augmented(source, kept[:AUGMENTED], self.recipe, range(VIEWS))
        readable = self.headers.widths > 0
        widths, heights = (sides[readable].astype(float) for sides in (self.headers.widths, self.headers.heights))
        counts, total = figures["counts"], max(1, figures["images"]["train"])
        rows = [(name, *(of[name] for of in counts.values()), n / total) for name, n in counts["train"].items()]
        rows.sort(key=lambda row: -row[1])
        outliers = self._extreme[:OUTLIERS_SHOWN]
        return {
            **figures,
            "name": (source.path.name if source.path else "") or source.kind,
            "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
            "total": sum(figures["images"].values()),
            "facts": self._facts(),
            "remarks": self.remarks(),
            "groups": [(name, size, [self._tile(i, small[i]) for i in chosen]) for name, size, chosen in groups],
            "classes": len(source.classes),
            "columns": ["class", *figures["images"], "share of train"],
            "rows": rows[:ROWS_SHOWN],
            "all_rows": sorted(rows) if len(rows) > ROWS_SHOWN else [],
            "numbers": [(split, *map(plain, values)) for split, values in figures["numbers"].items()],
            "labels": _histogram(source.labels) if source.task == "regression" else [],
            "histograms": {
                "size: root of width × height, in pixels": _histogram(np.sqrt(widths * heights)),
                "width / height": _histogram(widths / heights),
            },
            "shapes": [(" × ".join(reversed(shape.split("x"))), n) for shape, n in figures["shapes"].items()],
            "limit": f"{EXTREME:g}",
            "outliers": [
                self._tile(i, image, name_of(source, i), f"{self.headers.widths[i]} × {self.headers.heights[i]}")
                for i, image in zip(outliers, thumbnails(source, outliers), strict=True)
            ],
            "unreadable_shown": list(figures["unreadable"].items())[:UNREADABLE_SHOWN],
            "seen": [(self._tile(i, small[i], label_of(source, i)), new) for i, new in zip(kept, seen, strict=False)],
            "views": [
                (before, [self._tile(i, view) for view in changed])
                for i, before, changed in zip(kept, seen, views, strict=False)
            ],
            "reasons": list(self.reasons),
            "job": self.recipe.job,
            "recipe": self.recipe.to_toml().strip().split("\n\n"),
        }

    def _facts(self) -> list[tuple[str, str]]:
        figures, source = self.figures, self.source
        facts = [(f"{split} images", f"{count:,}") for split, count in figures["images"].items()]
        facts.append(("task", source.task) if source.task == "regression" else ("classes", f"{len(source.classes):,}"))
        if figures["widths"]:
            median = f"{figures['widths']['median']} × {figures['heights']['median']}"
            facts.append(("median width × height", median))
        return [*facts, ("format", source.kind)]

    def save(self, out: str | Path) -> Path:
        """Write look.html and look.json into a new or empty folder, and return the page.

        Raises:
            InputError: the folder holds something, or cannot be written.
        """
        check_free(Path(out))
        folder = make_folder(Path(out))
        write_page(folder / PAGE, "look.html.j2", self.content())
        write_json(folder / FIGURES, self.figures)
        return folder / PAGE

    def _repr_html_(self) -> str:
        return framed(page("look.html.j2", self.content()))


def look_at(job: Any, data: Any, changes: Mapping[str, object], console: Console) -> Look:
    """Look at what `resolve` finds for a job, data and changes; only the data is downloaded."""
    reasons: list[str] = []
    accelerated = parse_devices("auto", "torch").is_accelerated
    recipe, found = resolve(
        job, data, changes, accelerated=accelerated, console=console, explain=reasons.append, fetch=False
    )
    source = found.read()
    headers = read_headers(source, console)
    console.finish()
    return Look(source, headers, with_task(recipe, source.task), reasons)


def look(data: Any = None, labels: Any = None, *, job: Any = None, quiet: bool = False, **changes: object) -> Look:
    """Look at a data set before training; in a notebook, the result shows itself.

    Args:
        data: see `fit`: a path, arrays with `labels`, pairs, or torch data sets.
        labels: the labels of `data`, if that is an array of images.
        job: a built-in job, a recipe file or a Recipe, for the model's inputs; by default one generated for the data.
        quiet: print nothing.
        **changes: recipe keys, see `fit`, such as `image_size=128` or `augment={"rotate": 20}`.

    Raises:
        InputError: the data or an argument is wrong; the message names it and the fix.
    """
    console = Console(None if quiet else sys.stdout)
    try:
        return look_at(job, join_data(data, labels, None), recipe_changes(changes), console)
    finally:
        console.close()


def format_look(look: Look) -> list[str]:
    """Return the main figures and the remarks as lines of text."""
    return [look.title, *format_sizes(look.figures), *look.remarks()]


def _histogram(values: np.ndarray) -> list[tuple[float, str]]:
    """Return height (0 to 1) and description of each bar; none if all values are equal."""
    if not len(values) or values.min() == values.max():
        return []
    # Long tails are shown on a logarithmic axis.
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, high, BINS + 1) if low > 0 and high > 4 * low else np.linspace(low, high, BINS + 1)
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(values, edges)
    names = [f"{plain(a)} to {plain(b)}: {n:,} images" for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    return list(zip((counts / counts.max()).tolist(), names, strict=True))
