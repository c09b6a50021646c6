"""The torch engine: one device of each rank, CPU, CUDA or MPS.

The path of a batch on the device: take this rank's share, gather rows of the resident images by index (or take the
streamed ones), augment and normalise, model, loss, gradients, their sum over the ranks, update, counts. Nothing in it
waits for the device.

Shape letters: N samples, B batch, H height, W width, C channels, K outputs.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from flatout.data.feed import Samples
from flatout.data.order import Batch, evaluation_batches
from flatout.dist.world import ALONE, World
from flatout.engine.base import Evaluation
from flatout.engine.eager import grad_accumulation as memory
from flatout.engine.eager.accelerator import Accelerator, accelerator_of
from flatout.engine.eager.batch_norm import BatchStatistics
from flatout.engine.eager.cuda_graph import CapturedStep
from flatout.engine.eager.device_setup import prepare
from flatout.engine.eager.exact_sums import exact_sums
from flatout.engine.eager.features import collect_features
from flatout.engine.eager.frozen_prefix import Cut, cut_frozen_prefix
from flatout.engine.eager.grad_reduce import GradientSum, OwnGradients, SharedGradients, SlicedGradients
from flatout.engine.eager.metric_sums import SUMS, Totals
from flatout.engine.eager.split import Inputs, Source, place, stream
from flatout.engine.eager.state import full_state, load_full_state
from flatout.engine.recorder import Recorder
from flatout.errors import InputError
from flatout.models.freeze import set_train_mode
from flatout.numerics import augment, loss, optim
from flatout.numerics.metrics import Counts
from flatout.recipe import Recipe

# Images in one evaluation batch at most. It does not depend on the ranks, so neither do the bits of a prediction.
EVALUATION_BATCH = 256


class TorchEngine:
    """Trains a module on one torch device, together with the other ranks.

    Args:
        model: trained in place, after being moved to the device.
        recipe: what to do; data.mean and data.std must be filled in.
        world: the ranks, and this one's device; None for the CPU alone.
        class_weights: float32 [classes], the weight of each class in the loss; None for none.
        accelerator: what its device can do; None asks the device.
        capture: whether the step may be recorded as a graph.
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
        accelerator: Accelerator | None = None,
        capture: bool = True,
        cache_prefix: bool = True,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        world = world or World()
        self.recipe, self.device, self.world = recipe, world.device, world
        self._accelerator = accelerator or accelerator_of(self.device)
        with contextlib.ExitStack() as undo:
            self._setup = prepare(self._accelerator, recipe.precision, undo, ranks_here=world.local_size)
            undo.callback(optim.keep_compiler_out())
            self._build(model, class_weights, capture=capture, cache_prefix=cache_prefix, report=report)
            self._undo = undo.pop_all()

    def _build(
        self,
        model: nn.Module,
        class_weights: np.ndarray | None,
        *,
        capture: bool,
        cache_prefix: bool,
        report: Callable[[str], None],
    ) -> None:
        """Bring the model to the device and prepare everything that the steps use."""
        recipe, world, accelerator = self.recipe, self.world, self._accelerator
        self._is_sliced = recipe.shard == "full" and world.is_joined
        capturable = capture and accelerator.can_capture and optim.can_capture(recipe.optimizer)
        if capturable and (world.backend == "gloo" or self._is_sliced):
            capturable = False
            reason = "a sharded model cannot be recorded" if self._is_sliced else "gloo adds gradients on the host"
            report(f"the step runs without a CUDA graph: {reason}")
        self.model = self._spread(model)
        set_train_mode(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._exact = None
        if not self._is_sliced and self._setup.precision == "fp32" and recipe.norm == "global":
            self._exact = exact_sums(self.model, world, self._setup.threads, recipe.batch_size)
        self._gradients: GradientSum
        if self._is_sliced:
            from flatout.engine.eager.fsdp import build_optimizer

            self._optimizer = build_optimizer(recipe.optimizer, self.parameters.values())
            self._gradients = SlicedGradients(self.model, world)
        else:
            self._optimizer = optim.build(recipe.optimizer, self.parameters.values(), capturable=capturable)
            extras = SUMS + len(world.control.outgoing)
            own, trained = OwnGradients(), list(self.parameters.values())
            self._gradients = own
            if world.is_joined:
                self._gradients = SharedGradients(trained, world, extras, self._exact, is_async=accelerator.is_async)
        self._update = optim.plain_step(self._optimizer)
        mean, std = (torch.tensor(v, device=self.device) for v in (recipe.data.mean, recipe.data.std))
        # One multiplication and one addition take a pixel 0..255 to its normalised value.
        self._scale, self._bias = 1 / (255 * std), -mean / std
        self._class_weights = class_weights
        self._class_weights_here = None if class_weights is None else torch.from_numpy(class_weights).to(self.device)
        self._totals = Totals(accelerator)
        self._communication_seconds = 0.0
        self.recorder: Recorder | None = None
        self.threads, self.device_names = self._setup.threads, [str(self.device)]
        self._passes = 0
        self._keeps_on_host = False
        self._report = report
        self._statistics = BatchStatistics(
            world if recipe.norm == "global" else ALONE, self._exact, native=not accelerator.is_host
        )
        self._captured = None
        if capturable:
            self._captured = CapturedStep(self._step, self._forget_gradients, accelerator, report)
        fixed_input = not recipe.augment.is_random
        may_cut = cache_prefix and fixed_input and not self._is_sliced
        self._cut: Cut | None = cut_frozen_prefix(self.model) if may_cut else None
        if self._cut:
            report(f"the first {self._cut.layers} layers are frozen: their output is computed once and cached")

    def _spread(self, model: nn.Module) -> nn.Module:
        """Bring the same model to the devices of all ranks, whole or each its slices."""
        if self._is_sliced:
            from flatout.engine.eager.fsdp import shard

            self.world.broadcast([*model.parameters(), *model.buffers()])
            shard(model, self.device)
            return model
        model = model.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    def describe(self) -> list[str]:
        """See `Engine.describe`."""
        sentences = [self._setup.describe()]
        if self.world.is_joined:
            how = {"memory": "shared memory", "gloo": "gloo", "nccl": "NCCL"}[self.world.backend]
            kept = "FSDP2, each with a slice of the model" if self._is_sliced else how
            sentences.append(f"{self.world.size} ranks; gradients are added up through {kept}")
        return sentences

    def communication_seconds(self) -> float:
        """See `Engine.communication_seconds`."""
        seconds, self._communication_seconds = self._communication_seconds, 0.0
        return float("nan") if self._accelerator.is_async and self.world.is_joined else seconds

    # --- data -----------------------------------------------------------------------------------------------------

    def place(self, samples: Samples) -> "TorchSplit":
        """See `Engine.place`."""
        images = place(samples, self._accelerator, self.recipe.data.placement, ranks_here=self.world.local_size)
        return TorchSplit(self, images)

    def begin_epoch(self, source: Source, transforms: np.ndarray | None) -> None:
        """See `DeviceSplit.begin_epoch`."""
        self._totals.begin_epoch()
        if transforms is not None:
            table = torch.from_numpy(transforms)
            if source.transforms is None:
                source.transforms = table.to(self.device)
            else:
                source.transforms.copy_(table)

    def feed(self, source: Source, batches: Iterable[Batch]) -> Iterator[Inputs]:
        """See `DeviceSplit.feed`."""
        rank, ranks = self.world.rank, self.world.size
        wholes: deque[Batch] = deque()

        def shares() -> Iterator[Batch]:
            for batch in batches:
                wholes.append(batch)
                yield batch.part(rank, ranks)

        if source.images is not None:
            return (self._inputs(source, wholes.popleft(), share, None) for share in shares())
        streamed = stream(source, shares(), self._accelerator)
        return (self._inputs(source, wholes.popleft(), share, images) for share, images in streamed)

    def _inputs(self, source: Source, whole: Batch, share: Batch, images: torch.Tensor | None) -> Inputs:
        weights = whole.weights
        if self._class_weights is not None:
            weights = weights * self._class_weights[source.samples.labels[whole.samples]]
        return Inputs(
            batch=share,
            samples=self._accelerator.put(share.samples),
            weights=self._accelerator.put(share.weights),
            total=whole.count,
            total_weight=self._accelerator.put(weights.sum(dtype=np.float32, keepdims=True))[0],
            images=images,
        )

    @torch.no_grad()
    def source(self, images: Source) -> Source:
        """Return what the trained part of the model reads of a split; each rank runs the prefix over its part."""
        if self._cut is None:
            return images
        prefix = self._cut.prefix

        def outputs() -> Iterator[torch.Tensor]:
            for _, batch in self._batches(images, in_step=True):
                with self._setup.autocast():
                    yield prefix(augment.apply(batch, None, self._scale, self._bias))

        return collect_features(outputs(), images, self.recipe.data.placement, self.world, self._accelerator)

    def _evaluation_batch(self, source: Source) -> int:
        return min(EVALUATION_BATCH, self.recipe.batch_size, len(source.samples))

    def _batches(self, source: Source, *, in_step: bool = False) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield this rank's images in padded batches on the device: every `size`-th batch of the split.

        Args:
            source: the split.
            in_step: whether every rank gets as many batches, those too many without a sample that counts.
        """
        rank, ranks = self.world.rank, self.world.size
        batches = list(evaluation_batches(len(source.samples), self._evaluation_batch(source)))
        own = batches[rank::ranks]
        if in_step and len(own) < -(-len(batches) // ranks):
            own.append(Batch(samples=batches[0].samples, weights=0 * batches[0].weights, count=0))
        resident = source.images
        for batch, images in (
            stream(source, own, self._accelerator)
            if resident is None
            else ((batch, resident[self._accelerator.put(batch.samples)]) for batch in own)
        ):
            self.world.control.check_stop()
            yield batch, images
            self.world.keep_alive()
        if len(own) < -(-len(batches) // ranks):
            self.world.control.check_stop()  # as often on every rank

    # --- training -------------------------------------------------------------------------------------------------

    def train_step(self, source: Source, inputs: Inputs, learning_rate: float, seed: int) -> None:
        """See `DeviceSplit.train_step`."""
        began = self.world.seconds
        if self._passes == 0:
            self._passes = self._count_passes(source, inputs)
            if self._passes > 1:
                # The passes of a step are pieces of their own, which depend on the ranks.
                self._exact = self._statistics.exact = None
        if self.recorder:
            self._record(source, inputs.batch, self.recorder)
        # Ranks drop different things: each has other samples.
        self._accelerator.seed((seed + self.world.rank) % 2**63)
        optim.set_learning_rate(self._optimizer, learning_rate)
        if self._captured is None or self._keeps_on_host:
            self._forget_gradients()
            self._step(source, inputs)
        else:
            self._captured(source, inputs)
        self.world.control.end_step()
        self._communication_seconds += self.world.seconds - began

    def _record(self, source: Source, batch: Batch, recorder: Recorder) -> None:
        samples = batch.samples[: batch.count]
        table = source.transforms
        recorder.step(samples, None if table is None else table[self._accelerator.put(samples)].cpu().numpy())

    def _step(self, source: Source, inputs: Inputs) -> None:
        self._gradients.begin()
        sums = torch.zeros(SUMS, device=self.device)
        for number in range(self._passes):
            self._gradients.is_last_pass = number == self._passes - 1
            sums += self._pass(source, inputs.part(number, self._passes))
        sums = self._gradients.finish(torch.cat([sums, self.world.control.outgoing]))
        self.world.control.incoming.copy_(sums[SUMS:])
        self._update()
        self._totals.add(sums)

    def _pass(self, source: Source, inputs: Inputs) -> torch.Tensor:
        """Compute the gradients of some of the step's samples; return their sums, float32 [SUMS]."""
        statistics = self._statistics
        statistics.batch_size, statistics.count = len(inputs.batch.samples), inputs.batch.count
        statistics.total = inputs.total
        if self._exact:
            self._exact.begin(min(self.recipe.batch_size, len(source.samples)))
        labels = source.labels.index_select(0, inputs.samples)
        weights = inputs.weights
        if self._class_weights_here is not None:
            weights = weights * self._class_weights_here.index_select(0, labels)
        with self._setup.autocast(), self._statistics, self._saved():
            logits = self._training_logits(source, inputs)
            losses = loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing)
            loss_sum = (losses * weights).sum()
        (loss_sum / inputs.total_weight).backward()
        real = inputs.weights > 0
        right = (loss.predicted(logits.detach()) == labels) & real
        return torch.stack([loss_sum.detach(), weights.sum(), right.sum().float(), real.sum().float()])

    def _saved(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that decides where activations wait for the backward pass."""
        if self._keeps_on_host:
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return contextlib.nullcontext()

    # --- memory ---------------------------------------------------------------------------------------------------

    def _count_passes(self, source: Source, inputs: Inputs) -> int:
        """Return in how many passes all ranks compute their shares: as few as fit into the memory of each.

        Raises:
            InputError: `micro_batch` would change what batch normalisation sees.
            TrainingFailed: not even the smallest pass fits.
        """
        share, wanted = len(inputs.batch.samples), self.recipe.micro_batch
        if not wanted and (self._is_sliced or not self._accelerator.raises_out_of_memory):
            return 1
        passes = self._fitting_passes(source, inputs)
        if self._statistics.was_used and passes != 1 and not wanted and self._accelerator.has_memory:
            self._keeps_on_host = True
            passes = self._fitting_passes(source, inputs)
        if self._statistics.was_used and passes > 1 and wanted:
            raise InputError(
                f"micro_batch = {wanted}: the model uses batch normalisation, which needs all {share} samples of a "
                "device together; leave micro_batch out"
            )
        if passes == 0 or (self._statistics.was_used and passes > 1):
            raise memory.no_room(share, whole=self._statistics.was_used)
        if self._keeps_on_host:
            self._report("what the backward pass needs waits in the host's memory: the device's does not suffice")
        if passes > 1:
            self._report(f"each step takes {passes} passes of up to {-(-share // passes)} samples on each device")
        return passes

    def _fitting_passes(self, source: Source, inputs: Inputs) -> int:
        """Return the passes that the rank with least room needs; 0 if one of them cannot do it at all."""
        share = len(inputs.batch.samples)
        if self._is_sliced:
            # An attempt on one rank alone would wait for the others' slices.
            samples = min(self.recipe.micro_batch, share)
        else:
            most = min(self.recipe.micro_batch or share, share)
            samples = memory.largest_pass(lambda n: self._try_pass(source, inputs, n), most, self._accelerator)
        needs = self.world.all_gather_object(-(-share // samples) if samples else 0)
        return max(needs) if min(needs) else 0

    def _try_pass(self, source: Source, inputs: Inputs, samples: int) -> None:
        """Compute one pass without telling the other ranks, and leave no trace of it."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        statistics = self._statistics
        self._statistics = BatchStatistics(native=statistics.native)
        self._gradients.is_last_pass = False
        # Room for what the optimizer will keep for each weight, and for the gradients on their way.
        ballast = [torch.empty_like(p) for p in self.parameters.values() for _ in range(memory.COPIES_OF_WEIGHTS)]
        try:
            self._pass(source, inputs.part(0, -(-len(inputs.batch.samples) // samples)))
        finally:
            statistics.was_used |= self._statistics.was_used
            self._statistics = statistics
            self._forget_gradients()
            ballast.clear()
            with torch.no_grad():
                for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(value)

    def _training_logits(self, source: Source, inputs: Inputs) -> torch.Tensor:
        images = inputs.images if source.images is None else source.images.index_select(0, inputs.samples)
        assert images is not None
        if self._cut is not None:
            return self._cut.train_suffix(images.movedim(-1, 1))
        transforms = None if source.transforms is None else source.transforms.index_select(0, inputs.samples)
        return self.model(augment.apply(images, transforms, self._scale, self._bias))

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def counts(self) -> tuple[Counts, int | None]:
        """See `Engine.counts`."""
        with self.world.heartbeat.waiting():
            return self._totals.fetch()

    # --- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, *, with_probabilities: bool = False) -> Evaluation:
        """See `DeviceSplit.evaluate`. Losses are those of the recipe, without class weights."""
        self._agree_on_buffers()
        count = len(source.samples)
        loss_sum = torch.zeros((), dtype=self._accelerator.wide_float, device=self.device)
        predicted = torch.zeros(count, dtype=torch.int64, device=self.device)
        probabilities: list[tuple[slice, torch.Tensor]] = []
        network = self._cut.eval_suffix if self._cut else self.model.eval()
        try:
            for batch, images in self._batches(source, in_step=self._is_sliced):
                with self._setup.autocast():
                    x = images.movedim(-1, 1) if self._cut else augment.apply(images, None, self._scale, self._bias)
                    logits = network(x)[: batch.count]
                labels = source.labels[self._accelerator.put(batch.samples[: batch.count])]
                loss_sum += loss.per_sample(logits, labels, self.recipe.loss, self.recipe.label_smoothing).sum()
                rows = slice(int(batch.samples[0]), int(batch.samples[0]) + batch.count)
                predicted[rows] = loss.predicted(logits)
                if with_probabilities:
                    probabilities.append((rows, loss.probabilities(logits)))
        finally:
            set_train_mode(self.model)
        return Evaluation(
            loss_sum=float(self.world.all_reduce(loss_sum)),
            predicted=self.world.all_reduce(predicted).cpu().numpy(),
            labels=source.samples.labels,
            probabilities=self._collect(probabilities, count) if with_probabilities else None,
        )

    def _collect(self, probabilities: list[tuple[slice, torch.Tensor]], count: int) -> np.ndarray:
        """Bring the ranks' probabilities together, [count, K] in the order of the split."""
        classes = max(self.world.all_gather_object(probabilities[0][1].shape[1] if probabilities else 0))
        table = torch.zeros((count, classes), device=self.device)
        for rows, some in probabilities:
            table[rows] = some
        return self.world.all_reduce(table).cpu().numpy()

    @torch.no_grad()
    def _agree_on_buffers(self) -> None:
        """Make buffers equal on all ranks: the mean of their own statistics, or what rank 0 has."""
        if not self.world.is_joined:
            return
        buffers = list(self.model.buffers())
        if self.recipe.norm == "per-device":
            for buffer in (b for b in buffers if b.is_floating_point()):
                buffer.copy_(self.world.all_reduce(buffer / self.world.size))
        self.world.broadcast(buffers)

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """See `Engine.state`."""
        self._agree_on_buffers()
        return full_state(self.model, self._optimizer, self.parameters)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See `Engine.load_state`."""
        if self._captured:
            # The optimizer's state gets new tensors.
            self._captured.release()
        load_full_state(self.model, self._optimizer, self.parameters, state)

    def close(self) -> None:
        """See `Engine.close`."""
        if self._captured:
            self._captured.release()
        self._undo.close()

    def peak_memory_bytes(self) -> int | None:
        """See `Engine.peak_memory_bytes`."""
        return self._accelerator.peak_bytes()


class TorchSplit:
    """See `DeviceSplit`.

    Args:
        engine: trains on the split.
        images: the split on the device.
    """

    def __init__(self, engine: TorchEngine, images: Source) -> None:
        self._engine, self._images = engine, images
        self.samples = images.samples

    @functools.cached_property
    def source(self) -> Source:
        """What the trained part of the model reads: images, or the output of its frozen prefix."""
        return self._engine.source(self._images)

    def compile(self) -> None:
        """See `DeviceSplit.compile`. Nothing is compiled."""

    def begin_epoch(self, transforms: np.ndarray | None) -> None:
        """See `DeviceSplit.begin_epoch`. The first time, the output of the frozen prefix is computed."""
        self._engine.begin_epoch(self.source, transforms)

    def feed(self, batches: Iterable[Batch]) -> Iterator[Inputs]:
        """See `DeviceSplit.feed`."""
        return self._engine.feed(self.source, batches)

    def train_step(self, inputs: Inputs, learning_rate: float, seed: int) -> None:
        """See `DeviceSplit.train_step`."""
        self._engine.train_step(self.source, inputs, learning_rate, seed)

    def evaluate(self, *, with_probabilities: bool = False) -> Evaluation:
        """See `DeviceSplit.evaluate`."""
        return self._engine.evaluate(self.source, with_probabilities=with_probabilities)
