"""Confident learning: wrong labels, from probabilities of a model that was not trained on the images it judges.

Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels" (JAIR 70, 2021,
arXiv 1911.00068).

Shape letters: N images, K classes, E errors.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Errors:
    """Likely wrong labels, the surest first.

    Attributes:
        index: of the images, int64 [E].
        given, suggested: classes, int64 [E]; in multi-label tasks `given` is the class whose presence is wrong, and
            `suggested` 1 where it should be added, 0 where removed.
        confidence: by how much the probability of the suggestion exceeds that of the given label, 0 to 1, float [E].
    """

    index: np.ndarray
    given: np.ndarray
    suggested: np.ndarray
    confidence: np.ndarray

    def __len__(self) -> int:
        return len(self.index)


def confident_joint(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the estimated number of images of each given and each true class, float64 [K, K].

    An image counts for the most probable class among those whose probability reaches the mean of that class over the
    images that have it as their label (section 3.1). Rows are scaled to the number of labels of each class.
    """
    K = probabilities_NK.shape[1]
    count_K = np.bincount(labels_N, minlength=K)
    own_N = probabilities_NK[np.arange(len(labels_N)), labels_N]
    threshold_K = np.bincount(labels_N, own_N, K) / np.maximum(count_K, 1)
    # A class without images has no threshold, and no image is taken to be of it.
    threshold_K[count_K == 0] = np.inf
    eligible_NK = np.where(probabilities_NK >= threshold_K, probabilities_NK, -1.0)
    confident_N = eligible_NK.argmax(axis=1)
    is_confident = eligible_NK.max(axis=1) >= 0
    cells = labels_N[is_confident] * K + confident_N[is_confident]
    joint_KK = np.bincount(cells, minlength=K * K).reshape(K, K).astype(np.float64)
    # A class of which nothing is certain is taken to be right.
    empty = joint_KK.sum(axis=1) == 0
    joint_KK[empty, empty] = 1.0
    return joint_KK / joint_KK.sum(axis=1, keepdims=True) * count_K[:, None]


def find_errors(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> Errors:
    """Return the labels that are likely wrong: pruning by noise rate, ranked by normalised margin (section 3.2).

    Of the images of a given class i, as many as the confident joint estimates to be of class j are taken, those with
    the largest margin of j over i. Only images whose most probable class is j are errors.
    """
    count, rows = len(labels_N), np.arange(len(labels_N))
    joint_KK = confident_joint(probabilities_NK, labels_N)
    best_N = probabilities_NK.argmax(axis=1)
    margin_N = probabilities_NK[rows, best_N] - probabilities_NK[rows, labels_N]
    found = np.zeros(count, bool)
    for given, wanted in zip(*np.nonzero(np.rint(joint_KK)), strict=True):
        if given != wanted:
            of = np.flatnonzero((labels_N == given) & (best_N == wanted))
            most = np.argsort(-margin_N[of], kind="stable")[: int(np.rint(joint_KK[given, wanted]))]
            found[of[most]] = True
    index = np.flatnonzero(found)
    index = index[np.argsort(-margin_N[index], kind="stable")]
    return Errors(index=index, given=labels_N[index], suggested=best_N[index], confidence=margin_N[index])


def find_errors_of_several(probabilities_NK: np.ndarray, labels_NK: np.ndarray) -> Errors:
    """Return the presences and absences of classes that are likely wrong: each class is judged as two, on its own."""
    parts = []
    for k in range(labels_NK.shape[1]):
        present = probabilities_NK[:, k]
        found = find_errors(np.stack([1 - present, present], axis=1), labels_NK[:, k].astype(np.int64))
        parts.append(
            (found.index, np.full(len(found), k, np.int64), found.suggested.astype(np.int64), found.confidence)
        )
    index, given, suggested, confidence = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(-confidence, kind="stable")
    return Errors(index=index[order], given=given[order], suggested=suggested[order], confidence=confidence[order])
