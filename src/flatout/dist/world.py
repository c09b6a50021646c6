"""The ranks of a run, one process for each device, and how their numbers become one.

Between hosts and between GPUs that is torch.distributed. CPU ranks of one host add through memory that they share
(`shared_memory.py`): loopback TCP takes ten times as long, more than a small step computes.
"""

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from flatout.dist import heartbeat as vitals
from flatout.dist.control import Control
from flatout.dist.env import Launched
from flatout.errors import InputError, RankLost
from flatout.dist.rendezvous import interface_to

Value = TypeVar("Value")

# Ranks may do different things for so long (one builds the pack, one draws the report); who is dead is found sooner,
# by `vitals.py`.
TIMEOUT = datetime.timedelta(hours=12)


class Bucket(Protocol):
    """A flat tensor that is added up over the ranks while the caller does something else."""

    @property
    def input(self) -> torch.Tensor:
        """Where this rank's numbers go, [n]."""
        ...

    def start(self) -> None:
        """Say that the input is complete."""
        ...

    def add(self) -> None:
        """Do this rank's part of the adding up, once the inputs of all are complete."""
        ...

    def finish(self) -> torch.Tensor:
        """Wait for the sum, [n]; it stays until the next `start` but one."""
        ...


class World:
    """The ranks of a run, seen from one of them.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those of its host.
        is_joined: whether they have met; until then this rank is alone, and every call returns at once.
        backend: what adds device tensors: "", "memory", "gloo" or "nccl".
        control: the flags by which ranks request a checkpoint or the end of the run.
        seconds: time spent in adding up on the host, waiting for others included.
    """

    def __init__(self, launched: Launched | None = None, device: torch.device | None = None) -> None:
        self.rank = launched.rank if launched else 0
        self.size = launched.size if launched else 1
        self.local_rank = launched.local_rank if launched else 0
        self.local_size = launched.local_size if launched else 1
        self.device = device or torch.device("cpu")
        self.backend = ""
        self.is_joined = False
        self.seconds = 0.0
        self.heartbeat = vitals.NONE
        self.control = Control(self)
        self._memory: Any = None
        self._board: Any = None
        self._place = (-1, 0)
        self._owns_group = False

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the run folder."""
        return self.rank == 0

    # --- numbers on the device ------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks, the same bits on each; on the device without waiting for it."""
        if not self.is_joined:
            return tensor
        with self._timed():
            if self._memory is not None and tensor.device.type == "cpu":
                return self._memory.sum(tensor)
            total = tensor.clone()
            dist.all_reduce(total)
            return total

    def buckets(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Bucket]:
        """Return a bucket for each number of elements; every rank must start them in this order."""
        if self._memory is not None:
            return self._memory.buckets(sizes, dtype)
        return [_GroupBucket(size, dtype, self.device) for size in sizes]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.is_joined:
            with torch.no_grad():
                for tensor in tensors:
                    dense = tensor.detach().contiguous()
                    with self.translate_errors():
                        dist.broadcast(dense, src=0)
                    tensor.copy_(dense)

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, all of one shape, in the order of the ranks."""
        if not self.is_joined:
            return [rows]
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        with self.translate_errors():
            dist.all_gather(gathered, rows.contiguous())
        return gathered

    # --- plain objects --------------------------------------------------------------------------------------------

    def broadcast_object(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.is_joined:
            return value
        box = [value]
        with self.translate_errors():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return every rank's value, in the order of the ranks."""
        if not self.is_joined:
            return [value]
        values: list[Any] = [None] * self.size
        with self.translate_errors():
            dist.all_gather_object(values, value)
        return values

    def main_process_first(self, work: Callable[[], Value], *, first: bool) -> Value:
        """Do a piece of work on the ranks with `first`, then on all others, which find it done."""
        if first:
            value = work()
            self.barrier()
            return value
        self.barrier()
        return work()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_object(None)

    # --- coming and going -----------------------------------------------------------------------------------------

    def join(self, launched: Launched, *, shares_gpu: bool = False) -> None:
        """Meet the other ranks.

        Args:
            launched: where, and as which rank.
            shares_gpu: whether several ranks of this host have one GPU, which NCCL refuses.

        Raises:
            InputError: they did not come; the message names where they were awaited.
        """
        self.backend = "nccl" if self.device.type == "cuda" and not shares_gpu else "gloo"
        self._choose_interface(launched)
        if dist.is_initialized():
            # Ray Train, for one, has brought them together already.
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            try:
                name = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
                dist.init_process_group(name, timeout=TIMEOUT, **launched.meeting_place())
            except (dist.DistError, RuntimeError) as error:
                raise InputError(f"{launched.where}: the ranks did not meet: {str(error).splitlines()[0]}") from None
            self._owns_group = True
        self.is_joined = True
        self._watch_over_each_other()
        if self.device.type == "cpu" and self.local_size == self.size:
            from flatout.dist.shared_memory import SharedMemory

            self._memory = SharedMemory(self)
            self.backend = "memory"

    def _choose_interface(self, launched: Launched) -> None:
        """Have gloo and NCCL listen where the others come from and nowhere else, unless the user has chosen."""
        interface = interface_to("127.0.0.1" if self.local_size == self.size else launched.address, launched.port)
        for name, value in (("GLOO_SOCKET_IFNAME", interface), ("NCCL_SOCKET_IFNAME", f"={interface}")):
            if interface:
                os.environ.setdefault(name, value)

    def _watch_over_each_other(self) -> None:
        """See that no rank outlives its launcher, or waits for ever for one that is gone."""
        self.heartbeat = vitals.current()
        if self.heartbeat is not vitals.NONE:
            # Our own launcher has seen to it.
            return
        self._board = vitals.create(self.local_size) if self.local_rank == 0 else None
        paths = self.all_gather_object(self._board.path if self._board else "")
        here = paths[self.rank - self.local_rank]
        self.heartbeat = vitals.attach(here, self.local_rank, str(self.device), rank=self.rank)
        self.barrier()
        self.heartbeat.watch(os.getppid())

    def report_step(self, epoch: int, step: int) -> None:
        """Say how far training has come."""
        self._place = (epoch, step)
        self.heartbeat.at(epoch, step)

    def keep_alive(self) -> None:
        """Say that work goes on, at the same place."""
        self.heartbeat.at(*self._place)

    def leave(self) -> None:
        """Part from the other ranks."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        # The others may end now; none of them is missed any more.
        self.heartbeat.end()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
        self.is_joined = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        with self.translate_errors():
            yield
        self.seconds += time.perf_counter() - began

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turn what torch says when a peer is gone into `RankLost`."""
        with self.heartbeat.waiting():
            try:
                yield
            except (dist.DistError, RuntimeError) as error:
                if isinstance(error, RankLost):
                    raise
                raise RankLost(f"rank {self.rank} lost touch with the others: {str(error).splitlines()[0]}") from error


ALONE = World()


class _GroupBucket:
    """A bucket of torch.distributed's default group."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.input = torch.zeros(size, dtype=dtype, device=device)
        self._work: Any = None

    def start(self) -> None:
        self._work = dist.all_reduce(self.input, async_op=True)

    def add(self) -> None:
        pass

    def finish(self) -> torch.Tensor:
        self._work.wait()
        self._work = None
        return self.input
