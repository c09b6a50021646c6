"""The torch engine on one device: CPU, CUDA or MPS.

The path of a batch on the device: gather rows of the resident images by index (or take the streamed ones), augment and
normalise, model, loss, gradients, update, counts. Nothing in it waits for the device.

Shape letters: N samples, B batch, H height, W width, C channels, K outputs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flatout import augment, loss, optim
from flatout.data.feed import Samples, prefetch
from flatout.data.order import Batch, evaluation_batches
from flatout.engine import hardware
from flatout.engine.base import Evaluation
from flatout.engine.batch_norm import BatchStatistics
from flatout.engine.capture import CapturedStep
from flatout.engine.prefix import Cut, cut_frozen_prefix
from flatout.errors import InputError
from flatout.metrics import Counts
from flatout.models.freeze import set_train_mode
from flatout.recipe import Recipe


@dataclass(kw_only=True, eq=False)
class Placed:
    """One split, where the steps read it.

    Attributes:
        samples: the split on the host.
        images: [N, ...] on the device; None while they are streamed from the host.
        labels: int64 [N] on the device.
        transforms: the epoch's augmentation table on the device, if any.
        features: the split's images after the frozen prefix, once that has been computed.
    """

    samples: Samples
    images: torch.Tensor | None
    labels: torch.Tensor
    transforms: torch.Tensor | None = None
    features: "Placed | None" = None


@dataclass(kw_only=True, eq=False)
class Inputs:
    """One batch on its way into a step: tensors on the device, `images` only if they are streamed."""

    batch: Batch
    samples: torch.Tensor
    weights: torch.Tensor
    images: torch.Tensor | None


@dataclass(kw_only=True, eq=False)
class Totals:
    """Sums on the device since they were last fetched."""

    sums: torch.Tensor
    numbers: torch.Tensor
    step: torch.Tensor
    first_bad_step: torch.Tensor

    @classmethod
    def zeros(cls, device: torch.device) -> "Totals":
        """Return empty totals; MPS has no float64."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        return cls(
            sums=torch.zeros(2, dtype=wide, device=device),
            numbers=torch.zeros(2, dtype=torch.int64, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            first_bad_step=torch.full((), -1, dtype=torch.int64, device=device),
        )


@dataclass(kw_only=True, eq=False)
class _Slots:
    """The tensors a recorded step reads: the same ones for every batch."""

    inputs: Inputs | None = None
    placed: Placed | None = None


