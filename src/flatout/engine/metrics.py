"""Metrics as sums and counts, which are divided once, so that they do not depend on batches and ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over samples.

    Attributes:
        loss_sum: sum of weight times loss.
        weight_sum: sum of the samples' weights (their number, unless classes are weighted).
        metric_sum: sum of the task's training metric, such as correct predictions.
        count: samples without padding.
    """

    loss_sum: float = 0.0
    weight_sum: float = 0.0
    metric_sum: float = 0.0
    count: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def loss(self) -> float:
        """Mean loss; NaN without samples."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")

    @property
    def metric(self) -> float:
        """Mean of the metric, such as the accuracy; NaN without samples."""
        return self.metric_sum / self.count if self.count else float("nan")


NO_COUNTS = Counts()
