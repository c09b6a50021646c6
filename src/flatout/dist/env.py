"""The ranks of a run as the launcher's environment variables describe them: flatout's launcher, torchrun, Slurm, Kubernetes, Ray."""

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Any

from flatout.errors import InputError

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The device of a rank that flatout's launcher started.
DEVICE = "FLATOUT_DEVICE"
# The file in which the ranks of one host meet; it is in the launcher's private folder.
STORE = "FLATOUT_STORE"
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The rank of this process among all processes and among those of its host, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def where(self) -> str:
        """The place of the store, for messages."""
        return os.environ.get(STORE) or f"MASTER_ADDR {self.address}, MASTER_PORT {self.port}"

    def process_group_arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's `init_process_group`.

        Where the launcher does not provide the store, rank 0 does. It listens on MASTER_ADDR only; torch itself would
        listen on all interfaces.
        """
        from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        if STORE in os.environ:
            store = FileStore(os.environ[STORE], self.size)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank:
            store = TCPStore(self.address, self.port, is_master=False)
        else:
            try:
                store = serve_store(self.address, self.port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise InputError(f"{self.where}: {error.strerror}") from None
                # A virtual address, such as that of a Kubernetes service.
                store = TCPStore(self.address, self.port, is_master=True, wait_for_workers=False)
        # The keys of an earlier attempt are still in the launcher's store.
        return {
            "store": PrefixStore(f"attempt_{restart_count()}", store),
            "rank": self.rank,
            "world_size": self.size,
        }


def serve_store(address: str, port: int) -> Any:
    """Return a TCPStore that listens on one address; torch's own would listen on all. Raises OSError."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def interface_to(address: str, port: int) -> str:
    """Return the name of the network interface from which this host reaches an address."""
    import psutil

    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This looks up the route; no packet is sent.
        probe.connect(target)
        own = ipaddress.ip_address(probe.getsockname()[0])
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and ipaddress.ip_address(each.address.partition("%")[0]) == own:
                return name
    return ""


def restart_count() -> int:
    """Return how often the launcher has restarted the ranks; a restarted rank resumes from the newest checkpoint."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def launched() -> Launched | None:
    """Return the rank of this process from the launcher's variables; None where it was not launched as a rank.

    Raises:
        InputError: a variable is missing or is not a number.
    """
    names = _TORCH
    if "RANK" not in os.environ:
        # A Slurm batch script has these variables too; only `srun` starts a task of a step with several.
        if "SLURM_STEP_ID" not in os.environ or (_number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS") or 1) == 1:
            return None
        names = _SLURM
    rank, size, local_rank, local_size = (_number(name) for name in names)
    rank, size = rank or 0, size or 1
    if local_size is None and names is _SLURM:
        # All nodes have the same number of tasks, or srun would have set the variable.
        local_size = size // (_number("SLURM_STEP_NUM_NODES") or _number("SLURM_NNODES") or 1)
    if local_size is None and local_rank is not None and size > 1:
        raise InputError(f"{names[2]} is set, but {names[3]} is not: set it to the number of ranks on this host")
    # Without both, as in a Kubernetes job with one pod per rank, every rank is on a host of its own.
    local_size, local_rank = local_size or 1, local_rank or 0
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ and size > 1:
            raise InputError(f"{names[0]} is set, but {name} is not: set it to the address where the ranks meet")
    port = _number("MASTER_PORT") or 0
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return Launched(rank=rank, size=size, local_rank=local_rank, local_size=local_size, address=address, port=port)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise InputError(f"{name}={text}: must be a whole number")
    return int(text)


def wanted_threads() -> int | None:
    """Return OMP_NUM_THREADS; None where it is not set, or where torchrun has set it to 1 as it does by default."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # The ranks of flatout's launcher have torchrun's variables too; torchrun sets this one for several processes only.
    is_torchruns = (
        threads == "1"
        and "TORCHELASTIC_RUN_ID" in os.environ
        and DEVICE not in os.environ
        and _number("LOCAL_WORLD_SIZE") != 1
    )
    return int(threads) if threads.isdigit() and int(threads) > 0 and not is_torchruns else None
