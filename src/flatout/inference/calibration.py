"""Calibration on the validation images: temperature, prediction sets and out-of-distribution detection.

The results are in the metadata of the weights, and in `known.safetensors`.
Shape letters: N images, F features, K classes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch

from flatout.engine.base import Evaluation
from flatout.models.weights import read_weights, save_tensors
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from flatout.config import Recipe
    from flatout.data.batches import Split

# Fewer validation images are not enough to calibrate probabilities.
MIN_IMAGES = 20
# Bins of equal width for the calibration error and the reliability diagram.
BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
# The bias of a class without labels would be unbounded.
MAX_BIAS = 20.0
# Possible coverages of prediction sets, in steps of 0.001; and those in summary and report.
MIN_COVERAGE, MAX_COVERAGE, COVERAGE_STEPS = 0.5, 0.999, 1000
COVERAGES = (0.9, 0.95, 0.99)
# The share of known images that are not flagged as unknown.
KNOWN_SHARE = 0.95
# Training images for feature statistics: in total, or if that is more, per class.
TRAINING_IMAGES, IMAGES_OF_A_CLASS = 5000, 10
# Shrinkage: this share of the mean variance is added in every direction.
SHRINKAGE = 0.01
# Images converted to float64 at a time.
_AT_ONCE = 256
# The arrays of `FeatureStats`, as `known.safetensors` names them.
_ARRAYS = ("means", "precision", "overall")


def both_logits(logits: np.ndarray) -> np.ndarray:
    """Return logits float64 [N, K]; a single one, [N, 1], is that of class 1, against 0."""
    logits = logits.astype(np.float64)
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if logits.shape[1] == 1 else logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of the probabilities, float64 [N, K]."""
    return scipy.special.log_softmax(both_logits(logits), axis=1)


# --- probabilities ----------------------------------------------------------------------------------------------------


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the least negative log-likelihood of softmax(logits / temperature).

    Guo et al., On Calibration of Modern Neural Networks (arXiv 1706.04599). If all images are classified correctly,
    there is no such temperature: the likelihood grows as it falls to 0. Then a share 1 / (N + 2) of each target belongs
    to the other classes, as in Platt, Probabilistic Outputs for Support Vector Machines (1999).
    """
    logits, rows = both_logits(logits), np.arange(len(labels))
    is_separable = (logits.argmax(axis=1) == labels).all()
    others = is_separable / (len(labels) + 2) / (logits.shape[1] - 1)

    def loss(log_temperature: float) -> float:
        losses_NK = -log_softmax(logits / math.exp(log_temperature))
        right_N = losses_NK[rows, labels]
        return float((right_N + others * (losses_NK.sum(axis=1) - logits.shape[1] * right_N)).mean())

    bounds = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    found: Any = scipy.optimize.minimize_scalar(loss, bounds=bounds, method="bounded")
    return math.exp(found.x)


def bias_corrected(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return probabilities float64 [N, K] that are calibrated per class: softmax(scale * logits + biases).

    Scale and biases have the least negative log-likelihood of the labels (Alexandari et al., arXiv 1901.06852).
    """
    logits, rows = both_logits(logits), np.arange(len(labels))
    share_K = np.bincount(labels, minlength=logits.shape[1]) / len(labels)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        log_probabilities = log_softmax(x[0] * logits + x[1:])
        probabilities = np.exp(log_probabilities)
        slope = (probabilities * logits).sum(axis=1).mean() - logits[rows, labels].mean()
        gradient = np.array([slope, *(probabilities.mean(axis=0) - share_K)])
        return -float(log_probabilities[rows, labels].mean()), gradient

    bounds = [(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE), *[(-MAX_BIAS, MAX_BIAS)] * logits.shape[1]]
    start = np.array([1.0, *[0.0] * logits.shape[1]])
    found: Any = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return np.exp(log_softmax(found.x[0] * logits + found.x[1:]))


def reliability(confidence: np.ndarray, is_right: np.ndarray) -> list[dict[str, float]]:
    """Return the mean `confidence`, the `accuracy` and the `count` of each bin of confidence that has images."""
    bins, found = np.minimum((confidence * BINS).astype(np.int64), BINS - 1), []
    for inside in (bins == number for number in np.unique(bins)):
        means = {"confidence": float(confidence[inside].mean()), "accuracy": float(is_right[inside].mean())}
        found.append({**means, "count": int(inside.sum())})
    return found


