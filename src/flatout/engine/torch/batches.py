"""The placement of a split for the torch engine, and the transfer of its batches to the device.

Shape letters: N samples of the split, B samples of this rank in a batch, S steps, K outputs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from flatout.data.batches import Ahead, Batch, Split, block_size, evaluation_batches, part, prefetch, read_ahead
from flatout.engine import augment
from flatout.engine.base import Evaluation, Keep
from flatout.engine.torch.accelerator import Accelerator, HostBuffer, allocate, placement
from flatout.models.features import caught
from flatout.models.heads import FeatureNetwork, Head
from flatout.tasks.base import Task

if TYPE_CHECKING:
    from flatout.distributed.world import World
    from flatout.engine.torch.engine import TorchEngine

# The key of the evaluation view of a split's images.
NOT_AUGMENTED = -1
# Batches that are read ahead from memory or disk.
READ_AHEAD = 3
# Steps whose inputs are copied to the device at once.
TABLE_STEPS = 64


@dataclass(kw_only=True, eq=False)
class DeviceBatch:
    """This rank's share of a batch, or a micro-batch of it: tensors on the device.

    Attributes:
        batch: the share, on the host.
        total: samples of all ranks without padding.
        is_padded: whether any rank has padding.
        samples: int64 [B], positions in the split.
        weights: float32 [B], 0 for padding, else the weight of the sample in the loss.
        total_weight: float32 [1], the sum of the weights of all ranks, by which the loss is divided.
        partners: int64 [B], the samples that these are mixed with; None without mixing.
        images: [B, ...] if they are streamed from the host.
        partner_images: see `images`.
    """

    batch: Batch
    total: int
    is_padded: bool
    samples: torch.Tensor
    weights: torch.Tensor
    total_weight: torch.Tensor
    partners: torch.Tensor | None = None
    images: torch.Tensor | None = None
    partner_images: torch.Tensor | None = None

    def micro_batch(self, number: int, count: int) -> "DeviceBatch":
        """Return one of `count` micro-batches."""
        if count == 1:
            return self
        chosen = part(len(self.batch.samples), number, count)
        split = ("samples", "weights", "partners", "images", "partner_images")
        tensors = {name: value for name in split if (value := getattr(self, name)) is not None}
        batch = self.batch.part(number, count)
        return replace(self, batch=batch, **{name: tensor[chosen] for name, tensor in tensors.items()})


class StepTable:
    """The inputs of the next steps on the device, and a counter there of the steps taken.

    A step finds its row by the counter, so it needs nothing from the host: a recorded step is only replayed.

    Args:
        columns: the first rows, [s, ...] by name; see `DeviceBatch`.
    """

    def __init__(self, columns: dict[str, np.ndarray], accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        rows = {name: torch.from_numpy(values[:1]) for name, values in columns.items()}
        self._columns = {name: row.repeat(TABLE_STEPS, 1).to(accelerator.device) for name, row in rows.items()}
        self._next = torch.zeros(1, dtype=torch.int64, device=accelerator.device)

    def fill(self, columns: dict[str, np.ndarray]) -> None:
        """Overwrite the first rows, in place, and take the first of them next."""
        for name, rows in columns.items():
            self._columns[name][: len(rows)].copy_(self._accelerator.pinned(rows), non_blocking=True)
        self._next.zero_()

    def read(self) -> dict[str, torch.Tensor]:
        """Return the row of the next step."""
        return {name: rows.index_select(0, self._next)[0] for name, rows in self._columns.items()}

    def advance(self) -> None:
        """Take the following row next."""
        self._next += 1


@dataclass(kw_only=True, eq=False)
class Step:
    """A training step as the host knows it; its tensors are read on the device when it runs.

    Attributes:
        batch, total, is_padded: see `DeviceBatch`.
        table: has the row of the step.
        rows: new rows of the table, of which this step's is the first; None if it has the row already.
        images, partner_images: see `DeviceBatch`.
    """

    batch: Batch
    total: int
    is_padded: bool
    table: StepTable
    rows: dict[str, np.ndarray] | None
    images: torch.Tensor | None = None
    partner_images: torch.Tensor | None = None

    @property
    def constants(self) -> tuple[int, int, int]:
        """The Python numbers of the step, which become constants of a captured one."""
        return len(self.batch.samples), self.batch.count, self.total

    def read(self) -> DeviceBatch:
        """Return the tensors of the step that is next."""
        return DeviceBatch(
            batch=self.batch,
            total=self.total,
            is_padded=self.is_padded,
            images=self.images,
            partner_images=self.partner_images,
            **self.table.read(),
        )

    def with_own_images(self) -> "Step":
        """Return the step with a copy of the streamed images."""
        own = {name: value.clone() for name, value in self._images().items()}
        return replace(self, **own)

    def copy_images(self, other: "Step") -> None:
        """Overwrite the streamed images with those of another step."""
        for name, images in self._images().items():
            images.copy_(getattr(other, name))

    def _images(self) -> dict[str, torch.Tensor]:
        found = {"images": self.images, "partner_images": self.partner_images}
        return {name: images for name, images in found.items() if images is not None}


Streamed = TypeVar("Streamed", DeviceBatch, Step)


@dataclass(kw_only=True, eq=False)
class DeviceImages:
    """The input of a model's trained part for a split: images, or the output of its frozen prefix.

    Attributes:
        samples: the split on the host.
        images: [N, ...] on the device; None if they are streamed from the host.
        targets: on the device; see `Task.targets`.
        transforms: the epoch's augmentation tables on the device; empty if nothing is random.
        partners: int32 [N] on the host, the samples that are mixed in; None without mixing.
        size: height and width that the epoch's training images are reduced to; None for the recipe's.
    """

    samples: Split
    images: torch.Tensor | None
    targets: torch.Tensor
    transforms: dict[str, torch.Tensor] = field(default_factory=dict)
    partners: np.ndarray | None = None
    size: tuple[int, int] | None = None

    def images_of(self, inputs: DeviceBatch, *, of_partners: bool = False) -> torch.Tensor:
        """Return the images of a batch, or their mixing partners, [B, ...] on the device."""
        samples, images = inputs.samples, inputs.images
        if of_partners:
            samples, images = inputs.partners, inputs.partner_images
        if self.images is not None and samples is not None:
            images = self.images.index_select(0, samples)
        assert images is not None
        return images

    def transforms_of(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows of the augmentation tables for samples."""
        return {name: table.index_select(0, samples) for name, table in self.transforms.items()}

    def stream(self, batches: Iterable[Streamed], accelerator: Accelerator, *, is_training: bool) -> Iterator[Streamed]:
        """Add prefetched images to batches, in training also their partners; nothing if they are on the device."""
        if self.images is not None:
            yield from batches
            return
        shape = self.samples.images.shape[1:]
        dtype = torch.from_numpy(np.empty(0, self.samples.images.dtype)).dtype

        partners = self.partners if is_training else None
        # One batch is in use while others are read. Each may have partners.
        buffer = accelerator.buffers((READ_AHEAD + 1) * (1 + (partners is not None)))

        def images_at(positions: np.ndarray) -> HostBuffer:
            images = buffer((len(positions), *shape), dtype)
            self.samples.read(positions, images.tensor.numpy())
            return images

        def read(inputs: Streamed) -> tuple[Streamed, HostBuffer, HostBuffer | None]:
            samples = inputs.batch.samples
            return inputs, images_at(samples), None if partners is None else images_at(partners[samples])

        for inputs, images, others in prefetch(read, batches, READ_AHEAD):
            with contextlib.ExitStack() as stack:
                inputs.images = stack.enter_context(images.on_device())
                if others is not None:
                    inputs.partner_images = stack.enter_context(others.on_device())
                yield inputs


