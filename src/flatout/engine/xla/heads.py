"""What a task computes from logits, as JAX functions.

Shape letters: B batch, K outputs, V views.
"""

import functools

import jax
import numpy as np
import torch
from torch import nn

from flatout.engine.xla.function import Function
from flatout.tasks.base import Task


class _LossHead(nn.Module):
    """What a task computes from logits: losses, metrics of a step, predictions and probabilities."""

    def __init__(self, task: Task, class_weights: tuple[float, ...] | None) -> None:
        super().__init__()
        self._task = task
        self._class_weights = None if class_weights is None else torch.tensor(class_weights)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return them."""
        losses = self._task.per_sample(logits, targets, self._class_weights)
        return (
            losses,
            self._task.step_metrics(logits, targets),
            self._task.predicted(logits),
            self._task.probabilities(logits),
        )


@functools.lru_cache(maxsize=16)
def head_of(
    task: Task, class_weights: tuple[float, ...] | None, logits_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> Function:
    """Return losses, metrics of a step, predictions and probabilities as a function of logits and targets.

    Training and evaluation share one where their batches have the same size.
    """
    dtype = torch.float32 if task.mixes_targets else torch.int64
    examples = example(*logits_shape), example(logits_shape[0], *target_shape, dtype=dtype)
    return Function(_LossHead(task, class_weights), examples, name="loss")


def averaged(task: Task, logits_VBK: jax.Array) -> jax.Array:
    """Return the logits [B, K] of the views together."""
    return Function(_Averaged(task), (example(*logits_VBK.shape),), name="views")({}, {}, logits_VBK)[0]


class _Averaged(nn.Module):
    """Logits [B, K] averaged over views [V, B, K]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return self._task.averaged(logits)


def example(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros that occupies a single element of memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array that JAX takes unchanged: whole numbers in 32 bits."""
    array = tensor.detach().cpu().numpy()
    return array.astype(np.int32) if array.dtype == np.int64 else array.copy()
