"""`flatout check DATA --labels`: wrong labels, found by networks that were not trained on the images they judge.

The images are divided into folds. For each fold a network is trained briefly on the others; all trainings together take
about as long as one. Where the recipe starts from published weights, only the head is trained, on cached features.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.console import Console
from flatout.data.source import DataRef, Source
from flatout.errors import InputError
from flatout.explore.confident import Errors, find_errors, find_errors_of_several
from flatout.files import printable
from flatout.recipe import Recipe
from flatout.report import run_files
from flatout.train.request import Options, TrainRequest
from flatout.train.run import train

# Three trainings on two thirds of the images, each 0.6 times as long as one, take 1.2 times as long together.
FOLDS, SHARE_OF_EPOCHS = 3, 0.6


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelErrors:
    """Wrong labels of a data set.

    Attributes:
        source: the data, without unreadable images.
        errors: see `confident.Errors`; `index` counts the images of the source.
        probabilities: of networks that were not trained on the image, float32 [N, K].
        recipe: how these were trained.
    """

    source: Source
    errors: Errors
    probabilities: np.ndarray
    recipe: Recipe

    @property
    def agreement(self) -> float:
        """The share of labels that are the networks' answers too; of several labels, twice the common ones of both."""
        if self.source.task == "multi-label":
            given, answers = self.source.labels > 0, self.probabilities >= 0.5
            return float(2 * (given & answers).sum() / max(1, given.sum() + answers.sum()))
        return float((self.probabilities.argmax(axis=1) == self.source.labels).mean())


def short(recipe: Recipe) -> Recipe:
    """Return the recipe of the folds: as long together as about one training, and with frozen features if published."""
    folds = FOLDS if recipe.epochs > 1 else 2
    changes: dict[str, Any] = {
        "epochs": max(1, int(SHARE_OF_EPOCHS * recipe.epochs)),
        "data.folds": folds,
        "data.fold": 0,
        "keep": "last",
        "early_stopping": 0,
        "tta": False,
    }
    if recipe.pretrained:
        # Every image passes the network once; the heads are fitted to what it returns.
        changes |= {"freeze": "all-but-last-0", "linear_probe": recipe.task in ("auto", "single-label")}
        changes |= {f"augment.{key}": value for key, value in dataclasses.asdict(type(recipe.augment)()).items()}
    return recipe.override(changes)


def find_label_errors(recipe: Recipe, data: DataRef | Source, options: Options, console: Console) -> LabelErrors:
    """Train on folds of the data and return the labels that are likely wrong.

    Images of a test split are judged by the networks of all folds, which have not seen them.

    Args:
        recipe: of one whole training; `short` makes that of the folds.
        options: where and how to train; the run folders are temporary.

    Raises:
        InputError: the labels are numbers, or training is impossible with this data and recipe.
        TrainingFailed: training cannot continue.
    """
    source = data.read() if isinstance(data, DataRef) else data
    if source.task == "regression":
        raise InputError(f"{source.path or 'data'}: labels that are numbers have no classes to confuse; drop --labels")
    recipe = short(recipe)
    with tempfile.TemporaryDirectory(prefix="flatout-labels-") as folder:
        options = dataclasses.replace(options, out=Path(folder) / "folds", report=False)
        out = train(TrainRequest(recipe=recipe, data=data, options=options), console)
        with np.load(out / run_files.PREDICTIONS) as arrays:
            answers = dict(arrays)
        skipped = run_files.read_summary(out, {})["skipped_images"]
    if skipped and source.files is not None:
        names = {printable(file): i for i, file in enumerate(source.files)}
        source = source.without({names[name]: reason for name, reason in skipped.items()})
    probabilities = np.empty((len(source), answers["probabilities"].shape[1]), np.float32)
    probabilities[answers["row"]] = answers["probabilities"]
    if "test" in source.splits:
        start, stop = source.splits["test"]
        probabilities[start:stop] = answers["test_probabilities"]
    return LabelErrors(source=source, errors=judge(source, probabilities), probabilities=probabilities, recipe=recipe)


def judge(source: Source, probabilities: np.ndarray) -> Errors:
    """Return the wrong labels of a source, given probabilities float32 [N, K]."""
    # The answer for an image for which a network returned no number is left open.
    probabilities = np.nan_to_num(probabilities.astype(np.float64), nan=0.0)
    of_task = find_errors_of_several if source.task == "multi-label" else find_errors
    return of_task(probabilities, source.labels)
