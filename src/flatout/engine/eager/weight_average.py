"""An exponential moving average of the weights, which is evaluated and kept instead of the weights themselves."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from flatout.engine.eager.state import local


class WeightAverage:
    """The average of a model's parameters and buffers; of a sharded model, this rank's part.

    Until the average has seen enough steps, it forgets faster: its decay in step t is at most (1 + t) / (10 + t), as in
    TensorFlow's ExponentialMovingAverage.

    Args:
        model: where it will be trained, with the weights to start from.
        decay: how much of the average remains in each step.
        steps: how many the average counts as seen at the start.

    Attributes:
        tensors: the averages by name, and the number of steps, [] on the device.
    """

    def __init__(self, model: nn.Module, decay: float, steps: int) -> None:
        self._decay = decay
        self._weights = {f"ema.{name}": value.detach() for name, value in model.state_dict().items()}
        self.tensors = {name: value.clone() for name, value in self._weights.items()}
        device = next(iter(self.tensors.values())).device
        self._steps = self.tensors["ema_steps"] = torch.full((), float(steps), device=device)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step into the average."""
        self._steps += 1
        share = 1 - torch.clamp((1 + self._steps) / (10 + self._steps), max=self._decay)
        for name, value in self._weights.items():
            average, value = local(self.tensors[name]), local(value)
            average.lerp_(value, share.to(value.dtype)) if value.is_floating_point() else average.copy_(value)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block."""
        kept = {name: value.clone() for name, value in self._weights.items()}
        self._copy(self.tensors)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in self._weights.items():
            value.copy_(tensors[name])
