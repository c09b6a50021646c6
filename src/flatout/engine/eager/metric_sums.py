"""Sums of the metrics of training steps, accumulated on the device."""

import torch

from flatout.engine.eager.accelerator import Accelerator
from flatout.numerics.metrics import Counts

# The sums of every step over its samples: loss times weight, weight, metric of the task, samples.
SUMS = 4


class MetricSums:
    """Sums on the device since they were last fetched."""

    def __init__(self, accelerator: Accelerator) -> None:
        device = accelerator.device
        self._sums = torch.zeros(SUMS - 1, dtype=accelerator.wide_float, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)

    def begin_epoch(self) -> None:
        """Count steps from 0 again."""
        self._step.zero_()
        self._first_bad_step.fill_(-1)

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of a step, [SUMS], without waiting for them."""
        self._sums += sums[: SUMS - 1]
        self._count += sums[SUMS - 1].long()
        is_first_bad = ~torch.isfinite(sums[0]) & (self._first_bad_step < 0)
        self._first_bad_step.copy_(torch.where(is_first_bad, self._step, self._first_bad_step))
        self._step += 1

    def fetch(self) -> tuple[Counts, int | None]:
        """See `Engine.counts`."""
        loss_sum, weight_sum, metric_sum = self._sums.tolist()
        count, bad = int(self._count), int(self._first_bad_step)
        self._sums.zero_()
        self._count.zero_()
        result = Counts(loss_sum=loss_sum, weight_sum=weight_sum, metric_sum=metric_sum, count=count)
        return result, bad if bad >= 0 else None
