"""Parts of a training step: network input, losses, sums of metrics, and the CUDA graph."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.config import Recipe
from flatout.engine import augment
from flatout.engine.base import Counts
from flatout.engine.torch.accelerator import Accelerator
from flatout.engine.torch.batches import DeviceBatch, DeviceImages, Step
from flatout.models.layers import Cut
from flatout.tasks import Task
from flatout.utils.errors import InputError, RankLost, causes, first_line


class NetworkInput:
    """Computes the input of the network on one device; behind a `cut`, the images are the frozen prefix's output."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        cut: Cut | None,
        batch_transforms: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        self._recipe, self._cut, self._batch_transforms = recipe, cut, batch_transforms
        mean, std = (torch.tensor(v, device=device) for v in (recipe.data.mean, recipe.data.std))
        # A pixel p of 0..255 becomes p * scale + bias.
        self._normalisation = 1 / (255 * std), -mean / std

    def normalised(self, images: torch.Tensor, transforms: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return stored images [B, H, W, C] as model input [B, C, H, W], augmented if there are transforms."""
        size = self._recipe.eval_sides if transforms is None else self._recipe.image_sides
        return augment.apply(images, transforms, *self._normalisation, size)

    def of(self, images: torch.Tensor, transforms: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the input of the network, [B, C, ...]: `normalised` images, or the output of the prefix."""
        return images.movedim(-1, 1) if self._cut else self.normalised(images, transforms)

    def of_batch(self, source: DeviceImages, inputs: DeviceBatch) -> torch.Tensor:
        rows = source.transforms_of(inputs.samples)
        images = self.of(source.images_of(inputs), rows)
        if inputs.partners is not None:
            partner_rows = source.transforms_of(inputs.partners)
            partners = self.of(source.images_of(inputs, of_partners=True), partner_rows)
            images = augment.mix(images, partners, rows["mix"])
        for transform in self._batch_transforms:
            shape, images = images.shape, transform(images)
            found = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            if found != tuple(shape):
                name = getattr(transform, "__name__", type(transform).__name__)
                raise InputError(f"batch_transforms: {name} returned {found} for {tuple(shape)}")
        return images


class Losses:
    """Computes losses on one device: by the user's `own` function of logits and targets, or else by the task."""

    def __init__(
        self, own: Callable[..., torch.Tensor] | None, class_weights: np.ndarray | None, device: torch.device
    ) -> None:
        self._own: Any = own
        if isinstance(own, nn.Module):
            self._own = copy.deepcopy(own).to(device)
            if hasattr(self._own, "reduction"):
                self._own.reduction = "none"  # torch's loss modules return the mean over the batch
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights).to(device)

    def of(
        self, task: Task, logits: torch.Tensor, targets: torch.Tensor, class_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each sample, float32 [B]."""
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
        self, task: Task, logits: torch.Tensor, targets: torch.Tensor, source: DeviceImages, inputs: DeviceBatch
    ) -> torch.Tensor:
        """Return the loss of each sample, [B]; see `Task.mixed` for mixtures."""

        def losses_of(targets: torch.Tensor) -> torch.Tensor:
            return self.of(task, logits, targets, self._class_weights)

        if inputs.partners is None:
            return losses_of(targets)
        share = source.transforms["mix"].index_select(0, inputs.samples)[:, 5]
        return task.mixed(losses_of, targets, source.targets.index_select(0, inputs.partners), share)


# The sums of every step over its samples: loss times weight, weight, metric of the task, samples.
SUMS = 4


class MetricSums:
    """Sums on the device since they were last fetched; adding to them never waits."""

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


class ReplacedFunctions(TorchFunctionMode):
    """While active, replaces torch functions wherever a model calls them."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function or its replacement; inside a replacement, torch's own are called."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))


# Lazy initialisation (cuBLAS handles, cuDNN's choice of algorithms, optimizer state) must be finished before the
# capture.
EAGER_STEPS = 3


class CapturedStep:
    """Runs a step eagerly a few times, then captures it as a graph and replays it.

    The step reads its inputs from tensors that stay in place. Its Python numbers become constants of a graph, so steps
    with other numbers (the short last batch) have their own. If a capture fails, all steps run eagerly from then on.
    `forget_gradients` sets every gradient to None, so that the backward pass allocates new ones.
    """

    def __init__(
        self,
        step: Callable[[DeviceImages, Step], None],
        forget_gradients: Callable[[], None],
        accelerator: Accelerator,
        report: Callable[[str], None],
    ) -> None:
        self._step, self._forget_gradients = step, forget_gradients
        self._accelerator, self._report = accelerator, report
        self._seen: Counter[tuple[int, ...]] = Counter()
        # By the constants of the step: the graph, and the step whose streamed images it reads.
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Step]] = {}
        self.is_off = False
        self._source: DeviceImages | None = None

    def __call__(self, source: DeviceImages, inputs: Step) -> None:
        constants = inputs.constants
        if source is not self._source:
            self.release()
            self._source = source
        if constants not in self._graphs and not self.is_off:
            # After the first graph, everything is initialised.
            seen, wanted = self._seen[constants], 1 if self._graphs else EAGER_STEPS
            if seen == wanted - 1:
                self._accelerator.reset_peak()
            if seen >= wanted:
                self._record(source, inputs)
        if constants in self._graphs:
            graph, static = self._graphs[constants]
            static.copy_images(inputs)
            graph.replay()
            return
        self._seen[constants] += 1
        self._forget_gradients()
        self._step(source, inputs)

    def _record(self, source: DeviceImages, inputs: Step) -> None:
        self._forget_gradients()
        static = inputs.with_own_images()
        try:
            if not self._accelerator.has_room_for_graph():
                raise RuntimeError("too little memory for a graph beside eager steps")
            graph = self._accelerator.capture(lambda: self._step(source, static))
        except (RuntimeError, RankLost) as error:
            # The end of the failed capture raises an error, too; a collective in it seems to have lost its peers.
            self.refuse(causes(error)[-1])
            return
        if not self._graphs:
            self._report("the whole step runs as one CUDA graph")
        self._graphs[inputs.constants] = graph, static

    def refuse(self, reason: BaseException | str) -> None:
        """Run all steps eagerly from here on."""
        self.is_off = True
        text = first_line(reason) if isinstance(reason, BaseException) else reason
        self._report(f"the step runs without a CUDA graph: {text}")

    def release(self) -> None:
        """Free the graphs, so that their communicator can be closed; later steps are captured again."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._seen.clear()
