"""Multi-label classification: any number of classes per image, one sigmoid logit per class.

Shape letters: N samples, B batch, V views, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe
from flatout.tasks.base import MIN_PROBABILITY, Curve, Task, class_rows, curve
from flatout.tasks.single_label import LABEL_WIDTH, averaged_sigmoid
from flatout.utils import style
from flatout.utils.style import finite, shorten

if TYPE_CHECKING:
    from torch import Tensor

# The threshold without validation data.
DEFAULT_THRESHOLD = 0.5
# Maximum number of classes in the picture, those with the lowest F1.
CLASSES_DRAWN = 40


class MultiLabel(Task):
    """See the module."""

    name = "multi-label"
    losses = ("binary-cross-entropy",)
    metric_names = ("map", "f1_macro", "f1_micro")
    step_metric = "exact_match"
    metric_title = "Mean average precision"
    mixes_targets = True
    picture = ("Precision, recall and F1", "Of each class, with its number of {split} images.")
    mistakes_shown = (
        "Worst mistakes",
        "The {count} {split} images with the most confident wrong decisions. They often show wrong labels too.",
    )
    explained = "the most probable class"
    table_columns = ("class", "images", "precision", "recall", "F1")

    @staticmethod
    def check(recipe: Recipe) -> None:
        """Every recipe is valid for several labels."""

    def num_outputs(self, classes: int) -> int:
        return classes

    def random_labels(self, rng: np.random.Generator, count: int, classes: int) -> np.ndarray:
        return rng.integers(0, 2, (count, classes), np.uint8)

    def targets(self, labels: np.ndarray) -> np.ndarray:
        return labels.astype(np.float32)

    def class_weights(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return the weight of each class where it is present: images without the class by images with it."""
        positive_K = labels.sum(axis=0, dtype=np.int64)
        return ((len(labels) - positive_K) / np.maximum(positive_K, 1)).astype(np.float32)

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """Return the binary cross-entropy of each sample, the mean over its classes, float32 [B].

        Label smoothing s moves the targets 0 and 1 to s/2 and 1 - s/2.
        """
        from torch.nn import functional

        smoothed = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses_BK = functional.binary_cross_entropy_with_logits(
            logits_BK.float(), smoothed, reduction="none", pos_weight=class_weights
        )
        return losses_BK.mean(dim=1)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        """Return 1 if the decisions on all classes are right, at probability 1/2; else 0."""
        return ((logits_BK > 0) == (targets > 0.5)).all(dim=1).float()

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.float().sigmoid()

    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        """See `Task.predicted`: the probabilities."""
        return self.probabilities(logits_BK)

    def predicted_from(self, probabilities: np.ndarray) -> np.ndarray:
        return probabilities

    def averaged(self, logits_VBK: "Tensor") -> "Tensor":
        return averaged_sigmoid(logits_VBK.float())

    def metrics(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the mean average precision over the classes, and F1: the mean over the classes, and of all decisions.

        See `average_precision_score` and `f1_score` of scikit-learn; a class without images counts 0.
        """
        answers = self.decided(predicted)
        correct_K = (answers * labels).sum(axis=0, dtype=np.int64)
        either_K = answers.sum(axis=0, dtype=np.int64) + labels.sum(axis=0, dtype=np.int64)
        precisions = [average_precision(p, y) for p, y in zip(predicted.T, labels.T, strict=True)]
        return {
            "map": float(np.mean(precisions)),
            "f1_macro": float(np.mean(2 * correct_K / np.maximum(1, either_K))),
            "f1_micro": float(2 * correct_K.sum() / max(1, either_K.sum())),
        }

    def guessing_loss(self, classes: int) -> float:
        # Positive weights that equal the ratio of negatives at most double it.
        return math.log(2) * (1 + self.is_balanced)

    @staticmethod
    def describe(split: str, figures: Mapping[str, Any]) -> str:
        precision, macro, micro = (figures[f"{split}_{key}"] for key in ("map", "f1_macro", "f1_micro"))
        return f"{split} mAP {precision:.4f}, F1 {macro:.4f} (macro), {micro:.4f} (micro)"

    def remark(self, split: str, figures: Mapping[str, Any]) -> str:
        macro, micro = (finite(figures.get(f"{split}_f1_{how}")) for how in ("macro", "micro"))
        return f"F1 {macro:.3f} (macro), {micro:.3f} (micro)" if macro is not None and micro is not None else ""

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """See `Task.losses_of`: binary cross-entropy, the mean over the classes."""
        given_NK = np.where(labels > 0, probabilities, 1 - probabilities)
        return -np.log(np.maximum(given_NK, MIN_PROBABILITY)).mean(axis=1)

    def selection_metric(self, metrics: dict[str, float]) -> float:
        return metrics["map"]

    def tuned(self, predicted: np.ndarray, labels: np.ndarray) -> "Task":
        """Return the task with the thresholds of the highest F1 of each class."""
        thresholds = [best_threshold(p, y) for p, y in zip(predicted.T, labels.T, strict=True)]
        return replace(self, thresholds=tuple(thresholds))

    def decided(self, predicted: np.ndarray) -> np.ndarray:
        """Return 1 where a probability reaches the threshold of its class, uint8 [N, K]."""
        return (predicted >= np.array(self.thresholds or (DEFAULT_THRESHOLD,))).astype(np.uint8)

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
        return class_rows(answers, labels, classes)

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
        """Return the mean area under the ROC curves of the classes that have one."""
        # The first curve is that of all decisions.
        found = self.curves(labels, probabilities, [""] * labels.shape[1])[1:]
        return {"roc_auc": float(np.mean([one.roc_auc for one in found]))} if found else {}

    def curves(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> list[Curve]:
        """Return the curves of all decisions together, and of each class with both labels."""
        is_finite = np.isfinite(probabilities).all(axis=1)
        labels, probabilities = labels[is_finite], probabilities[is_finite]
        columns = [(name, labels[:, k], probabilities[:, k]) for k, name in enumerate(classes)]
        columns = [("all decisions", labels.ravel(), probabilities.ravel()), *columns]
        return [curve(*column) for column in columns if len(np.unique(column[1])) == 2]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> dict[str, Any]:
        """Return the classes whose probabilities reach their thresholds, the most probable first."""
        best = [i for i in np.argsort(-row, kind="stable") if self.decided(row)[i]]
        return {"classes": tuple(classes[i] for i in best), "probabilities": tuple(row[best].tolist())}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return ", ".join(name for name, present in zip(classes, label, strict=True) if present) or "none"

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        """See `Task.is_right`: all decisions are right."""
        return (answers == labels).all(axis=1)

    def class_table(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[tuple[Any, ...]]:
        rows = [row for row in self.per_class(answers, labels, classes) if row["support"]]
        keys = ("class", "support", "precision", "recall", "f1")
        return sorted((tuple(row[key] for key in keys) for row in rows), key=lambda row: (row[4], -row[1]))

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return the images with wrong decisions, those with the worst one first."""
        answers = self.decided(predicted)
        worst = (np.abs(np.nan_to_num(predicted) - labels) * (answers != labels)).max(axis=1)
        order = np.argsort(-worst, kind="stable")
        return order[(answers != labels).any(axis=1)[order]]

    def draw(self, path: Path, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
        """Write precision, recall and F1 of each class as bars, lowest F1 first; with many classes only the worst."""
        rows = sorted(self.per_class(answers, labels, classes), key=lambda row: row["f1"])[:CLASSES_DRAWN]
        figure = style.new_figure(7.0, 1.8 + 0.36 * len(rows), dpi=150)
        axes = figure.add_subplot()
        shown = f", the {len(rows)} worst of {len(classes)} classes" if len(rows) < len(classes) else ""
        style.style_panel(axes, f"Precision, recall and F1{shown}")
        axes.grid(visible=False, axis="y")
        for number, (key, colour) in enumerate(
            (("precision", style.ORANGE), ("recall", style.MUTED), ("f1", style.RIGHT))
        ):
            heights = [position + 0.26 * (number - 1) for position in range(len(rows))]
            axes.barh(heights, [row[key] for row in rows], height=0.24, color=colour, label=key.replace("f1", "F1"))
        names = [f"{shorten(row['class'], LABEL_WIDTH)} ({row['support']:,})" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=8, family=style.families(), parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        style.write_png(figure, path)


def average_precision(predicted_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the mean of the precision over the positives, by falling probability; ties are counted together.

    0 without positives.
    """
    found, correct, reached = _curve(predicted_N, labels_N)
    gained = np.diff(correct, prepend=0)
    return float((gained * correct / found).sum() / max(1, correct[-1])) if len(reached) else 0.0


def best_threshold(predicted_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the threshold with the highest F1, halfway to the next lower probability; 1/2 without positives."""
    found, correct, reached = _curve(predicted_N, labels_N)
    if not correct[-1]:
        return DEFAULT_THRESHOLD
    best = int(np.argmax(correct / (found + correct[-1])))
    lower = reached[best + 1] if best + 1 < len(reached) else 0.0
    return float((reached[best] + lower) / 2)


def _curve(predicted_N: np.ndarray, labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each distinct probability, descending: the samples and positives that reach it, and itself."""
    values = np.nan_to_num(predicted_N.astype(np.float64))
    order = np.argsort(-values, kind="stable")
    values = values[order]
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
    return ends + 1, np.cumsum(labels_N[order], dtype=np.int64)[ends], values[ends]
