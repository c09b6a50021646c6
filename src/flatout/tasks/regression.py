"""A number for each image, such as an age or a price.

Networks are trained on standardised numbers, so that learning rates suit any unit; everything else is in the unit of
the labels.

Shape letters: N samples, B batch, V views, K = 1 output.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe
from flatout.tasks.base import Task, refuse
from flatout.utils import style
from flatout.utils.errors import InputError
from flatout.utils.style import finite

if TYPE_CHECKING:
    from torch import Tensor


class Regression(Task):
    """See the module."""

    name = "regression"
    losses = ("mse", "huber")
    metric_names = ("mae", "r2")
    step_metric = "mae"
    metric_title = "Mean absolute error"
    mixes_targets = True
    picture = ("Predicted against actual", "A point for each of the {split} images; on the line, both are equal.")
    mistakes_shown = (
        "Largest errors",
        "The {count} {split} images with the largest errors. They often show wrong labels too.",
    )
    explained = "a larger number"

    @staticmethod
    def check(recipe: Recipe) -> None:
        only = {
            "label_smoothing": (0.0, "smooths classes"),
            "class_weights": ("none", "weighs classes"),
            "augment.cutmix": (0.0, "the number of a patchwork of two images is unknown"),
        }
        refuse(recipe, "regression", only)

    def num_outputs(self, classes: int) -> int:
        return 1

    def random_labels(self, rng: np.random.Generator, count: int, classes: int) -> np.ndarray:
        return rng.standard_normal(count, np.float32)

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """Return the standardised labels, float32 [N]."""
        return ((labels.astype(np.float64) - self.label_mean) / self.label_std).astype(np.float32)

    def per_sample(self, logits_BK: "Tensor", targets: "Tensor", class_weights: "Tensor | None" = None) -> "Tensor":
        """Return the squared error of each sample, or its Huber loss with delta 1, of standardised numbers."""
        error = logits_BK.float()[:, 0] - targets
        if self.loss == "mse":
            return error.square()
        size = error.abs()
        return (0.5 * error.square()).where(size < 1, size - 0.5)

    def step_metrics(self, logits_BK: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the absolute errors."""
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
        """Return the mean absolute error, and R², the share of the variance that is explained.

        See `mean_absolute_error` and `r2_score` of scikit-learn; R² of equal labels is 0.
        """
        error, actual = predicted.astype(np.float64) - labels, labels.astype(np.float64)
        total = float(np.square(actual - actual.mean()).sum())
        explained = 1 - float(np.square(error).sum()) / total if total else 0.0
        return {"mae": float(np.abs(error).mean()), "r2": explained}

    def guessing_loss(self, classes: int) -> float:
        return 1.0 if self.loss == "mse" else 0.5

    @staticmethod
    def describe(split: str, figures: Mapping[str, Any]) -> str:
        return f"{split} mean absolute error {style.plain(figures[f'{split}_mae'])}, R² {figures[f'{split}_r2']:.4f}"

    def remark(self, split: str, figures: Mapping[str, Any]) -> str:
        explained = finite(figures.get(f"{split}_r2"))
        return f"R² {explained:.3f}" if explained is not None else ""

    def losses_of(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """See `Task.losses_of`: the absolute error."""
        return np.abs(probabilities[:, 0] - labels)

    def selection_metric(self, metrics: dict[str, float]) -> float:
        return -metrics["mae"]

    def answer(self, row: np.ndarray, classes: Sequence[str], top: int) -> dict[str, Any]:
        """Return the number."""
        return {"value": float(row[0])}

    def text(self, label: Any, classes: Sequence[str]) -> str:
        return style.plain(label)

    def is_right(self, answers: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
        return None

    def mistakes(self, predicted: np.ndarray, labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return all positions, the largest error first."""
        return np.argsort(-np.abs(np.nan_to_num(predicted - labels)), kind="stable")

    def draw(self, path: Path, answers: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
        """Write a scatter plot of predicted against actual numbers."""
        figure = style.new_figure(5.4, 5.4, dpi=150)
        axes = figure.add_subplot()
        found = self.metrics(answers, labels)
        style.style_panel(axes, f"Mean absolute error {style.plain(found['mae'])}, R² {found['r2']:.3f}", "actual")
        axes.set_ylabel("predicted", fontsize=8, color=style.MUTED)
        is_finite = np.isfinite(answers)
        ends = [float(np.min([labels.min(), *answers[is_finite]])), float(np.max([labels.max(), *answers[is_finite]]))]
        axes.plot(ends, ends, color=style.FAINT, linewidth=1.2, zorder=1)
        axes.scatter(labels[is_finite], answers[is_finite], s=8, alpha=0.5, color=style.RIGHT, linewidths=0, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        if max(map(abs, ends)) >= 10_000:  # 400,000 in place of 0.4 and a factor of 1e6 at the end of the axis
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=5)
        style.write_png(figure, path)


def statistics(labels: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of the training labels.

    Raises:
        InputError: all labels are equal.
    """
    mean, std = float(labels.mean(dtype=np.float64)), float(labels.std(dtype=np.float64))
    if not std > 0:
        raise InputError(f"all training images have the label {mean:g}: there is nothing to learn")
    return mean, std
