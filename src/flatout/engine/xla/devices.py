"""The devices that XLA computes on: found, counted, named, and messages for when they are not there."""

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.data.cache import cache_folder
from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.dist.world import World

INSTALL = "pip install 'flatout[tpu]'"
# What JAX calls the platforms of our kinds of devices; the host's processors are always wanted beside them.
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu,cpu", "cuda": "cuda,cpu"}
# Programs that took less than this to compile are not worth a file.
KEPT_SECONDS = 0.5


def require() -> None:
    """Check that what the engine rests on is installed.

    Raises:
        InputError: something is missing or does not fit; the message says what to install.
    """
    for name in ("jax", "optax", "torchax"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if name == "torchax":
                    from flatout.engine.xla.function import import_lowerings

                    import_lowerings()
                else:
                    importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            raise InputError(f"--engine xla needs {missing}, which is not installed: {INSTALL}") from None
        except Exception as error:  # a version that does not fit fails in its own way
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise InputError(
                f"--engine xla: the installed {name} does not fit the other packages ({what}); "
                f"versions that do: {INSTALL}"
            ) from error


def kinds() -> list[tuple[str, int]]:
    """Return the kinds of devices that JAX finds on this host with their numbers, best first; `cpu` is always there."""
    require()
    import jax

    _configure(None, 1)
    found = []
    for kind in ("tpu", "cuda") if has_tpu() else ("cuda",):
        with contextlib.suppress(RuntimeError):
            found.append((kind, len(jax.local_devices(backend=kind))))
    return [*found, ("cpu", 1)]


def has_tpu() -> bool:
    """Return whether this host has a TPU, by the devices that Linux shows."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def find_on_all_hosts(kind: str, indices: Sequence[int], world: "World") -> list[Any]:
    """Return the devices of all hosts of a run, those of each host together; see `find`.

    Every host's process must call it, before anything else starts JAX there.
    """
    require()
    import jax

    _configure(kind, max(indices) + 1)
    address, port = os.environ["MASTER_ADDR"], 0
    if world.rank == 0:
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
    place = f"{address}:{world.broadcast_object(port)}"
    jax.distributed.initialize(place, world.size, world.rank, coordinator_bind_address=place)
    own = [device.id for device in find(kind, indices)]
    chosen = {number for numbers in world.all_gather_object(own) for number in numbers}
    return sorted(
        (device for device in jax.devices(kind) if device.id in chosen), key=lambda d: (d.process_index, d.id)
    )


def find(kind: str, indices: Sequence[int]) -> list[Any]:
    """Return devices of a kind: `cpu` (simulated on this machine's cores), `tpu` or `cuda`.

    Raises:
        InputError: there are not so many, or another process holds them; the message says what there is.
    """
    require()
    import jax

    wanted = max(indices) + 1
    _configure(kind, wanted)
    try:
        found = jax.local_devices(backend=kind)
    except RuntimeError as error:
        raise InputError(explain(kind, str(error))) from error
    if wanted > len(found):
        if kind == "cpu":
            raise InputError(
                f"--devices {wanted}xcpu: JAX was started in this process with {len(found)} simulated device(s), "
                f"which cannot change; start the process with JAX_NUM_CPU_DEVICES={wanted} in its environment"
            )
        raise InputError(f"--devices {wanted}x{kind}: this host has {len(found)} of them")
    return [found[index] for index in indices]


def settle_for_compiling() -> None:
    """Settle JAX for compiling programs of devices that are not there: libtpu is needed too.

    Raises:
        InputError: something is missing; the message says what to install.
    """
    require()
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(f"the TPU compiler needs libtpu, which is not installed: {INSTALL}")
    _configure("cpu", 1)


def explain(kind: str, error: str) -> str:
    """Return what a user can do about JAX finding no devices of a kind, given what it said."""
    said = error.strip().partition("\n")[0]
    lower = error.lower()
    if "in use" in lower or "libtpu_lockfile" in lower or "already" in lower:
        return (
            f"--devices {kind}: another process holds it ({said}); end that process, or take other devices. "
            "One process at a time can use a TPU."
        )
    if "version" in lower and ("incompatible" in lower or "mismatch" in lower or "newer" in lower):
        return f"--devices {kind}: its driver and JAX do not fit each other ({said}); reinstall both: {INSTALL}"
    return (
        f"--devices {kind}: JAX finds no {kind.upper()} here ({said}). On a machine that has one, install its driver: "
        f"{INSTALL if kind == 'tpu' else 'pip install jax[cuda13]'}; to try the engine without: --devices 8xcpu"
    )


def _configure(kind: str | None, count: int) -> None:
    """Settle JAX before it starts; where it has started in this process, what it has is taken."""
    import jax

    if not has_tpu():
        # libtpu would ask the cloud about the machine for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # `find` and `kinds` say what is wrong, in words for users.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", None if kind is None else _PLATFORMS[kind])
        if kind == "cpu":
            jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_SECONDS)