class TorchEngine:
    """Trains a module on one torch device.

    Args:
        model: trained in place, after being moved to the device.
        recipe: what to do; data.mean and data.std must be filled in.
        device: a torch device name.
        class_weights: float32 [classes], the weight of each class in the loss; None for none.
        capture: whether the step may be recorded in a CUDA graph.
        cache_prefix: whether the output of a frozen prefix may be cached.
        report: takes sentences for the log.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        device: str = "cpu",
        class_weights: np.ndarray | None = None,
        capture: bool = True,
        cache_prefix: bool = True,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.recipe, self.device = recipe, torch.device(device)
        self._setup = hardware.prepare(self.device, recipe.precision)
        self.model = model.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        set_train_mode(self.model)
        capturable = capture and self.device.type == "cuda" and optim.can_capture(recipe.optimizer)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._let_compiler_in = optim.keep_compiler_out()
        self._optimizer = optim.build(recipe.optimizer, self.parameters.values(), capturable=capturable)
        self._update = optim.plain_step(self._optimizer)
        mean, std = (torch.tensor(v, device=self.device) for v in (recipe.data.mean, recipe.data.std))
        # One multiplication and one addition take a pixel 0..255 to its normalised value.
        self._scale, self._bias = 1 / (255 * std), -mean / std
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights).to(self.device)
        self._totals = Totals.zeros(self.device)
        self._statistics = BatchStatistics()
        self._slots = _Slots()
        self._captured = CapturedStep(self._slot_step, self._forget_gradients, report) if capturable else None
        fixed_input = not recipe.augment.is_random
        self._cut: Cut | None = cut_frozen_prefix(self.model) if cache_prefix and fixed_input else None
        if self._cut:
            report(f"the first {self._cut.layers} layers are frozen: their output is computed once and cached")

    def describe(self) -> list[str]:
        """See `Engine.describe`."""
        return self._setup.describe()

    # --- data -----------------------------------------------------------------------------------------------------

    def place(self, samples: Samples) -> Placed:
        """See `Engine.place`. Images go to the device if they fit, else stay in memory or on disk."""
        labels = torch.from_numpy(samples.labels).to(self.device)
        where = hardware.placement(samples.nbytes, self.device, self.recipe.data.placement)
        if where == "disk":
            return Placed(samples=samples, images=None, labels=labels)
        shape = samples.images.shape[1:]
        in_memory = samples.read(np.arange(len(samples)), np.empty((len(samples), *shape), samples.images.dtype))
        if where == "device":
            return Placed(samples=samples, images=torch.from_numpy(in_memory).to(self.device), labels=labels)
        held = Samples(images=in_memory, rows=np.arange(len(samples)), labels=samples.labels)
        return Placed(samples=held, images=None, labels=labels)

    def begin_epoch(self, placed: Placed, transforms: np.ndarray | None) -> None:
        """See `Engine.begin_epoch`. The first time, the frozen prefix is computed."""
        self._totals.step.zero_()
        self._totals.first_bad_step.fill_(-1)
        if transforms is not None:
            table = torch.from_numpy(transforms)
            if placed.transforms is None:
                placed.transforms = table.to(self.device)
            else:
                placed.transforms.copy_(table)
        self._source(placed)

    def feed(self, placed: Placed, batches: Iterable[Batch]) -> Iterator[Inputs]:
        """See `Engine.feed`."""
        source = self._source(placed)
        if source.images is not None:
            return (self._inputs(batch, None) for batch in batches)
        read = _pinned_reader(source.samples) if self.device.type == "cuda" else _reader(source.samples)
        loaded = prefetch(lambda batch: (batch, read(batch.samples)), batches)
        return (self._inputs(batch, images.to(self.device, non_blocking=True)) for batch, images in loaded)

    def _inputs(self, batch: Batch, images: torch.Tensor | None) -> Inputs:
        samples, weights = torch.from_numpy(batch.samples), torch.from_numpy(batch.weights)
        if self.device.type == "cuda":
            samples, weights = samples.pin_memory(), weights.pin_memory()
        return Inputs(
            batch=batch,
            samples=samples.to(self.device, non_blocking=True),
            weights=weights.to(self.device, non_blocking=True),
            images=images,
        )

    def _source(self, placed: Placed) -> Placed:
        """Return the split as the trained part of the model reads it: images, or the frozen prefix's output."""
        if self._cut is None:
            return placed
        if placed.features is None:
            placed.features = self._compute_features(placed, self._cut)
        return placed.features

    @torch.no_grad()
    def _compute_features(self, placed: Placed, cut: Cut) -> Placed:
        """Run the frozen prefix over a split, in the batch size of training, and place the result by its size."""
        features: np.ndarray | torch.Tensor | None = None
        for batch, images in self._batches(placed):
            with self._setup.autocast():
                output = cut.prefix(augment.apply(images, None, self._scale, self._bias))[: batch.count]
            # Rows are kept in the order in which the convolutions read them.
            rows = output.movedim(1, -1)
            if features is None:
                features = hardware.allocate(len(placed.samples), rows, self.device, self.recipe.data.placement)
            start = int(batch.samples[0])
            if isinstance(features, torch.Tensor):
                features[start : start + batch.count] = rows
            else:
                features[start : start + batch.count] = rows.float().cpu().numpy()
        assert features is not None
        if isinstance(features, torch.Tensor):
            return Placed(samples=placed.samples, images=features, labels=placed.labels)
        samples = Samples(images=features, rows=np.arange(len(features)), labels=placed.samples.labels)
        return Placed(samples=samples, images=None, labels=placed.labels)

    def _batches(self, placed: Placed) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield every sample's image once, in order, in padded batches on the device."""
        batches = evaluation_batches(len(placed.samples), self.recipe.batch_size)
        if placed.images is not None:
            for batch in batches:
                yield batch, placed.images[torch.from_numpy(batch.samples).to(self.device)]
        else:
            read = _reader(placed.samples)
            for batch, images in prefetch(lambda batch: (batch, read(batch.samples)), batches):
                yield batch, images.to(self.device)

    # --- training -------------------------------------------------------------------------------------------------

    def train_step(self, placed: Placed, inputs: Inputs, learning_rate: float, seed: int) -> None:
        """See `Engine.train_step`."""
        torch.manual_seed(seed)
        optim.set_learning_rate(self._optimizer, learning_rate)
        source = self._source(placed)
        self._statistics.count, self._statistics.batch_size = inputs.batch.count, len(inputs.batch.samples)
        if self._captured is None or inputs.batch.count < len(inputs.batch.samples):
            self._forget_gradients()
            self._step(source, inputs)
            return
        self._fill_slots(source, inputs)
        self._captured()

    def _step(self, source: Placed, inputs: Inputs) -> None:
        labels = source.labels.index_select(0, inputs.samples)
        weights = inputs.weights
        if self._class_weights is not None:
            weights = weights * self._class_weights.index_select(0, labels)
        with self._setup.autocast(), self._statistics:
            logits = self._training_logits(source, inputs)
        losses = loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing)
        loss_sum, weight_sum = (losses * weights).sum(), weights.sum()
        (loss_sum / weight_sum).backward()
        self._update()
        self._count(loss_sum.detach(), weight_sum, logits.detach(), labels, inputs.weights)

    def _training_logits(self, source: Placed, inputs: Inputs) -> torch.Tensor:
        images = inputs.images if source.images is None else source.images.index_select(0, inputs.samples)
        assert images is not None
        if self._cut is not None:
            return self._cut.train_suffix(images.movedim(-1, 1))
        transforms = None if source.transforms is None else source.transforms.index_select(0, inputs.samples)
        return self.model(augment.apply(images, transforms, self._scale, self._bias))

    def _count(
        self,
        loss_sum: torch.Tensor,
        weight_sum: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        sample_weights: torch.Tensor,
    ) -> None:
        totals, real = self._totals, sample_weights > 0
        totals.sums += torch.stack([loss_sum, weight_sum])
        right = (loss.predicted(logits) == labels) & real
        totals.numbers += torch.stack([right.sum(), real.sum()])
        is_first_bad = ~torch.isfinite(loss_sum) & (totals.first_bad_step < 0)
        totals.first_bad_step.copy_(torch.where(is_first_bad, totals.step, totals.first_bad_step))
        totals.step += 1

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _fill_slots(self, source: Placed, inputs: Inputs) -> None:
        """Copy a batch into the tensors that the recorded step reads."""
        slots = self._slots
        if slots.inputs is None:
            slots.placed = source
            slots.inputs = Inputs(
                batch=inputs.batch,
                samples=inputs.samples.clone(),
                weights=inputs.weights.clone(),
                images=None if inputs.images is None else inputs.images.clone(),
            )
            return
        assert slots.placed is source
        slots.inputs.samples.copy_(inputs.samples)
        slots.inputs.weights.copy_(inputs.weights)
        if inputs.images is not None:
            assert slots.inputs.images is not None
            slots.inputs.images.copy_(inputs.images)

    def _slot_step(self) -> None:
        assert self._slots.placed is not None
        assert self._slots.inputs is not None
        self._step(self._slots.placed, self._slots.inputs)

    def counts(self) -> tuple[Counts, int | None]:
        """See `Engine.counts`."""
        totals = self._totals
        loss_sum, weight_sum = totals.sums.tolist()
        correct, count = totals.numbers.tolist()
        bad = int(totals.first_bad_step)
        totals.sums.zero_()
        totals.numbers.zero_()
        result = Counts(loss_sum=loss_sum, weight_sum=weight_sum, correct=correct, count=count)
        return result, bad if bad >= 0 else None

    # --- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, placed: Placed) -> Evaluation:
        """See `Engine.evaluate`. Losses are those of the recipe, without class weights."""
        source = self._source(placed)
        loss_sum = torch.zeros((), dtype=self._totals.sums.dtype, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        probabilities = []
        network = self._cut.eval_suffix if self._cut else self.model.eval()
        for batch, images in self._batches(source):
            with self._setup.autocast():
                x = images.movedim(-1, 1) if self._cut else augment.apply(images, None, self._scale, self._bias)
                logits = network(x)[: batch.count]
            labels = source.labels[torch.from_numpy(batch.samples[: batch.count]).to(self.device)]
            loss_sum += loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing).sum()
            correct += (loss.predicted(logits) == labels).sum()
            probabilities.append(loss.probabilities(logits))
        set_train_mode(self.model)
        count = len(placed.samples)
        counts = Counts(loss_sum=float(loss_sum), weight_sum=float(count), correct=int(correct), count=count)
        return Evaluation(counts=counts, probabilities=torch.cat(probabilities).cpu().numpy())

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """See `Engine.state`."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See `Engine.load_state`."""
        weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
        for name, parameter in self.parameters.items():
            prefix = f"optimizer.{name}."
            kept = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            for key, value in kept.items():
                current = self._optimizer.state[parameter].get(key)
                device = current.device if isinstance(current, torch.Tensor) else self._state_device(key)
                copied = value.to(device, copy=True)
                if value.ndim == 4:
                    copied = copied.contiguous(memory_format=torch.channels_last)
                self._optimizer.state[parameter][key] = copied

    def _state_device(self, key: str) -> torch.device:
        # Torch keeps step counts on the CPU unless the step is fused or captured on the device.
        fused = any(group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups)
        return self.device if key != "step" or fused else torch.device("cpu")

    def close(self) -> None:
        """See `Engine.close`."""
        self._setup.restore()
        self._let_compiler_in()

    def peak_memory_bytes(self) -> int | None:
        """See `Engine.peak_memory_bytes`."""
        return hardware.peak_memory_bytes(self.device)


def _reader(samples: Samples) -> Callable[[np.ndarray], torch.Tensor]:
    shape, dtype = samples.images.shape[1:], samples.images.dtype
    return lambda positions: torch.from_numpy(samples.read(positions, np.empty((len(positions), *shape), dtype)))


def _pinned_reader(samples: Samples) -> Callable[[np.ndarray], torch.Tensor]:
    """Read into page-locked memory, from which a copy to the device overlaps with its work."""

    def read(positions: np.ndarray) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, samples.images.dtype)).dtype
        batch = torch.empty((len(positions), *samples.images.shape[1:]), dtype=dtype, pin_memory=True)
        samples.read(positions, batch.numpy())
        return batch

    return read
