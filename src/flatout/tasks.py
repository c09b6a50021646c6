"""Tasks: what labels mean, with the losses, metrics and predictions of each kind.

Formulas on logits are torch, and pure, since the XLA engine exports them. Everything else is NumPy.
Shape letters: N samples, B batch, V views, K outputs or classes.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flatout.config import Recipe
from flatout.config.settings import nearest
from flatout.utils.errors import InputError
from flatout.utils.run_files import JsonObject
from flatout.utils.style import plain

if TYPE_CHECKING:
    from torch import Tensor

# Binary decisions, the main one first: name, labels 0 and 1, probabilities.
Decisions = list[tuple[str, np.ndarray, np.ndarray]]

# Lower bound of probabilities, so that logarithms are finite.
MIN_PROBABILITY = 1e-12
# The k of the top-k accuracy, and the maximum number of listed confused pairs.
TOP, PAIRS = 5, 20
# The threshold of several labels without validation data.
DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task; equal tasks give equal results."""

    loss: str = ""  # this and the next two: see the recipe
    label_smoothing: float = 0.0
    is_balanced: bool = False  # class_weights = "balanced"
    label_mean: float = 0.0  # of regression labels, which are standardised
    label_std: float = 1.0
    thresholds: tuple[float, ...] = ()  # minimum probability at which each class is predicted; empty for 1/2
    own_metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()  # names, and functions of labels and predictions
    temperature: float = 1.0  # divisor of the logits; see `inference.calibration`

    name: ClassVar[str]  # the recipe's `task`
    losses: ClassVar[tuple[str, ...]]  # the recipe's choices of `loss`, the default first
    metric_names: ClassVar[tuple[str, ...]]  # the keys of `metrics`; the first one is drawn and printed
    metric_title: ClassVar[str]  # of the curve of the first one
    description: ClassVar[str]  # the metrics in words
    report_remark: ClassVar[str]  # what the report has below the first one
    step_metric: ClassVar[str]  # what `step_metrics` returns, on average
    mixes_targets: ClassVar[bool]  # whether targets are mixed before the loss, or else two losses
    # Recipe keys with the only value that this task supports, and the reason.
    only: ClassVar[Mapping[str, tuple[Any, str]]] = {}

    def num_outputs(self, classes: int) -> int:
        """Return K for a number of classes."""
        return classes

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """Return the targets of the loss for labels of a pack: [N] or [N, K], int64 or float32."""
        return labels

    def blank_labels(self, count: int, classes: int) -> np.ndarray:
        """Return labels of which only shape and type matter."""
        return np.zeros(count, np.int64)

    def class_weights(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return float32 [classes] for `class_weights = "balanced"`."""
        raise NotImplementedError

    def sample_weights(self, labels: np.ndarray, class_weights: np.ndarray | None) -> np.ndarray | None:
        """Return the weight of each sample in the loss, float32 [N]; None if all are equal."""
        return None

    # --- formulas -----------------------------------------------------------------------------------------------

    @abstractmethod
    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """Return the loss of each sample, float32 [B]; without sample weights."""

    def mixed(self, loss_of: Callable[[Any], Any], targets: Any, partners: Any, share_B: Any) -> Any:
        """Return the losses of mixtures, [B], linear in the partners' shares `share_B`.

        For targets that are indices, the losses are mixed instead. Arrays are torch's or JAX's.
        """
        if self.mixes_targets:
            share = share_B.reshape(-1, *[1] * (targets.ndim - 1))
            return loss_of(targets + share * (partners - targets))
        losses = loss_of(targets)
        return losses + share_B * (loss_of(partners) - losses)

    @abstractmethod
    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the metric that training steps add up, of each sample, float32 [B]."""

    @abstractmethod
    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        """Return the probability of each class, float32 [B, classes]; in regression the numbers, [B, 1]."""

    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        """Return the predictions: classes int64 [B], -1 if not finite; probabilities [B, K]; or numbers [B]."""
        return self.probabilities(logits_BK)

    def predicted_from(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the predictions from `probabilities` [N, classes], such as means over several models."""
        return probabilities

    @abstractmethod
    def averaged(self, logits_VBK: "Tensor") -> "Tensor":
        """Return logits [B, K] whose probabilities, or numbers, are the mean of those of several views."""

    # --- results ------------------------------------------------------------------------------------------------

    @abstractmethod
    def metrics(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return `metric_names` with their values."""

    @abstractmethod
    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the plain loss of each sample, float64 [N], from probabilities float64 [N, classes]."""

    def own(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the user's metrics by name."""
        answers, found = self.decided(predicted), {}
        for name, function in self.own_metrics:
            try:
                found[name] = float(function(labels, answers))
            except Exception as error:
                raise InputError(f"metrics: {name} raised {type(error).__name__}: {error}") from error
        return found

    def selection_metric(self, metrics: dict[str, float]) -> float:
        """Return the metric that chooses the best epoch; the higher, the better."""
        return metrics[self.metric_names[0]]

    def selection_error(self, metric: float, count: int) -> float:
        """Return the standard error of a `selection_metric` of so many images, if it is an accuracy, else 0."""
        return 0.0

    def remark(self, split: str, figures: JsonObject) -> str:
        """Return the remark below the first metric of a split in the report; "" if figures are missing."""
        with contextlib.suppress(KeyError):
            return self.report_remark.format(**_of(split, figures))
        return ""

    def tuned(self, predicted: np.ndarray, labels: np.ndarray) -> "Task":
        """Return the task with thresholds tuned on the validation split."""
        return self

    def decided(self, predicted: np.ndarray) -> np.ndarray:
        """Return the final predictions, in the form of labels."""
        return predicted

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[JsonObject]:
        """Return `class`, `precision`, `recall`, `f1` and `support` of each class, 0 if undefined; [] in regression."""
        return []

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> JsonObject:
        """Return the metrics that are computed once, after training, from finite `probabilities`."""
        return {}

    def confused_pairs(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[JsonObject]:
        """Return mistakes made more than once: `actual`, `predicted`, `count`, and `of`, the actual class's images."""
        return []

    def decisions(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> Decisions:
        """Return the decisions that have ROC curves."""
        return []

    @abstractmethod
    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> JsonObject:
        """Return the fields of a `Prediction` for one row of `probabilities`."""

    # --- report -------------------------------------------------------------------------------------------------

    @abstractmethod
    def text(self, label: object, classes: Sequence[str]) -> str:
        """Return a label, or a prediction, in words."""

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        """Return whether each prediction is right, bool [N]; None in regression."""
        return answers == labels

    @abstractmethod
    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return the positions of mistakes, int64, the worst first."""

    def confidence(self, answer: object, probabilities_K: np.ndarray) -> float | None:
        """Return the probability of a prediction, or None."""
        return None


def _of(split: str, figures: JsonObject) -> JsonObject:
    """Return the figures of a split without its prefix; `plain_mae` has no exponent."""
    found = {key.removeprefix(f"{split}_"): value for key, value in figures.items() if value is not None}
    return found | {"plain_mae": plain(found["mae"])} if "mae" in found else found


class SingleLabel(Task):
    """Single-label classification: one class per image; two classes may have a single sigmoid logit."""

    name = "single-label"
    losses = ("cross-entropy", "binary-cross-entropy")
    metric_names = ("accuracy", "correct", "balanced_accuracy")
    step_metric = "accuracy"
    metric_title = "Accuracy"
    description = "accuracy {accuracy:.4f} ({correct:,} of {count:,} right)"
    report_remark = "{correct:,} of {count:,} right"
    mixes_targets = False

    def num_outputs(self, classes: int) -> int:
        if self.loss != "binary-cross-entropy":
            return classes
        if classes != 2:
            raise InputError(f"loss = {self.loss!r}: needs 2 classes, the data has {classes}; try cross-entropy")
        return 1

    def class_weights(self, labels: np.ndarray, classes: int) -> np.ndarray:
        # Inverse to the number of samples of each class, and 1 on average over the samples.
        counts = np.bincount(labels, minlength=classes)
        inverse = len(labels) / (np.count_nonzero(counts) * np.maximum(1, counts))
        return np.where(counts > 0, inverse, 0).astype(np.float32)

    def sample_weights(self, labels: np.ndarray, class_weights: np.ndarray | None) -> np.ndarray | None:
        return None if class_weights is None else class_weights[labels]

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """See `Task`; label smoothing moves that share of the target evenly over all classes (arXiv 1512.00567)."""
        from torch.nn import functional

        logits = logits_BK.float()
        if self.loss == "binary-cross-entropy":
            target = targets.to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
            return functional.binary_cross_entropy_with_logits(logits[:, 0], target, reduction="none")
        return functional.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        return (self.predicted(logits_BK) == targets).float()

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        import torch

        logits = logits_BK.float() / self.temperature
        if logits.shape[1] == 1:
            positive = logits.sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        return logits.softmax(dim=1)

    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        best_B = (logits_BK[:, 0] > 0).long() if logits_BK.shape[1] == 1 else logits_BK.argmax(dim=1)
        return best_B.where(logits_BK.isfinite().all(dim=1), -1)

    def predicted_from(self, probabilities: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(probabilities).all(axis=1), probabilities.argmax(axis=1), -1)

    def averaged(self, logits_VBK: "Tensor") -> "Tensor":
        logits = logits_VBK.float()
        if logits.shape[2] == 1:
            return averaged_sigmoid(logits)
        # Logits are defined up to a constant, chosen here so that their energy is the mean over the views.
        return logits.log_softmax(2).logsumexp(0) - math.log(len(logits)) + logits.logsumexp(2).mean(0)[:, None]

    def metrics(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        counts_K = np.bincount(labels)
        correct_K = np.bincount(labels[predicted == labels], minlength=len(counts_K))
        return {
            "accuracy": int(correct_K.sum()) / len(labels),
            "correct": int(correct_K.sum()),
            "balanced_accuracy": float(np.mean(correct_K[counts_K > 0] / counts_K[counts_K > 0])),
        }

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], MIN_PROBABILITY))

    def selection_metric(self, metrics: dict[str, float]) -> float:
        # Records of earlier versions have no balanced accuracy.
        return metrics.get("balanced_accuracy", 0.0) if self.is_balanced else metrics["accuracy"]

    def selection_error(self, metric: float, count: int) -> float:
        return math.sqrt(metric * (1 - metric) / count)

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[JsonObject]:
        counted = labels[answers == labels], answers[answers >= 0], labels
        return _by_class(classes, *(np.bincount(some, minlength=len(classes)) for some in counted))

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> JsonObject:
        K = probabilities.shape[1]
        found: JsonObject = {"accuracy_interval": list(wilson(int((predicted == labels).sum()), len(labels)))}
        is_finite = np.isfinite(probabilities).all(axis=1)
        if K > TOP:
            best = np.argsort(-probabilities[is_finite], axis=1, kind="stable")[:, :TOP]
            found["top5_accuracy"] = float((best == labels[is_finite, None]).sum()) / len(labels)
        for _, labels_N, probabilities_N in self.decisions(labels, probabilities, [""] * K):
            # Importing it takes a second, which other runs save.
            from sklearn.metrics import average_precision_score, roc_auc_score

            found["roc_auc"] = float(roc_auc_score(labels_N, probabilities_N))
            found["average_precision"] = float(average_precision_score(labels_N, probabilities_N))
        return found

    def confused_pairs(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[JsonObject]:
        matrix_KK = confusion(answers, labels, len(classes))
        count_K = matrix_KK.sum(axis=1) + np.bincount(labels[answers < 0], minlength=len(classes))
        np.fill_diagonal(matrix_KK, 0)
        most = np.argsort(-matrix_KK, axis=None, kind="stable")[:PAIRS].tolist()
        cells = [(a, p, int(matrix_KK[a, p])) for a, p in (divmod(cell, len(classes)) for cell in most)]
        return [
            {"actual": classes[a], "predicted": classes[p], "count": count, "of": int(count_K[a])}
            for a, p, count in cells
            if count > 1
        ]

    def decisions(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> Decisions:
        is_finite = np.isfinite(probabilities).all(axis=1)
        if len(classes) != 2 or len(np.unique(labels[is_finite])) != 2:
            return []
        return [(classes[1], labels[is_finite], probabilities[is_finite, 1])]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> JsonObject:
        best = np.argsort(-row, kind="stable")[:top]
        return {"classes": tuple(classes[i] for i in best), "probabilities": tuple(row[best].tolist())}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return classes[int(label)] if label >= 0 else "none"

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        wrong = np.flatnonzero(predicted != labels)
        return wrong[np.argsort(-np.nan_to_num(probabilities[wrong].max(axis=1)), kind="stable")]

    def confidence(self, answer: Any, probabilities_K: np.ndarray) -> float | None:
        return float(probabilities_K[answer]) if answer >= 0 else None


def _by_class(
    classes: Sequence[str], right_K: np.ndarray, answered_K: np.ndarray, actual_K: np.ndarray
) -> list[JsonObject]:
    """See `Task.per_class`, for the right answers, all answers, and the labels of each class."""
    figures = {
        "precision": right_K / np.maximum(1, answered_K),
        "recall": right_K / np.maximum(1, actual_K),
        "f1": 2 * right_K / np.maximum(1, answered_K + actual_K),
        "support": actual_K,
    }
    columns = {"class": classes} | {name: column.tolist() for name, column in figures.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, by Wilson's method (JASA 22, 1927)."""
    z, share = NormalDist().inv_cdf(0.975), right / count
    middle, scale = share + z**2 / (2 * count), 1 + z**2 / count
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def averaged_sigmoid(logits_VBK: "Tensor") -> "Tensor":
    """Return logits [B, K] whose sigmoid is the mean over the views."""
    from torch.nn import functional

    return functional.logsigmoid(logits_VBK).logsumexp(0) - functional.logsigmoid(-logits_VBK).logsumexp(0)


def confusion(answers: np.ndarray, labels: np.ndarray, K: int) -> np.ndarray:
    """Return counts int64 [K, K], a row per actual class, without predictions that are not finite."""
    cells = labels[answers >= 0] * K + answers[answers >= 0]
    return np.bincount(cells, minlength=K * K).reshape(K, K)


class MultiLabel(Task):
    """Multi-label classification: any number of classes per image, one sigmoid logit per class."""

    name = "multi-label"
    losses = ("binary-cross-entropy",)
    metric_names = ("map", "f1_macro", "f1_micro")
    step_metric = "exact_match"
    metric_title = "Mean average precision"
    description = "mAP {map:.4f}, F1 {f1_macro:.4f} (macro), {f1_micro:.4f} (micro)"
    report_remark = "F1 {f1_macro:.3f} (macro), {f1_micro:.3f} (micro)"
    mixes_targets = True

    def blank_labels(self, count: int, classes: int) -> np.ndarray:
        return np.zeros((count, classes), np.uint8)

    def targets(self, labels: np.ndarray) -> np.ndarray:
        return labels.astype(np.float32)

    def class_weights(self, labels: np.ndarray, classes: int) -> np.ndarray:
        # Where the class is present: images without it by images with it.
        positive_K = labels.sum(axis=0, dtype=np.int64)
        return ((len(labels) - positive_K) / np.maximum(positive_K, 1)).astype(np.float32)

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """See `Task`: the mean over the classes; label smoothing s moves the targets 0 and 1 to s/2 and 1 - s/2."""
        from torch.nn import functional

        smoothed = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses_BK = functional.binary_cross_entropy_with_logits(
            logits_BK.float(), smoothed, reduction="none", pos_weight=class_weights
        )
        return losses_BK.mean(dim=1)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        return ((logits_BK > 0) == (targets > 0.5)).all(dim=1).float()

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.float().sigmoid()

    def averaged(self, logits_VBK: "Tensor") -> "Tensor":
        return averaged_sigmoid(logits_VBK.float())

    def metrics(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """See `Task`, and scikit-learn's `average_precision_score` and `f1_score`; a class without images counts 0."""
        from sklearn.metrics import average_precision_score

        answers = self.decided(predicted)
        correct_K = (answers * labels).sum(axis=0, dtype=np.int64)
        either_K = answers.sum(axis=0, dtype=np.int64) + labels.sum(axis=0, dtype=np.int64)
        columns = zip(np.nan_to_num(predicted).T, labels.T, strict=True)
        precisions = [average_precision_score(y, p) if y.any() else 0.0 for p, y in columns]
        return {
            "map": float(np.mean(precisions)),
            "f1_macro": float(np.mean(2 * correct_K / np.maximum(1, either_K))),
            "f1_micro": float(2 * correct_K.sum() / max(1, either_K.sum())),
        }

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        given_NK = np.where(labels > 0, probabilities, 1 - probabilities)
        return -np.log(np.maximum(given_NK, MIN_PROBABILITY)).mean(axis=1)

    def tuned(self, predicted: np.ndarray, labels: np.ndarray) -> "Task":
        thresholds = [best_threshold(p, y) for p, y in zip(predicted.T, labels.T, strict=True)]
        return replace(self, thresholds=tuple(thresholds))

    def decided(self, predicted: np.ndarray) -> np.ndarray:
        return (predicted >= np.array(self.thresholds or (DEFAULT_THRESHOLD,))).astype(np.uint8)

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[JsonObject]:
        return _by_class(classes, *(x.sum(axis=0, dtype=np.int64) for x in (answers * labels, answers, labels)))

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> JsonObject:
        from sklearn.metrics import roc_auc_score

        found = self.decisions(labels, probabilities, [""] * labels.shape[1])[1:]
        return {"roc_auc": float(np.mean([roc_auc_score(*each) for _, *each in found]))} if found else {}

    def decisions(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> Decisions:
        is_finite = np.isfinite(probabilities).all(axis=1)
        labels, probabilities = labels[is_finite], probabilities[is_finite]
        columns = [(name, labels[:, k], probabilities[:, k]) for k, name in enumerate(classes)]
        columns = [("all decisions", labels.ravel(), probabilities.ravel()), *columns]
        return [column for column in columns if len(np.unique(column[1])) == 2]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> JsonObject:
        decided = self.decided(row)
        best = [i for i in np.argsort(-row, kind="stable") if decided[i]]
        return {"classes": tuple(classes[i] for i in best), "probabilities": tuple(row[best].tolist())}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return ", ".join(name for name, present in zip(classes, label, strict=True) if present) or "none"

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        return (answers == labels).all(axis=1)

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        answers = self.decided(predicted)
        worst = (np.abs(np.nan_to_num(predicted) - labels) * (answers != labels)).max(axis=1)
        order = np.argsort(-worst, kind="stable")
        return order[(answers != labels).any(axis=1)[order]]


def best_threshold(predicted_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the threshold with the highest F1, halfway to the next lower probability; 1/2 without positives."""
    from sklearn.metrics import precision_recall_curve

    if not labels_N.any():
        return DEFAULT_THRESHOLD
    precision, recall, reached = precision_recall_curve(labels_N, np.nan_to_num(predicted_N.astype(np.float64)))
    f1 = precision * recall / np.maximum(precision + recall, MIN_PROBABILITY)
    # Of equally good thresholds the highest; the last point of the curve has none.
    best = len(reached) - 1 - int(np.argmax(f1[-2::-1]))
    return float((reached[best] + (reached[best - 1] if best else 0.0)) / 2)


class Regression(Task):
    """A number for each image. Networks train on standardised ones, which suit any rate; the rest is in their unit."""

    name = "regression"
    losses = ("mse", "huber")
    metric_names = ("mae", "r2")
    step_metric = "mae"
    metric_title = "Mean absolute error"
    description = "mean absolute error {plain_mae}, R² {r2:.4f}"
    report_remark = "R² {r2:.3f}"
    mixes_targets = True
    only: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "label_smoothing": (0.0, "smooths classes"),
        "class_weights": ("none", "weighs classes"),
        "augment.cutmix": (0.0, "the number of a patchwork of two images is unknown"),
    }

    def num_outputs(self, classes: int) -> int:
        return 1

    def targets(self, labels: np.ndarray) -> np.ndarray:
        return ((labels.astype(np.float64) - self.label_mean) / self.label_std).astype(np.float32)

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """See `Task`: the squared error, or the Huber loss with delta 1, of standardised numbers."""
        error = logits_BK.float()[:, 0] - targets
        if self.loss == "mse":
            return error.square()
        size = error.abs()
        return (0.5 * error.square()).where(size < 1, size - 0.5)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        return (logits_BK.float()[:, 0] - targets).abs() * self.label_std

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.float() * self.label_std + self.label_mean

    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        return self.probabilities(logits_BK)[:, 0]

    def predicted_from(self, probabilities: np.ndarray) -> np.ndarray:
        return probabilities[:, 0]

    def averaged(self, logits_VBK: "Tensor") -> "Tensor":
        return logits_VBK.float().mean(dim=0)

    def metrics(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """See `Task`, and scikit-learn's `mean_absolute_error` and `r2_score`; R² of equal labels is 0."""
        error, actual = predicted.astype(np.float64) - labels, labels.astype(np.float64)
        total = float(np.square(actual - actual.mean()).sum())
        explained = 1 - float(np.square(error).sum()) / total if total else 0.0
        return {"mae": float(np.abs(error).mean()), "r2": explained}

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.abs(probabilities[:, 0] - labels)

    def selection_metric(self, metrics: dict[str, float]) -> float:
        return -metrics["mae"]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> JsonObject:
        return {"value": float(row[0])}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return plain(label)

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        return None

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        return np.argsort(-np.nan_to_num(np.abs(predicted - labels), nan=np.inf), kind="stable")


def statistics(labels: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of the training labels, which must not all be equal."""
    mean, std = float(labels.mean(dtype=np.float64)), float(labels.std(dtype=np.float64))
    if not std > 0:
        raise InputError(f"all training images have the label {mean:g}: there is nothing to learn")
    return mean, std


TASKS: dict[str, type[Task]] = {task.name: task for task in (SingleLabel, MultiLabel, Regression)}


def task_named(name: object) -> Task:
    """Return a task without a recipe, for displaying results; single-label for an unknown name."""
    return TASKS.get(str(name), SingleLabel)()


def task_of(recipe: Recipe) -> Task:
    """Return the task of a recipe; `auto` is treated as single-label."""
    return TASKS["single-label" if recipe.task == "auto" else recipe.task](
        loss=recipe.loss,
        label_smoothing=recipe.label_smoothing,
        is_balanced=recipe.class_weights == "balanced",
        label_mean=recipe.data.label_mean,
        label_std=recipe.data.label_std or 1.0,
    )


def weights_of(recipe: Recipe, task: Task, labels: np.ndarray, classes: Sequence[str]) -> np.ndarray | None:
    """Return the weights of the classes in the loss, float32 [classes]; None if all are equal."""
    given = recipe.class_weights
    if isinstance(given, str):
        return task.class_weights(labels, len(classes)) if task.is_balanced else None
    if isinstance(given, dict):
        if unknown := given.keys() - set(classes):
            name = min(unknown)
            raise InputError(f"class_weights: the data has no class {name!r}; {nearest(name, classes)}")
        return np.array([given.get(name, 1.0) for name in classes], np.float32)
    if len(given) != len(classes):
        raise InputError(
            f"class_weights has {len(given)} numbers, but the data has {len(classes)} classes; "
            'for some alone, name them: {"' + classes[0] + '": 2.0}'
        )
    return np.array(given, np.float32)


def describe_metrics(split: str, figures: JsonObject) -> str:
    """Return the main metrics of a split in words; `figures` are those of `summary.json`, including `task`."""
    return f"{split} {TASKS[figures['task']].description.format(**_of(split, figures))}"


def with_task(recipe: Recipe, name: str, note: Callable[[str], None] = lambda sentence: None) -> Recipe:
    """Return a recipe with the task of the data, and that task's loss in place of a default loss, which is noted."""
    task = TASKS[name]
    if recipe.task not in ("auto", name):
        raise InputError(f"task = {recipe.task!r}: the labels of the data are {name}; set task = {name!r}")
    loss = task.losses[0] if recipe.loss == Recipe.loss else recipe.loss
    if loss not in task.losses:
        raise InputError(f"loss = {loss!r}: the losses of a {name} task are {', '.join(task.losses)}")
    flat = recipe.flat()
    for key, (value, reason) in task.only.items():
        if flat[key] != value:
            raise InputError(f"{key} = {flat[key]!r}: {reason}; a {name} task needs {key} = {value!r}")
    if loss != recipe.loss:
        note(f"loss = {loss}: the labels are {name}")
    return recipe.override({"task": name, "loss": loss})
