"""Stored predictions and images of a run (`predictions.npz`, `splits.csv`), and their display in notebooks."""

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.batches import Split
from flatout.data.detect import find
from flatout.data.source import DataSource
from flatout.inference.predict import heatmaps_of
from flatout.models.build import build_model
from flatout.models.weights import load_exactly, read_weights
from flatout.report.page import data_uri, thumbnail
from flatout.utils import run_files
from flatout.utils.errors import InputError, first_line
from flatout.utils.files import printable, write_atomically
from flatout.utils.random import Stream, permutation

if TYPE_CHECKING:
    from torch import nn

    from flatout.config import Recipe
    from flatout.data.pack import Pack
    from flatout.engine.base import Evaluation
    from flatout.tasks import Task

# The pictures of a report: a grid of 5x5 chosen at random, and as many of the most confident mistakes.
PICTURES = 25
# The mistakes with heatmaps.
EXPLAINED = 10
# Images whose brightness shows that two runs were tested on the same images.
COMPARED_IMAGES = 500
_SHOWN_PIXELS = 112


def write_predictions(
    folder: Path,
    recipe: "Recipe",
    split: str,
    result: "Evaluation",
    samples: Split,
    classes: Sequence[str],
    *,
    note: Callable[[str], object],
    files: Sequence[str] | None,
    module: "nn.Module | None" = None,
    allow_code: bool = False,
    more: Mapping[str, np.ndarray | None],
) -> None:
    """Store all predictions and the few images of the pictures, so that a report needs no data.

    The folder has the weights already. `note` receives the reason why the report has no heatmaps; `files` are the names
    of all images of the pack, if they are files. docs/trust.md lists the arrays, which `more` completes.
    """
    probabilities, labels, task = result.probabilities, result.labels, result.task
    assert probabilities is not None
    grid = np.sort(permutation(recipe.seed, Stream.PICTURES, 0, len(labels))[:PICTURES])
    mistakes = task.mistakes(result.predicted, labels, probabilities)[:PICTURES]
    losses = np.nan_to_num(task.losses_of(probabilities.astype(np.float64), labels), nan=np.inf)
    worst = np.argsort(-losses, kind="stable")[:PICTURES]
    sample, positions = np.unique(np.concatenate([grid, mistakes, worst]), return_inverse=True)
    images = samples.images_at(sample)
    predicted = task.decided(result.predicted)
    arrays: dict[str, Any] = {
        "split": np.array(split),
        "classes": np.array(classes),
        "probabilities": probabilities.astype(np.float32),
        "labels": labels,
        "predicted": predicted,
        "row": samples.rows,
        "name": None if files is None else np.array([files[row] for row in samples.rows.tolist()]),
        "brightness": _brightness(samples),
        "sample": sample,
        "images": images,
        "grid": positions[: len(grid)],
        "mistakes": positions[len(grid) : len(grid) + len(mistakes)],
        **more,
    }
    weights = folder / run_files.WEIGHTS
    # The folder of a cross-validation has no weights.
    if len(mistakes) and weights.is_file():
        shown = images[arrays["mistakes"][:EXPLAINED]]
        # What speaks for the wrong class, or for the first one if the answer was not a number.
        answers = np.maximum(predicted[mistakes[:EXPLAINED]], 0) if task.name == "single-label" else None
        try:
            model = build_model(recipe, len(classes), module=module, allow_code=allow_code).eval()
            load_exactly(model, read_weights(weights)[0], weights)
            maps = heatmaps_of(model, recipe, shown, answers)
            arrays["heatmaps"] = (255 * maps).round().astype(np.uint8)
        except Exception as error:  # a user's model may raise anything, which must not fail the run
            note(f"the report shows no heatmaps: {type(error).__name__}: {first_line(error)}")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array for name, array in arrays.items() if array is not None})
    write_atomically(folder / run_files.PREDICTIONS, buffer.getvalue())


def _brightness(samples: Split) -> np.ndarray:
    """Return the mean value of evenly spaced images, float32 in 0..1, which hardly depends on their size."""
    positions = np.linspace(0, len(samples) - 1, min(len(samples), COMPARED_IMAGES)).astype(np.int64)
    means = [samples.images_at(some).mean() for some in positions[:, None]]
    return (np.array(means) / np.iinfo(samples.images.dtype).max).astype(np.float32)


def file_names(recipe: "Recipe", pack: "Pack") -> list[str] | None:
    """Return the names of all images of a pack, below the folder of the data; None if they are not unchanged files."""
    path = recipe.data.path
    if not pack.is_decoded or not path or "://" in path:
        return None
    try:
        source = find(path, recipe.data, recipe.task)
        if isinstance(source, DataSource) and source.inputs:  # a container, which takes long to read
            return None
        found = source.read()
    except (InputError, OSError):
        return None
    if found.files is None or found.path is None:
        return None
    kept = np.flatnonzero(~np.isin(np.arange(len(found.files)), list(pack.skipped_rows)))
    if not np.array_equal(found.labels[kept], pack.labels):
        return None
    folder = f"{found.path if found.path.is_dir() else found.path.parent}{os.sep}"
    return [printable(found.files[row]).removeprefix(folder) for row in kept.tolist()]


def write_splits(
    folder: Path, splits: Mapping[str, Split], files: Sequence[str], task: "Task", classes: Sequence[str]
) -> None:
    """Write `splits.csv`: the split, the file and the label of each image."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["split", "file", "label"])
    for name, samples in splits.items():
        for row, label in zip(samples.rows.tolist(), samples.labels, strict=True):
            table.writerow([name, files[row], task.text(label, classes)])
    write_atomically(folder / run_files.SPLITS, text.getvalue().encode())


# --- in notebooks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPrediction:
    """A run's prediction for one of its test (else validation) images, with label and prediction in words.

    `image` is uint8 [H, W, 1 or 3], and None beyond the worst ones, which the run keeps. `file` is None for images that
    are not files, and in runs of earlier versions.
    """

    index: int
    actual: str
    predicted: str
    loss: float
    probability: float | None
    image: np.ndarray | None
    file: str | None = None

    def __repr__(self) -> str:
        sure = "" if self.probability is None else f" {self.probability:.3f}"
        name = self.file or self.index
        return f"{name}: {self.predicted}{sure}, actually {self.actual}, loss {self.loss:.3f}"

    def _repr_html_(self) -> str:
        style = f"width:{_SHOWN_PIXELS}px;image-rendering:pixelated"
        shown = "" if self.image is None else f'<img src="{thumbnail(self.image)}" style="{style}">'
        words = escape(f"{self.predicted} / actually {self.actual}")
        title = f' title="{escape(self.file)}"' if self.file else ""
        figure = f'<figure style="display:inline-block;margin:4px"{title}>'
        return f"{figure}{shown}<figcaption>{words}</figcaption></figure>"


class StoredPredictions(list[StoredPrediction]):
    """A list that a notebook shows as pictures."""

    def _repr_html_(self) -> str:
        return "".join(answer._repr_html_() for answer in self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion:
    """A confusion matrix: `counts` int64 [K, K], a row for each actual class, a column for each predicted one."""

    counts: np.ndarray
    classes: tuple[str, ...]
    picture: Path | None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.counts, dtype=dtype)

    def _repr_html_(self) -> str:
        if self.picture is None:
            return f"<pre>{escape(repr(self))}</pre>"
        return f'<img style="max-width:100%" src="{data_uri("image/png", self.picture.read_bytes())}">'
