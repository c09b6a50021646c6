"""A split for the torch engine: its placement, the transfer of its batches to the device, and recorded steps.

Shape letters: N samples of the split, B samples of this rank in a batch, S steps, K outputs.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from flatout.data.batches import Batch, Split, part, prefetch
from flatout.engine.torch.accelerator import Accelerator, HostBuffer
from flatout.utils.errors import RankLost, causes, first_line

# Batches that are read ahead from memory or disk.
READ_AHEAD = 3
# Steps whose inputs are copied to the device at once.
TABLE_STEPS = 64
# Lazy initialisation (cuBLAS handles, cuDNN's choice of algorithms, optimizer state) must be finished before the
# capture.
EAGER_STEPS = 3


@dataclass(kw_only=True, eq=False)
class _Share:
    """This rank's share of a batch as the host knows it."""

    batch: Batch
    total: int  # samples of all ranks without padding
    is_padded: bool  # whether any rank has padding
    streamed: tuple[Tensor, ...] = ()  # images from the host, [B, ...] on the device, and those of partners


@dataclass(kw_only=True, eq=False)
class DeviceBatch(_Share):
    """This rank's share of a batch, or a micro-batch of it, on the device."""

    samples: Tensor  # int64 [B], positions in the split
    weights: Tensor  # float32 [B], 0 for padding, else the weight of the sample in the loss
    total_weight: Tensor  # float32 [1], over 0: the weights of all ranks together, by which the loss is divided
    partners: Tensor | None = None  # int64 [B], the samples that these are mixed with

    def micro_batch(self, number: int, count: int) -> "DeviceBatch":
        if count == 1:
            return self
        chosen = part(len(self.batch.samples), number, count)
        if chosen.start == chosen.stop:
            # Another rank's share has one sample more: one of weight 0 stands for it.
            first = self.micro_batch(0, count)
            return replace(first, batch=replace(first.batch, count=0), weights=torch.zeros_like(first.weights))
        return replace(
            self,
            batch=self.batch.part(number, count),
            streamed=tuple(images[chosen] for images in self.streamed),
            samples=self.samples[chosen],
            weights=self.weights[chosen],
            partners=None if self.partners is None else self.partners[chosen],
        )


class StepTable:
    """The inputs of the next steps on the device, and a counter there of the steps taken.

    A step finds its row by the counter, so it needs nothing from the host: a recorded step is only replayed. `columns`
    are the tensors of `DeviceBatch` for the first steps, [s, ...].
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

    def read(self) -> dict[str, Tensor]:
        return {name: rows.index_select(0, self._next)[0] for name, rows in self._columns.items()}

    def advance(self) -> None:
        self._next += 1


@dataclass(kw_only=True, eq=False)
class Step(_Share):
    """A step of training or evaluation; its tensors are read on the device when it runs."""

    table: StepTable  # has the row of the step
    rows: dict[str, np.ndarray] | None  # new ones of the table, from this step's on; None if it has the row already

    @property
    def constants(self) -> tuple[int, int, int]:
        """The Python numbers of the step, which become constants of a captured one."""
        return len(self.batch.samples), self.batch.count, self.total

    def begin(self) -> None:
        """Bring its row to the device, if it is not there."""
        if self.rows:
            self.table.fill(self.rows)

    def read(self) -> DeviceBatch:
        return DeviceBatch(
            batch=self.batch, total=self.total, is_padded=self.is_padded, streamed=self.streamed, **self.table.read()
        )


@dataclass(kw_only=True, eq=False)
class DeviceImages:
    """The input of a model's trained part for a split: images, or the output of its frozen prefix."""

    samples: Split  # on the host
    images: Tensor | None  # [N, ...] on the device; None if they are streamed from the host
    targets: Tensor  # on the device; see `Task.targets`
    transforms: dict[str, Tensor] = field(default_factory=dict)  # the epoch's tables, on the device
    partners: np.ndarray | None = None  # int32 [N] on the host, the samples that are mixed in

    def images_of(self, inputs: DeviceBatch, *, of_partners: bool = False) -> Tensor:
        """Return the images of a batch, or their mixing partners, [B, ...] on the device."""
        if self.images is None:
            return inputs.streamed[of_partners]
        samples = inputs.partners if of_partners else inputs.samples
        assert samples is not None
        return self.images.index_select(0, samples)

    def transforms_of(self, samples: Tensor) -> dict[str, Tensor]:
        return {name: table.index_select(0, samples) for name, table in self.transforms.items()}

    def stream(self, steps: Iterable[Step], accelerator: Accelerator, *, is_training: bool) -> Iterator[Step]:
        """Add prefetched images to steps, in training also their partners; nothing if they are on the device."""
        if self.images is not None:
            yield from steps
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

        def read(step: Step) -> tuple[Step, list[HostBuffer]]:
            samples = step.batch.samples
            wanted = [samples] if partners is None else [samples, partners[samples]]
            return step, [images_at(positions) for positions in wanted]

        for step, buffers in prefetch(read, steps, READ_AHEAD):
            with contextlib.ExitStack() as stack:
                step.streamed = tuple(stack.enter_context(buffer.on_device()) for buffer in buffers)
                yield step


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
                self._accelerator.reset_peak(keep=True)
            if seen >= wanted:
                self._record(source, inputs)
        if constants in self._graphs:
            graph, static = self._graphs[constants]
            for own, images in zip(static.streamed, inputs.streamed, strict=True):
                own.copy_(images)
            graph.replay()
            return
        self._seen[constants] += 1
        self._forget_gradients()
        self._step(source, inputs)

    def _record(self, source: DeviceImages, inputs: Step) -> None:
        self._forget_gradients()
        static = replace(inputs, streamed=tuple(images.clone() for images in inputs.streamed))
        try:
            if not self._accelerator.has_room_for_graph():
                raise RuntimeError("too little memory for a graph beside eager steps")
            graph = self._accelerator.capture(lambda: self._step(source, static))
        except (RuntimeError, RankLost) as error:
            # The end of the failed capture raises an error, too; a collective in it seems to have lost its peers.
            self.refuse(first_line(causes(error)[-1]))
            return
        if not self._graphs:
            self._report("the whole step runs as one CUDA graph")
        self._graphs[inputs.constants] = graph, static

    def refuse(self, reason: str) -> None:
        """Run all steps eagerly from here on."""
        self.is_off = True
        self._report(f"the step runs without a CUDA graph: {reason}")

    def release(self) -> None:
        """Free the graphs, so that their communicator can be closed; later steps are captured again."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._seen.clear()
