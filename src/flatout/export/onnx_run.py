"""An exported ONNX file that classifies images as its run does."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError, first_line, one_line
from flatout.export.onnx import open_session
from flatout.recipe import Recipe
from flatout.run.folder import Run
from flatout.run.predict import Outputs
from flatout.run.trust import Trust
from flatout.settings import one_or_both
from flatout.tasks import task_of

if TYPE_CHECKING:
    from flatout.tasks.base import Task

_BATCH = 32


class OnnxRun(Run):
    """What a run's `predict` needs, from an ONNX file and its metadata.

    Args:
        path: a file that `flatout export` has written.

    Raises:
        InputError: the file is missing, damaged, or was written by something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        self._session = open_session(path)
        try:
            self._metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
            self._outputs = [output.name for output in self._session.get_outputs()]
            if self._metadata.get("producer", "").startswith("flatout "):
                self._outputs.index("probabilities")
                self._known = self.classes, self.task, self.trust  # here, so that damage is found now
                return
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise InputError(f"{path}: is damaged: its metadata cannot be read ({reason})") from None
        raise InputError(f"{path}: was not written by flatout export, so its classes and images are not known")

    @cached_property
    def recipe(self) -> Recipe:
        """What decides how images are read; nothing else in it means anything."""
        found = self._metadata
        size = json.loads(found["image_size"])
        recipe = Recipe(
            model=found["model"],
            image_size=one_or_both((size[0], size[1])),
            channels=int(found["channels"]),
            epochs=1,
            batch_size=_BATCH,
        )
        return recipe.override({"task": found["task"], "data.resize": found["resize"], "data.bits": int(found["bits"])})

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the outputs."""
        return tuple(json.loads(self._metadata["classes"]))

    @cached_property
    def task(self) -> "Task":
        """What the answers mean, with the thresholds of the run."""
        return task_of(self.recipe, tuple(json.loads(self._metadata.get("thresholds", "[]"))))

    @cached_property
    def trust(self) -> Trust | None:
        """What the run's validation images say about the answers; the temperature is in the file's computation."""
        found = self._metadata
        if "set_thresholds" not in found:
            return None
        threshold = found.get("unknown_threshold")
        return Trust(
            temperature=1.0,
            set_thresholds=tuple(json.loads(found["set_thresholds"])),
            images=int(found["calibration_images"]),
            novelty=None if threshold is None else _ScoreOfFile(float(threshold)),  # pyright: ignore[reportArgumentType]
        )

    @property
    def model(self) -> Any:
        """There is none."""
        raise InputError(f"{self.path}: an ONNX file has no torch module; load the run that it was exported from")

    def outputs(self, pixels_NHWC: np.ndarray, *, tta: bool = False) -> Outputs:
        """Return what the file answers. Logarithms of probabilities are logits; the score stands for the features."""
        if tta:
            raise InputError(f"{self.path}: an ONNX file has no test-time augmentation of its own; leave --tta out")
        try:
            found = dict(zip(self._outputs, self._session.run(self._outputs, {"images": pixels_NHWC}), strict=True))
        except Exception as error:  # onnxruntime's own, of many types
            raise InputError(f"{self.path}: cannot be computed, so it is damaged ({first_line(error)})") from None
        probabilities, score = found["probabilities"], found.get("unknown_score")
        return Outputs(
            probabilities=probabilities,
            logits=np.log(np.maximum(probabilities, np.finfo(np.float32).tiny)),
            features=None if score is None else score[:, None],
        )


class _ScoreOfFile:
    """Takes the place of `Novelty`: the file computes the score."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def score(self, logits: np.ndarray, features: np.ndarray) -> np.ndarray:
        return features[:, 0]
