"""What a run keeps of its answers: all of them, and the few images that the pictures of its report show."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.batches import Samples
from flatout.errors import first_line
from flatout.files import write_atomically
from flatout.numerics.random import Stream, permutation
from flatout.report import run_files

if TYPE_CHECKING:
    from flatout.engine.base import Evaluation
    from flatout.train.request import TrainRequest
    from flatout.train.run_log import RunLog

# The pictures of a report: a grid of 5x5 chosen at random, and as many of the most confident mistakes.
PICTURES = 25
# The mistakes with heatmaps.
EXPLAINED = 10
# By the brightness of so many images, two runs know that they were tested on the same ones.
COMPARED_IMAGES = 500


def write_predictions(
    request: "TrainRequest",
    log: "RunLog",
    split: str,
    result: "Evaluation",
    samples: Samples,
    classes: Sequence[str],
    **more: np.ndarray | None,
) -> None:
    """Keep all answers and the few images that the pictures show, so that a report needs no data; `more` is added.

    The arrays are those of `run_files.Predictions`. `request` has the run folder and the recipe of the run.
    """
    probabilities, labels, task = result.probabilities, result.labels, result.task
    assert probabilities is not None and request.run_dir is not None
    grid = np.sort(permutation(request.recipe.seed, Stream.PICTURES, 0, len(labels))[:PICTURES])
    mistakes = task.mistakes(result.predicted, labels, probabilities)[:PICTURES]
    worst = np.argsort(-task.losses_of(probabilities.astype(np.float64), labels), kind="stable")[:PICTURES]
    sample, positions = np.unique(np.concatenate([grid, mistakes, worst]), return_inverse=True)
    images = samples.images_at(sample)
    of_mistakes = images[positions[len(grid) : len(grid) + len(mistakes)]]
    arrays: dict[str, Any] = {
        "split": np.array(split),
        "classes": np.array(classes),
        "probabilities": probabilities.astype(np.float32),
        "labels": labels,
        "predicted": task.decided(result.predicted),
        "row": samples.rows,
        "brightness": _brightness(samples),
        "sample": sample,
        "images": images,
        "grid": positions[: len(grid)],
        "mistakes": positions[len(grid) : len(grid) + len(mistakes)],
        "heatmaps": _heatmaps(request, log, len(classes), of_mistakes, task.decided(result.predicted)[mistakes]),
        **more,
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array for name, array in arrays.items() if array is not None})
    write_atomically(request.run_dir / run_files.PREDICTIONS, buffer.getvalue())


def _heatmaps(
    request: "TrainRequest", log: "RunLog", classes: int, images: np.ndarray, answers: np.ndarray
) -> np.ndarray | None:
    """Return what speaks for the first wrong answers, uint8 [M, H, W]; None where the model does not show it."""
    from flatout.models.build import build_model, copied
    from flatout.models.weights import load_exactly, read_weights
    from flatout.run.explain import heatmaps_of

    assert request.run_dir is not None
    images, answers, weights = images[:EXPLAINED], answers[:EXPLAINED], request.run_dir / run_files.WEIGHTS
    # The folder of a cross-validation has no weights.
    if not len(images) or not weights.is_file():
        return None
    recipe, module = request.recipe, request.module
    try:
        module = None if module is None else copied(module)
        model = build_model(recipe, classes, module=module, allow_code=request.options.allow_code)
        load_exactly(model.eval(), read_weights(weights)[0], weights)
        is_class = answers.dtype.kind == "i" and answers.ndim == 1
        found = heatmaps_of(model, recipe, recipe.task, images, np.maximum(answers, 0) if is_class else None)
        return (255 * found).round().astype(np.uint8)
    except Exception as error:  # a model that is not ours may raise anything, and the run is worth more
        log.note(f"the report shows no heatmaps: {type(error).__name__}: {first_line(error)}")
        return None


def _brightness(samples: Samples) -> np.ndarray:
    """Return the mean value of images spread evenly over a split, float32 in 0..1: it hardly depends on their size."""
    positions = np.linspace(0, len(samples) - 1, min(len(samples), COMPARED_IMAGES)).astype(np.int64)
    means = [samples.images_at(some).mean() for some in positions[:, None]]
    return (np.array(means) / np.iinfo(samples.images.dtype).max).astype(np.float32)
