"""What the validation images say about a network's answers: it is kept with the weights, for `predict` and `evaluate`.

Shape letters: N images, K classes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.batches import Samples
from flatout.numerics import calibration, novelty
from flatout.numerics.novelty import KNOWN_SHARE, Known, Novelty

if TYPE_CHECKING:
    from flatout.engine.base import Evaluation, Keep
    from flatout.recipe import Recipe

# Fewer validation images than this say little about a probability.
LEAST_IMAGES = 20
# The coverages of the prediction sets in summary and report.
COVERAGES = (0.9, 0.95, 0.99)
# So many training images show what is known: more where that is less than these of each class.
TRAINING_IMAGES, IMAGES_OF_A_CLASS = 5000, 10
# The arrays of `Known`.
_ARRAYS = ("means", "precision", "overall")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What `fit` finds.

    Attributes:
        temperature: see `calibration.fit_temperature`.
        set_thresholds: see `calibration.set_thresholds`; for logits that are divided by the temperature.
        images: the validation images that it rests on.
        novelty: which images are unknown; None where it could not be computed, or its file is missing.
        missing: that file, if it is missing.
    """

    temperature: float
    set_thresholds: tuple[float, ...]
    images: int
    novelty: Novelty | None = None
    missing: Path | None = None

    @property
    def remark(self) -> str:
        """What a reader of the answers should know, as a sentence; empty for nothing."""
        if self.missing is None:
            return ""
        return f"{self.missing} is missing: unknown images are not recognised; copy it from the original run folder"

    def metadata(self) -> dict[str, str]:
        """Return it as metadata of the weights."""
        novelty, thresholds = self.novelty, [round(value, 5) for value in self.set_thresholds]
        return {
            "temperature": repr(self.temperature),
            "set_thresholds": json.dumps(thresholds, separators=(",", ":")),
            "calibration_images": str(self.images),
            **({"unknown": json.dumps([novelty.centre, novelty.scale, novelty.threshold])} if novelty else {}),
        }

    def write(self, path: Path) -> None:
        """Write what unknown images are found with beside the weights, if there is anything but numbers."""
        import torch

        from flatout.models.weights import save_tensors

        if self.novelty and self.novelty.known:
            tensors = {name: torch.from_numpy(getattr(self.novelty.known, name)) for name in _ARRAYS}
            save_tensors(path, tensors, {"format": "pt"})

    @classmethod
    def of(cls, metadata: Mapping[str, str], path: Path) -> "Trust | None":
        """Return what the metadata of weights and the file of `write` have; None where there were no validation images.

        Raises:
            InputError: the file is damaged.
        """
        from flatout.models.weights import read_weights

        if "temperature" not in metadata:
            return None
        found = None
        if "unknown" in metadata:
            centre, scale, threshold = json.loads(metadata["unknown"])
            tensors = read_weights(path)[0] if path.is_file() else {}
            is_whole = tensors.keys() >= set(_ARRAYS)
            known = Known(**{name: tensors[name].numpy() for name in _ARRAYS}) if is_whole else None
            if known or len(centre) == 1:
                found = Novelty(known=known, centre=tuple(centre), scale=tuple(scale), threshold=threshold)
        return cls(
            temperature=float(metadata["temperature"]),
            set_thresholds=tuple(json.loads(metadata["set_thresholds"])),
            images=int(metadata["calibration_images"]),
            novelty=found,
            missing=path if "unknown" in metadata and found is None else None,
        )

    def is_unknown(self, logits: np.ndarray, features: np.ndarray | None) -> np.ndarray | None:
        """Return which images are unlike the training images, bool [N]; None where the run does not know."""
        found = self.novelty
        return None if found is None else found.score(logits, features) > found.threshold

    def in_set(self, logits: np.ndarray, coverage: float) -> np.ndarray | None:
        """Return which classes are in the prediction set of each image, bool [N, K].

        None where the validation images are too few for the coverage.
        """
        threshold = calibration.set_threshold(self.set_thresholds, coverage)
        return None if threshold is None else calibration.strangeness(logits / self.temperature) <= threshold

    def figures(self, result: "Evaluation") -> dict[str, Any]:
        """Return what `summary.json` and `evaluate` say of images with known classes; see `docs/trust.md`.

        `result` has distances in place of features, as `keep_of` returns them.
        """
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
        if self.novelty is not None:
            is_unknown = self.novelty.score_at(result.logits, result.features) > self.novelty.threshold
            found["unknown"] = {"known_share": KNOWN_SHARE, "flagged": float(is_unknown.mean())}
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


