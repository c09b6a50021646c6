"""The XLA engine: TPUs, GPUs or simulated devices, all of them driven by one process of each host.

Arrays are global: the batch lies in equal parts on the devices, padded where it does not come out even; weights lie
whole on each, or cut into slices (`shard = "full"`). What the devices must tell each other follows from that, and XLA
puts it into the program. Programs are compiled ahead, before the clock of training starts, for shapes that never
change; so nothing is compiled twice.

Shape letters: N samples, B batch, H height, W width, C channels, K outputs, T steps in one dispatch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from flatout.data.feed import Samples, prefetch
from flatout.data.order import Batch, evaluation_batches
from flatout.dist.world import World
from flatout.engine.base import Evaluation
from flatout.engine.recorder import Recorder
from flatout.engine.xla import input as feed
from flatout.engine.xla import optim as updates
from flatout.engine.xla.input import Placed, Prepared
from flatout.engine.xla.mesh import Layout
from flatout.engine.xla.step import Inputs, Program, State, to_array
from flatout.errors import InputError
from flatout.host import physical_cores
from flatout.numerics.metrics import Counts
from flatout.recipe import Recipe

# Images in one evaluation batch at most, as in the torch engine.
EVALUATION_BATCH = 256
# Steps of one dispatch on devices that are faster than Python. On CPUs XLA's convolutions inside a loop are 17 times
# slower (github.com/jax-ml/jax, issue 12868), so there every step is a program of its own.
STEPS_PER_DISPATCH = 16
# Dispatches under way at once: enough to keep the devices busy, few enough to bound the batches that wait.
RUN_AHEAD = 4


class XlaEngine:
    """Trains a module on all devices of a mesh.

    Args:
        model: exported as it is, never changed.
        recipe: what to do; data.mean and data.std must be filled in.
        devices: the devices.
        world: the processes, one for each host.
        class_weights: float32 [classes], the weight of each class in the loss; None for none.
        report: takes sentences for the log.
        steps_per_dispatch: steps that one program takes; None for what suits the devices.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        devices: Sequence[Any],
        world: World | None = None,
        class_weights: np.ndarray | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        steps_per_dispatch: int | None = None,
    ) -> None:
        if recipe.exact_sums:
            raise InputError("exact_sums = true is not available: the XLA engine; use --engine torch on CPUs")
        self.recipe, self.devices, self.world = recipe, list(devices), world or World()
        self.model = model.to("cpu")
        self.recorder: Recorder | None = None
        self._class_weights, self._report = class_weights, report
        self._platform = self.devices[0].platform
        self._precision = _precision(recipe.precision, self._platform)
        self._layout = Layout(self.devices, recipe.shard)
        is_cpu = self._platform == "cpu"
        self._per_dispatch = steps_per_dispatch or (1 if is_cpu else STEPS_PER_DISPATCH)
        self._program: Program | None = None
        self._state: State | None = None
        self._waiting_state: dict[str, torch.Tensor] | None = None
        self._compiled: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._pending: list[Inputs] = []
        self._pending_table: jax.Array | None = None
        self._sums: list[jax.Array] = []
        self._under_way: deque[jax.Array] = deque()
        self._counted_steps = 0
        self._first_bad_step: int | None = None
        self.threads = physical_cores()
        kind = {"gpu": "cuda"}.get(self._platform, self._platform)
        own = (device for device in self.devices if device.process_index == jax.process_index())
        self.device_names = [kind if kind == "cpu" else f"{kind}:{device.id}" for device in own]

    def describe(self) -> list[str]:
        """See `Engine.describe`."""
        count, kind = len(self.devices), self.devices[0].device_kind
        words = {
            "fp32": "32-bit floats",
            "tf32": "32-bit floats, matrix products and convolutions in TF32",
            "bf16": "bfloat16 with 32-bit weights",
        }
        what = f"{count} simulated devices" if self._platform == "cpu" and count > 1 else f"{count} x {kind}"
        sentences = [f"XLA on {self._platform}: {what}, {words[self._precision]}"]
        if self._per_dispatch > 1:
            sentences.append(f"{self._per_dispatch} steps in each dispatch")
        return sentences

    def communication_seconds(self) -> float:
        """See `Engine.communication_seconds`."""
        return float("nan") if len(self.devices) > 1 else 0.0

    # --- data -----------------------------------------------------------------------------------------------------

    def place(self, samples: Samples) -> "XlaSplit":
        """See `Engine.place`. Images lie whole on every device where they fit; simulated ones read from the host."""
        return XlaSplit(self, feed.place(samples, self._layout, self.devices, self.recipe.data.placement))

    def compile(self, placed: Placed) -> None:
        """See `DeviceSplit.compile`. Exports the model and compiles its step."""
        program = self._program_for(min(self.recipe.batch_size, len(placed.samples)))
        padding = program.batch - min(self.recipe.batch_size, len(placed.samples))
        if padding:
            self._report(
                f"{padding} of {program.batch} samples in each batch are padding, so that {len(self.devices)} devices "
                f"get equal parts: {padding / program.batch:.0%} of the work is for nothing"
            )
        if self._per_dispatch > 1:
            self._compile("train_steps", placed)
        self._compile("train_step", placed)

    def _program_for(self, batch: int) -> Program:
        if self._program is None:
            self._program = Program(
                self.model,
                self.recipe,
                batch=self._layout.padded(batch),
                evaluation_batch=self._layout.padded(min(EVALUATION_BATCH, self.recipe.batch_size)),
                groups=len(self.devices) if self.recipe.norm == "per-device" else 1,
                precision=self._precision,
            )
            state = self._program.initial_state()
            self._state = self._layout.put_whole(state, self._layout.of_state(state))
            if self._waiting_state is not None:
                self.load_state(self._waiting_state)
        return self._program

    def begin_epoch(self, placed: Placed, transforms: np.ndarray | None) -> None:
        """See `DeviceSplit.begin_epoch`."""
        self._program_for(min(self.recipe.batch_size, len(placed.samples)))
        placed.transforms = transforms
        self._counted_steps, self._first_bad_step = 0, None

    def feed(self, placed: Placed, batches: Iterable[Batch]) -> Iterator[Prepared]:
        """See `DeviceSplit.feed`."""
        assert self._program is not None
        return prefetch(self._reader(placed, self._program.batch, is_training=True), batches)

    def _reader(self, placed: Placed, size: int, *, is_training: bool) -> Callable[[Batch], Prepared]:
        """Return what makes a batch of a split ready for the devices."""
        own, weights = self._layout.own(size), self._class_weights
        return lambda batch: feed.prepare(placed, batch, size, own, is_training=is_training, class_weights=weights)

    # --- training -------------------------------------------------------------------------------------------------

    def train_step(self, placed: Placed, inputs: Prepared, learning_rate: float, seed: int) -> None:
        """See `DeviceSplit.train_step`."""
        batch = inputs.batch
        if self.recorder:
            table, own = placed.transforms, self._layout.own(self._program_for(0).batch)
            samples = batch.samples[own.start : min(own.stop, batch.count)]
            self.recorder.step(samples, None if table is None else table[samples])
        self._pending_table = placed.table
        self._pending.append(
            Inputs(
                images=inputs.images,  # pyright: ignore[reportArgumentType]
                labels=inputs.labels,  # pyright: ignore[reportArgumentType]
                weights=inputs.weights,  # pyright: ignore[reportArgumentType]
                transforms=inputs.transforms,  # pyright: ignore[reportArgumentType]
                learning_rate=np.float32(learning_rate),  # pyright: ignore[reportArgumentType]
                seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),  # pyright: ignore[reportArgumentType]
            )
        )
        if len(self._pending) == self._per_dispatch:
            self._dispatch()

    def _dispatch(self) -> None:
        """Send the steps that wait to the devices."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if self.world.is_joined:
            self.world.control.exchange()
        if len(pending) == self._per_dispatch > 1:
            stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *pending)
            self._run("train_steps", stacked)
        else:
            for inputs in pending:
                self._run("train_step", inputs)

    def _run(self, which: str, inputs: Inputs) -> None:
        function = self._compiled[which, self._pending_table is not None]
        placed = self._layout.put_batch(inputs, self._layout.of_inputs(inputs, stacked=which == "train_steps"))
        table = () if self._pending_table is None else (self._pending_table,)
        self._state, sums = function(self._state, placed, *table)
        self._sums.append(sums)
        self._under_way.append(sums)
        if len(self._under_way) > RUN_AHEAD:
            self._under_way.popleft().block_until_ready()

    def _compile(self, which: str, placed: Placed) -> Callable[..., Any]:
        """Return one of the programs for the batches of a split, compiled when it is first needed."""
        key = which, placed.table is not None
        if key not in self._compiled:
            assert self._program is not None
            about: dict[str, Any] = {
                "is_resident": placed.table is not None,
                "table": placed.table,
                "precision": self._precision,
            }
            if which == "evaluate":
                lowered = self._layout.lower_evaluation(self._program, **about)
            else:
                steps = self._per_dispatch if which == "train_steps" else None
                lowered = self._layout.lower_step(self._program, steps=steps, **about)
            self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def counts(self) -> tuple[Counts, int | None]:
        """See `Engine.counts`."""
        self._dispatch()
        waiting, self._sums = self._sums, []
        self._under_way.clear()
        steps = np.concatenate([np.atleast_2d(np.asarray(s)) for s in waiting]) if waiting else np.zeros((0, 4))
        bad = np.flatnonzero(~np.isfinite(steps[:, 0]))
        if len(bad) and self._first_bad_step is None:
            self._first_bad_step = self._counted_steps + int(bad[0])
        self._counted_steps += len(steps)
        loss_sum, weight_sum, correct, count = steps.sum(0, dtype=np.float64)
        counts = Counts(loss_sum=float(loss_sum), weight_sum=float(weight_sum), correct=int(correct), count=int(count))
        return counts, self._first_bad_step

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, placed: Placed, *, with_probabilities: bool = False) -> Evaluation:
        """See `DeviceSplit.evaluate`."""
        count = len(placed.samples)
        program = self._program_for(min(self.recipe.batch_size, count))
        self._dispatch()
        function = self._compile("evaluate", placed)
        size = program.evaluation_batch
        table = () if placed.table is None else (placed.table,)
        batches = prefetch(self._reader(placed, size, is_training=False), evaluation_batches(count, size))
        results = []
        for prepared in batches:
            self.world.control.check_stop()
            arrays = (prepared.images, prepared.labels, prepared.weights)
            arrays = self._layout.put_batch(arrays, (self._layout.shared,) * len(arrays))
            results.append((function(self._state, *arrays, *table), prepared.batch.count))
            if len(results) > RUN_AHEAD:
                results[-RUN_AHEAD - 1][0].predicted.block_until_ready()
        rows = [np.asarray(r.probabilities)[:number] for r, number in results] if with_probabilities else None
        return Evaluation(
            loss_sum=sum(float(r.loss_sum) for r, _ in results),
            predicted=np.concatenate([np.asarray(r.predicted)[:number] for r, number in results]).astype(np.int64),
            labels=placed.samples.labels,
            probabilities=np.concatenate(rows) if rows else None,
        )

    # --- state ----------------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """See `Engine.is_finite`."""
        return all(bool(value.isfinite().all()) for value in self.snapshot().values())

    def restore(self, snapshot: dict[str, torch.Tensor]) -> None:
        """See `Engine.restore`."""
        self.load_state({**self.snapshot(), **snapshot})

    def state(self, snapshot: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """See `Engine.state`."""
        found = self.snapshot() if snapshot is None else snapshot
        return found if self.world.is_main else {}

    def snapshot(self, *, weights_only: bool = False) -> dict[str, torch.Tensor]:
        """See `Engine.snapshot`."""
        return {n: v for n, v in self._host_state().items() if not weights_only or n.startswith("model.")}

    def _host_state(self) -> dict[str, torch.Tensor]:
        if self._state is None and self._waiting_state is not None:
            return dict(self._waiting_state)
        if self._state is None:
            return {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        self._dispatch()
        state: State = jax.tree.map(_fetch, self._state)
        values = {**state.trained, **state.frozen, **state.buffers}
        canonical = self._names()
        found = {}
        for name, like in self.model.state_dict().items():
            found[f"model.{name}"] = torch.from_numpy(np.array(values[canonical[name]])).to(like.dtype)
        for name, value in updates.to_torch(state.optimizer).items():
            found[f"optimizer.{name}"] = torch.from_numpy(np.array(value))
        return found

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See `Engine.load_state`."""
        state = self.world.broadcast_object(state)
        if self._state is None:
            self._waiting_state = state
            return
        self._dispatch()
        weights = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
        assert self._program is not None
        fresh = self._program.initial_state()
        kept = {n.removeprefix("optimizer."): to_array(t) for n, t in state.items() if n.startswith("optimizer.")}
        fresh = fresh._replace(optimizer=updates.from_torch(fresh.optimizer, kept))
        self._state = self._layout.put_whole(fresh, self._layout.of_state(fresh))

    def _names(self) -> dict[str, str]:
        """Return by each name of a weight or buffer the one that the program knows it by; a shared one has several."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        first = {id(tensor): name for name, tensor in named}
        every = self.model.state_dict(keep_vars=True)
        return {name: first[id(tensor)] for name, tensor in every.items()}

    def close(self) -> None:
        """See `Engine.close`."""
        self._compiled.clear()
        self._state = self._program = None

    def peak_memory_bytes(self) -> int | None:
        """See `Engine.peak_memory_bytes`: of the device that used most."""
        if self._platform == "cpu":
            return None
        return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self.devices)


class XlaSplit:
    """See `DeviceSplit`.

    Args:
        engine: trains on the split.
        placed: where its images lie.
    """

    def __init__(self, engine: XlaEngine, placed: Placed) -> None:
        self._engine, self._placed = engine, placed
        self.samples = placed.samples

    def compile(self) -> None:
        """See `DeviceSplit.compile`."""
        self._engine.compile(self._placed)

    def begin_epoch(self, transforms: np.ndarray | None) -> None:
        """See `DeviceSplit.begin_epoch`."""
        self._engine.begin_epoch(self._placed, transforms)

    def feed(self, batches: Iterable[Batch]) -> Iterator[Prepared]:
        """See `DeviceSplit.feed`."""
        return self._engine.feed(self._placed, batches)

    def train_step(self, inputs: Prepared, learning_rate: float, seed: int) -> None:
        """See `DeviceSplit.train_step`."""
        self._engine.train_step(self._placed, inputs, learning_rate, seed)

    def evaluate(self, *, with_probabilities: bool = False) -> Evaluation:
        """See `DeviceSplit.evaluate`."""
        return self._engine.evaluate(self._placed, with_probabilities=with_probabilities)


def _precision(wanted: str, platform: str) -> str:
    """Return the number format that a recipe's `precision` comes to.

    Raises:
        InputError: the platform has no such format.
    """
    formats = {"cpu": ("fp32", "bf16"), "tpu": ("bf16", "fp32"), "gpu": ("tf32", "fp32", "bf16")}[platform]
    if wanted == "auto":
        return formats[0]
    if wanted not in formats:
        raise InputError(f"precision = {wanted!r}: XLA on {platform} has only {', '.join(formats)}")
    return wanted


def _fetch(array: jax.Array) -> np.ndarray:
    """Return a whole array on the host, also where other hosts hold parts of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
