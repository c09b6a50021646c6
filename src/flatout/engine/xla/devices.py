"""XLA's devices, JAX's settings, and messages for devices that cannot be used."""

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.data.cache import cache_folder
from flatout.distributed.environment import launched
from flatout.utils.errors import InputError, first_line

if TYPE_CHECKING:
    from flatout.distributed.world import World

INSTALL = "pip install 'flatout[tpu]'"

# PCI device IDs of TPU chips (Google is vendor 0x1ae0), and JAX's devices per chip: v2 and v3, v4, v5p, v5e, v6e, v7x.
# From jax/_src/hardware_utils.py.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027": 2, "0x005e": 1, "0x0056": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}


def tpu_count(root: Path = Path("/")) -> int:
    """Return the number of TPU devices of this host as JAX counts them, without starting JAX."""
    nodes = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
    folders = root.glob("sys/bus/pci/devices/*") if nodes else ()
    numbers = [tuple((folder / name).read_text().strip() for name in ("vendor", "device")) for folder in folders]
    chips = [_TPUS[device] for vendor, device in numbers if vendor == _GOOGLE and device in _TPUS]
    chips = chips or [1 for node in nodes if node.name.startswith("accel")]
    visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
    return sum(chips[: visible.count(",") + 1] if visible else chips)


def require() -> None:
    """Check that the engine's packages are installed, in versions that fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("jax")
            importlib.import_module("flatout.engine.xla.function").import_lowerings()
    except Exception as error:  # incompatible versions fail in their own ways
        raise InputError(f"--engine xla: {first_line(error)}; install what it needs: {INSTALL}") from error


def require_compiler() -> None:
    """Check that libtpu is installed, which contains the compiler of TPU programs; it is not imported."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(f"the TPU compiler needs libtpu, which is not installed: {INSTALL}")


@contextlib.contextmanager
def _reserved_port(address: str) -> Iterator[int]:
    """Reserve a free port for JAX's coordinator, which shares it (SO_REUSEPORT) and is the only listener."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def find(kind: str, indices: Sequence[int], world: "World | None" = None) -> list[Any]:
    """Return devices of this host, or of all hosts of a joined world, grouped by host. This starts JAX.

    They are of the kind `tpu`, or `cpu`: simulated on the host's cores. All processes of the world must call this.
    """
    import jax

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
            f"process at a time; a matching driver comes with {INSTALL}; to simulate devices: --devices 8xcpu"
        ) from error
    if wanted > len(found):
        fix = (
            "; JAX was started in this process with that number, which cannot change; start the process with "
            f"JAX_NUM_CPU_DEVICES={wanted} in its environment"
        )
        raise InputError(f"--devices {wanted}x{kind}: only {len(found)} available{fix if kind == 'cpu' else ''}")
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
    """Set JAX's start-up settings unless it has already started; they are restored afterwards."""
    import jax

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
    import jax
    from jax.experimental.compilation_cache import compilation_cache as cache

    folder = "jax_compilation_cache_dir"
    if getattr(jax.config, folder) is not None:
        yield
        return
    jax.config.update(folder, str(cache_folder() / "xla"))
    cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(folder, None)
        cache.reset_cache()
