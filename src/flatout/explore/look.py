"""`flatout look`: a data set before training: its images, counts, sizes, outliers, and what a model sees of them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flatout.console import Console, in_notebook
from flatout.data.check import FEW_IMAGES, label_of, name_of, numbers_of, sizes_of
from flatout.data.source import DataRef, Source, describe
from flatout.data.survey import EXTREME, Survey, survey
from flatout.explore import images as pictures
from flatout.numerics.random import Stream, permutation
from flatout.recipe import Recipe
from flatout.report.html import SMOOTH_FROM_PIXELS, framed, page, thumbnail, write_page
from flatout.report.run_files import write_json
from flatout.settings import in_python
from flatout.tasks import with_task
from flatout.train.fit_arguments import join_data, recipe_changes
from flatout.train.recipes import resolve

PAGE, PICTURE, FIGURES = "look.html", "look.png", "look.json"
# Classes with pictures, and images of each; classes in the table that is always open.
CLASSES_SHOWN, IMAGES_OF_CLASS, ROWS_SHOWN = 20, 8, 20
# Numbers are shown in so many ranges of equally many images.
RANGES = 5
OUTLIERS_SHOWN, UNREADABLE_SHOWN, SHAPES_SHOWN = 24, 100, 8
SEEN, AUGMENTED, VIEWS = 8, 6, 8
BINS = 24


@dataclass(frozen=True, kw_only=True)
class Group:
    """Images that are shown together: those of a class, or of a range of numbers; `chosen` are some of them."""

    name: str
    count: int
    chosen: tuple[int, ...]


class Look:
    """A data set looked at: `show()` it in a notebook, `save(DIR)` it, or read `figures` and `survey`.

    Attributes:
        source: the data.
        survey: what the headers of all images say.
        recipe: the one that the images are shown for.
        reasons: why a generated recipe is as it is; empty for one that the user named.
    """

    def __init__(self, source: Source, found: Survey, recipe: Recipe, reasons: Sequence[str] = ()) -> None:
        self.source, self.survey, self.recipe, self.reasons = source, found, recipe, tuple(reasons)
        self.made = datetime.now().astimezone()

    def __repr__(self) -> str:
        return f"<Look: {describe(self.source.kind, self.source.classes, self.source.splits, self.source.task)}>"

    def name(self, index: int) -> str:
        """Return the name of an image: its file, or split[position] in an array."""
        return name_of(self.source, index, self.source.split_of(index))

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Counts, sizes and outliers as plain values, as in look.json."""
        source, found = self.source, self.survey
        readable = found.widths > 0
        sides = {"widths": found.widths[readable], "heights": found.heights[readable]}
        shapes, counts = np.unique(
            np.stack([found.heights, found.widths], axis=1)[readable], axis=0, return_counts=True
        )
        order = np.argsort(-counts, kind="stable")[:SHAPES_SHOWN]
        return {
            "kind": source.kind,
            "path": None if source.path is None else str(source.path),
            "task": source.task,
            "images": {split: stop - start for split, (start, stop) in source.splits.items()},
            "numbers": numbers_of(source) if source.task == "regression" else {},
            "counts": {split: source.class_counts(split) for split in source.splits},
            **{name: asdict(sizes) if (sizes := sizes_of(values)) else None for name, values in sides.items()},
            "shapes": {f"{shapes[i][0]}x{shapes[i][1]}": int(counts[i]) for i in order},
            "modes": found.modes,
            "unreadable": {self.name(i): reason for i, reason in found.unreadable.items()},
            "extreme": [self.name(i) for i in found.extreme.tolist()],
            "blank": [self.name(i) for i in found.blank.tolist()],
            "recipe": self.recipe.flat(),
            "notes": list(source.notes),
        }

    def remarks(self) -> list[str]:
        """Return sentences about what a reader should know before training."""
        figures, source = self.figures, self.source
        counts = source.class_counts("train")
        few = {name: n for name, n in counts.items() if n < FEW_IMAGES}
        remarks = [*source.notes]
        if len(figures["images"]) == 1:
            remarks.append("There is one split: training takes validation and test images from it.")
        if few:
            names = ", ".join(f"{name} ({n:,})" for name, n in list(few.items())[:5]) + ", …" * (len(few) > 5)
            remarks.append(f"{len(few):,} classes have fewer than {FEW_IMAGES} training images: {names}.")
        if counts and max(counts.values()) >= 3 * max(1, min(counts.values())):
            most, least = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
            remarks.append(f"Classes are unbalanced: {counts[most]:,} images of {most}, {counts[least]:,} of {least}.")
        for key, text in (("unreadable", "cannot be read"), ("blank", "show nothing")):
            if count := len(figures[key]):
                remarks.append(f"{count:,} images {text}.")
        if count := len(figures["extreme"]):
            remarks.append(
                f"{count:,} images have a side {EXTREME:g} times the other, or are {EXTREME:g} times as large or small "
                "as usual."
            )
        return remarks

    def lines(self) -> list[str]:
        """Return the main figures as lines of text."""
        source, figures = self.source, self.figures
        lines = [describe(source.kind, source.classes, source.splits, source.task)]
        for name, spread in (("width: ", figures["widths"]), ("height:", figures["heights"])):
            if spread:
                lines.append(f"{name} {spread['smallest']} to {spread['largest']} pixels, median {spread['median']}")
        return [*lines, *self.remarks()]

    def groups(self) -> list[Group]:
        """Return the classes that are shown with pictures: all, or some from the largest to the smallest."""
        source, (start, stop) = self.source, self.source.splits["train"]
        labels = source.labels[start:stop]
        if source.task == "regression":
            parts = np.array_split(np.argsort(labels, kind="stable"), min(RANGES, len(labels)))
            named = [(f"{labels[part[0]]:.4g} to {labels[part[-1]]:.4g}", part) for part in parts]
            return [self._group(name, start + part, number) for number, (name, part) in enumerate(named)]
        counts = np.array(list(source.class_counts("train").values()))
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        if len(order) > CLASSES_SHOWN:
            order = order[np.linspace(0, len(order) - 1, CLASSES_SHOWN).round().astype(int)]
        else:
            order = np.sort(order)
        found = []
        for k in order.tolist():
            rows = np.flatnonzero(labels[:, k] > 0 if labels.ndim == 2 else labels == k)
            found.append(self._group(source.classes[k], start + rows, k))
        return found

    def _group(self, name: str, rows: np.ndarray, number: int) -> Group:
        chosen = rows[permutation(self.recipe.seed, Stream.PICTURES, number + 1, len(rows))[:IMAGES_OF_CLASS]]
        return Group(name=name, count=len(rows), chosen=tuple(chosen.tolist()))

    @cached_property
    def shown(self) -> dict[str, Any]:
        """The images of the page and the picture: of groups, as the model sees them, and augmented."""
        groups = self.groups()
        every = [index for group in groups for index in group.chosen]
        thumbs = dict(zip(every, pictures.thumbnails(self.source, every), strict=True))
        # One of each group first, so that the few that are shown differ.
        turns = [group.chosen[i] for i in range(IMAGES_OF_CLASS) for group in groups if i < len(group.chosen)]
        some = list(dict.fromkeys(turns))[: 4 * SEEN]
        stored, kept = pictures.stored(self.source, some, self.recipe)
        recipe = pictures.with_statistics(self.recipe, stored)
        seen = pictures.as_evaluated(stored[:SEEN], recipe)
        views = np.empty((0, 0, 1, 1, 1), np.uint8)
        if recipe.augment.is_random and len(kept):
            views = pictures.augmented(self.source, kept[:AUGMENTED], recipe, range(VIEWS))
        return {"groups": groups, "thumbs": thumbs, "kept": kept, "seen": seen, "views": views}

    def _tile(self, index: int, image: np.ndarray | None, text: str = "", quiet: str = "") -> dict[str, Any]:
        return {
            "image": "" if image is None else thumbnail(image),
            "tiny": image is not None and max(image.shape[:2]) < SMOOTH_FROM_PIXELS,
            "title": f"{self.name(index)}: {label_of(self.source, index)}",
            "text": text,
            "quiet": quiet,
        }

    def content(self) -> dict[str, Any]:
        """Return everything that the page shows, by name."""
        figures, found, shown = self.figures, self.survey, self.shown
        thumbs, kept = shown["thumbs"], shown["kept"].tolist()
        outliers = {"extreme": found.extreme.tolist(), "blank": found.blank.tolist()}
        readable = found.widths > 0
        sizes = np.sqrt(found.widths[readable].astype(float) * found.heights[readable])
        rows = _class_rows(figures)
        return {
            "name": (self.source.path.name if self.source.path else "") or self.source.kind,
            "date": f"{self.made:%Y-%m-%d %H:%M}",
            "total": sum(figures["images"].values()),
            "facts": _facts(figures, self.source),
            "remarks": self.remarks(),
            "task": self.source.task,
            "groups": [
                (group.name, group.count, [self._tile(i, thumbs[i]) for i in group.chosen]) for group in shown["groups"]
            ],
            "classes": len(self.source.classes),
            "columns": ["class", *figures["images"], "share of train"],
            "rows": rows[:ROWS_SHOWN],
            "all_rows": sorted(rows) if len(rows) > ROWS_SHOWN else [],
            "numbers": [(split, *map(_number, values)) for split, values in figures["numbers"].items()],
            "labels": _histogram(self.source.labels) if self.source.task == "regression" else [],
            "histograms": {
                "size: root of width × height, in pixels": _histogram(sizes),
                "width / height": _histogram(found.widths[readable] / found.heights[readable]),
            },
            "shapes": [(" × ".join(reversed(shape.split("x"))), n) for shape, n in figures["shapes"].items()],
            "modes": list(found.modes.items()),
            "limit": f"{EXTREME:g}",
            "outliers": {key: self._outliers(indices) for key, indices in outliers.items()},
            "outlier_counts": {key: len(indices) for key, indices in outliers.items()},
            "unreadable": list(figures["unreadable"].items())[:UNREADABLE_SHOWN],
            "unreadable_count": len(figures["unreadable"]),
            "seen": [
                (self._tile(i, thumbs[i], label_of(self.source, i)), self._tile(i, image))
                for i, image in zip(kept, shown["seen"], strict=False)
            ],
            "views": [
                (self._tile(i, shown["seen"][n]), [self._tile(i, view) for view in views])
                for n, (i, views) in enumerate(zip(kept, shown["views"], strict=False))
            ],
            "reasons": list(self.reasons),
            "job": self.recipe.job,
            "recipe": self.recipe.to_toml().strip().split("\n\n"),
        }

    def _outliers(self, indices: list[int]) -> list[dict[str, Any]]:
        shown, found = indices[:OUTLIERS_SHOWN], self.survey
        images = pictures.thumbnails(self.source, shown)
        sizes = [f"{found.widths[i]} × {found.heights[i]}" for i in shown]
        return [self._tile(i, image, self.name(i), size) for i, image, size in zip(shown, images, sizes, strict=True)]

    def save(self, out: str | Path) -> Path:
        """Write look.html, look.png and look.json into a new or empty folder, and return the page.

        Raises:
            InputError: the folder holds something, or cannot be written.
        """
        from flatout.explore.picture import draw
        from flatout.scale.scale import check_free, make_folder

        check_free(Path(out))
        folder = make_folder(Path(out), "look")
        write_page(folder / PAGE, "look.html.j2", self.content())
        draw(folder / PICTURE, self)
        write_json(folder / FIGURES, self.figures)
        return folder / PAGE

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return framed(page("look.html.j2", self.content()))

    def show(self) -> Any:
        """Show the page: in a notebook in the cell, else the main figures are printed."""
        if not in_notebook():
            return print("\n".join(self.lines()))
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        return display(HTML(self._repr_html_()))


