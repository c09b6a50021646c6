"""The ranks of a run, one process for each device, and their collective operations.

Between hosts and between GPUs torch.distributed does the work. CPU ranks of one host add up in memory that they share
(`shared_memory.py`): TCP over loopback takes ten times as long.
"""

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from flatout.dist import heartbeat
from flatout.dist.control import Control
from flatout.dist.env import Launched, interface_to
from flatout.errors import InputError, RankLost, TrainingFailed

Value = TypeVar("Value")

# Ranks may legitimately do different things for this long (one decodes the images). Heartbeats find lost ranks sooner.
TIMEOUT = datetime.timedelta(hours=12)


class Bucket(Protocol):
    """A flat tensor whose sum over the ranks is computed while the caller does something else."""

    @property
    def input(self) -> torch.Tensor:
        """This rank's numbers, [n]."""
        ...

    def start(self) -> None:
        """Start the sum; the input is complete."""
        ...

    def add(self) -> None:
        """Do this rank's part of the sum, once the inputs of all are complete."""
        ...

    def finish(self) -> torch.Tensor:
        """Wait for the sum, [n]; it is valid until the next `start` but one."""
        ...


class World:
    """The ranks of a run, seen from one of them.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those of its host.
        is_joined: whether the ranks have met. Until then this rank is alone, and every call returns at once.
        backend: what adds up tensors: "", "memory", "gloo" or "nccl".
        control: the flags by which ranks request a checkpoint or the end of the run.
        seconds: time spent in sums, including the wait for other ranks.
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
        self.heartbeat = heartbeat.current()
        self.control = Control(self)
        self._memory: Any = None
        self._board: Any = None
        self._owns_group = False

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the run folder."""
        return self.rank == 0

    # --- tensors --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks, with the same bits on each; asynchronous on accelerators."""
        if not self.is_joined:
            return tensor
        began = time.perf_counter()
        with self.translate_errors("all_reduce"):
            if self._memory is not None and tensor.device.type == "cpu":
                total = self._memory.sum(tensor)
            else:
                total = tensor.clone()
                dist.all_reduce(total)
        self.seconds += time.perf_counter() - began
        return total

    def buckets(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Bucket]:
        """Return a bucket for each number of elements; every rank must start them in this order."""
        if self._memory is not None:
            return self._memory.buckets(sizes, dtype)
        return [_GroupBucket(size, dtype, self.device) for size in sizes]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.is_joined:
            with torch.no_grad(), self.translate_errors("broadcast"):
                for tensor in tensors:
                    dense = tensor.detach().contiguous()
                    dist.broadcast(dense, src=0)
                    tensor.copy_(dense)

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, all of one shape, in the order of the ranks."""
        if not self.is_joined:
            return [rows]
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        with self.translate_errors("all_gather"):
            dist.all_gather(gathered, rows.contiguous())
        return gathered

    # --- objects --------------------------------------------------------------------------------------------------

    def broadcast_object(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.is_joined:
            return value
        self._exchange("broadcast_object", None)
        box = [value]
        with self.translate_errors("broadcast_object"):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def from_main(self, make: Callable[[], Value]) -> Value:
        """Return on every rank what a function returns in the main process; every rank raises its InputError."""
        outcome: Any = None
        if self.is_main:
            try:
                outcome = make()
            except InputError as error:
                outcome = error
        outcome = self.broadcast_object(outcome)
        if isinstance(outcome, InputError):
            raise outcome
        return outcome

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return every rank's value, in the order of the ranks."""
        return self._exchange("all_gather_object", value)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._exchange("barrier", None)

    def _exchange(self, operation: str, value: Value) -> list[Value]:
        """Gather objects, and check that all ranks call the same operation at the same place.

        Raises:
            TrainingFailed: they do not; without the check they would get each other's values, or wait for ever.
        """
        if not self.is_joined:
            return [value]
        frame = sys._getframe(2)  # noqa: SLF001
        while frame.f_code.co_filename == __file__ and frame.f_back:
            frame = frame.f_back
        call = f"{operation} in {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
        answers: list[Any] = [None] * self.size
        with self.translate_errors(call):
            dist.all_gather_object(answers, (call, value))
        for rank, (other, _) in enumerate(answers):
            if other != answers[0][0]:
                raise TrainingFailed(
                    f"the ranks are in different collectives: rank 0 calls {answers[0][0]}, rank {rank} calls {other}"
                )
        return [value for _, value in answers]

    # --- joining and leaving --------------------------------------------------------------------------------------

    def join(self, launched: Launched, *, shares_gpu: bool = False) -> None:
        """Meet the other ranks.

        Args:
            launched: the address where they meet, and the rank of this process.
            shares_gpu: whether several ranks of this host use one GPU, which NCCL refuses.

        Raises:
            InputError: the others did not come; the message names the address.
        """
        self.backend = "nccl" if self.device.type == "cuda" and not shares_gpu else "gloo"
        is_one_host = self.local_size == self.size
        # gloo and NCCL listen only where the other ranks come from: between hosts the user may choose, on one host not.
        interface = interface_to("127.0.0.1" if is_one_host else launched.address, launched.port)
        for name, value in (("GLOO_SOCKET_IFNAME", interface), ("NCCL_SOCKET_IFNAME", f"={interface}")):
            if interface and (is_one_host or name not in os.environ):
                os.environ[name] = value
        if dist.is_initialized():
            # Ray Train, for one, has initialised the process group already.
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            try:
                name = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
                dist.init_process_group(name, timeout=TIMEOUT, **launched.process_group_arguments())
            except (dist.DistError, RuntimeError) as error:
                raise InputError(f"{launched.where}: the ranks did not meet: {str(error).splitlines()[0]}") from None
            self._owns_group = True
        self.is_joined = True
        self._start_heartbeat()
        if self.device.type == "cpu" and is_one_host:
            from flatout.dist.shared_memory import SharedMemory

            self._memory = SharedMemory(self)
            self.backend = "memory"

    def _start_heartbeat(self) -> None:
        """Have the ranks watch each other where flatout's launcher does not do it."""
        if self.heartbeat is not heartbeat.NONE:
            return
        self._board = heartbeat.create(self.local_size) if self.local_rank == 0 else None
        paths = self.all_gather_object(self._board.path if self._board else "")
        here = paths[self.rank - self.local_rank]
        self.heartbeat = heartbeat.attach(here, self.local_rank, str(self.device), rank=self.rank)
        self.barrier()
        self.heartbeat.watch(os.getppid())

    def leave(self) -> None:
        """Leave the other ranks; they no longer need this one."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.heartbeat.end()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
        self.is_joined = False

    @contextmanager
    def translate_errors(self, collective: str = "") -> Iterator[None]:
        """Mark a wait for the other ranks; raise `RankLost` where torch reports that one is gone.

        Args:
            collective: its name; empty for a wait for the device.
        """
        if collective:
            self.heartbeat.count_collective()
        with self.heartbeat.waiting(collective):
            try:
                yield
            except (dist.DistError, RuntimeError) as error:
                if isinstance(error, TrainingFailed):
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
