"""XLA's devices, and the sharding of a step's arrays over them, from which XLA derives the communication.

Shape letters: B batch.
"""

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flatout.data.cache import cache_folder
from flatout.distributed.environment import launched
from flatout.distributed.world import World
from flatout.engine.devices import XLA_INSTALL, Devices, tpu_count
from flatout.engine.xla.program import DeviceBatch, Program, State
from flatout.utils.errors import InputError, first_line

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


# --- devices ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reserved_port(address: str) -> Iterator[int]:
    """Reserve a free port for JAX's coordinator, which shares it (SO_REUSEPORT) and is the only listener."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def find(kind: str, indices: Sequence[int], world: World | None = None) -> list[Any]:
    """Return devices of this host, or of all hosts of a joined world, grouped by host. This starts JAX.

    They are of the kind `tpu`, or `cpu`: simulated on the host's cores. All processes of the world must call this.
    """
    wanted, launch = max(indices) + 1, launched()
    hosts = world if world is not None and world.is_joined else None
    if hosts and launch and not jax.distributed.is_initialized():
        with _reserved_port(launch.address) if hosts.is_main else contextlib.nullcontext(0) as port:
            place = f"{launch.address}:{hosts.broadcast_object(port)}"
            with _settings(kind, wanted):
                jax.distributed.initialize(place, hosts.size, hosts.rank, coordinator_bind_address=place)
    try:
        with _settings(kind, wanted):
            found = jax.local_devices(backend=kind)
    except RuntimeError as error:
        raise InputError(
            f"--devices {kind}: JAX finds no {kind.upper()} here ({first_line(error)}). A TPU can be used by one "
            f"process at a time; a matching driver comes with {XLA_INSTALL}; to simulate devices: --engine xla "
            "--devices 8xcpu"
        ) from error
    if wanted > len(found):
        fix = (
            "; JAX was started in this process with that number, which cannot change; start the process with "
            f"JAX_NUM_CPU_DEVICES={wanted} in its environment"
        )
        spec = Devices(kind=kind, indices=tuple(indices))
        raise InputError(f"--devices {spec}: only {len(found)} available{fix if kind == 'cpu' else ''}")
    own = [found[index] for index in indices]
    if hosts is None:
        return own
    chosen = hosts.all_gather_object([device.id for device in own])
    if len(set(map(len, chosen))) > 1:
        numbers = ", ".join(str(len(ids)) for ids in chosen)
        raise InputError(f"--devices: every host must use the same number of devices, not {numbers}")
    devices = (device for device in jax.devices(kind) if any(device.id in ids for ids in chosen))
    return sorted(devices, key=lambda device: (device.process_index, device.id))


@contextlib.contextmanager
def _settings(kind: str, count: int) -> Iterator[None]:
    """Set JAX's start-up settings unless it has already started; platforms and log level are restored afterwards."""
    if not tpu_count():
        # libtpu would query the cloud's metadata server for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # `find` explains errors to users.
    logger = logging.getLogger("jax._src.xla_bridge")
    config: Any = jax.config
    level, platforms, cpus = logger.level, config.jax_platforms, config.jax_num_cpu_devices
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.suppress(RuntimeError):
            config.update("jax_platforms", "cpu" if kind == "cpu" else f"{kind},cpu")
            if kind == "cpu":
                config.update("jax_num_cpu_devices", max(count, cpus))
        yield
    finally:
        logger.setLevel(level)
        with contextlib.suppress(RuntimeError):
            config.update("jax_platforms", platforms)


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Cache programs compiled inside in flatout's cache folder, unless the user has set JAX's own."""
    folder = "jax_compilation_cache_dir"
    if getattr(jax.config, folder) is not None:
        yield
        return
    jax.config.update(folder, str(cache_folder() / "xla"))
    jax_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(folder, None)
        jax_cache.reset_cache()