def look_at(job: Any, data: Any, changes: Mapping[str, Any], console: Console) -> Look:
    """Return the look at what `resolve` finds for a job, data and changes; nothing is downloaded but the data.

    Raises:
        InputError: as `resolve`.
    """
    from flatout.engine.devices import parse_devices

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
    source = found.read() if isinstance(found, DataRef) else found
    looked = survey(source, console)
    console.finish()
    return Look(source, looked, with_task(recipe, source.task), reasons)


@in_python
def look(data: Any = None, labels: Any = None, *, job: Any = None, quiet: bool = False, **changes: Any) -> Look:
    """Look at a data set before training; in a notebook, the result shows itself.

    Args:
        data: as for `fit`: a path, arrays with `labels`, pairs, or torch data sets.
        labels: the labels of `data`, if that is an array of images.
        job: a built-in job, a recipe file or a Recipe, for what the model will see; by default one made for the data.
        quiet: print nothing.
        **changes: recipe keys as for `fit`, such as `image_size=128` or `augment={"rotate": 20}`.

    Raises:
        InputError: the data or an argument is wrong; the message names it and the fix.
    """
    console = Console(None if quiet else sys.stdout)
    try:
        return look_at(job, join_data(data, labels, None), recipe_changes(changes), console)
    finally:
        console.close()


def _facts(figures: Mapping[str, Any], source: Source) -> list[tuple[str, str]]:
    facts = [(f"{split} images", f"{count:,}") for split, count in figures["images"].items()]
    facts.append(("task", source.task) if source.task == "regression" else ("classes", f"{len(source.classes):,}"))
    if (widths := figures["widths"]) and (heights := figures["heights"]):
        facts.append(("median width × height", f"{widths['median']} × {heights['median']}"))
    return [*facts, ("format", source.kind)]


def _class_rows(figures: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return a row for each class: its name, its images in each split, and its share; the largest first."""
    counts = figures["counts"]
    total = max(1, figures["images"]["train"])
    names = list(counts["train"])
    rows = [(name, *(of[name] for of in counts.values()), counts["train"][name] / total) for name in names]
    return sorted(rows, key=lambda row: -row[1])


def _histogram(values: np.ndarray) -> list[tuple[float, str]]:
    """Return height (0 to 1) and description of each bar; none where all values are equal."""
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
