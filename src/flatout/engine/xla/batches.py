"""The placement of a split for the XLA engine, and the transfer of its batches, a few steps at a time.

Shape letters: N samples, T steps of one dispatch, B batch, H height, W width, C channels.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flatout.data.batches import Batch, Split, block_size, evaluation_batches, prefetch, read_ahead
from flatout.distributed.world import World
from flatout.engine.augment import NOT_AUGMENTED, Transforms, epoch_transforms
from flatout.engine.base import Evaluation, Keep
from flatout.engine.torch.accelerator import MEMORY_SHARE
from flatout.engine.xla.mesh import MeshSharding
from flatout.engine.xla.program import DeviceBatch, shapes_of
from flatout.utils.host import available_memory

if TYPE_CHECKING:
    from flatout.engine.xla.engine import XlaEngine

# Dispatches in flight: enough to keep the devices busy.
RUN_AHEAD = 4
# Maximum bytes of images in flight to each device, unless two batches are larger.
IN_FLIGHT_BYTES = 256 * 2**20

# The batches of one dispatch, those of all processes; and this process's part of each array, with a leading T.
Group = tuple[Sequence[Batch], DeviceBatch]


def place(samples: Split, sharding: MeshSharding, wanted: str, world: World) -> tuple[Split, jax.Array | None]:
    """Copy a split's images to every device if they fit, else to host memory, else leave them on disk.

    Simulated devices share the host's memory, so their batches are read from there.
    """
    is_resident = wanted == "device"
    if wanted == "auto" and sharding.devices[0].platform != "cpu":
        # All hosts run the same program, so the host with the least free memory decides.
        free = min(world.all_gather_object(min(map(_free_bytes, sharding.local_devices))))
        is_resident = samples.nbytes <= MEMORY_SHARE * free
    rows = np.arange(len(samples))
    if is_resident:
        return samples, sharding.put_state(samples.images_at(rows), sharding.replicated)
    if wanted != "disk" and samples.nbytes <= MEMORY_SHARE * available_memory():
        samples = samples.with_images(samples.images_at(rows))
    return samples, None


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def read_batches(
    samples: Split,
    batches: Sequence[Batch],
    size: int,
    own: slice,
    *,
    is_resident: bool,
    targets: np.ndarray,
    transforms: Transforms | None = None,
    sample_weights: np.ndarray | None = None,
) -> Group:
    """Read this process's part, `own`, of batches of `size` samples; padding copies a batch's first sample.

    Row numbers take the place of images that are on the devices (`is_resident`). The other arrays have a row for each
    sample of the split.
    """
    rows = np.stack([np.append(b.samples, np.full(size - len(b.samples), b.samples[0])) for b in batches])[:, own]
    weights = np.stack([np.append(b.weights, np.zeros(size - len(b.weights))) for b in batches])[:, own]

    def at(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, Transforms | None]:
        """Return images, targets and transforms of samples [T, B]."""
        images = rows.astype(np.int32)
        if not is_resident:
            images = samples.images_at(rows.ravel()).reshape(*rows.shape, *samples.images.shape[1:])
        own = targets[rows].astype(np.int32 if targets.dtype == np.int64 else np.float32)
        return images, own, transforms and {n: t[rows] for n, t in transforms.items()}

    images, own_targets, own_transforms = at(rows)
    return batches, DeviceBatch(
        images=images,
        targets=own_targets,
        weights=np.where(weights > 0, 1 if sample_weights is None else sample_weights[rows], -1).astype(np.float32),
        transforms=own_transforms,
        partners=at(transforms["partner"][rows]) if transforms and "partner" in transforms else None,
    )


def dispatch_limits(batch_bytes: int, steps: int) -> tuple[int, int]:
    """Return the steps per dispatch, at most `steps`, and the maximum dispatches in flight.

    The images of a batch, `batch_bytes` on each device, stay within `IN_FLIGHT_BYTES`; they are 0 if they need no copy.
    """
    if not batch_bytes:
        return steps, RUN_AHEAD
    steps = max(1, min(steps, IN_FLIGHT_BYTES // (RUN_AHEAD * batch_bytes)))
    return steps, max(2, min(RUN_AHEAD, IN_FLIGHT_BYTES // (steps * batch_bytes)))


class XlaDataset:
    """One split of the data; see `DeviceDataset`."""

    def __init__(self, engine: "XlaEngine", samples: Split) -> None:
        self._engine, self.samples = engine, samples
        self.targets = engine.task.targets(samples.labels)
        self._sample_weights = engine.task.sample_weights(samples.labels, engine.class_weights)
        # The samples of a training batch, without padding and with it.
        self._batch = min(engine.recipe.batch_size, len(samples))
        self._padded = engine.sharding.padded(self._batch)
        self._transforms: Transforms | None = None
        self._pending: list[tuple[Group, int, float, int]] = []
        # The network's inputs by view of the images: in memory, and on every device, unless they are streamed.
        self._views: dict[int, tuple[Split, jax.Array | None]] = {}
        if engine.cut is None:
            self._read_view()

    def _read_view(self, view: int = NOT_AUGMENTED, transforms: Transforms | None = None) -> None:
        """Read the images from now on; or the output of the frozen prefix for a view, computed the first time."""
        engine = self._engine
        if view not in self._views:
            read = self._prefix_outputs(transforms) if engine.cut else self.samples
            self._views[view] = place(read, engine.sharding, engine.recipe.data.placement, engine.world)
        self._read, self._table = self._views[view]
        image_bytes = self._read.nbytes // len(self._read) if self._table is None else 0
        batch_bytes = self._padded // engine.sharding.size * image_bytes
        self._steps, self._run_ahead = dispatch_limits(batch_bytes, engine.steps_per_dispatch)

    def _prefix_outputs(self, transforms: Transforms | None) -> Split:
        """Return a split with the output of the frozen prefix instead of its images, which are augmented first."""
        self._read, self._table = self.samples, None
        rows = [fetch(output)[:count] for output, count in self._results(self._engine.program.prefix, transforms)]
        return self.samples.with_images(np.concatenate(rows))

    def compile(self) -> None:
        self.begin_epoch(0)
        engine = self._engine
        if padding := self._padded - self._batch:
            engine.report(
                f"each batch of {self._batch} samples is padded to {self._padded}, for equal parts on "
                f"{engine.sharding.size} devices: {padding / self._padded:.0%} of the computation is wasted"
            )
        read = self._reader(self._padded, self._transforms, self._sample_weights)
        _, example = read([next(evaluation_batches(len(self.samples), self._batch))])
        if self._steps > 1:
            engine.report(f"{self._steps} steps per dispatch")
            engine.compiled(engine.program.train_steps, shapes_of(example, self._padded, self._steps), self._table)
        engine.compiled(engine.program.train_step, shapes_of(example, self._padded), self._table)

    def begin_epoch(self, epoch: int) -> None:
        engine, recipe = self._engine, self._engine.recipe
        engine.begin_epoch(self)
        transforms = epoch_transforms(recipe, epoch, len(self.samples), block_size(recipe, self.samples))
        if engine.cut:
            self._read_view(epoch % recipe.augment.views if transforms else NOT_AUGMENTED, transforms)
        else:
            self._transforms = transforms

    def feed(self, batches: Iterable[Batch]) -> Iterator[tuple[Group, int]]:
        """See `DeviceDataset.feed`. A thread prefetches all batches of a dispatch into one array."""
        world = self._engine.world
        if self._table is None:
            batches = read_ahead(self._read, batches, world.local_rank, world.local_size)
        items = iter(batches)
        groups = iter(lambda: list(islice(items, self._steps)), [])
        read = self._reader(self._padded, self._transforms, self._sample_weights)
        for group in prefetch(read, groups, depth=3 if self._steps == 1 else 1):
            for step in range(len(group[0])):
                yield group, step

    def _reader(
        self, size: int, transforms: Transforms | None = None, sample_weights: np.ndarray | None = None
    ) -> Callable[[list[Batch]], Group]:
        return functools.partial(
            read_batches,
            self._read,
            size=size,
            own=self._engine.sharding.own(size),
            is_resident=self._table is not None,
            targets=self.targets,
            transforms=transforms,
            sample_weights=sample_weights,
        )

    def _results(self, function: Callable[..., Any], transforms: Transforms | None = None) -> Iterator[tuple[Any, int]]:
        """Yield the results of a function of the program on all batches, some in flight, and their samples."""
        engine, waiting = self._engine, deque[tuple[Any, int]]()
        read = self._reader(engine.evaluation_batch, transforms)
        batches = evaluation_batches(len(self.samples), engine.evaluation_batch)
        for (batch,), inputs in prefetch(read, ([batch] for batch in batches)):
            engine.world.control.check_stop()
            waiting.append((engine.call(function, _of_step(inputs, 0), self._table), batch.count))
            if len(waiting) > RUN_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def draws(self, inputs: tuple[Group, int]) -> tuple[np.ndarray, Transforms]:
        (batches, _), step = inputs
        batch, own = batches[step], self._engine.sharding.own(self._padded)
        samples = batch.samples[own.start : min(own.stop, batch.count)]
        return samples, {name: table[samples] for name, table in (self._transforms or {}).items()}

    def train_step(self, inputs: tuple[Group, int], learning_rate: float, seed: int) -> None:
        """See `DeviceDataset.train_step`. Steps wait until their dispatch is full."""
        (batches, _), step = inputs
        self._pending.append((*inputs, learning_rate, seed))
        if step == len(batches) - 1:
            self.flush()

    def flush(self) -> None:
        """Enqueue the waiting steps: in one program if they fill a dispatch, else one by one."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if self._engine.world.is_joined:
            self._engine.world.control.exchange()
        groups, steps, rates, seeds = zip(*pending, strict=True)
        words = np.array(seeds, np.uint64)
        halves = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
        inputs = groups[0][1]._replace(learning_rate=np.array(rates, np.float32), seed=halves)
        if len(pending) == self._steps > 1:
            self._engine.train(inputs, self._table, self._run_ahead)
            return
        for number, ((_, group), step) in enumerate(zip(groups, steps, strict=True)):
            one = _of_step(group, step)._replace(learning_rate=inputs.learning_rate[number], seed=halves[number])
            self._engine.train(one, self._table, self._run_ahead)

    def features(self) -> np.ndarray | None:
        if self._engine.cut is None:
            return None
        self._read_view()
        return self._read.images

    def evaluate(
        self,
        *,
        with_probabilities: bool = False,
        with_logits: bool = False,
        keep_features: Keep | None = None,
        tta: bool = False,
    ) -> Evaluation:
        engine = self._engine
        engine.flush()
        if engine.cut:
            self._read_view()
        wanted = {"probabilities": with_probabilities, "logits": with_logits, "features": keep_features is not None}
        names = ["predicted", *(name for name, is_wanted in wanted.items() if is_wanted)]
        kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
        loss_sum = 0.0
        for result, count in self._results(engine.program.evaluate_views if tta else engine.program.evaluate):
            for name, parts in kept.items():
                if (found := getattr(result, name)) is not None:
                    rows = np.asarray(found)[:count]
                    parts.append(keep_features(rows) if keep_features and name == "features" else rows)
            loss_sum += float(result.loss_sum)
        tables: dict[str, Any] = {name: np.concatenate(parts) for name, parts in kept.items() if parts}
        if tables["predicted"].dtype.kind == "i":
            tables["predicted"] = tables["predicted"].astype(np.int64)
        return Evaluation(**tables, task=engine.task, loss_sum=loss_sum, labels=self.samples.labels)


def _of_step(inputs: DeviceBatch, step: int) -> DeviceBatch:
    return jax.tree.map(lambda array: array[step], inputs)


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return a whole array on the host; if other hosts have parts of it, all must call this."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
