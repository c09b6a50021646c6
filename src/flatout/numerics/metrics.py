"""Results as sums and counts, divided once, so that they are exact however the samples were split up."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over samples.

    Attributes:
        loss_sum: sum of weight times loss.
        weight_sum: sum of the samples' weights (their number, unless classes are weighted).
        correct: samples predicted right.
        count: samples seen, without padding.
    """

    loss_sum: float
    weight_sum: float
    correct: int
    count: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            loss_sum=self.loss_sum + other.loss_sum,
            weight_sum=self.weight_sum + other.weight_sum,
            correct=self.correct + other.correct,
            count=self.count + other.count,
        )

    @property
    def loss(self) -> float:
        """Mean loss; NaN without samples."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")

    @property
    def accuracy(self) -> float:
        """Share predicted right, 0..1; NaN without samples."""
        return self.correct / self.count if self.count else float("nan")


NO_COUNTS = Counts(loss_sum=0.0, weight_sum=0.0, correct=0, count=0)
