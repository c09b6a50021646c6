"""The ranks and hosts of a run, defined by environment variables (torchrun, Slurm, Kubernetes, Ray) and flags."""

import math
import os
import re
from dataclasses import dataclass

from flatout.utils.errors import InputError

# Set by flatout's launcher: the device of a rank, and the file in which the ranks of one host meet.
DEVICE, STORE = "FLATOUT_DEVICE", "FLATOUT_STORE"
# Seconds without progress after which a rank is considered hung.
HANG_TIMEOUT = 300.0
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The rank of this process among all processes and among those of its host, and the address of the store."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def launched() -> Launched | None:
    """Return the rank of this process from the launcher's variables; None if it was not launched as a rank."""
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
    needed = ["MASTER_ADDR", "MASTER_PORT"] + [names[3]] * (local_rank is not None and local_size is None)
    if missing := [name for name in needed if size > 1 and name not in os.environ]:
        raise InputError(f"{names[0]} is set, but {missing[0]} is not: set it in the script that starts the ranks")
    return Launched(
        rank=rank,
        size=size,
        # Without both, as in a Kubernetes job with one pod per rank, every rank is on a separate host.
        local_rank=local_rank or 0,
        local_size=local_size or 1,
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number("MASTER_PORT") or 0,
    )


def restart_count() -> int:
    """Return the launcher's restart count; a restarted rank resumes from the newest checkpoint."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def wanted_threads() -> int | None:
    """Return OMP_NUM_THREADS; None if it is not set, or if torchrun has set it to 1, its default."""
    threads = _number("OMP_NUM_THREADS") if os.environ.get("OMP_NUM_THREADS", "").isdigit() else None
    # The ranks of flatout's launcher have torchrun's variables too; torchrun sets this one for several processes only.
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and DEVICE not in os.environ
    return None if threads == 1 and is_of_torchrun and _number("LOCAL_WORLD_SIZE") != 1 else threads or None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdigit():
        raise InputError(f"{name}={text}: must be a whole number")
    return None if text is None else int(text)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run: their number `nodes`, N or MIN:MAX, and where and how long they wait for each other.

    `rendezvous` is HOST:PORT of the first host, which is the one with that address; needed for several hosts.
    """

    nodes: str = "1"
    rendezvous: str = ""
    timeout: float = 120.0  # seconds

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9]+(:[0-9]+)?", self.nodes) or not 1 <= self.least <= self.most:
            raise InputError(
                f"--nodes {self.nodes}: must be a number of hosts, at least 1, or MIN:MAX, MIN at most MAX"
            )
        if not 0 < self.timeout < math.inf:
            raise InputError(f"--rendezvous-timeout {self.timeout:g}: must be a number of seconds, more than 0")
        if self.most == 1 and self.rendezvous:
            raise InputError(
                f"--rendezvous {self.rendezvous}: is for several hosts; give their number with --nodes, or leave it out"
            )
        has_address = re.fullmatch(".+:[0-9]+", self.rendezvous) and 0 < self.address[1] < 65536
        if self.most > 1 and not has_address:
            raise InputError(
                f"--nodes {self.nodes} needs --rendezvous HOST:PORT, an address of the first host and a port from 1 to "
                f"65535, not {self.rendezvous!r}"
            )

    @property
    def least(self) -> int:
        """The minimum number of hosts."""
        return int(self.nodes.split(":")[0])

    @property
    def most(self) -> int:
        """The maximum number of hosts."""
        return int(self.nodes.split(":")[-1])

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store of several hosts."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)
