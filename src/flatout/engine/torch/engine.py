"""The torch engine: one device of each rank, CPU, CUDA or MPS.

A training step never waits for the device, so it can be captured as a CUDA graph.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.data.batches import Split
from flatout.distributed.world import ALONE, World
from flatout.engine import augment, optim, pixels
from flatout.engine.base import Counts
from flatout.engine.torch import state as states
from flatout.engine.torch.accelerator import MEMORY_SHARE, Accelerator, accelerator_of
from flatout.engine.torch.batch_norm import BatchNorm, ReplacedFunctions
from flatout.engine.torch.batches import CapturedStep, DeviceBatch, DeviceImages, Step
from flatout.engine.torch.dataset import TorchDataset
from flatout.engine.torch.gradients import BucketedAllReduce, FSDPGradients, Gradients
from flatout.engine.torch.state import Snapshot, TrainingState, WeightAverage
from flatout.models.features import BATCH_PIXELS, WORTHWHILE_PIXELS, Function, frozen_network
from flatout.models.heads import Head, before_head
from flatout.models.layers import Cut, cut_frozen_prefix, learning_rate_scales, set_train_mode
from flatout.tasks import Task, task_of
from flatout.utils.errors import InputError, TrainingFailed, first_line, is_out_of_memory

# Memory reserved during the trial of a micro-batch, in copies of the weights: two for Adam, one for the all-reduce.
COPIES_OF_WEIGHTS = 3


class NetworkInput:
    """Computes the input of the network on one device; behind a `cut`, the images are the frozen prefix's output."""

    def __init__(
        self, recipe: Recipe, device: torch.device, cut: Cut | None, batch_transforms: Sequence[Function]
    ) -> None:
        self._recipe, self._cut, self._batch_transforms = recipe, cut, batch_transforms
        mean, std = (torch.tensor(v, device=device) for v in (recipe.data.mean, recipe.data.std))
        # A pixel p of 0..255 becomes p * scale + bias.
        self._normalisation = 1 / (255 * std), -mean / std

    def normalised(self, images: Tensor, transforms: dict[str, Tensor] | None = None) -> Tensor:
        """Return stored images [B, H, W, C] as model input [B, C, H, W], augmented if there are transforms."""
        size = self._recipe.eval_sides if transforms is None else self._recipe.image_sides
        return augment.apply(images, transforms, *self._normalisation, size)

    def of(self, images: Tensor, transforms: dict[str, Tensor] | None = None) -> Tensor:
        """Return the input of the network, [B, C, ...]: `normalised` images, or the output of the prefix."""
        return images.movedim(-1, 1) if self._cut else self.normalised(images, transforms)

    def of_batch(self, source: DeviceImages, inputs: DeviceBatch) -> Tensor:
        rows = source.transforms_of(inputs.samples)
        images = self.of(source.images_of(inputs), rows)
        if inputs.partners is not None:
            partner_rows = source.transforms_of(inputs.partners)
            partners = self.of(source.images_of(inputs, of_partners=True), partner_rows)
            images = augment.mix(images, partners, rows["mix"])
        for transform in self._batch_transforms:
            shape, images = images.shape, transform(images)
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            if found != tuple(shape):
                name = getattr(transform, "__name__", type(transform).__name__)
                raise InputError(f"batch_transforms: {name} returned {found} for {tuple(shape)}")
        return images


