"""Finished runs as objects: a run folder, a cross-validation.

Shape letters: N images, H height, W width, C channels, K classes.
"""

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flatout.config import Data, Recipe, load_recipe, of_run
from flatout.engine import pixels
from flatout.engine.augment import tta_views
from flatout.inference.calibration import Calibration
from flatout.inference.evaluate import evaluate
from flatout.inference.hub import SCHEME, download_run
from flatout.inference.predict import Outputs, Prediction, normalised, predict
from flatout.inference.predictions import Confusion, StoredPrediction, StoredPredictions
from flatout.models.build import build_model
from flatout.models.features import WORTHWHILE_PIXELS, FrozenClassifier, caught
from flatout.models.keras import KerasModule, is_keras
from flatout.models.weights import load_exactly, read_weights
from flatout.report.page import data_uri, framed
from flatout.tasks import SingleLabel, Task, confusion, task_of
from flatout.utils import run_files
from flatout.utils.console import Console, in_notebook
from flatout.utils.errors import InputError
from flatout.utils.run_files import JsonObject, Predictions

if TYPE_CHECKING:
    from flatout.inference.export import Exported


class Run:
    """A finished or interrupted run.

    Args:
        path: the run folder.
        model: needed only if the run trained a module or Keras model given in Python: one of the same architecture,
            which gets the weights when `.model` is first used.
        allow_code: whether a model named as `package.module:factory` may be imported.
    """

    def __init__(self, path: str | Path, *, model: Any = None, allow_code: bool = False) -> None:
        self.path = Path(path)
        self._given, self._allow_code = model, allow_code
        self._classified, self._frozen = 0, None
        if not (self.path / run_files.RECIPE).is_file():
            wrong = f"not a run folder: {run_files.RECIPE} is missing; give the folder that `flatout train` wrote"
            raise InputError(f"{self.path}: {wrong}")
        if not (self.path / run_files.WEIGHTS).is_file():
            raise InputError(f"{self.path}: has not finished; flatout train --resume --out {self.path} continues it")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_frozen": None}  # a network of OpenVINO cannot be sent to the processes of devices

    @property
    def members(self) -> "tuple[Run, ...]":
        """The runs whose predictions are averaged: this one."""
        return (self,)

    def __repr__(self) -> str:
        name = self.task.metric_names[0]
        summary = run_files.read_summary(self.path, {})  # a run that was killed while it was written has none
        values = (summary.get(f"{split}_{name}") for split in ("test", "valid"))
        shown = next((f"{value:.4f}" for value in values if value is not None), None)
        return f"Run({str(self.path)!r}, model={self.recipe.model!r}, {name}={shown})"

    @cached_property
    def recipe(self) -> Recipe:
        """The complete recipe."""
        return of_run(load_recipe(self.path / run_files.RECIPE))

    @cached_property
    def summary(self) -> JsonObject:
        """The content of summary.json."""
        missing: dict[str, str] = {}
        summary = run_files.read_summary(self.path, missing)
        if missing:
            raise InputError(f"{self.path}: {missing[run_files.SUMMARY]}")
        return summary

    @cached_property
    def epochs(self) -> list[JsonObject]:
        """The lines of metrics.jsonl, one per epoch."""
        return run_files.read_metrics(self.path, {})

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the outputs."""
        return tuple(json.loads(self._weights[1]["classes"]))

    @cached_property
    def task(self) -> Task:
        """The task, with the thresholds and the temperature of the run."""
        thresholds = tuple(json.loads(self._weights[1].get("thresholds", "[]")))
        temperature = self.calibration.temperature if self.calibration else 1.0
        return replace(task_of(self.recipe), thresholds=thresholds, temperature=temperature)

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration on the validation images; None without any."""
        return Calibration.read(self._weights[1], self.path / run_files.KNOWN)

    @property
    def unknown_threshold(self) -> float | None:
        """Images whose `Outputs.unknown_score` is higher are unlike the training images; None if unknown."""
        detector = self.calibration.detector if self.calibration else None
        return detector.threshold if detector else None

    @property
    def _predictions(self) -> Predictions:
        missing: dict[str, str] = {}
        found = run_files.read_predictions(self.path, self.summary, missing)
        if found is None:
            raise InputError(f"{self.path}: {missing[run_files.PREDICTIONS]}")
        return found

    @cached_property
    def _weights(self) -> tuple[dict[str, Any], dict[str, str]]:
        return read_weights(self.path / run_files.WEIGHTS)

    @cached_property
    def model(self) -> nn.Module:
        """The trained module on the CPU, in evaluation mode: normalised images [N, C, H, W] to logits [N, K].

        In regression, logits are standardised numbers; `recipe.data.label_mean` and `label_std` restore the unit. If a
        model was given in Python, this is a copy of it, and the weights are loaded into the given one too.
        """
        given = KerasModule(self._given) if is_keras(self._given) else self._given
        if given is None and self.recipe.model.startswith("python:"):
            raise InputError(
                f"{self.path}: trained a module given in Python ({self.recipe.model.removeprefix('python:')}); "
                "load it with flatout.load(path, model=YourModule())"
            )
        model = build_model(self.recipe, len(self.classes), module=given, allow_code=self._allow_code)
        for each in (model,) if given is None else (model, given.to("cpu")):
            load_exactly(each.eval(), self._weights[0], self.path / run_files.WEIGHTS)
        if isinstance(given, KerasModule) and given is not self._given:
            given.write_to(self._given)
        return model

    def evaluate(
        self, data: object = None, *, devices: str = "auto", engine: str = "auto", tta: bool = False
    ) -> JsonObject:
        """Return loss, count and metrics on the run's test data, or on other data, with the keys of `summary.json`.

        If only a validation split exists, the prefix is `valid`.

        Args:
            data: see `fit`; its test split is used if it has one, else its validation split, else all of it.
            devices: a device SPEC.
            engine: `torch`, `xla` or `auto`.
            tta: average over views of each image (test-time augmentation), as the recipe's `tta` does.
        """
        return evaluate(self, data, devices=devices, engine=engine, console=Console(), tta=tta)

    def predict(
        self,
        images: object,
        *,
        top: int = 5,
        tta: bool = False,
        coverage: float | None = None,
        explain: str | Path | None = None,
        on_bad_image: str = "stop",
    ) -> list[Prediction]:
        """Return the `top` most probable classes of each image; all that reach their thresholds; or its number.

        Args:
            images: a file, a folder, a PIL image, the bytes of a file, an array or tensor [H, W], [H, W, C] or
                [C, H, W], or a list of these; or one array or tensor of many images, [N, ...]. Values are uint8, or
                numbers in 0..1 or 0..255. Images of another size are resized.
            top: how many classes.
            tta: see `evaluate`.
            coverage: add the set of classes that contains the right one with this probability, such as 0.95.
            explain: a new or empty folder, for a picture of each image next to a heatmap of the regions that support
                the first class.
            on_bad_image: "stop" raises an error that names all images that cannot be read; with "skip", their
                predictions have an `error` and nothing else.

        Raises:
            InputError: an image is missing or cannot be read; the run has no prediction sets of this coverage.
        """
        found = predict(self, images, top=top, tta=tta, coverage=coverage, explain=explain, on_bad_image=on_bad_image)
        return list(found)

    def export(self, out: str | Path, *, data: object = None) -> "Exported":
        """Write the run as ONNX for other programs, verified on its test images; see `docs/export.md`.

        Args:
            out: a new file, such as "model.onnx". A cross-validation is written as the mean of its folds.
            data: other images to verify on; by default the run's own.

        Raises:
            InputError: the file exists, the run cannot be written as ONNX, its data is missing, or fewer than
                99.99 % of the labels are equal.
        """
        from flatout.inference.export import export

        return export(self, out, data=data, console=Console())

    def probabilities(self, pixels_NHWC: np.ndarray, *, tta: bool = False) -> np.ndarray:
        """Return class probabilities, float32 [N, K], or numbers [N, 1], of images in the stored size and bits.

        With `tta`, or if the recipe has it, they are averaged over views of each image.
        """
        return self.outputs(pixels_NHWC, tta=tta).probabilities

    @contextlib.contextmanager
    def _network(self) -> "Iterator[tuple[Any, Any]]":
        """Provide a function for logits that also catches features; large inputs use OpenVINO."""
        model = self.model.eval()
        if self._classified * math.prod(self.recipe.image_sides) < WORTHWHILE_PIXELS:
            with caught(model, model) as features:
                yield model, features
            return
        if self._frozen is None:
            self._frozen = FrozenClassifier(model, model, torch.get_num_threads())
        yield self._frozen, self._frozen

    def outputs(self, pixels_NHWC: np.ndarray, *, tta: bool = False) -> Outputs:
        """Return all outputs for images; for the arguments see `probabilities`."""
        views = tta_views(self.recipe) if tta or self.recipe.tta else []
        results, seen = [], []
        with torch.no_grad(), self._network() as (model, features):
            for start in range(0, len(pixels_NHWC), self.recipe.batch_size):
                stored = np.ascontiguousarray(pixels_NHWC[start : start + self.recipe.batch_size])
                images = normalised(self.recipe, torch.from_numpy(stored))
                each = [model(pixels.view(torch, images, *view)) for view in views]
                results.append((self.task.averaged(torch.stack(each)) if each else model(images)).float())
                seen.append(features.take())
        self._classified += len(pixels_NHWC)
        logits = torch.cat(results)
        detector = self.calibration.detector if self.calibration else None
        kept = [one.numpy() for one in seen if one is not None]
        return Outputs(
            probabilities=self.task.probabilities(logits).numpy(),
            logits=logits.numpy(),
            unknown_score=detector and detector.score(logits.numpy(), np.concatenate(kept) if kept else None),
        )

    def _repr_html_(self) -> str:
        """Return the run in words and its pictures, for notebooks."""
        pictures = (self.path / name for name in ("curves.png", "predictions.png"))
        uris = [data_uri("image/png", path.read_bytes()) for path in pictures if path.is_file()]
        shown = "".join(f'<img style="max-width:45%" src="{uri}">' for uri in uris)
        return f"<p>{escape(repr(self))}</p>{shown}"

    def top_losses(self, count: int = 9) -> StoredPredictions:
        """Return the `count` test (else validation) images with the highest loss; a notebook shows them as pictures."""
        found = self._predictions
        losses = self.task.losses_of(found.probabilities.astype(np.float64), found.labels)
        worst = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable")[: max(0, count)]
        kept = {int(number): image for number, image in zip(found.sample, found.images, strict=True)}
        return StoredPredictions(
            StoredPrediction(
                index=int(i),
                actual=self.task.text(found.labels[i], self.classes),
                predicted=self.task.text(found.predicted[i], self.classes),
                loss=float(losses[i]) + 0.0,  # no -0.0
                probability=self.task.confidence(found.predicted[i], found.probabilities[i]),
                image=kept.get(int(i)),
                file=None if found.name is None else str(found.name[i]),
            )
            for i in worst
        )

    def confusion(self) -> Confusion:
        """Return the confusion matrix on the test (else validation) images of a single-label run."""
        if not isinstance(self.task, SingleLabel):
            need = "confusion() needs one class for each image; show() has the tables of this task"
            raise InputError(f"{self.path}: {need}")
        found, picture = self._predictions, self.path / run_files.PICTURES[2]
        counts = confusion(found.predicted, found.labels, len(self.classes))
        return Confusion(counts=counts, classes=self.classes, picture=picture if picture.is_file() else None)

    def show(self) -> Any:
        """Show the report: in a notebook in the cell, else its path is printed."""
        report = self.path / run_files.REPORT
        if not report.is_file():
            raise InputError(f"{report}: there is no report; flatout report {self.path} draws it")
        if not in_notebook():
            return print(report)
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        return display(HTML(framed(report.read_text(encoding="utf-8"))))