def missing(recipe: "Recipe", splits: Mapping[str, Samples]) -> str:
    """Return why a run can have no `Trust`, as a sentence; empty where it can, or where it makes no sense."""
    if recipe.task != "single-label" or recipe.data.fold:
        return ""
    found = len(splits["valid"]) if "valid" in splits else 0
    if found >= LEAST_IMAGES:
        return ""
    few = f"only {found} validation images" if found else "no validation images"
    left = len(splits["train"]) + found
    fraction = max(0.1, -(-100 * LEAST_IMAGES // left) / 100)
    fix = f"; --set data.valid_fraction={fraction:g} reserves training images for them" if fraction <= 0.5 else ""
    return (
        f"{few}: probabilities are not calibrated, and predict has neither prediction sets nor an answer for unknown "
        f"images{fix}"
    )


def sample_of(samples: Samples, classes: int) -> Samples:
    """Return training images that are spread evenly over a split, enough to know each class."""
    count = min(len(samples), max(TRAINING_IMAGES, IMAGES_OF_A_CLASS * classes))
    return samples.at(np.linspace(0, len(samples) - 1, count).astype(np.int64))


def fit(known: Known | None, valid: "Evaluation") -> Trust | None:
    """Return what the validation images say; None where too few answers are finite.

    Args:
        known: where the features of training images are; None where they are not known.
        valid: with logits, and distances from `known` in place of features.
    """
    assert valid.logits is not None
    is_finite = np.isfinite(valid.logits).all(axis=1)
    logits, labels = valid.logits[is_finite], valid.labels[is_finite]
    if len(labels) < LEAST_IMAGES:
        return None
    temperature = calibration.fit_temperature(logits, labels)
    thresholds = calibration.set_thresholds(logits / temperature, labels)
    distances = None if valid.features is None else valid.features[is_finite]
    return Trust(
        temperature=temperature,
        set_thresholds=tuple(thresholds),
        images=len(labels),
        novelty=novelty.fit(known, logits, distances),
    )


def keep_of(known: Known | None) -> "Keep | None":
    """Return what an evaluation keeps of features: the distances from training images, if these are known."""
    return known.distances if known else None


def lines_of(split: str, figures: Mapping[str, Any]) -> list[str]:
    """Return intervals, further metrics and calibration in words; `figures` as in `summary.json`."""
    found, lines = figures.get("trust") or {}, []
    parts = []
    if interval := figures.get(f"{split}_accuracy_interval"):
        parts.append(f"95 % interval {interval[0]:.4f} to {interval[1]:.4f}")
    names = {"balanced_accuracy": "balanced", "top5_accuracy": "top-5", "roc_auc": "ROC AUC"}
    values = {name: figures.get(f"{split}_{key}") for key, name in names.items()}
    parts += [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
    lines += [", ".join(parts)] if parts else []
    if "ece_after" in found:
        error, temperature = (found[key] for key in ("ece_before", "temperature"))
        lines.append(
            f"expected calibration error {found['ece_after']:.4f} ({error:.4f} before temperature {temperature:.3g})"
        )
        if "unknown" in found:
            lines.append(f'answered "unknown": {100 * found["unknown"]["flagged"]:.1f} %')
        for row in found.get("prediction_sets") or ():
            size = f"{row['mean_size']:.2f} classes on average"
            lines.append(f"{100 * row['coverage']:g} % sets: {row['covered']:.4f} hold the right class, {size}")
    return lines


def scores_of(split: str, result: "Evaluation", classes: Sequence[str], found: "Trust | None") -> dict[str, Any]:
    """Return the figures of `summary.json` and `evaluate` that are computed once, after training.

    Args:
        split: `test` or `valid`, whose name is in front of single figures.
        result: with probabilities; with logits where `found` is given.
        found: what the validation images say about the answers.
    """
    task, labels = result.task, result.labels
    assert result.probabilities is not None
    answers = task.decided(result.predicted)
    scores = task.scores(result.predicted, labels, result.probabilities)
    return {
        **{f"{split}_{name}": value for name, value in scores.items()},
        "per_class": task.per_class(answers, labels, classes),
        "confused_pairs": task.confused_pairs(answers, labels, classes),
        "trust": found.figures(result) if found else None,
    }
