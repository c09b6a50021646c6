"""Unknown images: how unlike the training images one is, from the features and logits of a network.

Shape letters: N images, F features, K classes.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flatout.numerics.calibration import both_logits

if TYPE_CHECKING:
    import torch

# So many known images are not answered "unknown".
KNOWN_SHARE = 0.95
# This share of the mean variance is added to the variance in every direction.
SHRINKAGE = 0.01
# Images in memory as 64-bit numbers.
AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """Where the features of training images are.

    Attributes:
        means: of the features of each class, and of all images in the last row, float32 [K + 1, F].
        precision, overall: the inverse covariances float32 [F, F] within the classes, and of all images.
    """

    means: np.ndarray
    precision: np.ndarray
    overall: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray | None, labels: np.ndarray) -> "Known | None":
        """Return it for features [N, F] of training images with labels int64 [N]; None where not all are finite."""
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

    def distances(self, features: np.ndarray) -> np.ndarray:
        """Return the relative Mahalanobis distance of each image, float32 [N], for features [N, F].

        It is the squared distance to the nearest class mean, less that to the mean of all images.
        """
        import torch

        def nearest(root: "torch.Tensor", means: "torch.Tensor") -> "torch.Tensor":
            points = rows @ root
            squares = points.square().sum(1, keepdim=True) + means.square().sum(1) - 2 * points @ means.T
            return squares.amin(dim=1)

        found = []
        for start in range(0, max(1, len(features)), AT_ONCE):
            rows = torch.from_numpy(features[start : start + AT_ONCE].astype(np.float64))
            within, overall = (nearest(*pair) for pair in self._whitened)
            found.append((within - overall).float())
        return torch.cat(found).numpy()

    @cached_property
    def _whitened(self) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """For both covariances, what features are multiplied by so that distances become Euclidean, and the means."""
        import torch

        means = torch.from_numpy(self.means).double()
        pairs = (self.precision, means[:-1]), (self.overall, means[-1:])
        roots = [(torch.linalg.cholesky(torch.from_numpy(precision).double()), rows) for precision, rows in pairs]
        return [(root, rows @ root) for root, rows in roots]


@dataclass(frozen=True, kw_only=True, eq=False)
class Novelty:
    """A score that is higher for images unlike the training images, and the threshold of unknown ones.

    The score is the sum of two parts, each standardised on validation images: the energy of the logits (Liu et al.,
    arXiv 2010.03759), and the relative Mahalanobis distance of the features (Ren et al., arXiv 2106.09022).

    Attributes:
        known: what distances are from; None where there are no features, and the energy counts alone.
        centre, scale: mean and standard deviation of the energy, and of the distance if there are features.
        threshold: the score from which on an image is unknown.
    """

    known: Known | None
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    threshold: float

    def score(self, logits: np.ndarray, features: np.ndarray | None) -> np.ndarray:
        """Return the score of each image, float64 [N]; infinite where an output is not finite."""
        return self.score_at(logits, self.known.distances(features) if self.known and features is not None else None)

    def score_at(self, logits: np.ndarray, distances: np.ndarray | None) -> np.ndarray:
        """Return the same for `Known.distances`."""
        parts = _parts(logits, distances)
        scaled = [(part - c) / s for part, c, s in zip(parts, self.centre, self.scale, strict=True)]
        return np.nan_to_num(np.sum(scaled, axis=0), nan=np.inf, posinf=np.inf, neginf=np.inf)


def _parts(logits: np.ndarray, distances: np.ndarray | None) -> list[np.ndarray]:
    """Return the energy, and the distance if there is one, each [N]."""
    from scipy.special import logsumexp

    # A single logit has no sign that means known.
    wide = both_logits(logits) if logits.shape[1] > 1 else np.abs(logits.astype(np.float64))
    energy: np.ndarray = -np.asarray(logsumexp(wide, axis=1))
    return [energy] if distances is None else [energy, distances]


def fit(known: Known | None, logits: np.ndarray, distances: np.ndarray | None) -> Novelty:
    """Return the score for a network.

    Args:
        known: of training images; None for the energy alone.
        logits: of other known images, by which the threshold is chosen, [N, K].
        distances: of the same images, [N], if `known` is given.
    """
    raw = [part[np.isfinite(part)] for part in _parts(logits, distances)]
    unset = Novelty(
        known=known,
        centre=tuple(float(part.mean()) for part in raw),
        scale=tuple(float(part.std()) or 1.0 for part in raw),
        threshold=math.inf,
    )
    scores = np.sort(unset.score_at(logits, distances))
    rank = min(len(scores), math.ceil((len(scores) + 1) * KNOWN_SHARE))
    return replace(unset, threshold=float(scores[rank - 1]))


def _precision(features: np.ndarray, centres: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the inverse covariance of features [N, F] around their centres, float32 [F, F].

    Args:
        features: of images.
        centres: of the features, float64 [C, F].
        places: which centre each image has, int64 [N].
    """
    covariance = np.zeros((features.shape[1],) * 2)
    # 64-bit copies of all features would take much memory.
    for start in range(0, len(features), AT_ONCE):
        centred = features[start : start + AT_ONCE] - centres[places[start : start + AT_ONCE]]
        covariance += centred.T @ centred / len(features)
    spread = np.trace(covariance) / len(covariance) or 1.0
    mixed = (1 - SHRINKAGE) * covariance + SHRINKAGE * spread * np.eye(len(covariance))
    return np.linalg.inv(mixed).astype(np.float32)