class Ensemble(Run):
    """A finished cross-validation: predictions are means of the probabilities, or numbers, of its folds.

    Each fold gets a copy of `model`; see `Run`.
    """

    def __init__(self, path: str | Path, *, model: Any = None, allow_code: bool = False) -> None:
        self.path = Path(path)
        folders = [self.path / run_files.FOLD.format(number) for number in range(1, self.recipe.data.folds + 1)]
        for name in (self.path / run_files.SUMMARY, *(folder / run_files.WEIGHTS for folder in folders)):
            if not name.is_file():
                resume = f"flatout train --resume --out {self.path}"
                raise InputError(f"{self.path}: the cross-validation has not finished; continue with: {resume}")
        self._members = tuple(Run(f, model=copy.deepcopy(model), allow_code=allow_code) for f in folders)

    @property
    def members(self) -> tuple[Run, ...]:
        """The runs of the folds, in their order."""
        return self._members

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the outputs."""
        return self.members[0].classes

    @cached_property
    def task(self) -> Task:
        """That of the first fold: nothing is tuned on its images, and numbers have nearly the same scale in all."""
        return self.members[0].task

    @property
    def model(self) -> nn.Module:
        """There is none: each of `members` has its own."""
        raise InputError(f"{self.path}: each fold has a model of its own: flatout.load(path).members[0].model")

    @property
    def calibration(self) -> None:
        """There is none: nothing is tuned on the held-out images of a fold."""

    def outputs(self, pixels_NHWC: np.ndarray, *, tta: bool = False) -> Outputs:
        """Return the mean of the probabilities of the folds."""
        found = [run.probabilities(pixels_NHWC, tta=tta) for run in self.members]
        return Outputs(probabilities=np.mean(found, axis=0))


def load(path: str | Path, *, model: Any = None, allow_code: bool = False) -> Run:
    """Read a run folder; its `model` is an ordinary torch module on the CPU, independent of the training device.

    A cross-validation is an `Ensemble`. See `Run` for the arguments. `hf://USER/NAME`, or `hf://USER/NAME@REVISION`, is
    downloaded from the Hugging Face hub into its cache.
    """
    if str(path).startswith(SCHEME):
        path = download_run(str(path))
    recipe = Path(path) / run_files.RECIPE
    data = load_recipe(recipe).data if recipe.is_file() else Data()
    return (Ensemble if data.folds and not data.fold else Run)(path, model=model, allow_code=allow_code)
