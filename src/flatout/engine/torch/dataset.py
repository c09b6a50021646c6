"""A split placed for the torch engine: its training steps and its evaluation."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, tee
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.batches import Ahead, Batch, block_size, evaluation_batches, read_ahead
from flatout.engine import augment
from flatout.engine.base import Evaluation, Keep
from flatout.engine.torch.batches import TABLE_STEPS, CapturedStep, DeviceBatch, DeviceImages, Step, StepTable
from flatout.models.features import FrozenClassifier, Function, caught
from flatout.models.heads import FeatureNetwork, Head

if TYPE_CHECKING:
    from flatout.distributed.world import World
    from flatout.engine.torch.engine import TorchEngine


class TorchDataset:
    """See `DeviceDataset`."""

    def __init__(self, engine: "TorchEngine", images: DeviceImages) -> None:
        self._engine, self._images = engine, images
        recipe, count, block = engine.recipe, len(images.samples), block_size(engine.recipe, images.samples)
        self._transforms_of = Ahead(lambda epoch: augment.epoch_transforms(recipe, epoch, count, block) or {})
        # For training or evaluation, by samples of this rank in a batch.
        self._tables: dict[tuple[bool, int], StepTable] = {}
        self.samples = images.samples
        self._weights = engine.task.sample_weights(self.samples.labels, engine.class_weights)
        # The network's input by view of the images.
        self._views = {augment.NOT_AUGMENTED: images} if engine.cut is None else {}

    @functools.cached_property
    def source(self) -> DeviceImages:
        """The network's input in training."""
        return self._plain

    @property
    def _plain(self) -> DeviceImages:
        return self._view(augment.NOT_AUGMENTED, {})

    @functools.cached_property
    def _mirrored(self) -> "TorchDataset":
        return self._engine.place(self.samples.mirrored())

    def _view(self, view: int, transforms: augment.Transforms) -> DeviceImages:
        """Return the images; or the output of the frozen prefix for a view, computed the first time."""
        if view in self._views:
            return self._views[view]
        engine, images, count = self._engine, self._images, len(self._images.samples)
        _copy_tables(transforms, images)
        features, start = None, 0
        for inputs in self._batches(images, engine.frozen_batch(count)):
            # Without augmentation, a fitted head gets what evaluations see.
            rows = images.transforms_of(inputs.samples) or None
            normalised = engine.input.normalised(images.images_of(inputs), rows)
            with torch.no_grad(), engine.accelerator.autocast():
                output = engine.prefix(normalised, count)
            # In channels_last order, as the convolutions read them.
            for rows in engine.world.all_gather(output.movedim(1, -1)):
                if features is None:
                    features = engine.accelerator.allocate(count, rows, engine.recipe.data.placement)
                kept: Any = rows[: count - start]
                where = slice(start, start + len(kept))
                features[where] = kept if isinstance(features, Tensor) else kept.float().cpu().numpy()
                start = where.stop
        images.transforms.clear()
        samples = images.samples
        if isinstance(features, np.ndarray):
            samples, features = samples.with_images(features), None
        self._views[view] = replace(images, samples=samples, images=features, transforms={})
        return self._views[view]

    def features(self) -> np.ndarray | None:
        if self._engine.cut is None:
            return None
        return self._plain.samples.images if self._plain.images is None else self._plain.images.float().cpu().numpy()

    @torch.no_grad()
    def head_features(self, head: Head, *, mirrored: bool) -> np.ndarray:
        """Return the head's input for images or their mirror images, float32 [N, F], through the cached prefix."""
        engine, split = self._engine, self._mirrored if mirrored else self
        assert engine.cut is not None
        source, rows = split._plain, _Rows(len(self.samples), engine.world)
        network: Function | None = None
        for inputs in split._batches(source, engine.frozen_batch(len(self.samples))):
            images = engine.input.of(source.images_of(inputs)).float()
            network = network or engine.frozen(FeatureNetwork(engine.cut.eval_suffix, head), images, len(self.samples))
            start, real = int(inputs.batch.samples[0]), inputs.batch.count
            rows.put(slice(start, start + real), network(images)[:real].float())
        found = rows.gather()
        assert found is not None
        return found

    def compile(self) -> None:
        # Nothing is compiled; the frozen prefix is computed for all views.
        recipe = self._engine.recipe
        if self._engine.cut:
            for epoch in range(min(max(1, recipe.augment.views), recipe.epochs)):
                self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        engine = self._engine
        engine.metric_sums.begin_epoch()
        transforms = self._transforms_of(epoch)
        if engine.cut is None:
            self.source.partners = transforms.get("partner")
            _copy_tables(transforms, self.source)
        elif transforms and not self._mirror(transforms):
            self._change_view(self._view(epoch % engine.recipe.augment.views, transforms))
        else:
            _ = self.source

    def _mirror(self, transforms: augment.Transforms) -> bool:
        """Train on cached output for images or their mirror images, if these are the only views and on the device."""
        recipe, world = self._engine.recipe, self._engine.world
        if set(transforms) != {"flip"} or recipe.image_sides != recipe.stored_sides:
            return False
        for is_mirrored in (False, True):
            # All ranks compute features together, so all must have them on their devices.
            images = (self._mirrored if is_mirrored else self)._plain.images
            if not all(world.all_gather_object(images is not None)):
                return False
        self._change_view(self._plain)
        mirrored = self._mirrored._plain.images
        assert self.source.images is not None and mirrored is not None
        chosen = torch.from_numpy(np.flatnonzero(transforms["flip"])).to(mirrored.device)
        self.source.images.index_copy_(0, chosen, mirrored.index_select(0, chosen))
        return True

    def _change_view(self, chosen: DeviceImages) -> None:
        """Train on a view from now on; captured steps read it at the same address."""
        if "source" not in vars(self) or (self.source.images is None) != (chosen.images is None):
            own = None if chosen.images is None else torch.empty_like(chosen.images)
            self.source = replace(chosen, images=own)
        self.source.samples = chosen.samples
        if self.source.images is not None:
            assert chosen.images is not None
            self.source.images.copy_(chosen.images)

    def feed(self, batches: Iterable[Batch]) -> Iterator[Step]:
        world, source = self._engine.world, self.source
        batches, again = tee(batches)
        steps = self._steps(batches, is_training=True)
        if source.images is None:
            read = read_ahead(source.samples, again, world.local_rank, world.local_size)
            steps = (step for _, step in zip(read, steps, strict=True))
        return source.stream(steps, self._engine.accelerator, is_training=True)

    def _steps(self, batches: Iterable[Batch], *, is_training: bool) -> Iterator[Step]:
        """Yield steps on batches of one size: on this rank's share in training, else on the whole."""
        world, batches, classes = self._engine.world, iter(batches), self._weights if is_training else None

        def weights_of(batch: Batch) -> np.ndarray:
            return batch.weights if classes is None else batch.weights * classes[batch.samples]

        while chunk := list(islice(batches, TABLE_STEPS)):
            shares = [batch.part(world.rank, world.size) for batch in chunk] if is_training else chunk
            samples = np.stack([share.samples for share in shares])
            totals = [weights_of(batch).sum(keepdims=True) for batch in chunk]
            columns = {
                "samples": samples,
                "weights": np.stack([weights_of(share) for share in shares]),
                # All samples may be of classes that weigh nothing; 0 / 0 would make the gradient NaN.
                "total_weight": np.maximum(totals, np.finfo(np.float32).tiny),
            }
            if is_training and self.source.partners is not None:
                columns["partners"] = self.source.partners[samples].astype(np.int64)
            place = is_training, samples.shape[1]
            if place not in self._tables:
                self._tables[place] = StepTable(columns, self._engine.accelerator)
            for batch, share in zip(chunk, shares, strict=True):
                yield Step(
                    batch=share,
                    total=batch.count,
                    is_padded=batch.count < len(batch.samples),
                    table=self._tables[place],
                    rows=columns if batch is chunk[0] else None,
                )

    def draws(self, inputs: Step) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        samples = inputs.batch.samples[: inputs.batch.count]
        rows = self.source.transforms_of(torch.from_numpy(samples).to(self._engine.device))
        return samples, {name: values.cpu().numpy() for name, values in rows.items()}

    def train_step(self, inputs: Step, learning_rate: float, seed: int) -> None:
        inputs.begin()
        self._engine.train_step(self.source, inputs, learning_rate, seed)

    @torch.no_grad()
    def evaluate(
        self,
        *,
        with_probabilities: bool = False,
        with_logits: bool = False,
        keep_features: Keep | None = None,
        tta: bool = False,
    ) -> Evaluation:
        # Evaluations of more than metrics follow the training.
        is_last = with_probabilities or with_logits or keep_features is not None
        engine, task = self._engine, self._engine.task
        engine.synchronise_buffers()
        if engine.is_captured and not is_last and not tta:
            results, run = self._recorded
            results.clear()
            with engine.evaluation_network():
                for step in self._evaluation_steps(self._plain):
                    run(self._plain, step)
            return results.evaluation(self.samples.labels)
        sources, logits_of = self._evaluated(tta=tta)
        kinds: dict[str, Function] = {"predicted": task.predicted}
        kinds |= {"probabilities": task.probabilities} if with_probabilities else {}
        kinds |= {"logits": Tensor.float} if with_logits else {}
        results = _Results(engine, len(self.samples), kinds)
        if keep_features:
            results.rows["features"] = _Rows(len(self.samples), engine.world)
        with contextlib.ExitStack() as stack:
            network: Any = stack.enter_context(engine.evaluation_network())
            features: Any = stack.enter_context(caught(engine.model, network)) if keep_features else None
            # After cached output, little computation remains: preparing OpenVINO would take longer.
            is_whole = engine.cut is None and engine.accelerator.precision == "fp32"
            size = engine.frozen_batch(len(self.samples)) if is_last and is_whole else 0
            if size:
                network = features = FrozenClassifier(engine.model, network, engine.threads)
            batches = [dataset._batches(source, size) for dataset, source in sources]
            for each in zip(*batches, strict=True):
                read = [source.images_of(inputs) for (_, source), inputs in zip(sources, each, strict=True)]
                with engine.accelerator.autocast():
                    logits = logits_of(network, *read)
                rows = results.add(logits, sources[0][1], each[0])
                if features and (found := features.take()) is not None and keep_features:
                    kept = keep_features(found[: len(rows)].cpu().numpy())
                    results.rows["features"].put(rows, torch.from_numpy(kept).to(engine.device))
        return results.evaluation(self.samples.labels)

    @functools.cached_property
    def _recorded(self) -> "tuple[_Results, CapturedStep]":
        engine = self._engine
        results = _Results(engine, len(self.samples), {"predicted": engine.task.predicted})

        def score(source: DeviceImages, step: Step) -> None:
            inputs, network = step.read(), engine.cut.eval_suffix if engine.cut else engine.model
            step.table.advance()
            with engine.accelerator.autocast():
                logits = network(engine.input.of(source.images_of(inputs)))
            results.add(logits, source, inputs)

        return results, CapturedStep(score, lambda: None, engine.accelerator, lambda sentence: None)

    def _evaluated(self, *, tta: bool) -> tuple[list[tuple["TorchDataset", DeviceImages]], Callable[..., Tensor]]:
        """Return what an evaluation reads, and a function (network, batch of each) -> logits."""
        engine = self._engine
        if not tta:
            return [(self, self._plain)], lambda network, images: network(engine.input.of(images))
        views = augment.tta_views(engine.recipe)
        if engine.cut is None or any(moved for moved, _ in views):
            # The frozen prefix's output for shifted images is not cached.
            return [(self, self._images)], engine.view_logits

        def mean(network: Any, *read: Tensor) -> Tensor:
            return engine.task.averaged(torch.stack([network(engine.input.of(images)) for images in read]))

        datasets = [self._mirrored if is_mirrored else self for _, is_mirrored in views]
        return [(dataset, dataset._plain) for dataset in datasets], mean

    def _batches(self, source: DeviceImages, size: int = 0) -> Iterator[DeviceBatch]:
        """Yield this rank's evaluation batches, of at least `size` images."""
        for step in self._evaluation_steps(source, size):
            inputs = step.read()
            step.table.advance()
            yield inputs

    def _evaluation_steps(self, source: DeviceImages, size: int = 0) -> Iterator[Step]:
        """Yield steps that are next in their table, as many on every rank: the last may be empty."""
        engine, world = self._engine, self._engine.world
        # The size is independent of the ranks, so predictions are bitwise independent of them.
        size = max(size, min(engine.accelerator.evaluation_batch, engine.recipe.batch_size))
        batches = list(evaluation_batches(len(source.samples), size))
        empty = Batch(samples=batches[0].samples, weights=0 * batches[0].weights, count=0)
        own = (batches + [empty] * (-len(batches) % world.size))[world.rank :: world.size]
        steps = self._steps(own, is_training=False)
        for step in source.stream(steps, engine.accelerator, is_training=False):
            world.control.check_stop()
            step.begin()
            yield step
            world.watch.keep_alive()


