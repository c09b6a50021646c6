"""How far probabilities can be trusted: temperature, calibration error, prediction sets, intervals and tests.

Everything here is NumPy; minimisation and tests are SciPy's.

Shape letters: N images, K classes.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Bins of equal width for the calibration error and the reliability diagram.
BINS = 15
# Temperatures that are considered.
COOLEST, HOTTEST = 0.05, 20.0
# A class without labels would get a bias without bound.
MOST_BIAS = 20.0
# Coverages that prediction sets may have, in steps of 0.001.
LEAST_COVERAGE, MOST_COVERAGE, COVERAGE_STEPS = 0.5, 0.999, 1000
CONFIDENCE = 0.95


def both_logits(logits: np.ndarray) -> np.ndarray:
    """Return logits float64 [N, K]; a single one, [N, 1], is that of class 1, against 0."""
    logits = logits.astype(np.float64)
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if logits.shape[1] == 1 else logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of the probabilities, float64 [N, K]."""
    from scipy.special import log_softmax

    return log_softmax(both_logits(logits), axis=1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the least negative log-likelihood of softmax(logits / temperature).

    Guo et al., On Calibration of Modern Neural Networks (arXiv 1706.04599).
    """
    from scipy.optimize import minimize_scalar

    logits, rows = both_logits(logits), np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / math.exp(log_temperature))[rows, labels].mean())

    found: Any = minimize_scalar(loss, bounds=(math.log(COOLEST), math.log(HOTTEST)), method="bounded")
    return math.exp(found.x)


def bias_corrected(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return probabilities float64 [N, K] that are right on average for each class: softmax(scale * logits + biases).

    Scale and biases have the least negative log-likelihood of the labels (Alexandari et al., arXiv 1901.06852).
    """
    from scipy.optimize import minimize

    logits, rows = both_logits(logits), np.arange(len(labels))
    share_K = np.bincount(labels, minlength=logits.shape[1]) / len(labels)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        log_probabilities = log_softmax(x[0] * logits + x[1:])
        probabilities = np.exp(log_probabilities)
        slope = (probabilities * logits).sum(axis=1).mean() - logits[rows, labels].mean()
        return -float(log_probabilities[rows, labels].mean()), np.array(
            [slope, *(probabilities.mean(axis=0) - share_K)]
        )

    bounds = [(1 / HOTTEST, 1 / COOLEST), *[(-MOST_BIAS, MOST_BIAS)] * logits.shape[1]]
    start = np.array([1.0, *[0.0] * logits.shape[1]])
    found: Any = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return np.exp(log_softmax(found.x[0] * logits + found.x[1:]))


def reliability(confidence: np.ndarray, is_right: np.ndarray) -> list[dict[str, float]]:
    """Return `confidence` and `accuracy`, both means, and `count` of each bin of confidence that has images."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    rows = []
    for number in np.unique(bins):
        inside = bins == number
        means = {"confidence": float(confidence[inside].mean()), "accuracy": float(is_right[inside].mean())}
        rows.append({**means, "count": int(inside.sum())})
    return rows


def calibration_error(bins: list[dict[str, float]]) -> float:
    """Return the expected calibration error: the mean distance of accuracy and confidence over the images."""
    total = sum(row["count"] for row in bins)
    return sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / total


# --- prediction sets ------------------------------------------------------------------------------------------------


def strangeness(logits: np.ndarray) -> np.ndarray:
    """Return how little each class conforms to an image, float64 [N, K]: the log-odds against the class.

    The order is that of 1 - probability, the score of Sadinle et al. (arXiv 1609.00451), but probabilities near 1 do
    not become equal by rounding.
    """
    logits = both_logits(logits)
    log_probabilities = log_softmax(logits)
    with np.errstate(divide="ignore"):
        found = np.log(-np.expm1(log_probabilities)) - log_probabilities
    best = logits.argmax(axis=1)
    found[np.arange(len(best)), best] = strangeness_of(logits, best)
    return found


def strangeness_of(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return `strangeness` of one class of each image, float64 [N]."""
    from scipy.special import logsumexp

    logits, rows = both_logits(logits), np.arange(len(labels))
    others = logits.copy()
    others[rows, labels] = -np.inf
    return logsumexp(others, axis=1) - logits[rows, labels]


def set_thresholds(logits: np.ndarray, labels: np.ndarray) -> list[float]:
    """Return the strangeness up to which a class is in the set, for coverages of 0.500, 0.501, ... 0.999.

    Split conformal prediction: with n calibration images, the ceil((n + 1) * coverage)-th smallest strangeness of the
    right class. Coverages for which n is too small have no threshold, so the list is shorter then.
    """
    scores = np.sort(strangeness_of(logits, labels))
    steps = range(round(LEAST_COVERAGE * COVERAGE_STEPS), round(MOST_COVERAGE * COVERAGE_STEPS) + 1)
    ranks = [-(-(len(scores) + 1) * step // COVERAGE_STEPS) for step in steps]
    return [float(scores[rank - 1]) for rank in ranks if rank <= len(scores)]


def set_threshold(thresholds: Sequence[float], coverage: float) -> float | None:
    """Return the threshold of a coverage, rounded up to the next 0.001; None where there is none."""
    index = math.ceil(round((coverage - LEAST_COVERAGE) * COVERAGE_STEPS, 6))
    return thresholds[index] if 0 <= index < len(thresholds) else None


def highest_coverage(thresholds: Sequence[float]) -> float:
    """Return the highest coverage that has a threshold."""
    return LEAST_COVERAGE + (len(thresholds) - 1) / COVERAGE_STEPS


# --- figures and tests ----------------------------------------------------------------------------------------------


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, by Wilson's method."""
    from scipy.stats import binomtest

    interval = binomtest(right, count).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(is_right: np.ndarray, is_right_too: np.ndarray) -> tuple[int, int, float]:
    """Return how many only the first and only the second got right, and the p-value of McNemar's exact test."""
    from scipy.stats import binomtest

    first, second = int((is_right & ~is_right_too).sum()), int((~is_right & is_right_too).sum())
    return first, second, float(binomtest(first, first + second).pvalue) if first + second else 1.0


def smaller_errors(first: np.ndarray, second: np.ndarray) -> tuple[tuple[int, int], float]:
    """Return how often each error is the smaller one, and the p-value of Wilcoxon's signed-rank test."""
    from scipy.stats import wilcoxon

    counts = int((first < second).sum()), int((second < first).sum())
    return counts, float(wilcoxon(first, second).pvalue) if sum(counts) else 1.0  # pyright: ignore