def place(samples: Split, task: Task, accelerator: Accelerator, wanted: str, *, ranks_here: int) -> DeviceImages:
    """Place a split in device memory, host memory or on disk, the first that fits."""
    targets = torch.from_numpy(task.targets(samples.labels)).to(accelerator.device)
    where = placement(samples.nbytes, accelerator, wanted, ranks_here=ranks_here)
    if where == "disk":
        return DeviceImages(samples=samples, images=None, targets=targets)
    in_memory = samples.images_at(np.arange(len(samples)))
    if where == "device":
        return DeviceImages(samples=samples, images=torch.from_numpy(in_memory).to(accelerator.device), targets=targets)
    held = Split(images=in_memory, rows=np.arange(len(samples)), labels=samples.labels)
    return DeviceImages(samples=held, images=None, targets=targets)


class TorchDataset:
    """See `DeviceDataset`."""

    def __init__(self, engine: "TorchEngine", images: DeviceImages) -> None:
        self._engine, self._images = engine, images
        recipe, count, block = engine.recipe, len(images.samples), block_size(engine.recipe, images.samples)
        self._transforms_of = Ahead(lambda epoch: augment.epoch_transforms(recipe, epoch, count, block) or {})
        # By samples of this rank in a batch.
        self._tables: dict[int, StepTable] = {}
        self.samples = images.samples
        self._weights = engine.task.sample_weights(self.samples.labels, engine.class_weights)
        # The network's input by view of the images.
        self._views: dict[int, DeviceImages] = {}
        if engine.cut is None:
            self._views[NOT_AUGMENTED] = images

    @functools.cached_property
    def source(self) -> DeviceImages:
        """The network's input in training."""
        return self._view(NOT_AUGMENTED, {})

    @functools.cached_property
    def _mirrored(self) -> "TorchDataset":
        """The split with mirrored images."""
        return self._engine.place(self.samples.mirrored())

    def _view(self, view: int, transforms: augment.Transforms) -> DeviceImages:
        """Return the images; or the output of the frozen prefix for a view, computed the first time."""
        if view not in self._views:
            _copy_tables(transforms, self._images)
            self._views[view] = self._through_prefix()
            self._images.transforms.clear()
        return self._views[view]

    def _through_prefix(self) -> DeviceImages:
        """Return the output of the frozen prefix for the images, augmented by the tables of `_images`, if any."""
        engine, images = self._engine, self._images

        def outputs() -> Iterator[torch.Tensor]:
            for inputs in self._batches(images, equally_many=True):
                rows = images.transforms_of(inputs.samples)
                normalised = engine.input.normalised(images.images_of(inputs), rows)
                with torch.no_grad(), engine.setup.autocast():
                    yield engine.prefix(normalised, len(images.samples))

        wanted = engine.recipe.data.placement
        features = collect_features(outputs(), len(images.samples), wanted, engine.world, engine.setup.accelerator)
        if isinstance(features, torch.Tensor):
            return replace(images, images=features, transforms={})
        samples = Split(images=features, rows=np.arange(len(features)), labels=images.samples.labels)
        return replace(images, samples=samples, images=None, transforms={})

    def features(self) -> np.ndarray | None:
        if self._engine.cut is None:
            return None
        source = self._view(NOT_AUGMENTED, {})
        return source.samples.images if source.images is None else source.images.float().cpu().numpy()

    @torch.no_grad()
    def head_features(self, head: Head, *, mirrored: bool) -> np.ndarray:
        """Return the head's input for images or their mirror images, float32 [N, F], through the cached prefix."""
        engine, split = self._engine, self._mirrored if mirrored else self
        assert engine.cut is not None
        source, rows = split._view(NOT_AUGMENTED, {}), _Rows(len(self.samples), engine.world)
        network: Callable[[torch.Tensor], torch.Tensor] | None = None
        for inputs in split._batches(source, equally_many=False):
            images = engine.input.of(source.images_of(inputs)).float()
            network = network or engine.frozen(FeatureNetwork(engine.cut.eval_suffix, head), images, len(self.samples))
            start, real = int(inputs.batch.samples[0]), inputs.batch.count
            rows.put(slice(start, start + real), network(images)[:real].float())
        found = rows.gather()
        assert found is not None
        return found

    def compile(self) -> None:
        """See `DeviceDataset.compile`. Nothing is compiled; the frozen prefix is computed for all views."""
        recipe = self._engine.recipe
        if self._engine.cut:
            for epoch in range(min(max(1, recipe.augment.views), recipe.epochs)):
                self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """See `DeviceDataset.begin_epoch`. The output of a frozen prefix is computed once for each view."""
        engine = self._engine
        engine.metric_sums.begin_epoch()
        transforms = self._transforms_of(epoch)
        if engine.cut is None:
            size = augment.training_size(engine.recipe, epoch)
            if self.source.size not in (None, size):
                engine.forget_shapes()
            self.source.size, self.source.partners = size, transforms.get("partner")
            _copy_tables(transforms, self.source)
        elif transforms and not self._mirror(transforms):
            self._change_view(self._view(epoch % engine.recipe.augment.views, transforms))
        else:
            _ = self.source

    def _mirror(self, transforms: augment.Transforms) -> bool:
        """Train on cached output for images or their mirror images, if these are the only views and on the device."""
        recipe = self._engine.recipe
        if set(transforms) != {"flip"} or recipe.image_sides != recipe.stored_sides:
            return False
        plain = self._view(NOT_AUGMENTED, {}).images
        mirrored = None if plain is None else self._mirrored._view(NOT_AUGMENTED, {}).images
        if plain is None or mirrored is None:
            return False
        self._change_view(self._view(NOT_AUGMENTED, {}))
        chosen = torch.from_numpy(np.flatnonzero(transforms["flip"])).to(plain.device)
        assert self.source.images is not None
        self.source.images.index_copy_(0, chosen, mirrored.index_select(0, chosen))
        return True

    def _change_view(self, chosen: DeviceImages) -> None:
        """Train on a view from now on; captured steps read it at the same address."""
        if "source" not in vars(self):
            own = None if chosen.images is None else torch.empty_like(chosen.images)
            self.source = replace(chosen, images=own)
        self.source.samples = chosen.samples
        if self.source.images is not None:
            assert chosen.images is not None
            self.source.images.copy_(chosen.images)

    def feed(self, batches: Iterable[Batch]) -> Iterator[Step]:
        world, source = self._engine.world, self.source
        batches, again = tee(batches)
        steps = self._steps(batches, source.partners)
        if source.images is None:
            read = read_ahead(source.samples, again, world.local_rank, world.local_size)
            steps = (step for _, step in zip(read, steps, strict=True))
        return source.stream(steps, self._engine.setup.accelerator, is_training=True)

    def _steps(self, batches: Iterable[Batch], partners: np.ndarray | None) -> Iterator[Step]:
        """Yield the steps on batches, all of one size."""
        world, batches = self._engine.world, iter(batches)
        while chunk := list(islice(batches, TABLE_STEPS)):
            shares = [batch.part(world.rank, world.size) for batch in chunk]
            samples = np.stack([share.samples for share in shares])
            columns = {
                "samples": samples,
                "weights": np.stack([self._weights_of(share) for share in shares]),
                "total_weight": np.stack([self._weights_of(batch).sum(keepdims=True) for batch in chunk]),
            }
            if partners is not None:
                columns["partners"] = partners[samples].astype(np.int64)
            size = samples.shape[1]
            if size not in self._tables:
                self._tables[size] = StepTable(columns, self._engine.setup.accelerator)
            for batch, share in zip(chunk, shares, strict=True):
                yield Step(
                    batch=share,
                    total=batch.count,
                    is_padded=batch.count < len(batch.samples),
                    table=self._tables[size],
                    rows=columns if batch is chunk[0] else None,
                )

    def _weights_of(self, batch: Batch) -> np.ndarray:
        return batch.weights if self._weights is None else batch.weights * self._weights[batch.samples]

    def train_step(self, inputs: Step, learning_rate: float, seed: int) -> None:
        engine, source = self._engine, self.source
        if engine.recorder:
            samples = inputs.batch.samples[: inputs.batch.count]
            rows = source.transforms_of(engine.setup.accelerator.put(samples))
            engine.recorder.step(samples, {name: values.cpu().numpy() for name, values in rows.items()})
        if inputs.rows:
            inputs.table.fill(inputs.rows)
        engine.train_step(source, inputs, learning_rate, seed)

    @torch.no_grad()
    def evaluate(
        self,
        *,
        with_probabilities: bool = False,
        with_logits: bool = False,
        keep_features: Keep | None = None,
        tta: bool = False,
    ) -> Evaluation:
        """See `DeviceDataset.evaluate`. Losses are those of the recipe, without class weights."""
        # Evaluations of more than metrics follow the training.
        is_last = with_probabilities or with_logits or keep_features is not None
        engine = self._engine
        task, world, accelerator = engine.task, engine.world, engine.setup.accelerator
        sources, logits_of = self._evaluated(tta=tta)
        engine.synchronise_buffers()
        loss_sum = torch.zeros((), dtype=accelerator.wide_float, device=accelerator.device)
        names = ["predicted"] + ["probabilities"] * with_probabilities + ["logits"] * with_logits
        names += ["features"] * (keep_features is not None)
        rows = {name: _Rows(len(self.samples), world) for name in names}
        with contextlib.ExitStack() as stack:
            network: Any = stack.enter_context(engine.evaluation_network())
            features: Any = stack.enter_context(caught(engine.model, network)) if keep_features else None
            # After cached output, little computation remains: preparing ONNX Runtime would take longer.
            is_whole = engine.cut is None and engine.setup.precision == "fp32"
            if is_last and is_whole and engine.is_frozen_faster(len(self.samples)):
                from flatout.models.features import FrozenClassifier

                network = features = FrozenClassifier(engine.model, network, engine.threads)
            batches = [self._batches(source, equally_many=engine.is_sharded) for source in sources]
            for inputs, *others in zip(*batches, strict=True):
                start, real = int(inputs.batch.samples[0]), inputs.batch.count
                read = [source.images_of(one) for source, one in zip(sources, (inputs, *others), strict=True)]
                with engine.setup.autocast():
                    logits = logits_of(network, *read)[:real]
                targets = sources[0].targets.index_select(0, inputs.samples[:real])
                loss_sum += engine.losses.of(engine.task, logits, targets).sum()
                where = slice(start, start + real)
                rows["predicted"].put(where, task.predicted(logits))
                if with_probabilities:
                    rows["probabilities"].put(where, task.probabilities(logits))
                if with_logits:
                    rows["logits"].put(where, logits.float())
                if features and keep_features and (found := features.take()) is not None:
                    kept = keep_features(found[:real].cpu().numpy())
                    rows["features"].put(where, torch.from_numpy(kept).to(accelerator.device))
        tables: dict[str, Any] = {name: own.gather() for name, own in rows.items()}
        return Evaluation(
            **{"probabilities": None, **tables},
            task=task,
            loss_sum=float(world.all_reduce(loss_sum)),
            labels=self.samples.labels,
        )

    def _evaluated(self, *, tta: bool) -> tuple[list[DeviceImages], Callable[..., torch.Tensor]]:
        """Return the images of an evaluation, and a function (network, batch) -> logits."""
        engine = self._engine
        if not tta:
            return [self._view(NOT_AUGMENTED, {})], lambda network, images: network(engine.input.of(images))
        if engine.cut is None or augment.tta_views(engine.recipe) != list(augment.MIRRORED):
            # The frozen prefix's output for shifted images is not cached.
            return [self._images], engine.view_logits

        def mean_of_both(network: Any, *read: torch.Tensor) -> torch.Tensor:
            return engine.task.averaged(torch.stack([network(engine.input.of(images)) for images in read]))

        return [self._view(NOT_AUGMENTED, {}), self._mirrored._view(NOT_AUGMENTED, {})], mean_of_both

    def _batches(self, source: DeviceImages, *, equally_many: bool) -> Iterator[DeviceBatch]:
        """Yield this rank's evaluation batches, every `size`-th of the split.

        Args:
            source: images, or the output of the frozen prefix.
            equally_many: whether every rank gets the same number of batches, with empty ones at the end.
        """
        world, count = self._engine.world, len(source.samples)
        # It is independent of the ranks, so predictions are bitwise independent of them.
        largest = self._engine.setup.accelerator.evaluation_batch
        batches = list(evaluation_batches(count, min(largest, self._engine.recipe.batch_size)))
        own = batches[world.rank :: world.size]
        if equally_many and len(own) < -(-len(batches) // world.size):
            own.append(Batch(samples=batches[0].samples, weights=0 * batches[0].weights, count=0))
        put = self._engine.setup.accelerator.put
        inputs = (
            DeviceBatch(
                batch=batch,
                total=batch.count,
                is_padded=batch.count < len(batch.samples),
                samples=put(batch.samples),
                weights=put(batch.weights),
                total_weight=put(batch.weights.sum(keepdims=True)),
            )
            for batch in own
        )
        for one in source.stream(inputs, self._engine.setup.accelerator, is_training=False):
            world.control.check_stop()
            yield one
            world.watch.keep_alive()
        if len(own) < -(-len(batches) // world.size):
            world.control.check_stop()  # as often on every rank


class _Rows:
    """Results of a split in one table: many small tensors would fragment the memory."""

    def __init__(self, count: int, world: "World") -> None:
        self._count, self._world = count, world
        self._table: torch.Tensor | None = None

    def put(self, rows: slice, values: torch.Tensor) -> None:
        """Store the values of samples."""
        if self._table is None:
            shape = (self._count, *values.shape[1:])
            self._table = torch.zeros(shape, dtype=values.dtype, device=self._world.device)
        self._table[rows] = values

    def gather(self) -> np.ndarray | None:
        """Return the rows of all ranks, [N, ...] in the order of the split; None if the first rank has none."""
        table, world = self._table, self._world
        found: Any = world.broadcast_object(None if table is None else (table.shape, table.dtype))
        if found is None:
            return None
        if table is None:
            table = torch.zeros(found[0], dtype=found[1], device=world.device)
        return world.all_reduce(table).cpu().numpy()


def _copy_tables(transforms: augment.Transforms, source: DeviceImages) -> None:
    """Copy an epoch's tables to the device, in place: captured steps refer to them."""
    for name, table in transforms.items():
        new = torch.from_numpy(table)
        source.transforms.setdefault(name, torch.empty_like(new, device=source.targets.device)).copy_(new)


def collect_features(
    outputs: Iterable[torch.Tensor], count: int, wanted: str, world: "World", accelerator: Accelerator
) -> torch.Tensor | np.ndarray:
    """Gather the output of a prefix for a whole split, [count, ...], on all ranks.

    Args:
        outputs: this rank's, [B, C, ...] each, of every `world.size`-th batch of the split; the same number on each
            rank.
    """
    features: Any = None
    start = 0
    for output in outputs:
        # In channels_last order, as the convolutions read them.
        for rows in world.all_gather(output.movedim(1, -1)):
            if features is None:
                features = allocate(count, rows, accelerator, wanted, ranks_here=world.local_size)
            rows = rows[: max(0, count - start)]
            stop = start + len(rows)
            kept: Any = rows if isinstance(features, torch.Tensor) else rows.float().cpu().numpy()
            features[start:stop] = kept
            start = stop
    assert features is not None
    return features
