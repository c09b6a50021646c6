"""The XLA engine: trains on TPUs or simulated devices, all devices of a host driven by one process.

Arrays are global: a batch is split equally over the devices, weights are replicated or sliced (`shard = "full"`), and
XLA adds the communication between devices to the program. Programs are compiled before training, for fixed shapes.

Shape letters: N samples, B batch, H height, W width, C channels, K outputs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import EVALUATION_BATCH, Split
from flatout.distributed.world import World
from flatout.engine.base import Counts
from flatout.engine.devices import XLA_PRECISIONS, choose_precision
from flatout.engine.torch.accelerator import PRECISIONS
from flatout.engine.xla.batches import XlaDataset, fetch
from flatout.engine.xla.functional import from_torch, to_torch
from flatout.engine.xla.mesh import MeshSharding, compilation_cache
from flatout.engine.xla.program import Average, DeviceBatch, Program, State, frozen_cut, to_array
from flatout.models.heads import Head, before_head
from flatout.tasks import Task, task_of
from flatout.utils.errors import InputError
from flatout.utils.host import physical_cores

# On devices that are faster than Python. On CPUs XLA's convolutions inside a loop are 17 times slower
# (github.com/jax-ml/jax, issue 12868), so every step is a separate program there.
STEPS_PER_DISPATCH = 16


class XlaEngine:
    """Trains a module on all devices of a mesh; see `Engine`, and `TorchEngine` for the arguments.

    `devices` are those of all processes, grouped by process; there is one process per host.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        devices: Sequence[Any],
        world: World | None = None,
        task: Task | None = None,
        class_weights: np.ndarray | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        steps_per_dispatch: int | None = None,
        head: Head | None = None,
    ) -> None:
        self.recipe, self.world, self.class_weights, self.report = recipe, world or World(), class_weights, report
        self.task = task or task_of(recipe)
        self.model = model.to("cpu")
        self.world.broadcast([*self.model.parameters(), *self.model.buffers()])
        self.sharding = MeshSharding(devices, recipe.shard)
        self.platform = devices[0].platform
        self.steps_per_dispatch = steps_per_dispatch or (1 if self.platform == "cpu" else STEPS_PER_DISPATCH)
        self.threads = physical_cores()
        local = self.sharding.local_devices
        self.device_names = ["cpu" if self.platform == "cpu" else f"{self.platform}:{d.id}" for d in local]
        where = f"XLA on {self.platform}"
        self._precision = choose_precision(recipe.precision, XLA_PRECISIONS[self.platform], where)
        self.cut = before_head(model, head) if head else frozen_cut(model, recipe)
        if recipe.micro_batch:
            report("micro_batch is ignored: XLA computes the whole share of a device at once")
        if self.cut and not head:
            report(self.cut.describe(recipe.augment.views))
        self.program = Program(
            model,
            recipe,
            devices=self.sharding.size,
            precision=self._precision,
            cut=self.cut,
            class_weights=class_weights,
        )
        self._put_state(self.program.initial_state())
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._sums: list[jax.Array] = []
        self._in_flight: deque[jax.Array] = deque()
        self._training: XlaDataset | None = None
        self._counted_steps = 0
        self._first_bad_step: int | None = None

    def describe(self) -> list[str]:
        count, kind = self.sharding.size, self.sharding.devices[0].device_kind
        what = f"{count} simulated devices" if self.platform == "cpu" and count > 1 else f"{count} x {kind}"
        return [f"XLA on {self.platform}: {what}, {PRECISIONS[self._precision]}"]

    def communication_seconds(self) -> float:
        return float("nan") if self.sharding.size > 1 else 0.0

    def place(self, samples: Split) -> "XlaDataset":
        return XlaDataset(self, samples)

    # --- programs -------------------------------------------------------------------------------------------------

    @property
    def evaluation_batch(self) -> int:
        return self.sharding.padded(min(EVALUATION_BATCH * self.sharding.size, self.recipe.batch_size))

    def compiled(
        self, function: Callable[..., Any], inputs: DeviceBatch, table: jax.Array | None
    ) -> Callable[..., Any]:
        """Return a function of the program, compiled when first requested for arrays of these shapes."""
        # Views of cached layers have transforms, evaluations have none.
        key = function, jax.tree.structure(inputs), inputs.weights.shape, None if table is None else table.shape
        if key not in self._compiled:
            lowered = self.sharding.lower(self.program, function, self._state, inputs, table)
            with compilation_cache():
                self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def call(self, function: Callable[..., Any], inputs: DeviceBatch, table: jax.Array | None) -> Any:
        """Enqueue a function of the program for a batch on the host; return its result."""
        put = self.sharding.put_batch(inputs)
        return self.compiled(function, put, table)(self._state, put, table)

    def train(self, inputs: DeviceBatch, table: jax.Array | None, run_ahead: int) -> None:
        """Enqueue one training step, or several; wait while `run_ahead` dispatches are in flight."""
        while len(self._in_flight) >= run_ahead:
            self._in_flight.popleft().block_until_ready()
        step = self.program.train_step if inputs.weights.ndim == 1 else self.program.train_steps
        self._state, sums = self.call(step, inputs, table)
        self._sums.append(sums)
        self._in_flight.append(sums)

    def begin_epoch(self, split: "XlaDataset") -> None:
        self._training, self._counted_steps, self._first_bad_step = split, 0, None

    def flush(self) -> None:
        """Enqueue the steps of an incomplete dispatch."""
        if self._training is not None:
            self._training.flush()

    def counts(self) -> tuple[Counts, int | None]:
        self.flush()
        self._in_flight.clear()
        waiting, self._sums = self._sums, []
        steps = np.concatenate([np.atleast_2d(np.asarray(s)) for s in waiting]) if waiting else np.zeros((0, 4))
        bad = np.flatnonzero(~np.isfinite(steps[:, 0]))
        if len(bad) and self._first_bad_step is None:
            self._first_bad_step = self._counted_steps + int(bad[0])
        self._counted_steps += len(steps)
        *sums, count = steps.sum(0, dtype=np.float64).tolist()
        counts = Counts(**dict(zip(("loss_sum", "weight_sum", "metric_sum"), sums, strict=True)), count=int(count))
        return counts, self._first_bad_step

    # --- state ----------------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        self.flush()
        return bool(_all_finite(self._state))

    def snapshot(self, *, weights_only: bool = False) -> State:
        self.flush()
        state = self._state._replace(optimizer=None) if weights_only else self._state
        return _copy(state) if self._has_room(state) else jax.tree.map(lambda array: np.array(fetch(array)), state)

    def restore(self, snapshot: State) -> None:
        self.flush()
        optimizer = self._state.optimizer
        if isinstance(jax.tree.leaves(snapshot)[0], np.ndarray):
            self._put_state(snapshot)
        else:
            state = _copy(snapshot)
            self._state = jax.device_put(state, self.sharding.of_state(state))
        if snapshot.optimizer is None:
            self._state = self._state._replace(optimizer=optimizer)

    def state(self, snapshot: State | None = None) -> dict[str, torch.Tensor]:
        found = self._host_state(snapshot)
        return found if self.world.is_main else {}

    def _has_room(self, state: State) -> bool:
        """Whether every device has memory for a copy of a state, in addition to the peak of the steps."""
        if self.platform == "cpu":
            return True
        needed = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(state))
        stats = [device.memory_stats() or {} for device in self.sharding.local_devices]
        room = min(s.get("bytes_limit", 0) - s.get("peak_bytes_in_use", 0) for s in stats)
        return needed < min(self.world.all_gather_object(room))

    def _host_state(self, snapshot: State | None = None) -> dict[str, torch.Tensor]:
        """Return the state, or a snapshot, as torch tensors under torch's names; all processes participate."""
        self.flush()
        state: State = jax.tree.map(fetch, snapshot or self._state)
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        # A shared weight has several names in torch; the first is used here.
        first_names = {id(tensor): name for name, tensor in named}
        found = {}
        sources = {"model": state} if state.average is None else {"ema": state.average, "model": state}
        for prefix, source in sources.items():
            values = {**source.trained, **state.frozen, **source.buffers}
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                value = torch.from_numpy(np.array(values[first_names[id(tensor)]]))
                found[f"{prefix}.{name}"] = value.to(tensor.dtype)
        if state.average is not None:
            found["ema_steps"] = torch.from_numpy(np.array(state.average.steps))
        for name, value in ({} if state.optimizer is None else to_torch(state.optimizer)).items():
            found[f"optimizer.{name}"] = torch.from_numpy(np.array(value))
        return found

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        state = self.world.broadcast_object(state)
        self.flush()
        try:
            self.model.load_state_dict(
                {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
            )
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
        fresh = self.program.initial_state()
        if fresh.average is not None and "ema_steps" in state:
            saved = {n.removeprefix("ema."): t for n, t in state.items() if n.startswith("ema.")}
            parts: list[Any] = [
                {n: to_array(saved[n]) if n in saved else value for n, value in part.items()}
                for part in fresh.average[1:]
            ]
            fresh = fresh._replace(average=Average(to_array(state["ema_steps"]), *parts))
        kept = {n.removeprefix("optimizer."): to_array(t) for n, t in state.items() if n.startswith("optimizer.")}
        self._put_state(fresh._replace(optimizer=from_torch(fresh.optimizer, kept)))

    def _put_state(self, state: State) -> None:
        self._state: State = self.sharding.put_state(state, self.sharding.of_state(state))

    def close(self) -> None:
        # Frees the memory of the devices.
        vars(self).clear()

    def peak_memory_bytes(self) -> int | None:
        if self.platform == "cpu":
            return None
        return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self.sharding.local_devices)


@jax.jit
def _copy(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


@jax.jit
def _all_finite(state: State) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in jax.tree.leaves(state)]).all()
