"""The task protocol: losses, metrics and pictures of one kind of labels.

Formulas on logits are torch, and pure, since the XLA engine exports them. Everything else is NumPy.

Shape letters: N samples, B batch, V views, K outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flatout.config import Recipe
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task; equal tasks give equal results.

    Attributes:
        loss, label_smoothing: see the recipe; `is_balanced` is its `class_weights = "balanced"`.
        label_mean, label_std: those of regression labels, which are standardised.
        thresholds: the minimum probability at which each class is predicted; empty for 1/2.
        own_metrics: pairs of a name and a user's function of labels and predictions.
        temperature: the divisor of the logits; see `inference.calibration`.
        name: the recipe's `task`.
        losses: the recipe's choices of `loss`, the default first.
        metric_names: the keys of `metrics`; the first one is drawn and printed.
        step_metric: the name of what `step_metrics` returns, on average.
        metric_title: the title of the curve of the first one.
        picture, mistakes_shown: headings and explanations of what `draw` and `mistakes` show, of `{split}` images.
        explained: what the heatmap of a mistake explains.
        table_columns: the headings of `class_table`.
        mixes_targets: whether targets are mixed before the loss, since they are numbers; otherwise two losses are
            mixed.
    """

    loss: str = ""
    label_smoothing: float = 0.0
    is_balanced: bool = False
    label_mean: float = 0.0
    label_std: float = 1.0
    thresholds: tuple[float, ...] = ()
    own_metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()
    temperature: float = 1.0

    name: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    metric_names: ClassVar[tuple[str, ...]]
    metric_title: ClassVar[str]
    step_metric: ClassVar[str]
    mixes_targets: ClassVar[bool]
    picture: ClassVar[tuple[str, str]]
    mistakes_shown: ClassVar[tuple[str, str]]
    explained: ClassVar[str] = "the wrong answer"
    table_columns: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    @abstractmethod
    def check(recipe: Recipe) -> None:
        """Raise InputError if a recipe has options that this task does not support."""

    @abstractmethod
    def num_outputs(self, classes: int) -> int:
        """Return K for a number of classes."""

    @abstractmethod
    def targets(self, labels: np.ndarray) -> np.ndarray:
        """Return the targets of the loss for labels of a pack: [N] or [N, K], int64 or float32."""

    @abstractmethod
    def random_labels(self, rng: np.random.Generator, count: int, classes: int) -> np.ndarray:
        """Return random labels for measuring speed."""

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

    def mixed(self, losses_of: Callable[[Any], Any], targets: Any, partners: Any, share_B: Any) -> Any:
        """Return the losses of mixtures, [B], linear in the partners' shares `share_B`.

        For targets that are indices, the losses are mixed instead. Arrays are torch's or JAX's.
        """
        if self.mixes_targets:
            share = share_B.reshape(-1, *[1] * (targets.ndim - 1))
            return losses_of(targets + share * (partners - targets))
        losses = losses_of(targets)
        return losses + share_B * (losses_of(partners) - losses)

    @abstractmethod
    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the metric that training steps add up, of each sample, float32 [B]."""

    @abstractmethod
    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        """Return the probability of each class, float32 [B, classes]; in regression the numbers, [B, 1]."""

    @abstractmethod
    def predicted(self, logits_BK: "Tensor") -> "Tensor":
        """Return the predictions: classes int64 [B], probabilities [B, K] or numbers [B]."""

    @abstractmethod
    def predicted_from(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the predictions from `probabilities` [N, classes], such as means over several models."""

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
        """Return the user's metrics by name.

        Raises:
            InputError: a metric raises an exception, or does not return a number.
        """
        answers, found = self.decided(predicted), {}
        for name, function in self.own_metrics:
            try:
                found[name] = float(function(labels, answers))
            except Exception as error:
                raise InputError(f"metrics: {name} raised {type(error).__name__}: {error}") from error
        return found

    @abstractmethod
    def selection_metric(self, metrics: dict[str, float]) -> float:
        """Return the metric that chooses the best epoch; the higher, the better."""

    @abstractmethod
    def guessing_loss(self, classes: int) -> float:
        """Return the loss of predictions that do not depend on the image."""

    @staticmethod
    @abstractmethod
    def describe(split: str, figures: Mapping[str, Any]) -> str:
        """Return the main metrics of a split in words, from figures such as `test_accuracy`."""

    def remark(self, split: str, figures: Mapping[str, Any]) -> str:
        """Return the remark below the first metric of a split in the report."""
        return ""

    def tuned(self, predicted: np.ndarray, labels: np.ndarray) -> "Task":
        """Return the task with thresholds tuned on the validation split."""
        return self

    def decided(self, predicted: np.ndarray) -> np.ndarray:
        """Return the final predictions, in the form of labels."""
        return predicted

    def per_class(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Return `class`, `precision`, `recall`, `f1` and `support` of each class; empty if there are none."""
        return []

    def scores(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
        """Return the metrics that are computed once, after training, from finite `probabilities`."""
        return {}

    def confused_pairs(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Return the most frequent mistakes: `actual`, `predicted`, `count`, and `of`, the actual class's images."""
        return []

    def curves(self, labels: np.ndarray, probabilities: np.ndarray, classes: Sequence[str]) -> "list[Curve]":
        """Return the ROC and precision-recall curves; empty if there are none."""
        return []

    @abstractmethod
    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> dict[str, Any]:
        """Return the fields of a `Prediction` for one row of `probabilities`."""

    # --- report -------------------------------------------------------------------------------------------------

    @abstractmethod
    def text(self, label: Any, classes: Sequence[str]) -> str:
        """Return a label, or a prediction, in words."""

    @abstractmethod
    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        """Return whether each prediction is right, bool [N]; None in regression."""

    def class_table(self, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return a row for each class that has images, the worst first; the first cell is its name."""
        return []

    @abstractmethod
    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return the positions of mistakes, int64, the worst first."""

    def confidence(self, answer: Any, probabilities_K: np.ndarray) -> float | None:
        """Return the probability of a prediction, or None."""
        return None

    @abstractmethod
    def draw(self, path: Path, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
        """Write the picture of all predictions, `confusion.png`."""


# Lower bound of probabilities, so that logarithms are finite.
MIN_PROBABILITY = 1e-12


def refuse(recipe: Recipe, task: str, reasons: dict[str, tuple[Any, str]]) -> None:
    """Raise InputError for the first key without its only valid value; key -> (value, reason)."""
    flat = recipe.flat()
    for key, (value, reason) in reasons.items():
        if flat[key] != value:
            raise InputError(f"{key} = {flat[key]!r}: {reason}; a {task} task needs {key} = {value!r}")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An ROC curve and a precision-recall curve of one class, or of all decisions together.

    Attributes:
        name: of the class.
        false_positive_rate, true_positive_rate, roc_auc: see `roc_curve` and `roc_auc_score` of scikit-learn.
        recall, precision, average_precision: see `precision_recall_curve` and `average_precision_score`.
    """

    name: str
    false_positive_rate: np.ndarray
    true_positive_rate: np.ndarray
    roc_auc: float
    recall: np.ndarray
    precision: np.ndarray
    average_precision: float


def curve(name: str, labels_N: np.ndarray, probabilities_N: np.ndarray) -> Curve:
    """Return the curves of labels 0 and 1, both of which must be present."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

    false_positive_rate, true_positive_rate, _ = roc_curve(labels_N, probabilities_N)
    precision, recall, _ = precision_recall_curve(labels_N, probabilities_N)
    return Curve(
        name=name,
        false_positive_rate=false_positive_rate,
        true_positive_rate=true_positive_rate,
        roc_auc=float(roc_auc_score(labels_N, probabilities_N)),
        recall=recall,
        precision=precision,
        average_precision=float(average_precision_score(labels_N, probabilities_N)),
    )


def class_rows(answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall and F1 of each class, as in scikit-learn; 0 if undefined."""
    from sklearn.metrics import precision_recall_fscore_support

    every = list(range(len(classes)))
    columns = precision_recall_fscore_support(labels, answers, labels=every, zero_division=0)  # pyright: ignore
    keys = ("precision", "recall", "f1", "support")
    rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    return [{"class": name, **dict(zip(keys, row, strict=True))} for name, row in zip(classes, rows, strict=True)]
