"""`flatout look`: a data set before training: images, counts, sizes, outliers, and model inputs."""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.analysis import images as pictures
from flatout.analysis.check import FEW_IMAGES
from flatout.analysis.images import EXTREME, Headers, format_sizes, label_of, name_of, read_headers, thumbnails, tile
from flatout.analysis.output import check_free, make_folder
from flatout.config import Recipe
from flatout.data.batches import Split, measure
from flatout.data.source import DataSource, ImageDataset, describe
from flatout.engine import pixels
from flatout.engine.devices import parse_devices
from flatout.report.html import framed, page, write_page
from flatout.tasks import with_task
from flatout.train.fit import join_data, recipe_changes
from flatout.train.recipes import resolve
from flatout.utils.console import Console
from flatout.utils.random import Stream, permutation
from flatout.utils.run_files import visible, write_json

PAGE, FIGURES = "look.html", "look.json"
# Classes with pictures, and images of each; classes in the table that is always open.
CLASSES_SHOWN, IMAGES_OF_CLASS, ROWS_SHOWN = 20, 8, 20
# Regression labels are shown in this many quantiles.
RANGES = 5
OUTLIERS_SHOWN, UNREADABLE_SHOWN, SHAPES_SHOWN = 24, 100, 8
# Images as the model sees them, augmented images, and views of each; images decoded to find readable ones.
SEEN, AUGMENTED, VIEWS, TRIED = 8, 6, 8, 32
BINS = 24


class Group(NamedTuple):
    """Images of a class, or of a range of numbers; `chosen` are examples."""

    name: str
    size: int
    chosen: list[int]


