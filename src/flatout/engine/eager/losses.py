"""The loss of each sample: that of the task, or the user's.

Shape letters: B samples of this rank in a batch.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.engine.eager.split import Inputs, Source
from flatout.errors import InputError
from flatout.tasks.base import Task


class Losses:
    """Computes losses on one device.

    Args:
        own: of logits and targets, in place of the task's; returns a loss for each sample. None for the task's.
        class_weights: as `Task.class_weights` returns them; None for none.
    """

    def __init__(
        self, own: Callable[..., torch.Tensor] | None, class_weights: np.ndarray | None, device: torch.device
    ) -> None:
        self._own = _per_sample(own, device)
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights).to(device)

    def of(
        self, task: Task, logits: torch.Tensor, targets: torch.Tensor, class_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each sample, float32 [B].

        Raises:
            InputError: the user's does not return one for each sample.
        """
        if self._own is None:
            return task.per_sample(logits, targets, class_weights)
        losses = self._own(logits.float(), targets)
        shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        if shape != (len(logits),):
            raise InputError(
                f"loss: must return a loss for each image, a tensor of shape {(len(logits),)}, not {shape}; torch's "
                "losses do with reduction='none'"
            )
        return losses

    def of_batch(
        self, task: Task, logits: torch.Tensor, targets: torch.Tensor, source: Source, inputs: Inputs
    ) -> torch.Tensor:
        """Return the loss of each sample, [B]; of a mixture, that of the mixed targets, or both by their shares."""

        def losses_of(targets: torch.Tensor) -> torch.Tensor:
            return self.of(task, logits, targets, self._class_weights)

        if inputs.partners is None:
            return losses_of(targets)
        share = source.transforms["mix"].index_select(0, inputs.samples)[:, 5]
        return task.mixed(losses_of, targets, source.targets.index_select(0, inputs.partners), share)


def _per_sample(loss: Callable[..., torch.Tensor] | None, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return a loss on a device, without the mean over the batch where it is a module of torch's kind."""
    if not isinstance(loss, nn.Module):
        return loss
    own: Any = copy.deepcopy(loss).to(device)
    if hasattr(own, "reduction"):
        own.reduction = "none"
    return own
