"""The sharding of a step's arrays. XLA derives the communication between devices from it.

Shape letters: B batch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flatout.engine.xla.program import DeviceBatch, Program, State

AXIS = "batch"


class MeshSharding:
    """The placement of arrays on a row of devices that share every batch, grouped by process.

    The state is replicated, or sliced over the devices if `shard` is "full"; a batch is split by its first dimension.
    """

    def __init__(self, devices: Sequence[Any], shard: str) -> None:
        self.devices, self.size = list(devices), len(devices)
        self._mesh = Mesh(np.array(self.devices), (AXIS,))
        self._is_sliced = shard == "full"
        self.replicated = NamedSharding(self._mesh, PartitionSpec())
        self.split = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._stacked = NamedSharding(self._mesh, PartitionSpec(None, AXIS))

    def padded(self, batch: int) -> int:
        """Return the smallest number of samples, at least `batch`, that the devices can share equally."""
        return -(-batch // self.size) * self.size

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process; JAX cannot query the memory of others."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    def own(self, batch: int) -> slice:
        """Return the range of a batch's samples on the devices of this process."""
        each, first = batch // self.size, self.devices.index(self.local_devices[0])
        return slice(each * first, each * (first + len(self.local_devices)))

    def put_batch(self, arrays: Any, shardings: Any) -> Any:
        """Copy this process's samples of a batch to its devices, asynchronously."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, shardings)
        return jax.tree.map(lambda a, sharding: jax.make_array_from_process_local_data(sharding, a), arrays, shardings)

    def put_state(self, arrays: Any, shardings: Any) -> Any:
        """Copy arrays that every process has completely to the devices."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, shardings)
        return jax.tree.map(
            lambda a, sharding: jax.make_array_from_callback(np.shape(a), sharding, lambda index: a[index]),
            arrays,
            shardings,
        )

    def of_state(self, state: State) -> Any:
        return jax.tree.map(lambda array: self._of(array.shape), state)

    def of_inputs(self, inputs: DeviceBatch, *, stacked: bool = False) -> Any:
        """Return the sharding of each array of a batch, or of several `stacked` ones."""
        of_samples = self._stacked if stacked else self.split
        shardings: Any = jax.tree.map(lambda array: of_samples, inputs)
        return shardings._replace(learning_rate=self.replicated, seed=self.replicated)

    def lower_step(
        self, program: Program, state: State, *, steps: int | None = None, table: jax.Array | None = None
    ) -> jax.stages.Lowered:
        """Return one training step, or `steps` of them, to be compiled for a state and a table of these shapes."""
        inputs = program.example_inputs(is_resident=table is not None, steps=steps)
        step = program.train_step if steps is None else program.train_steps
        shardings = self.of_inputs(inputs, stacked=steps is not None)
        results = self.of_state(state), self.replicated
        return self._lower(program, step, state, [inputs], [shardings], table, out_shardings=results, donate_argnums=0)

    def lower_evaluation(
        self, program: Program, state: State, *, table: jax.Array | None = None, tta: bool = False
    ) -> jax.stages.Lowered:
        """Return the evaluation of a batch, to be compiled; see `lower_step`."""
        inputs = program.example_inputs(is_resident=table is not None, batch=program.evaluation_batch)
        arrays = [inputs.images, inputs.targets, inputs.weights]
        evaluate = functools.partial(program.evaluate, tta=tta)
        return self._lower(program, evaluate, state, arrays, [self.split] * 3, table, out_shardings=self.replicated)

    def _lower(
        self,
        program: Program,
        function: Any,
        state: State,
        inputs: list[Any],
        shardings: list[Any],
        table: jax.Array | None,
        **options: Any,
    ) -> jax.stages.Lowered:
        tables = [] if table is None else [table]
        of_inputs = (self.of_state(state), *shardings, *[self.replicated] * len(tables))
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        with program.matmul_precision():
            return jax.jit(function, in_shardings=of_inputs, **options).lower(shapes, *inputs, *tables)

    def _of(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of the state: replicated, or sliced along its longest divisible dimension."""
        even = [(length, -axis) for axis, length in enumerate(shape) if length and length % self.size == 0]
        if not self._is_sliced or not even:
            return self.replicated
        return NamedSharding(self._mesh, PartitionSpec(*[None] * -max(even)[1], AXIS))
