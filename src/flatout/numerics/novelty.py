"""Unknown images: how unlike the training images one is, from the features and logits of a network.

Shape letters: N images, F features, K classes.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from flatout.numerics.calibration import both_logits

# So many known images are not answered "unknown".
KNOWN_SHARE = 0.95
# This share of the mean variance is added to the variance in every direction.
SHRINKAGE = 0.01
# Images in memory as 64-bit numbers.
AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Novelty:
    """A score that is higher for images unlike the training images, and the threshold of unknown ones.

    The score is the sum of two parts, each standardised on validation images: the energy of the logits (Liu et al.,
    arXiv 2010.03759), and the relative Mahalanobis distance of the features (Ren et al., arXiv 2106.09022): the squared
    distance to the nearest class mean, less that to the mean of all images.

    Attributes:
        means: of the features of each class, and of all images in the last row, float32 [K + 1, F]; None where there
            are no features, and the energy counts alone.
        precision, overall: the inverse covariances float32 [F, F] within the classes, and of all images.
        centre, scale: mean and standard deviation of the energy, and of the distance if there are features.
        threshold: the score from which on an image is unknown.
    """

    means: np.ndarray | None
    precision: np.ndarray | None
    overall: np.ndarray | None
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    threshold: float

    def score(self, logits: np.ndarray, features: np.ndarray | None) -> np.ndarray:
        """Return the score of each image, float64 [N]; infinite where an output is not finite."""
        parts = self.parts(logits, features)
        scaled = [(part - c) / s for part, c, s in zip(parts, self.centre, self.scale, strict=True)]
        return np.nan_to_num(np.sum(scaled, axis=0), nan=np.inf, posinf=np.inf, neginf=np.inf)

    def parts(self, logits: np.ndarray, features: np.ndarray | None) -> list[np.ndarray]:
        """Return the energy, and the distance if there are features, each [N]."""
        from scipy.special import logsumexp

        # A single logit has no sign that means known.
        wide = both_logits(logits) if logits.shape[1] > 1 else np.abs(logits.astype(np.float64))
        energy: np.ndarray = -np.asarray(logsumexp(wide, axis=1))
        if self.means is None or self.precision is None or self.overall is None or features is None:
            return [energy]
        means, every = self.means.astype(np.float64), range(0, len(features), AT_ONCE)
        nearest = [_distances(features[i : i + AT_ONCE], means[:-1], self.precision).min(axis=1) for i in every]
        overall = [_distances(features[i : i + AT_ONCE], means[-1:], self.overall)[:, 0] for i in every]
        return [energy, np.concatenate(nearest) - np.concatenate(overall)]


def fit(features: np.ndarray | None, labels: np.ndarray, valid: tuple[np.ndarray, np.ndarray | None]) -> Novelty:
    """Return the score for a network.

    Args:
        features: of training images, [N, F], on which the class means rest; None for the energy alone.
        labels: of the same images, int64 [N].
        valid: logits and features of other known images, by which the threshold is chosen.
    """
    means = precision = overall = None
    if features is not None and np.isfinite(features).all():
        wide = features.astype(np.float64)
        present, places = np.unique(labels, return_inverse=True)
        rows = np.array([wide[places == place].mean(axis=0) for place in range(len(present))])
        means = np.array([*rows, wide.mean(axis=0)], np.float32)
        precision, overall = _precision(wide - rows[places]), _precision(wide - wide.mean(axis=0))
    raw = Novelty(means=means, precision=precision, overall=overall, centre=(), scale=(), threshold=math.inf)
    parts = [part[np.isfinite(part)] for part in raw.parts(*valid)]
    scaled = replace(
        raw,
        centre=tuple(float(part.mean()) for part in parts),
        scale=tuple(float(part.std()) or 1.0 for part in parts),
    )
    scores = np.sort(scaled.score(*valid))
    rank = min(len(scores), math.ceil((len(scores) + 1) * KNOWN_SHARE))
    return replace(scaled, threshold=float(scores[rank - 1]))


def _precision(centred: np.ndarray) -> np.ndarray:
    """Return the inverse of the covariance of centred features [N, F], float32 [F, F]."""
    covariance = centred.T @ centred / len(centred)
    spread = np.trace(covariance) / len(covariance) or 1.0
    mixed = (1 - SHRINKAGE) * covariance + SHRINKAGE * spread * np.eye(len(covariance))
    return np.linalg.inv(mixed).astype(np.float32)


def _distances(features: np.ndarray, means_KF: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distances to each mean, float64 [N, K]."""
    from scipy.spatial.distance import cdist

    root = np.linalg.cholesky(precision.astype(np.float64))
    return cdist(features.astype(np.float64) @ root, means_KF @ root, "sqeuclidean")