class _Results:
    """The loss of a split, and results by kind, which are functions of the logits."""

    def __init__(self, engine: "TorchEngine", count: int, kinds: Mapping[str, Function]) -> None:
        self._engine, self._kinds = engine, kinds
        self._loss_sum = torch.zeros((), dtype=engine.accelerator.wide_float, device=engine.device)
        self.rows = {name: _Rows(count, engine.world) for name in kinds}

    def clear(self) -> None:
        self._loss_sum.zero_()
        for rows in self.rows.values():
            rows.clear()

    def add(self, logits: Tensor, source: DeviceImages, inputs: DeviceBatch) -> Tensor:
        """Add a batch; return the positions of its samples, without padding."""
        engine, rows = self._engine, inputs.samples[: inputs.batch.count]
        logits = logits[: len(rows)]
        if len(rows):  # the user's loss need not take the empty batch of a rank
            self._loss_sum += engine.losses.of(logits, source.targets.index_select(0, rows)).sum()
        for name, function in self._kinds.items():
            self.rows[name].put(rows, function(logits))
        return rows

    def evaluation(self, labels: np.ndarray) -> Evaluation:
        """Return the results of all ranks."""
        tables: dict[str, Any] = {name: rows.gather() for name, rows in self.rows.items()}
        loss_sum = float(self._engine.world.all_reduce(self._loss_sum))
        return Evaluation(**tables, task=self._engine.task, loss_sum=loss_sum, labels=labels)


class _Rows:
    """Results of a split in one table: many small tensors would fragment the memory."""

    def __init__(self, count: int, world: "World") -> None:
        self._count, self._world = count, world
        self._table: Tensor | None = None

    def clear(self) -> None:
        if self._table is not None:
            self._table.zero_()

    def put(self, rows: slice | Tensor, values: Tensor) -> None:
        if self._table is None:
            shape = (self._count, *values.shape[1:])
            self._table = torch.zeros(shape, dtype=values.dtype, device=self._world.device)
        self._table[rows] = values

    def gather(self) -> np.ndarray | None:
        """Return the rows of all ranks, [N, ...] in the order of the split; None if there are none."""
        return None if self._table is None else self._world.all_reduce(self._table).cpu().numpy()


def _copy_tables(transforms: augment.Transforms, source: DeviceImages) -> None:
    """Copy an epoch's tables to the device, in place: captured steps refer to them."""
    for name, table in transforms.items():
        new = torch.from_numpy(table)
        source.transforms.setdefault(name, torch.empty_like(new, device=source.targets.device)).copy_(new)