def calibration_error(bins: list[dict[str, float]]) -> float:
    """Return the expected calibration error: the mean distance of accuracy and confidence over the images."""
    total = sum(row["count"] for row in bins)
    return sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / total


# --- prediction sets --------------------------------------------------------------------------------------------------


def nonconformity(logits: np.ndarray) -> np.ndarray:
    """Return the nonconformity of each class, float64 [N, K]: the log-odds against the class.

    The order is that of 1 - probability, the score of Sadinle et al. (arXiv 1609.00451), but probabilities near 1 do
    not become equal by rounding.
    """
    logits = both_logits(logits)
    log_probabilities, rows, best = log_softmax(logits), np.arange(len(logits)), logits.argmax(axis=1)
    with np.errstate(divide="ignore"):
        found = np.log(-np.expm1(log_probabilities)) - log_probabilities
    others = logits.copy()
    others[rows, best] = -np.inf
    found[rows, best] = scipy.special.logsumexp(others, axis=1) - logits[rows, best]
    return found


def set_thresholds(logits: np.ndarray, labels: np.ndarray) -> list[float]:
    """Return the nonconformity up to which a class is in the set, for coverages of 0.500, 0.501, ... 0.999.

    Split conformal prediction: with n calibration images, the ceil((n + 1) * coverage)-th smallest nonconformity of the
    right class. Coverages for which n is too small have no threshold, so the list is shorter then.
    """
    scores = np.sort(nonconformity(logits)[np.arange(len(labels)), labels])
    steps = range(round(MIN_COVERAGE * COVERAGE_STEPS), round(MAX_COVERAGE * COVERAGE_STEPS) + 1)
    ranks = [-(-(len(scores) + 1) * step // COVERAGE_STEPS) for step in steps]
    return [float(scores[rank - 1]) for rank in ranks if rank <= len(scores)]


def set_threshold(thresholds: Sequence[float], coverage: float) -> float | None:
    """Return the threshold of a coverage, rounded up to the next 0.001; None if there is none."""
    place = round((coverage - MIN_COVERAGE) * COVERAGE_STEPS, 6)
    return thresholds[math.ceil(place)] if 0 <= place <= len(thresholds) - 1 else None


# --- unknown images ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureStats:
    """Mean and covariance of the features of training images."""

    means: np.ndarray  # of each class, and in the last row of all images, float32 [K + 1, F]
    precision: np.ndarray  # the inverse covariance within the classes, float32 [F, F]
    overall: np.ndarray  # that of all images

    @classmethod
    def of(cls, features: np.ndarray | None, labels: np.ndarray) -> "FeatureStats | None":
        """Compute the statistics of training features [N, F] with labels int64 [N]; None if not all are finite."""
        if features is None or not np.isfinite(features).all():
            return None
        present, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
        rows = np.zeros((len(present), features.shape[1]))
        np.add.at(rows, places, features)
        rows /= counts[:, None]
        mean = features.mean(axis=0, dtype=np.float64)
        return cls(
            means=np.array([*rows, mean], np.float32),
            precision=_precision(features, rows, places),
            overall=_precision(features, mean[None], np.zeros_like(places)),
        )

    @cached_property
    def whitening(self) -> tuple[np.ndarray, np.ndarray]:
        """The whitening matrices of centred features, within classes and overall, which make distances Euclidean."""
        within, overall = (np.linalg.cholesky(one.astype(np.float64)) for one in (self.precision, self.overall))
        return within, overall

    def distances(self, features: np.ndarray) -> np.ndarray:
        """Return the relative Mahalanobis distance, float32 [N]: that to the nearest class less that to all images."""
        within, overall = self.whitening
        mean = self.means[-1].astype(np.float64)
        means = (self.means[:-1] - mean) @ within
        found = np.empty(len(features), np.float32)
        for start in range(0, len(features), _AT_ONCE):
            centred = features[start : start + _AT_ONCE].astype(np.float64) - mean
            points = centred @ within
            squares = np.square(points).sum(axis=1, keepdims=True) + np.square(means).sum(axis=1) - 2 * points @ means.T
            found[start : start + _AT_ONCE] = squares.min(axis=1) - np.square(centred @ overall).sum(axis=1)
        return found


def _precision(features: np.ndarray, centres: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the inverse covariance, float32 [F, F], of features [N, F] around centres [C, F] at `places` int64 [N]."""
    covariance = np.zeros((features.shape[1],) * 2)
    # 64-bit copies of all features would take much memory.
    for start in range(0, len(features), _AT_ONCE):
        centred = features[start : start + _AT_ONCE] - centres[places[start : start + _AT_ONCE]]
        covariance += centred.T @ centred / len(features)
    spread = np.trace(covariance) / len(covariance) or 1.0
    mixed = (1 - SHRINKAGE) * covariance + SHRINKAGE * spread * np.eye(len(covariance))
    return np.linalg.inv(mixed).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class OODDetector:
    """A score that is higher for images unlike the training images, and the threshold of unknown ones.

    The score is the sum of two parts, each standardised on validation images: the energy of the logits (Liu et al.,
    arXiv 2010.03759), and the relative Mahalanobis distance of the features (Ren et al., arXiv 2106.09022).
    """

    stats: FeatureStats | None  # without features, the energy is used alone
    centre: tuple[float, ...]  # the means of the parts
    scale: tuple[float, ...]  # their standard deviations
    threshold: float

    @classmethod
    def fit(cls, stats: FeatureStats | None, logits: np.ndarray, distances: np.ndarray | None) -> "OODDetector":
        """Fit a detector to known images that were not trained on: their logits [N, K], and distances from `stats`."""
        raw = [part[np.isfinite(part)] for part in _ood_parts(logits, distances)]
        unset = cls(
            stats=stats,
            centre=tuple(float(part.mean()) for part in raw),
            scale=tuple(float(part.std()) or 1.0 for part in raw),
            threshold=math.inf,
        )
        scores = np.sort(unset.score_at(logits, distances))
        rank = min(len(scores), math.ceil((len(scores) + 1) * KNOWN_SHARE))
        return replace(unset, threshold=float(scores[rank - 1]))

    def score(self, logits: np.ndarray, features: np.ndarray | None) -> np.ndarray:
        """Return `score_at` for features [N, F], if there are any."""
        return self.score_at(logits, self.stats.distances(features) if self.stats and features is not None else None)

    def score_at(self, logits: np.ndarray, distances: np.ndarray | None) -> np.ndarray:
        """Return the score of each image, float64 [N]; infinite where an output is not finite."""
        parts = _ood_parts(logits, distances)
        scaled = [(part - c) / s for part, c, s in zip(parts, self.centre, self.scale, strict=True)]
        return np.nan_to_num(np.sum(scaled, axis=0), nan=np.inf, posinf=np.inf, neginf=np.inf)


def _ood_parts(logits: np.ndarray, distances: np.ndarray | None) -> list[np.ndarray]:
    """Return the energy, and the distance if there is one, each [N]."""
    # A single logit has no sign that means known.
    wide = both_logits(logits) if logits.shape[1] > 1 else np.abs(logits.astype(np.float64))
    energy: np.ndarray = -np.asarray(scipy.special.logsumexp(wide, axis=1))
    return [energy] if distances is None else [energy, distances]


# --- what a run keeps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The calibration of a run on its validation images."""

    temperature: float
    set_thresholds: tuple[float, ...]  # for logits divided by the temperature
    images: int  # of the validation split
    detector: OODDetector | None = None
    remark: str = ""  # for readers of the predictions

    @classmethod
    def fit(cls, stats: FeatureStats | None, valid: Evaluation) -> "Calibration | None":
        """Fit a calibration to the validation images, with distances from `stats` in place of features.

        None if too few outputs are finite.
        """
        assert valid.logits is not None
        is_finite = np.isfinite(valid.logits).all(axis=1)
        logits, labels = valid.logits[is_finite], valid.labels[is_finite]
        if len(labels) < MIN_IMAGES:
            return None
        temperature = fit_temperature(logits, labels)
        return cls(
            temperature=temperature,
            set_thresholds=tuple(set_thresholds(logits / temperature, labels)),
            images=len(labels),
            detector=OODDetector.fit(stats, logits, None if valid.features is None else valid.features[is_finite]),
        )

    @classmethod
    def read(cls, metadata: Mapping[str, str], path: Path) -> "Calibration | None":
        """Read a calibration from the metadata of weights and the file of `write`; None without validation images."""
        if "temperature" not in metadata:
            return None
        detector, remark = None, ""
        if "unknown" in metadata:
            centre, scale, threshold = json.loads(metadata["unknown"])
            tensors = read_weights(path)[0] if path.is_file() else {}
            is_whole = tensors.keys() >= set(_ARRAYS)
            stats = FeatureStats(**{name: tensors[name].numpy() for name in _ARRAYS}) if is_whole else None
            if stats or len(centre) == 1:
                detector = OODDetector(stats=stats, centre=tuple(centre), scale=tuple(scale), threshold=threshold)
            else:
                remark = f"{path} is missing: unknown images are not recognised; copy it from the original run folder"
        return cls(
            temperature=float(metadata["temperature"]),
            set_thresholds=tuple(json.loads(metadata["set_thresholds"])),
            images=int(metadata["calibration_images"]),
            detector=detector,
            remark=remark,
        )

    def metadata(self) -> dict[str, str]:
        """Return the numbers as metadata of the weights."""
        thresholds = [round(value, 5) for value in self.set_thresholds]
        found = {
            "temperature": repr(self.temperature),
            "set_thresholds": json.dumps(thresholds, separators=(",", ":")),
            "calibration_images": str(self.images),
        }
        if detector := self.detector:
            found["unknown"] = json.dumps([detector.centre, detector.scale, detector.threshold])
        return found

    def write(self, path: Path) -> None:
        """Write the feature statistics, if any, into a file next to the weights."""
        if self.detector and (stats := self.detector.stats):
            save_tensors(path, {name: torch.from_numpy(getattr(stats, name)) for name in _ARRAYS}, {"format": "pt"})

    def in_set(self, logits: np.ndarray, coverage: float) -> np.ndarray:
        """Return the prediction sets, bool [N, K], of a coverage that has a threshold."""
        threshold = set_threshold(self.set_thresholds, coverage)
        assert threshold is not None
        return nonconformity(logits / self.temperature) <= threshold

    def figures(self, result: Evaluation) -> JsonObject:
        """Return `trust` of `summary.json` and `evaluate`, for images with known classes; see `docs/trust.md`.

        `result` has `FeatureStats.distances` in place of features.
        """
        assert result.logits is not None
        is_finite = np.isfinite(result.logits).all(axis=1)
        logits, labels = result.logits[is_finite], result.labels[is_finite]
        found: JsonObject = {"temperature": self.temperature, "calibration_images": self.images}
        if not len(labels):
            return found
        is_right = both_logits(logits).argmax(axis=1) == labels
        for name, temperature in (("before", 1.0), ("after", self.temperature)):
            confidence = np.exp(log_softmax(logits / temperature).max(axis=1))
            bins = reliability(confidence, is_right)
            found |= {f"ece_{name}": calibration_error(bins), f"reliability_{name}": bins}
        found["prediction_sets"] = rows = []
        for coverage in COVERAGES:
            if set_threshold(self.set_thresholds, coverage) is not None:
                inside = self.in_set(logits, coverage)
                sizes, covered = inside.sum(axis=1), inside[np.arange(len(labels)), labels]
                means = {"covered": covered, "mean_size": sizes, "single": sizes == 1}
                rows.append({"coverage": coverage, **{name: float(each.mean()) for name, each in means.items()}})
        if self.detector is not None:
            is_unknown = self.detector.score_at(result.logits, result.features) > self.detector.threshold
            found["unknown"] = {"known_share": KNOWN_SHARE, "flagged": float(is_unknown.mean())}
        return found


def why_uncalibrated(recipe: "Recipe", splits: "Mapping[str, Split]") -> str:
    """Return why a run has no `Calibration`, or "" if it has one or the task does not support it."""
    count = len(splits["valid"]) if "valid" in splits else 0
    if recipe.task != "single-label" or recipe.data.fold or count >= MIN_IMAGES:
        return ""
    few = f"only {count} validation images" if count else "no validation images"
    share = max(0.1, math.ceil(100 * MIN_IMAGES / (len(splits["train"]) + count)) / 100)
    more = f": --set data.valid_fraction={share:g} takes them from training images, unless the data has such a split"
    return (
        f"{few}: probabilities are not calibrated, and predict has neither prediction sets nor an answer for unknown "
        f"images; at least {MIN_IMAGES} are needed{more if share <= 0.6 else ''}"
    )


def feature_samples(samples: "Split", classes: int) -> "Split":
    """Return evenly spaced training images for `FeatureStats`."""
    count = min(len(samples), max(TRAINING_IMAGES, IMAGES_OF_A_CLASS * classes))
    return samples.at(np.linspace(0, len(samples) - 1, count).astype(np.int64))