class Losses:
    """Computes losses on one device: by the user's `own` function of logits and targets, or else by the task."""

    def __init__(
        self, own: Callable[..., Tensor] | None, task: Task, class_weights: np.ndarray | None, device: torch.device
    ) -> None:
        if isinstance(own, nn.Module):
            own = copy.deepcopy(own).to(device)
            if "reduction" in vars(own):
                vars(own)["reduction"] = "none"  # torch's loss modules return the mean over the batch
        self._own, self._task = own, task
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights).to(device)

    def of(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
        """Return the loss of each sample, float32 [B]."""
        if self._own is None:
            return self._task.per_sample(logits, targets, class_weights)
        losses = self._own(logits.float(), targets)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != (len(logits),):
            raise InputError(
                f"loss: must return a loss for each image, a tensor of shape {(len(logits),)}, not {shape}; torch's "
                "losses do with reduction='none'"
            )
        return losses

    def of_batch(self, logits: Tensor, targets: Tensor, source: DeviceImages, inputs: DeviceBatch) -> Tensor:
        """Return the loss of each sample, [B]; see `Task.mixed` for mixtures."""
        loss_of = functools.partial(self.of, logits, class_weights=self._class_weights)
        if inputs.partners is None:
            return loss_of(targets)
        share = source.transforms["mix"].index_select(0, inputs.samples)[:, 5]
        return self._task.mixed(loss_of, targets, source.targets.index_select(0, inputs.partners), share)


# The sums of every step over its samples: loss times weight, weight, metric of the task, samples.
SUMS = 4


class MetricSums:
    """Sums on the device since they were last fetched; adding to them never waits."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._sums = torch.zeros(SUMS, dtype=accelerator.wide_float, device=accelerator.device)
        self._step = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self._first_bad_step = torch.full_like(self._step, -1)

    def begin_epoch(self) -> None:
        """Count steps from 0 again."""
        self._step.zero_()
        self._first_bad_step.fill_(-1)

    def add(self, sums: Tensor) -> None:
        self._sums += sums[:SUMS]
        is_first_bad = ~torch.isfinite(sums[0]) & (self._first_bad_step < 0)
        self._first_bad_step.copy_(torch.where(is_first_bad, self._step, self._first_bad_step))
        self._step += 1

    def fetch(self) -> tuple[Counts, int | None]:
        """See `Engine.counts`."""
        loss_sum, weight_sum, metric_sum, count = self._sums.tolist()
        bad = int(self._first_bad_step)
        self._sums.zero_()
        result = Counts(loss_sum=loss_sum, weight_sum=weight_sum, metric_sum=metric_sum, count=int(count))
        return result, bad if bad >= 0 else None


class TorchEngine:
    """Trains a module on one torch device, together with the other ranks.

    Args:
        model: trained in place, after being moved to the device.
        recipe: data.mean and data.std must be filled in.
        world: the ranks, and this one's device; None for a single CPU process.
        task: the task with the metrics of the user; None for the recipe's.
        class_weights: see `Task.class_weights`.
        capture: whether the step may be captured as a graph.
        cache_prefix: whether the output of a frozen prefix may be cached.
        head: the head, if nothing else of the model changes; its input is then computed once.
        loss: a function of logits and targets in place of the task's; returns a loss for each sample.
        batch_transforms: functions of normalised training images [B, C, H, W]; each returns such images.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        world: World | None = None,
        task: Task | None = None,
        class_weights: np.ndarray | None = None,
        capture: bool = True,
        cache_prefix: bool = True,
        head: Head | None = None,
        loss: Callable[..., Tensor] | None = None,
        batch_transforms: Sequence[Function] = (),
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        world = world or World()
        self.accelerator = accelerator = accelerator_of(world.device)
        self.recipe, self.device, self.world = recipe, world.device, world
        self.task = task or task_of(recipe)
        self.class_weights, self._report = class_weights, report
        self._batch_transforms, self._has_own_functions = tuple(batch_transforms), bool(loss or batch_transforms)
        with contextlib.ExitStack() as undo:
            accelerator.prepare(recipe.precision, undo, ranks_here=world.local_size, is_tuned=recipe.tune == "always")
            accelerator.reset_peak()
            undo.callback(optim.keep_compiler_out())
            self.losses = Losses(loss, self.task, class_weights, self.device)
            self._build(model, capture=capture, cache_prefix=cache_prefix, head=head)
            self._undo = undo.pop_all()

    def _build(self, model: nn.Module, *, capture: bool, cache_prefix: bool, head: Head | None) -> None:
        recipe, world, accelerator = self.recipe, self.world, self.accelerator
        is_async = not accelerator.is_host
        self.threads, self.device_names = accelerator.threads, [str(self.device)]
        self.is_sharded = recipe.shard == "full" and world.is_joined
        self.model, self._gradients = model, self._distribute(model)
        set_train_mode(model, recipe.norm)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if world.is_joined and not self.is_sharded:
            extras = SUMS + len(world.control.outgoing)
            self._gradients = BucketedAllReduce(list(self.parameters.values()), world, extras, is_async=is_async)
        normalised = world if recipe.norm == "global" else ALONE
        self._batch_norm = BatchNorm(normalised, on_host=accelerator.is_host, has_kernels=accelerator.has_batch_norm)
        can_capture = capture and accelerator.can_capture and self._can_capture()
        scales = learning_rate_scales(model, recipe.optimizer.layer_decay)
        self._optimizer = optim.build(
            recipe.optimizer, self.parameters, scales, capturable=can_capture, is_sharded=self.is_sharded
        )
        self._update = optim.plain_step(self._optimizer)
        self.cut: Cut | None = None
        self._average = self._captured = None
        self._prefix = self._compiled = None  # made when they are needed
        if recipe.ema:
            self._average = WeightAverage(model, recipe.ema, recipe.averaged_steps, is_async=is_async)
        self._state = TrainingState(model, self._optimizer, self.parameters, self._average)
        if can_capture:
            self._captured = CapturedStep(self._step, self._optimizer.zero_grad, accelerator, self._report)
        self.metric_sums = MetricSums(accelerator)
        self._communication_seconds, self._micro_batches = 0.0, 0
        may_cut = cache_prefix and recipe.is_cacheable and not self.is_sharded and not self._batch_transforms
        if head:
            self.cut = before_head(model, head)
        elif may_cut and (cut := cut_frozen_prefix(model)):
            self.cut = cut
            self._report(cut.describe(recipe.augment.views))
        self.input = NetworkInput(recipe, self.device, self.cut, self._batch_transforms)
        self._network = self.cut.train_suffix if self.cut else model
        self._is_to_be_compiled = recipe.tune == "always" and accelerator.can_compile and not world.is_joined

    def _distribute(self, model: nn.Module) -> Gradients:
        """Give each rank a copy or a shard of rank 0's model."""
        if not self.is_sharded:
            model.to(self.device)
            # Not `model.to(memory_format=...)`, which refuses 3D convolutions.
            for tensor in (t for t in [*model.parameters(), *model.buffers()] if t.ndim == 4):
                # `contiguous` would leave the strides of a single channel, and so the outputs, as they are.
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
        self.world.broadcast([*model.parameters(), *model.buffers()])
        return FSDPGradients(model, self.world) if self.is_sharded else Gradients()

    def _can_capture(self) -> bool:
        reasons = {
            f"{self.recipe.optimizer.name} cannot be captured": not optim.can_capture(self.recipe.optimizer),
            "functions given in Python cannot always be captured": self._has_own_functions,
            "a sharded model cannot be captured": self.is_sharded,
            "gloo sums gradients on the host": self.world.backend == "gloo",
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            self._report(f"the step runs without a CUDA graph: {reason}")
        return not reason

    @property
    def is_captured(self) -> bool:
        return self._captured is not None and not self._captured.is_off

    def describe(self) -> list[str]:
        sentences = [self.accelerator.describe()]
        if self.world.is_joined:
            how = {"memory": "shared memory", "gloo": "gloo", "nccl": "NCCL"}[self.world.backend]
            how = "FSDP2, which shards the model" if self.is_sharded else how
            sentences.append(f"{self.world.size} ranks; gradients are summed through {how}")
        return sentences

    # --- training -------------------------------------------------------------------------------------------------

    def place(self, samples: Split) -> TorchDataset:
        self._release_graph()
        targets = torch.from_numpy(self.task.targets(samples.labels)).to(self.device)
        where, images = self.accelerator.placement(samples.nbytes, self.recipe.data.placement), None
        if where != "disk":
            read = samples.images_at(np.arange(len(samples)))
            if where == "device":
                images = torch.from_numpy(read).to(self.device)
            else:
                samples = samples.with_images(read)
        return TorchDataset(self, DeviceImages(samples=samples, images=images, targets=targets))

    def train_step(self, source: DeviceImages, inputs: Step, learning_rate: float, seed: int) -> None:
        began = self.world.seconds
        if self._micro_batches == 0:
            self._choose_micro_batches(source, inputs.read())
        # Dropout must differ between ranks, like their samples.
        self.accelerator.seed((seed + self.world.rank) % 2**63)
        optim.set_learning_rate(self._optimizer, learning_rate)
        if self._captured:
            self._captured(source, inputs)
        else:
            self._optimizer.zero_grad()
            self._step(source, inputs)
        self.world.control.end_step()
        self._communication_seconds += self.world.seconds - began

    def _step(self, source: DeviceImages, inputs: Step) -> None:
        batch = inputs.read()
        inputs.table.advance()
        sums = torch.zeros(SUMS, device=self.device)
        for number in range(self._micro_batches):
            self._gradients.begin_backward(is_last=number == self._micro_batches - 1)
            sums += self._backward(source, batch.micro_batch(number, self._micro_batches), self._batch_norm)
        sums = self._gradients.all_reduce(torch.cat([sums, self.world.control.outgoing]))
        self.world.control.incoming.copy_(sums[SUMS:])
        if self.recipe.clip_norm:
            self._clip_gradients()
        self._update()
        if self._average:
            self._average.update()
        self.metric_sums.add(sums)

    def _backward(self, source: DeviceImages, inputs: DeviceBatch, batch_norm: BatchNorm) -> Tensor:
        """Accumulate the gradients of a micro-batch; return the sums of its metrics, float32 [SUMS]."""
        batch_norm.begin(len(inputs.batch.samples), inputs.batch.count, inputs.total, is_padded=inputs.is_padded)
        targets, weights = source.targets.index_select(0, inputs.samples), inputs.weights
        images = self.input.of_batch(source, inputs)  # resampled in 32 bits: bfloat16 moves pixels
        with self.accelerator.autocast(), ReplacedFunctions({functional.batch_norm: batch_norm}):
            # Compiling once more for the padded batch of an epoch takes longer than it saves.
            network = self._network if inputs.is_padded or self._compiled is None else self._compiled
            logits = network(images)
            losses = self.losses.of_batch(logits, targets, source, inputs)
            loss_sum = (losses * weights).sum()
        (loss_sum / inputs.total_weight).backward()
        metrics, count = self.task.step_metrics(logits.detach(), targets), inputs.batch.count
        return torch.stack([loss_sum.detach(), weights.sum(), metrics[:count].sum(), weights.new_full((), count)])

    def _clip_gradients(self) -> None:
        parameters = list(self.parameters.values())
        if self.world.backend == "memory":
            # All ranks read the same memory.
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        nn.utils.clip_grad_norm_(parameters, self.recipe.clip_norm)

    def view_logits(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return the logits of stored images, averaged over their views."""
        images = self.input.normalised(images)
        views = (pixels.view(torch, images, *view) for view in augment.tta_views(self.recipe))
        seen = [network(self.prefix(view, len(view)) if self.cut else view) for view in views]
        return self.task.averaged(torch.stack(seen))

    def frozen_batch(self, count: int) -> int:
        """Return the images per batch of a frozen network for `count` images; 0: too few for OpenVINO's preparation."""
        if not self.accelerator.is_host or count * math.prod(self.recipe.image_sides) < WORTHWHILE_PIXELS:
            return 0
        most = max(1, BATCH_PIXELS // math.prod(self.recipe.image_sides))
        return math.ceil(count / math.ceil(count / most))

    def prefix(self, images: Tensor, count: int) -> Tensor:
        """Return the output of the frozen prefix for a batch [B, C, H, W] of `count` images in total."""
        assert self.cut is not None
        self._prefix = self._prefix or self.frozen(self.cut.prefix, images, count)
        return self._prefix(images)

    def frozen(self, network: nn.Module, example: Tensor, count: int) -> Function:
        """Return the fastest implementation of a frozen network for `count` images; `example` is an input batch."""
        return frozen_network(network, example, self.threads, self._report) if self.frozen_batch(count) else network

    @contextlib.contextmanager
    def evaluation_network(self) -> Iterator[nn.Module]:
        """Provide the model after its frozen prefix, in evaluation mode and with the averaged weights."""
        with self._average.applied() if self._average else contextlib.nullcontext():
            try:
                yield self.cut.eval_suffix if self.cut else self.model.eval()
            finally:
                set_train_mode(self.model, self.recipe.norm)

    # --- gradient accumulation ------------------------------------------------------------------------------------

    def _choose_micro_batches(self, source: DeviceImages, inputs: DeviceBatch) -> None:
        """Choose the micro-batches before the first step: as few as fit."""
        share, wanted = len(inputs.batch.samples), self.recipe.micro_batch
        if self.is_sharded:
            # A trial on one rank would wait for the other ranks' shards.
            self._micro_batches = max(self.world.all_gather_object(-(-share // wanted))) if wanted else 1
        elif not wanted and not self.accelerator.raises_out_of_memory:
            self._micro_batches = 1
        else:
            fitting = self._fitting(source, inputs, min(wanted or share, share))
            # The rank with the least memory determines the number.
            counts = self.world.all_gather_object(math.ceil(share / fitting) if fitting else 0)
            needs_whole = self._batch_norm.was_used and not wanted
            if not min(counts) or (needs_whole and max(counts) > 1):
                whole = f"the {share} samples of a device, which batch normalisation needs together"
                raise TrainingFailed(
                    f"out of memory: no room for {whole if needs_whole else 'one sample'}; "
                    "use more devices, a smaller batch_size or image_size, or shard = 'full'"
                )
            self._micro_batches = max(counts)
        count = self._micro_batches
        self._batch_norm.micro_batch = wanted if count > 1 else 0
        if count > 1:
            self._report(f"gradient accumulation: {count} micro-batches of up to {-(-share // count)}")

    def _fitting(self, source: DeviceImages, inputs: DeviceBatch, samples: int) -> int:
        """Return the size of the largest micro-batch that fits, at most `samples`; 0 if not even one sample does."""
        while samples:
            try:
                self._try(source, inputs.micro_batch(0, -(-len(inputs.batch.samples) // samples)))
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                error.__traceback__ = None
            samples = 0 if samples == 1 else math.ceil(samples / 2)
            self.accelerator.empty_cache()
        return samples

    def _try(self, source: DeviceImages, inputs: DeviceBatch) -> None:
        """Compute a micro-batch without the other ranks, and leave no trace of it."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        alone = BatchNorm(on_host=self._batch_norm.on_host)
        self._gradients.begin_backward(is_last=False)
        if self._is_to_be_compiled:
            self._compiled = None  # of a trial that ran out of memory
        reserved = [torch.empty_like(p) for p in self.parameters.values() for _ in range(COPIES_OF_WEIGHTS)]
        try:
            # The first time, libraries are initialised, which may wait for the device.
            self._backward(source, inputs, alone)
            if self._is_to_be_compiled:
                # What `alone` has noted by now would change in the first pass, and the model would be compiled twice.
                self._compiled = torch.compile(self._network)
                problem = self._problem(source, inputs, alone, contextlib.nullcontext())
                self._is_to_be_compiled = False
                if problem:
                    self._compiled = None
                    self._report(f"the model is not compiled: {problem}")
            if self._captured and not self._captured.is_off:
                # A step that waits for the device would fail in the capture.
                problem = self._problem(source, inputs, alone, self.accelerator.refusing_to_wait())
                if alone.normalised_others and self.world.is_joined:
                    problem = "the ranks exchange the length of what the model normalises besides its batch"
                if problem:
                    self._captured.refuse(problem)
        finally:
            self._batch_norm.was_used |= alone.was_used
            self._optimizer.zero_grad()
            reserved.clear()
            with torch.no_grad():
                for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(value)

    def _problem(
        self, source: DeviceImages, inputs: DeviceBatch, alone: BatchNorm, context: AbstractContextManager[object]
    ) -> str:
        """Compute a micro-batch in a context; return what fails in a line, except that memory runs out."""
        self._optimizer.zero_grad()
        try:
            with context:
                self._backward(source, inputs, alone)
        except Exception as error:  # the compiler raises anything
            if is_out_of_memory(error):
                raise
            return first_line(error)
        return ""

    # --- results and state ----------------------------------------------------------------------------------------

    def counts(self) -> tuple[Counts, int | None]:
        with self.world.watch.paused():
            return self.metric_sums.fetch()

    def communication_seconds(self) -> float:
        seconds, self._communication_seconds = self._communication_seconds, 0.0
        return seconds if self.accelerator.is_host or not self.world.is_joined else float("nan")

    @torch.no_grad()
    def synchronise_buffers(self) -> None:
        """Synchronise buffers: with norm = "per-device" to their mean, else to those of rank 0."""
        if not self.world.is_joined:
            return
        buffers = list(self.model.buffers())
        if self._average:
            averages, names = self._average.tensors, [f"ema.{name}" for name, _ in self.model.named_buffers()]
            buffers += [averages[name] for name in names if name in averages]  # without those that are not saved
        if self.recipe.norm == "per-device":
            for buffer in (b for b in buffers if b.is_floating_point()):
                buffer.copy_(self.world.all_reduce(buffer / self.world.size))
        self.world.broadcast(buffers)

    def _tensors(self, *, weights_only: bool = False) -> dict[str, Tensor]:
        self.synchronise_buffers()
        return self._state.tensors(weights_only=weights_only)

    @torch.no_grad()
    def is_finite(self) -> bool:
        finite = states.is_finite(self._tensors()).float()
        return int(self.world.all_reduce(finite)) == self.world.size

    @torch.no_grad()
    def snapshot(self, *, weights_only: bool = False) -> Snapshot:
        held = {name: states.local(value) for name, value in self._tensors(weights_only=weights_only).items()}
        fits = sum(v.nbytes for v in held.values()) <= MEMORY_SHARE * self.accelerator.free_bytes()
        copies = {name: value.to(value.device if fits else "cpu", copy=True) for name, value in held.items()}
        return Snapshot(tensors=copies, weights_only=weights_only)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        self._release_graph()
        self._state.restore(snapshot)

    @torch.no_grad()
    def state(self, snapshot: Snapshot | None = None) -> dict[str, Tensor]:
        return states.gathered(self._tensors(), snapshot.tensors if snapshot else None, self.world)

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        self._release_graph()
        self._state.load(state, self.world)

    def forget_shapes(self) -> None:
        """Prepare for batches of other shapes: choose micro-batches and capture the step again."""
        self._micro_batches = 0
        self._release_graph()

    def _release_graph(self) -> None:
        """Free captured steps: the tensors of the optimizer that they refer to may be replaced."""
        if self._captured:
            self._captured.release()

    def peak_memory_bytes(self) -> int | None:
        return self.accelerator.peak_bytes()

    def close(self) -> None:
        self._release_graph()
        self._gradients.close()
        self._undo.close()
        self.accelerator.empty_cache()
