"""The torch engine: one device of each rank, CPU, CUDA or MPS.

The path of a batch on the device: take this rank's share, gather rows of the resident images by index (or take the
streamed ones), augment and normalise, model, loss, gradients, their sum over the ranks, update, counts. Nothing in it
waits for the device.

Shape letters: N samples, B batch, H height, W width, C channels, K outputs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flatout import augment, loss, optim
from flatout.data.feed import Samples
from flatout.data.order import Batch, evaluation_batches
from flatout.engine import hardware
from flatout.engine.base import Ask, Evaluation, Value
from flatout.engine.batch_norm import BatchStatistics
from flatout.engine.capture import CapturedStep
from flatout.engine.gradients import Gradients
from flatout.engine.placed import Inputs, Placed, place, stream, to_device
from flatout.engine.prefix import Cut, cut_frozen_prefix
from flatout.engine.world import ALONE, World
from flatout.errors import InputError
from flatout.metrics import Counts
from flatout.models.freeze import set_train_mode
from flatout.recipe import Recipe

# Images in one evaluation batch at most. It does not depend on the ranks, so neither do the bits of a prediction.
EVALUATION_BATCH = 256
# What every step adds up over its samples: loss times weight, weight, right predictions, samples.
SUMS = 4
# What the ranks ask of each other is added up with the gradients: how many ask for each thing.
ASKS = tuple(Ask)
# GPU ranks read that so many steps later, so as not to wait for the device.
ASK_LAG = 8


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
    """Trains a module on one torch device, together with the other ranks.

    Args:
        model: trained in place, after being moved to the device.
        recipe: what to do; data.mean and data.std must be filled in.
        world: the ranks, and this one's device; None for the CPU alone.
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
        world: World | None = None,
        class_weights: np.ndarray | None = None,
        capture: bool = True,
        cache_prefix: bool = True,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        world = world or World()
        self.recipe, self.device, self.world = recipe, world.device, world
        self._setup = hardware.prepare(self.device, recipe.precision, ranks_here=world.local_size)
        self.model = model.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        set_train_mode(self.model)
        world.broadcast([*self.model.parameters(), *self.model.buffers()])
        capturable = capture and self.device.type == "cuda" and optim.can_capture(recipe.optimizer)
        if capturable and world.backend == "gloo":
            capturable = False
            report("the step runs without a CUDA graph: gloo adds gradients on the host")
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._let_compiler_in = optim.keep_compiler_out()
        self._optimizer = optim.build(recipe.optimizer, self.parameters.values(), capturable=capturable)
        self._update = optim.plain_step(self._optimizer)
        mean, std = (torch.tensor(v, device=self.device) for v in (recipe.data.mean, recipe.data.std))
        # One multiplication and one addition take a pixel 0..255 to its normalised value.
        self._scale, self._bias = 1 / (255 * std), -mean / std
        self._class_weights = class_weights
        self._class_weights_here = None if class_weights is None else torch.from_numpy(class_weights).to(self.device)
        self._totals = Totals.zeros(self.device)
        self._gradients: Gradients | None = None
        if world.is_joined:
            self._gradients = Gradients(list(self.parameters.values()), world, extras=SUMS + len(ASKS))
        self._communication_seconds = 0.0
        self._ask = Ask.NOTHING
        self._asks = torch.zeros(len(ASKS), device=self.device)
        self._agreed = torch.zeros_like(self._asks)
        self._answers: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._statistics = BatchStatistics(world if recipe.norm == "global" else ALONE)
        self._slots = _Slots()
        self._captured = CapturedStep(self._slot_step, self._forget_gradients, report) if capturable else None
        fixed_input = not recipe.augment.is_random
        self._cut: Cut | None = cut_frozen_prefix(self.model) if cache_prefix and fixed_input else None
        if self._cut:
            report(f"the first {self._cut.layers} layers are frozen: their output is computed once and cached")

    @property
    def threads(self) -> int:
        """See `Engine.threads`."""
        return self._setup.threads

    def describe(self) -> list[str]:
        """See `Engine.describe`."""
        sentences = self._setup.describe()
        if self.world.is_joined:
            how = {"memory": "shared memory", "gloo": "gloo", "nccl": "NCCL"}[self.world.backend]
            sentences[0] = f"{self.world.size} ranks, each {sentences[0]}; gradients are added up through {how}"
        return sentences

    def communication_seconds(self) -> float:
        """See `Engine.communication_seconds`."""
        seconds, self._communication_seconds = self._communication_seconds, 0.0
        return seconds if self.device.type == "cpu" else float("nan") if self.world.is_joined else 0.0

    # --- data -----------------------------------------------------------------------------------------------------

    def place(self, samples: Samples) -> Placed:
        """See `Engine.place`. Images go to the device if they fit, else stay in memory or on disk."""
        return place(samples, self.device, self.recipe.data.placement, ranks_here=self.world.local_size)

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
        rank, ranks = self.world.rank, self.world.size
        wholes: deque[Batch] = deque()

        def shares() -> Iterator[Batch]:
            for batch in batches:
                wholes.append(batch)
                yield batch.part(rank, ranks)

        if source.images is not None:
            return (self._inputs(source, wholes.popleft(), share, None) for share in shares())
        streamed = stream(source, shares(), self.device)
        return (self._inputs(source, wholes.popleft(), share, images) for share, images in streamed)

    def _inputs(self, source: Placed, whole: Batch, share: Batch, images: torch.Tensor | None) -> Inputs:
        weights = whole.weights
        if self._class_weights is not None:
            weights = weights * self._class_weights[source.samples.labels[whole.samples]]
        return Inputs(
            batch=share,
            samples=to_device(share.samples, self.device),
            weights=to_device(share.weights, self.device),
            total=whole.count,
            total_weight=to_device(weights.sum(dtype=np.float32, keepdims=True), self.device)[0],
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
        """Run the frozen prefix over a split, each rank over its part, and place the result by its size."""
        features: np.ndarray | torch.Tensor | None = None
        ranks_here = self.world.local_size
        count, size = len(placed.samples), self._evaluation_batch(placed)
        for first, (_, images) in zip(
            range(0, count, size * self.world.size), self._batches(placed, in_step=True), strict=True
        ):
            with self._setup.autocast():
                output = cut.prefix(augment.apply(images, None, self._scale, self._bias))
            # Rows are kept in the order in which the convolutions read them.
            for rank, rows in enumerate(self.world.gather_rows(output.movedim(1, -1))):
                if features is None:
                    wanted = self.recipe.data.placement
                    features = hardware.allocate(count, rows, self.device, wanted, ranks_here=ranks_here)
                start = first + rank * size
                here = rows[: max(0, count - start)]
                if isinstance(features, torch.Tensor):
                    features[start : start + len(here)] = here
                elif len(here):
                    features[start : start + len(here)] = here.float().cpu().numpy()
        assert features is not None
        if isinstance(features, torch.Tensor):
            return Placed(samples=placed.samples, images=features, labels=placed.labels)
        samples = Samples(images=features, rows=np.arange(len(features)), labels=placed.samples.labels)
        return Placed(samples=samples, images=None, labels=placed.labels)

    def _evaluation_batch(self, placed: Placed) -> int:
        return min(EVALUATION_BATCH, self.recipe.batch_size, len(placed.samples))

    def _batches(self, placed: Placed, *, in_step: bool = False) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield this rank's images in padded batches on the device: every `size`-th batch of the split.

        Args:
            placed: the split.
            in_step: whether every rank gets as many batches, those too many without a sample that counts.
        """
        rank, ranks = self.world.rank, self.world.size
        batches = list(evaluation_batches(len(placed.samples), self._evaluation_batch(placed)))
        own = batches[rank::ranks]
        if in_step and len(own) < -(-len(batches) // ranks):
            own.append(Batch(samples=batches[0].samples, weights=0 * batches[0].weights, count=0))
        if placed.images is None:
            for batch, images in stream(placed, own, self.device):
                yield batch, images
                self.world.moves()
            return
        for batch in own:
            yield batch, placed.images[to_device(batch.samples, self.device)]
            self.world.moves()

    # --- training -------------------------------------------------------------------------------------------------

    def train_step(
        self, placed: Placed, inputs: Inputs, learning_rate: float, seed: int, ask: Ask = Ask.NOTHING
    ) -> None:
        """See `Engine.train_step`."""
        began = self.world.seconds
        # Ranks drop different things: each has other samples.
        torch.manual_seed((seed + self.world.rank) % 2**63)
        optim.set_learning_rate(self._optimizer, learning_rate)
        source, statistics = self._source(placed), self._statistics
        statistics.batch_size, statistics.count = len(inputs.batch.samples), inputs.batch.count
        statistics.total = inputs.total
        if self._gradients and ask != self._ask:
            self._asks.copy_(torch.tensor([float(bool(ask & one)) for one in ASKS]))
        self._ask = ask
        if self._captured is None or inputs.batch.count < len(inputs.batch.samples):
            self._forget_gradients()
            self._step(source, inputs)
        else:
            self._fill_slots(source, inputs)
            self._captured()
        self._await_answer()
        self._communication_seconds += self.world.seconds - began

    def _step(self, source: Placed, inputs: Inputs) -> None:
        labels = source.labels.index_select(0, inputs.samples)
        weights = inputs.weights
        if self._class_weights_here is not None:
            weights = weights * self._class_weights_here.index_select(0, labels)
        with self._setup.autocast(), self._statistics:
            logits = self._training_logits(source, inputs)
        losses = loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing)
        loss_sum = (losses * weights).sum()
        if self._gradients:
            self._gradients.begin()
        (loss_sum / inputs.total_weight).backward()
        real = inputs.weights > 0
        right = (loss.predicted(logits.detach()) == labels) & real
        sums = torch.stack([loss_sum.detach(), weights.sum(), right.sum().float(), real.sum().float()])
        if self._gradients:
            sums = self._gradients.finish(torch.cat([sums, self._asks]))
            self._agreed.copy_(sums[SUMS:])
        self._update()
        self._count(sums)

    def _training_logits(self, source: Placed, inputs: Inputs) -> torch.Tensor:
        images = inputs.images if source.images is None else source.images.index_select(0, inputs.samples)
        assert images is not None
        if self._cut is not None:
            return self._cut.train_suffix(images.movedim(-1, 1))
        transforms = None if source.transforms is None else source.transforms.index_select(0, inputs.samples)
        return self.model(augment.apply(images, transforms, self._scale, self._bias))

    def _count(self, sums: torch.Tensor) -> None:
        totals = self._totals
        totals.sums += sums[:2]
        totals.numbers += sums[2:SUMS].long()
        is_first_bad = ~torch.isfinite(sums[0]) & (totals.first_bad_step < 0)
        totals.first_bad_step.copy_(torch.where(is_first_bad, totals.step, totals.first_bad_step))
        totals.step += 1

    def _await_answer(self) -> None:
        """Note what the ranks asked for in this step, or on a GPU when that can be read."""
        if self._gradients is None:
            return
        answer, event = self._agreed.to("cpu", non_blocking=True, copy=True), None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._answers.append((answer, event))

    def asked(self) -> Ask:
        """See `Engine.asked`."""
        if self._gradients is None:
            return self._ask
        found = Ask.NOTHING
        while len(self._answers) > (ASK_LAG if self.device.type == "cuda" else 0):
            answer, event = self._answers.popleft()
            if event:
                event.synchronize()
            for one, number in zip(ASKS, answer.tolist(), strict=True):
                found |= one if number else Ask.NOTHING
        return found

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
                total=inputs.total,
                total_weight=inputs.total_weight.clone(),
                images=None if inputs.images is None else inputs.images.clone(),
            )
            return
        assert slots.placed is source
        slots.inputs.samples.copy_(inputs.samples)
        slots.inputs.weights.copy_(inputs.weights)
        slots.inputs.total_weight.copy_(inputs.total_weight)
        if inputs.images is not None:
            assert slots.inputs.images is not None
            slots.inputs.images.copy_(inputs.images)

    def _slot_step(self) -> None:
        assert self._slots.placed is not None
        assert self._slots.inputs is not None
        self._step(self._slots.placed, self._slots.inputs)

    def share(self, value: Value) -> Value:
        """See `Engine.share`."""
        return self.world.share(value)

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
    def evaluate(self, placed: Placed, *, with_probabilities: bool = False) -> Evaluation:
        """See `Engine.evaluate`. Losses are those of the recipe, without class weights."""
        self._agree_on_buffers()
        source, count = self._source(placed), len(placed.samples)
        loss_sum = torch.zeros((), dtype=self._totals.sums.dtype, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        probabilities: list[tuple[Batch, torch.Tensor]] = []
        network = self._cut.eval_suffix if self._cut else self.model.eval()
        for batch, images in self._batches(source):
            with self._setup.autocast():
                x = images.movedim(-1, 1) if self._cut else augment.apply(images, None, self._scale, self._bias)
                logits = network(x)[: batch.count]
            labels = source.labels[to_device(batch.samples[: batch.count], self.device)]
            loss_sum += loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing).sum()
            correct += (loss.predicted(logits) == labels).sum()
            if with_probabilities:
                probabilities.append((batch, loss.probabilities(logits)))
        set_train_mode(self.model)
        loss_sum, correct = self.world.sum(loss_sum), self.world.sum(correct)
        counts = Counts(loss_sum=float(loss_sum), weight_sum=float(count), correct=int(correct), count=count)
        return Evaluation(
            counts=counts, probabilities=self._collect(probabilities, count) if with_probabilities else None
        )

    def _collect(self, probabilities: list[tuple[Batch, torch.Tensor]], count: int) -> np.ndarray:
        """Bring the ranks' probabilities together, [count, K] in the order of the split."""
        classes = max(self.world.gather(probabilities[0][1].shape[1] if probabilities else 0))
        table = torch.zeros((count, classes), device=self.device)
        for batch, rows in probabilities:
            start = int(batch.samples[0])
            table[start : start + batch.count] = rows
        return self.world.sum(table).cpu().numpy()

    @torch.no_grad()
    def _agree_on_buffers(self) -> None:
        """Make buffers equal on all ranks: the mean of their own statistics, or what rank 0 has."""
        if not self.world.is_joined:
            return
        buffers = list(self.model.buffers())
        if self.recipe.norm == "per-device":
            for buffer in (b for b in buffers if b.is_floating_point()):
                buffer.copy_(self.world.sum(buffer / self.world.size))
        self.world.broadcast(buffers)

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """See `Engine.state`."""
        self._agree_on_buffers()
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
