"""Confident learning: wrong labels, from probabilities of a model that was not trained on the images it judges.

After Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels" (JAIR 70, 2021,
arXiv 1911.00068): how often images of other classes get a label is estimated together with which labels these are, and
images with the lowest self-confidence, the probability of their own label, are listed. The paper counts errors by
thresholds on probabilities; of what a short training confuses, that takes much for errors. Here probabilities are
calibrated with a bias for each class, and Bayes' rule gives the probability that a label is wrong (see
`probability_wrong`).

Shape letters: N images, K classes, E errors.
"""

from dataclasses import dataclass

import numpy as np

from flatout.inference.calibration import bias_corrected

# A label is listed from this probability on that it is wrong: looking at an image costs less than a missed error.
LISTED_FROM = 0.15
# The share of wrong labels that the estimate starts from, the most steps, and the change that ends it, in images.
START, MOST_STEPS, LEAST_CHANGE = 0.1, 500, 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Errors:
    """Likely wrong labels, the surest first.

    Attributes:
        index: of the images, int64 [E].
        given, suggested: classes, int64 [E]; in multi-label tasks `given` is the class whose presence is wrong, and
            `suggested` 1 where it should be added, 0 where removed.
        confidence: the probability that the label is wrong, float [E].
    """

    index: np.ndarray
    given: np.ndarray
    suggested: np.ndarray
    confidence: np.ndarray

    def __len__(self) -> int:
        return len(self.index)


def probability_wrong(own_N: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the probability that each label is wrong, float64 [N].

    An image is labelled k with probability p = c (1 - s) + (1 - c) r: c is that of being of class k, s the share of
    wrong labels, and r the rate at which images of other classes are labelled k. The label k is wrong with probability
    (1 - c) r / p. The mean of these is s again, until it stays the same. The share is one for all classes: where a
    network knows little, shares of single classes would grow until all labels of a class are wrong.

    Args:
        own_N: p for the given label, calibrated on the labels as they are.
        labels_N: int64 [N].
    """
    count_K = np.bincount(labels_N)
    own_N, share = np.maximum(own_N, np.finfo(np.float64).tiny), START
    wrong_N = np.zeros(len(labels_N))
    for _ in range(MOST_STEPS):
        rate_N = np.minimum(1, share * count_K / np.maximum(1, len(labels_N) - count_K))[labels_N]
        clean_N = np.clip((own_N - rate_N) / np.maximum(1e-6, 1 - share - rate_N), 0, 1)
        wrong_N = np.where(own_N <= rate_N, 1.0, np.minimum(1, (1 - clean_N) * rate_N / own_N))
        before, share = share, wrong_N.mean()
        if abs(share - before) * len(labels_N) < LEAST_CHANGE:
            break
    return wrong_N


def find_errors(probabilities_NK: np.ndarray, labels_N: np.ndarray) -> Errors:
    """Return the labels that are likely wrong, the surest first.

    Only images whose most probable class is another one are errors; it is the suggestion.

    Args:
        probabilities_NK: float [N, K], of a model that was not trained on the image.
        labels_N: int64 [N].
    """
    calibrated_NK = bias_corrected(np.log(np.maximum(probabilities_NK, 1e-7)), labels_N)
    wrong_N = probability_wrong(calibrated_NK[np.arange(len(labels_N)), labels_N], labels_N)
    best_N = calibrated_NK.argmax(axis=1)
    index = np.flatnonzero((wrong_N >= LISTED_FROM) & (best_N != labels_N))
    index = index[np.argsort(-wrong_N[index], kind="stable")]
    return Errors(index=index, given=labels_N[index], suggested=best_N[index], confidence=wrong_N[index])


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
