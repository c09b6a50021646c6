"""Where the arrays of a step lie on the devices; what the devices must tell each other follows from that.

Shape letters: B batch.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flatout.engine.xla.step import Inputs, Program, State

AXIS = "batch"


class Layout:
    """A row of devices that share every batch.

    Args:
        devices: real, simulated, or those of a topology that is not there.
        shard: "full" to cut the state into slices, one for each device; "none" to keep it whole on each.

    Attributes:
        whole: for arrays that every device has.
        shared: for arrays whose first dimension is the batch: each device has an equal part.
    """

    def __init__(self, devices: Sequence[Any], shard: str) -> None:
        self.size = len(devices)
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._is_sliced = shard == "full"
        self.whole = NamedSharding(self._mesh, PartitionSpec())
        self.shared = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._stacked = NamedSharding(self._mesh, PartitionSpec(None, AXIS))

    def padded(self, batch: int) -> int:
        """Return the smallest batch of so many samples that comes out even."""
        return -(-batch // self.size) * self.size

    def own(self, batch: int) -> slice:
        """Return which samples of a batch lie on the devices of this process."""
        each, mine = batch // self.size, jax.process_index()
        own = [i for i, device in enumerate(self._mesh.devices) if device.process_index == mine]
        return slice(each * own[0], each * (own[-1] + 1))

    def put_batch(self, arrays: Any, places: Any) -> Any:
        """Bring arrays that hold this process's own samples of a batch to its devices, without waiting for it."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, places)
        return jax.tree.map(lambda a, place: jax.make_array_from_process_local_data(place, a), arrays, places)

    def put_whole(self, arrays: Any, places: Any) -> Any:
        """Bring arrays that every process holds whole to where they belong."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, places)
        return jax.tree.map(
            lambda a, place: jax.make_array_from_callback(np.shape(a), place, lambda index: np.asarray(a)[index]),
            arrays,
            places,
        )

    def of_state(self, state: State) -> Any:
        """Return where each array of a state lies."""
        return jax.tree.map(lambda array: self._of(array.shape), state)

    def of_inputs(self, inputs: Inputs, *, stacked: bool = False) -> Any:
        """Return where the arrays of a batch go; `stacked` if they hold several, one behind the other."""
        of_samples = self._stacked if stacked else self.shared
        places = Inputs(*[of_samples] * len(inputs))  # pyright: ignore[reportArgumentType]
        transforms = None if inputs.transforms is None else of_samples
        return places._replace(transforms=transforms, learning_rate=self.whole, seed=self.whole)

    def lower_step(
        self, program: Program, *, steps: int | None, is_resident: bool, table: Any, precision: str
    ) -> jax.stages.Lowered:
        """Return the training step of a program, ready to be compiled for the devices.

        Args:
            program: the job.
            steps: how many steps one call takes, as `Program.train_steps`; None for `Program.train_step`.
            is_resident: whether the images lie on the devices.
            table: those images or their shape; None where they do not.
            precision: as `arithmetic`.
        """
        inputs = program.example_inputs(is_resident=is_resident, steps=steps)
        state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.initial_state())
        layout, tables = self.of_state(state), () if table is None else (table,)
        jitted = jax.jit(
            program.train_step if steps is None else program.train_steps,
            in_shardings=(layout, self.of_inputs(inputs, stacked=steps is not None), *[self.whole] * len(tables)),
            out_shardings=(layout, self.whole),
            donate_argnums=0,
        )
        with arithmetic(precision):
            return jitted.lower(state, inputs, *tables)

    def lower_evaluation(self, program: Program, *, is_resident: bool, table: Any, precision: str) -> Any:
        """Return the evaluation of a batch, ready to be compiled; arguments as in `lower_step`."""
        inputs = program.example_inputs(is_resident=is_resident, batch=program.evaluation_batch)
        state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.initial_state())
        tables = () if table is None else (table,)
        jitted = jax.jit(
            program.evaluate,
            in_shardings=(self.of_state(state), *[self.shared] * 3, *[self.whole] * len(tables)),
            out_shardings=self.whole,
        )
        with arithmetic(precision):
            return jitted.lower(state, inputs.images, inputs.labels, inputs.weights, *tables)

    def _of(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return where an array of the state lies: whole on each, or cut along its longest side that comes out even."""
        even = [(length, -axis) for axis, length in enumerate(shape) if length and length % self.size == 0]
        if not self._is_sliced or not even:
            return self.whole
        return NamedSharding(self._mesh, PartitionSpec(*[None] * -max(even)[1], AXIS))


def arithmetic(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a program's 32-bit products are computed as `precision` says."""
    return jax.default_matmul_precision("highest" if precision == "fp32" else "default")
