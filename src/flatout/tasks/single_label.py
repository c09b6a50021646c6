"""One class for each image.

Shape letters: N samples, B batch, V views, K outputs or classes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe
from flatout.tasks.base import MIN_PROBABILITY, Curve, Task, class_rows, curve
from flatout.utils import style
from flatout.utils.errors import InputError
from flatout.utils.style import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

# Up to this many classes, the cells of a confusion matrix have numbers.
NUMBERS_UP_TO_CLASSES = 15
LABELS_AT_MOST, LABEL_WIDTH = 51, 20
# The k of the top-k accuracy, and the maximum number of listed confused pairs.
TOP, PAIRS = 5, 20


class SingleLabel(Task):
    """See the module."""

    name = "single-label"
    losses = ("cross-entropy", "binary-cross-entropy")
    metric_names = ("accuracy", "correct", "balanced_accuracy")
    step_metric = "accuracy"
    metric_title = "Accuracy"
    mixes_targets = False
    picture = (
        "Confusion matrix",
        "A row for each actual class, a column for each predicted class, on the {split} images.",
    )
    mistakes_shown = (
        "Most confident mistakes",
        "The {count} wrong answers on the {split} images with the highest probability."
        " They often show wrong labels too.",
    )
    table_columns = ("class", "images", "precision", "recall", "F1", "most often taken for")

    @staticmethod
    def check(recipe: Recipe) -> None:
        """See `Task.check`."""

    def num_outputs(self, classes: int) -> int:
        """See `Task.num_outputs`: binary cross-entropy takes one logit, that of class 1."""
        if self.loss != "binary-cross-entropy":
            return classes
        if classes != 2:
            raise InputError(
                f"loss = {self.loss!r}: needs 2 classes, the data has {classes}; try loss = 'cross-entropy'"
            )
        return 1

    def random_labels(self, rng: np.random.Generator, count: int, classes: int) -> np.ndarray:
        return rng.integers(0, classes, count)

    def targets(self, labels: np.ndarray) -> np.ndarray:
        return labels

    def class_weights(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return weights inverse to the number of samples of each class, and 1 on average over the samples."""
        counts = np.bincount(labels, minlength=classes)
        present = counts > 0
        weights = np.zeros(classes, np.float32)
        weights[present] = len(labels) / (present.sum() * counts[present])
        return weights

    def sample_weights(self, labels: np.ndarray, class_weights: np.ndarray | None) -> np.ndarray | None:
        return None if class_weights is None else class_weights[labels]

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """Return the loss of each sample, float32 [B].

        Cross-entropy is log-softmax followed by the negative log-likelihood. Label smoothing moves that share of the
        target evenly over all classes (Szegedy et al., arXiv 1512.00567).
        """
        from torch.nn import functional

        logits = logits_BK.float()
        if self.loss == "binary-cross-entropy":
            target = targets.to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
            return functional.binary_cross_entropy_with_logits(logits[:, 0], target, reduction="none")
        return functional.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        """Return 1 if the prediction is right, else 0."""
        return (self.predicted(logits_BK) == targets).float()

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        """See `Task.probabilities`; a single logit becomes two classes."""
        import torch

        logits = logits_BK.float() / self.temperature
        if logits.shape[1] == 1:
            positive = logits.sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        return logits.softmax(dim=1)

    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        """Return the most probable class of each sample, int64 [B]; -1 where the logits are not finite."""
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
        """Return accuracy, the number of right answers, and the mean accuracy over the classes."""
        counts_K = np.bincount(labels)
        correct_K = np.bincount(labels[predicted == labels], minlength=len(counts_K))
        return {
            "accuracy": int(correct_K.sum()) / len(labels),
            "correct": int(correct_K.sum()),
            "balanced_accuracy": float(np.mean(correct_K[counts_K > 0] / counts_K[counts_K > 0])),
        }

    def guessing_loss(self, classes: int) -> float:
        return math.log(max(2, classes))

    @staticmethod
    def describe(split: str, figures: Mapping[str, Any]) -> str:
        share, right, count = (figures[f"{split}_{key}"] for key in ("accuracy", "correct", "count"))
        return f"{split} accuracy {share:.4f} ({right:,} of {count:,} right)"

    def remark(self, split: str, figures: Mapping[str, Any]) -> str:
        correct, count = figures.get(f"{split}_correct"), figures.get(f"{split}_count") or 0
        return f"{correct:,} of {count:,} right" if correct is not None else ""

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """See `Task.losses_of`: cross-entropy."""
        return -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], MIN_PROBABILITY))

    def selection_metric(self, metrics: dict[str, float]) -> float:
        """See `Task.selection_metric`; classes are weighted as in the loss."""
        # Records of earlier versions have no balanced accuracy.
        return metrics.get("balanced_accuracy", 0.0) if self.is_balanced else metrics["accuracy"]

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
        return class_rows(answers, labels, classes)

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
        """Return the interval of the accuracy; the top-5 accuracy for more than five classes; areas for two."""
        from sklearn.metrics import top_k_accuracy_score

        K = probabilities.shape[1]
        found: dict[str, Any] = {"accuracy_interval": list(wilson(int((predicted == labels).sum()), len(labels)))}
        is_finite = np.isfinite(probabilities).all(axis=1)
        if K > TOP:
            right = is_finite.any() and top_k_accuracy_score(
                labels[is_finite], probabilities[is_finite], k=TOP, labels=np.arange(K), normalize=False
            )
            found["top5_accuracy"] = float(right) / len(labels)
        if binary := self.curves(labels, probabilities, [""] * K):
            found |= {"roc_auc": binary[0].roc_auc, "average_precision": binary[0].average_precision}
        return found

    def confused_pairs(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
        """See `Task.confused_pairs`; single mistakes are left out."""
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

    def curves(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> list[Curve]:
        """Return the curves of the second of two classes, if both have images."""
        is_finite = np.isfinite(probabilities).all(axis=1)
        if len(classes) != 2 or len(np.unique(labels[is_finite])) != 2:
            return []
        return [curve(classes[1], labels[is_finite], probabilities[is_finite, 1])]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> dict[str, Any]:
        """Return the `top` most probable classes, best first."""
        best = np.argsort(-row, kind="stable")[:top]
        return {"classes": tuple(classes[i] for i in best), "probabilities": tuple(row[best].tolist())}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return classes[int(label)] if label >= 0 else "none"

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        return answers == labels

    def class_table(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[tuple[Any, ...]]:
        """See `Task.class_table`; the last cell is the most frequent wrong answer."""
        matrix_KK = confusion(answers, labels, len(classes))
        np.fill_diagonal(matrix_KK, 0)
        rival_K, times_K = matrix_KK.argmax(axis=1).tolist(), matrix_KK.max(axis=1).tolist()
        rows = []
        for row, rival, times in zip(self.per_class(answers, labels, classes), rival_K, times_K, strict=True):
            if row["support"]:
                taken_for = f"{classes[rival]} ({times:,}\u00a0×)" if times else "—"
                rows.append((*(row[key] for key in ("class", "support", "precision", "recall", "f1")), taken_for))
        return sorted(rows, key=lambda row: (row[4], -row[1]))

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return the wrong answers, the most confident first."""
        wrong = np.flatnonzero(predicted != labels)
        confidence = np.nan_to_num(probabilities[wrong].max(axis=1)) if len(wrong) else np.empty(0)
        return wrong[np.argsort(-confidence, kind="stable")]

    def confidence(self, answer: Any, probabilities_K: np.ndarray) -> float | None:
        return float(probabilities_K[answer]) if answer >= 0 else None

    def draw(self, path: Path, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
        draw_confusion(path, confusion(answers, labels, len(classes)), classes)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, by Wilson's method."""
    from scipy.stats import binomtest

    interval = binomtest(right, count).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def averaged_sigmoid(logits_VBK: "Tensor") -> "Tensor":
    """Return logits [B, K] whose sigmoid is the mean over the views."""
    from torch.nn import functional

    return functional.logsigmoid(logits_VBK).logsumexp(0) - functional.logsigmoid(-logits_VBK).logsumexp(0)


def confusion(answers: np.ndarray, labels: np.ndarray, K: int) -> np.ndarray:
    """Return counts int64 [K, K], a row per actual class, without predictions that are not finite."""
    cells = labels[answers >= 0] * K + answers[answers >= 0]
    return np.bincount(cells, minlength=K * K).reshape(K, K)


def draw_confusion(path: Path, matrix_KK: np.ndarray, classes: Sequence[str]) -> None:
    """Write the confusion matrix: counts [K, K], a row per actual class, a column per predicted class.

    A cell's colour is its share of the row, blue on the diagonal and red off it, on a square-root scale so that rare
    mistakes are visible; rows of classes without images are grey. Up to 15 classes the cells contain their counts;
    beyond 51 only some classes are labelled.
    """
    from matplotlib.colors import to_rgb

    K = len(classes)
    row_totals = matrix_KK.sum(axis=1, keepdims=True)
    shares_KK = matrix_KK / np.maximum(row_totals, 1)
    full_KKC = np.where(np.eye(K, dtype=bool)[..., None], to_rgb(style.RIGHT), to_rgb(style.WRONG))
    colours_KKC = 1 + (full_KKC - 1) * np.sqrt(shares_KK)[..., None]
    colours_KKC[row_totals[:, 0] == 0] = to_rgb(style.EMPTY)
    side = float(np.clip(2.6 + 0.42 * K, 4.2, 9.5))
    figure = style.new_figure(side + 0.6, side + 0.5, dpi=150)
    axes = figure.add_subplot()
    axes.imshow(colours_KKC)
    correct, total = int(np.trace(matrix_KK)), int(matrix_KK.sum())
    title = f"Accuracy {correct / total:.3f}: {correct:,} of {total:,} right" if total else "No predictions"
    axes.set_title(title, fontsize=11, weight="bold", color=style.INK, loc="left", pad=10)
    _label_classes(axes, classes)
    if K <= NUMBERS_UP_TO_CLASSES:
        for (row, column), count in np.ndenumerate(matrix_KK):
            colour = style.readable_on(colours_KKC[row, column])
            text = "" if not count else f"{int(count):,}" if count < 100_000 else f"{count:.0e}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5 if K > 5 else 10, color=colour)
        axes.set_xticks(np.arange(0.5, K - 1), minor=True)
        axes.set_yticks(np.arange(0.5, K - 1), minor=True)
        axes.grid(which="minor", color="#ffffff", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
    style.write_png(figure, path)


def _label_classes(axes: "Axes", classes: Sequence[str]) -> None:
    K = len(classes)
    ticks = range(0, K, math.ceil(K / LABELS_AT_MOST))
    labels = [shorten(classes[tick], LABEL_WIDTH) for tick in ticks]
    size = 8 if K <= NUMBERS_UP_TO_CLASSES else 6.5
    text: dict[str, Any] = {"fontsize": size, "family": style.families(), "parse_math": False, "color": style.INK}
    slant: dict[str, Any] = {"rotation": 90}
    if K <= NUMBERS_UP_TO_CLASSES:
        slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(ticks, labels, **text, **slant)
    axes.set_yticks(ticks, labels, **text)
    axes.set_xlabel("predicted  (colour: share of the row, square-root scale)", fontsize=8, color=style.MUTED)
    axes.set_ylabel("actual", fontsize=8, color=style.MUTED)
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_color(style.FAINT)
