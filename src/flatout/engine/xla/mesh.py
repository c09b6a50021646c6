"""The sharding of a step's arrays. XLA derives the communication between devices from it.

Shape letters: B batch.
"""

import functools
from collections.abc import Callable, Sequence
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

    def put_batch(self, inputs: DeviceBatch) -> DeviceBatch:
        """Copy this process's samples of a batch, or of several, to its devices, asynchronously."""
        return _put(inputs, self.of_inputs(inputs), jax.make_array_from_process_local_data)

    def put_state(self, arrays: object, shardings: object) -> Any:
        """Copy arrays that every process has completely to the devices."""
        return _put(
            arrays,
            shardings,
            lambda sharding, array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__),
        )

    def of_state(self, state: State) -> Any:
        return jax.tree.map(lambda array: self._of(array.shape), state)

    def of_inputs(self, inputs: DeviceBatch) -> DeviceBatch:
        """Return the sharding of each array of a batch, or of several."""
        of_samples = self.split if inputs.weights.ndim == 1 else self._stacked
        return DeviceBatch(*[of_samples] * 5, learning_rate=self.replicated, seed=self.replicated)

    def lower(
        self,
        program: Program,
        function: Callable[..., Any],
        state: State,
        inputs: DeviceBatch,
        table: jax.Array | None = None,
    ) -> jax.stages.Lowered:
        """Return a function of a program, to be compiled for a state, a batch or several, and a table of these shapes.

        One that returns a new state takes the memory of the old one.
        """
        of_state, results, donated = self.of_state(state), self.replicated, ()
        if function in (program.train_step, program.train_steps):
            results, donated = (of_state, self.replicated), 0
        of_arguments = of_state, self.of_inputs(inputs), self.replicated
        jitted = jax.jit(function, in_shardings=of_arguments, out_shardings=results, donate_argnums=donated)
        with jax.default_matmul_precision("highest" if program.precision == "fp32" else "default"):
            return jitted.lower(state, inputs, table)

    def _of(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of the state: replicated, or sliced along its longest divisible dimension."""
        even = [(length, -axis) for axis, length in enumerate(shape) if length and length % self.size == 0]
        if not self._is_sliced or not even:
            return self.replicated
        return NamedSharding(self._mesh, PartitionSpec(*[None] * -max(even)[1], AXIS))


def _put(arrays: object, shardings: object, make: Callable[[NamedSharding, np.ndarray], jax.Array]) -> Any:
    """Copy arrays to their devices; with several processes by a function, since each knows only its own devices."""
    if jax.process_count() == 1:
        return jax.device_put(arrays, shardings)
    return jax.tree.map(lambda sharding, part: jax.tree.map(functools.partial(make, sharding), part), shardings, arrays)
