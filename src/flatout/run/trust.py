"""What the validation images say about a network's answers: it is kept with the weights, for `predict` and `evaluate`.

Shape letters: N images, K classes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.numerics import calibration

if TYPE_CHECKING:
    from flatout.engine.base import Evaluation
    from flatout.recipe import Recipe

# Fewer validation images than this say little about a probability.
LEAST_IMAGES = 20
# The coverages of the prediction sets in summary and report.
COVERAGES = (0.9, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What `fit` finds.

    Attributes:
        temperature: see `calibration.fit_temperature`.
        set_thresholds: see `calibration.set_thresholds`; for logits that are divided by the temperature.
        images: the validation images that it rests on.
    """

    temperature: float
    set_thresholds: tuple[float, ...]
    images: int

    def metadata(self) -> dict[str, str]:
        """Return it as metadata of the weights."""
        thresholds = [round(value, 5) for value in self.set_thresholds]
        return {
            "temperature": repr(self.temperature),
            "set_thresholds": json.dumps(thresholds, separators=(",", ":")),
            "calibration_images": str(self.images),
        }

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> "Trust | None":
        """Return what the metadata of weights has; None where the run had no validation images."""
        if "temperature" not in metadata:
            return None
        return cls(
            temperature=float(metadata["temperature"]),
            set_thresholds=tuple(json.loads(metadata["set_thresholds"])),
            images=int(metadata["calibration_images"]),
        )

    def in_set(self, logits: np.ndarray, coverage: float) -> np.ndarray | None:
        """Return which classes are in the prediction set of each image, bool [N, K].

        None where the validation images are too few for the coverage.
        """
        threshold = calibration.set_threshold(self.set_thresholds, coverage)
        return None if threshold is None else calibration.strangeness(logits / self.temperature) <= threshold

    def figures(self, result: "Evaluation") -> dict[str, Any]:
        """Return what `summary.json` and `evaluate` say of images with known classes; see `docs/trust.md`."""
        assert result.logits is not None
        is_finite = np.isfinite(result.logits).all(axis=1)
        logits, labels = result.logits[is_finite], result.labels[is_finite]
        found: dict[str, Any] = {"temperature": self.temperature, "calibration_images": self.images}
        if not len(labels):
            return found
        is_right = logits_right(logits, labels)
        for name, temperature in (("before", 1.0), ("after", self.temperature)):
            confidence = np.exp(calibration.log_softmax(logits / temperature).max(axis=1))
            bins = calibration.reliability(confidence, is_right)
            found |= {f"ece_{name}": calibration.calibration_error(bins), f"reliability_{name}": bins}
        found["prediction_sets"] = [
            {"coverage": coverage, **_of_sets(inside, labels)}
            for coverage in COVERAGES
            if (inside := self.in_set(logits, coverage)) is not None
        ]
        return found


def logits_right(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return whether the class with the highest logit is the label, bool [N]."""
    return calibration.both_logits(logits).argmax(axis=1) == labels


def _of_sets(inside: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    sizes = inside.sum(axis=1)
    return {
        "covered": float(inside[np.arange(len(labels)), labels].mean()),
        "mean_size": float(sizes.mean()),
        "empty": float((sizes == 0).mean()),
        "single": float((sizes == 1).mean()),
    }


def missing(recipe: "Recipe", splits: Mapping[str, Any]) -> str:
    """Return why a run can have no `Trust`, as a sentence; empty where it can, or where it makes no sense."""
    if recipe.task != "single-label" or recipe.data.fold:
        return ""
    found = len(splits["valid"].samples) if "valid" in splits else 0
    if found >= LEAST_IMAGES:
        return ""
    few = f"only {found} validation images" if found else "no validation images"
    return (
        f"{few}: probabilities are not calibrated, and predict has neither prediction sets nor an answer for unknown "
        "images; --set data.valid_fraction=0.1 reserves a tenth of the training images for them"
    )


def fit(valid: "Evaluation") -> Trust | None:
    """Return what the validation images say; None where too few answers are finite."""
    assert valid.logits is not None
    is_finite = np.isfinite(valid.logits).all(axis=1)
    logits, labels = valid.logits[is_finite], valid.labels[is_finite]
    if len(labels) < LEAST_IMAGES:
        return None
    temperature = calibration.fit_temperature(logits, labels)
    thresholds = calibration.set_thresholds(logits / temperature, labels)
    return Trust(temperature=temperature, set_thresholds=tuple(thresholds), images=len(labels))
