"""What a launcher tells a process about the run it belongs to: ours, torchrun, Kubernetes and Slurm."""

import errno
import os
import socket
from dataclasses import dataclass
from typing import Any

from flatout.errors import InputError

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """This process among those of the run: of all, and of its host; and where they meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def where(self) -> str:
        """The meeting place, for messages."""
        return f"MASTER_ADDR {self.address}, MASTER_PORT {self.port}"

    def meeting_place(self) -> dict[str, Any]:
        """Return how torch's `init_process_group` finds the other ranks.

        Where no launcher keeps the store, rank 0 does, on MASTER_ADDR alone: torch by itself would listen on every
        interface.
        """
        from torch._C._distributed_c10d import TCPStore

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank:
            store = TCPStore(self.address, self.port, is_master=False)
        elif listener := _listen(self.address, self.port):
            file = listener.detach()
            store = TCPStore(self.address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=file)
        else:
            store = TCPStore(self.address, self.port, is_master=True, wait_for_workers=False)
        return {"store": store, "rank": self.rank, "world_size": self.size}


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address; None where that is no address of this host (a virtual one)."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise InputError(f"MASTER_ADDR {address}, MASTER_PORT {port}: {error.strerror}") from None
    listener.listen()
    return listener


def launched() -> Launched | None:
    """Read the launcher's variables; None where nobody launched this process as one of several.

    Raises:
        InputError: some of the variables are there and others are not.
    """
    names = _TORCH
    if "RANK" not in os.environ:
        # A Slurm batch script has these variables as well; only what srun starts is one task of a step of several.
        if "SLURM_STEP_ID" not in os.environ or (_number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS") or 1) == 1:
            return None
        names = _SLURM
    rank, size, local_rank, local_size = (_number(name) for name in names)
    rank, size = rank or 0, size or 1
    if local_size is None and names is _SLURM:
        # As many on each node, or srun would have said so.
        local_size = size // (_number("SLURM_STEP_NUM_NODES") or _number("SLURM_NNODES") or 1)
    if local_size is None and local_rank is not None and size > 1:
        raise InputError(f"{names[2]} is set, but {names[3]} is not: the launcher must say how many ranks a host has")
    # Where neither is said, as in a Kubernetes job with a pod for each rank, every rank has a host of its own.
    local_size, local_rank = local_size or 1, local_rank or 0
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ and size > 1:
            raise InputError(f"{names[0]} is set, but {name} is not: the launcher must say where the ranks meet")
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
    is_torchruns = threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return int(threads) if threads.isdigit() and int(threads) > 0 and not is_torchruns else None