class Look:
    """A data set looked at: notebooks show its page; `save(DIR)` it, or read `figures` and `remarks()`.

    Images are shown for a recipe; `reasons` explain a generated one.
    """

    def __init__(self, source: ImageDataset, headers: Headers, recipe: Recipe, reasons: Sequence[str] = ()) -> None:
        self.source, self.headers, self.recipe, self.reasons = source, headers, recipe, tuple(reasons)
        self._extreme = headers.extreme().tolist()
        self.title = describe(source.kind, source.classes, source.splits, source.task)

    def __repr__(self) -> str:
        return f"<Look: {self.title}>"

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Counts, sizes and outliers as plain values, as in look.json."""
        source, found = self.source, pictures.figures(self.source, self.headers)
        return {
            **found,
            "shapes": dict(list(found["shapes"].items())[:SHAPES_SHOWN]),
            "unreadable": {name_of(source, i): reason for i, reason in self.headers.unreadable.items()},
            "extreme": [name_of(source, i) for i in self._extreme],
            "recipe": self.recipe.flat(),
        }

    def remarks(self) -> list[str]:
        """Return remarks for the user before training."""
        figures, source = self.figures, self.source
        counts = source.class_counts("train")
        few = [f"{name} ({n:,})" for name, n in counts.items() if n < FEW_IMAGES]
        remarks = [*source.notes]
        if len(figures["images"]) == 1:
            remarks.append("There is one split: training takes validation and test images from it.")
        if few:
            names = ", ".join(few[:5]) + ", …" * (len(few) > 5)
            remarks.append(f"{len(few):,} classes have fewer than {FEW_IMAGES} training images: {names}.")
        ranked = sorted((n, name) for name, n in counts.items())
        if ranked and ranked[-1][0] >= 3 * max(1, ranked[0][0]):
            (least, smallest), (most, largest) = ranked[0], ranked[-1]
            remarks.append(f"Classes are unbalanced: {most:,} images of {largest}, {least:,} of {smallest}.")
        if unreadable := len(figures["unreadable"]):
            remarks.append(f"{unreadable:,} images cannot be read.")
        if extreme := len(figures["extreme"]):
            times = f"{EXTREME:g} times"
            remarks.append(
                f"{extreme:,} images have a side {times} the other, or are {times} as large or small as usual."
            )
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
        return Group(name, len(rows), chosen.tolist())

    def _tile(self, index: int, image: np.ndarray | None, text: str = "", quiet: str = "") -> dict[str, Any]:
        title = f"{name_of(self.source, index)}: {label_of(self.source, index)}"
        return {**tile(image), "title": title, "text": text, "quiet": quiet}

    def content(self) -> dict[str, Any]:
        """Return everything that the page shows, by name."""
        figures, source, groups = self.figures, self.source, self.groups()
        # One image of each group first, so that the few that are shown differ.
        turns = (group.chosen[i] for i in range(IMAGES_OF_CLASS) for group in groups if i < len(group.chosen))
        indices = list(dict.fromkeys(turns))
        small = dict(zip(indices, thumbnails(source, indices), strict=True))
        stored, kept = pictures.stored(source, indices[:TRIED], self.recipe)
        visible_MHWC = visible(pixels.centre(stored[:SEEN], *self.recipe.eval_sides))
        seen = [self._tile(i, image) for i, image in zip(kept.tolist(), visible_MHWC, strict=False)]
        views = []
        if self.recipe.augment.is_random and len(kept):
            recipe = _with_statistics(self.recipe, stored)
            views = pictures.augmented(source, kept[:AUGMENTED], recipe, range(VIEWS))
        readable = self.headers.widths > 0
        widths, heights = (sides[readable].astype(float) for sides in (self.headers.widths, self.headers.heights))
        rows = _class_rows(figures)
        outliers = self._extreme[:OUTLIERS_SHOWN]
        return {
            "name": (source.path.name if source.path else "") or source.kind,
            "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
            "total": sum(figures["images"].values()),
            "facts": _facts(figures, source),
            "remarks": self.remarks(),
            "task": source.task,
            "groups": [(name, size, [self._tile(i, small[i]) for i in chosen]) for name, size, chosen in groups],
            "classes": len(source.classes),
            "columns": ["class", *figures["images"], "share of train"],
            "rows": rows[:ROWS_SHOWN],
            "all_rows": sorted(rows) if len(rows) > ROWS_SHOWN else [],
            "numbers": [(split, *map(_number, values)) for split, values in figures["numbers"].items()],
            "labels": _histogram(source.labels) if source.task == "regression" else [],
            "histograms": {
                "size: root of width × height, in pixels": _histogram(np.sqrt(widths * heights)),
                "width / height": _histogram(widths / heights),
            },
            "shapes": [(" × ".join(reversed(shape.split("x"))), n) for shape, n in figures["shapes"].items()],
            "modes": list(figures["modes"].items()),
            "limit": f"{EXTREME:g}",
            "outliers": [
                self._tile(i, image, name_of(source, i), f"{self.headers.widths[i]} × {self.headers.heights[i]}")
                for i, image in zip(outliers, thumbnails(source, outliers), strict=True)
            ],
            "outlier_count": len(self._extreme),
            "unreadable": list(figures["unreadable"].items())[:UNREADABLE_SHOWN],
            "unreadable_count": len(figures["unreadable"]),
            "seen": [
                (self._tile(i, small[i], label_of(source, i)), after)
                for i, after in zip(kept.tolist(), seen, strict=False)
            ],
            "views": [
                (before, [self._tile(i, view) for view in changed])
                for i, before, changed in zip(kept.tolist(), seen, views, strict=False)
            ],
            "reasons": list(self.reasons),
            "job": self.recipe.job,
            "recipe": self.recipe.to_toml().strip().split("\n\n"),
        }

    def save(self, out: str | Path) -> Path:
        """Write look.html and look.json into a new or empty folder, and return the page.

        Raises:
            InputError: the folder holds something, or cannot be written.
        """
        check_free(Path(out))
        folder = make_folder(Path(out), "look")
        write_page(folder / PAGE, "look.html.j2", self.content())
        write_json(folder / FIGURES, self.figures)
        return folder / PAGE

    def _repr_html_(self) -> str:
        return framed(page("look.html.j2", self.content()))


def look_at(job: Any, data: Any, changes: Mapping[str, Any], console: Console) -> Look:
    """Look at what `resolve` finds for a job, data and changes; only the data is downloaded.

    Raises:
        InputError: see `resolve`.
    """
    reasons: list[str] = []
    recipe, found = resolve(
        job,
        data,
        changes,
        accelerated=parse_devices("auto", "torch").is_accelerated,
        console=console,
        explain=reasons.append,
        fetch=False,
    )
    source = found.read() if isinstance(found, DataSource) else found
    headers = read_headers(source, console)
    console.finish()
    return Look(source, headers, with_task(recipe, source.task), reasons)


def look(data: Any = None, labels: Any = None, *, job: Any = None, quiet: bool = False, **changes: Any) -> Look:
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


def _with_statistics(recipe: Recipe, images_MHWC: np.ndarray) -> Recipe:
    if recipe.data.mean:
        return recipe
    count = len(images_MHWC)
    mean, std = measure(Split(images=images_MHWC, rows=np.arange(count), labels=np.zeros(count, np.int64)))
    return recipe.override({"data.mean": mean, "data.std": std})


def _facts(figures: Mapping[str, Any], source: ImageDataset) -> list[tuple[str, str]]:
    facts = [(f"{split} images", f"{count:,}") for split, count in figures["images"].items()]
    facts.append(("task", source.task) if source.task == "regression" else ("classes", f"{len(source.classes):,}"))
    if (widths := figures["widths"]) and (heights := figures["heights"]):
        facts.append(("median width × height", f"{widths['median']} × {heights['median']}"))
    return [*facts, ("format", source.kind)]


def _class_rows(figures: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    counts = figures["counts"]
    total = max(1, figures["images"]["train"])
    rows = [(name, *(of[name] for of in counts.values()), n / total) for name, n in counts["train"].items()]
    return sorted(rows, key=lambda row: -row[1])


def _histogram(values: np.ndarray) -> list[tuple[float, str]]:
    """Return height (0 to 1) and description of each bar; none if all values are equal."""
    if not len(values) or values.min() == values.max():
        return []
    # Long tails are shown on a logarithmic axis.
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, high, BINS + 1) if low > 0 and high > 4 * low else np.linspace(low, high, BINS + 1)
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(values, edges)
    names = [f"{_number(a)} to {_number(b)}: {n:,} images" for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    return list(zip((counts / counts.max()).tolist(), names, strict=True))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
