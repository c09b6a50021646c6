"""The ranks of a run, one process per device, their collective operations, and control flags.

All communicate by torch.distributed; only the sums of CPU ranks on one host go through shared memory.
"""

import contextlib
import datetime
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntFlag
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flatout.distributed.environment import HANG_TIMEOUT, STORE, Launched, restart_count
from flatout.distributed.rank import PeerSilent, current_watch
from flatout.distributed.shared_memory import Bucket, SharedMemory
from flatout.utils.errors import InputError, RankLost, Stopped, TrainingFailed, first_line, is_out_of_memory

Value = TypeVar("Value")

# Extra timeout of tensor collectives over the hang timeout, so that the hung rank is reported first.
_MARGIN_SECONDS = 60.0
# Others wait in a collective of objects while one rank works alone, such as decoding images.
_PATIENCE = datetime.timedelta(hours=12)


class Flag(IntFlag):
    """Requests of a rank to all: fetch the running loss, write a checkpoint, end or replan the run."""

    NONE = 0
    LOSS = 1
    CHECKPOINT = 2
    INTERRUPT = 4
    TERMINATE = 8
    REPLAN = 16


FLAGS = tuple(Flag)
STOP_FLAGS = Flag.INTERRUPT | Flag.TERMINATE
# Ranks on accelerators read the flags this many steps later, to avoid synchronisation.
LAG = 8


class Control:
    """The control flags of one rank, known to every rank after the same step.

    They are sent with the gradients: the engine adds up `outgoing`, float32 [flags] on the device, over the ranks in
    the step's own all-reduce, and writes the sum to `incoming`. Engines without such an all-reduce call `exchange`.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        # `stop` are the signals that this process has received; they are requested with every step. What was requested
        # is in `outgoing`, too, until it is sent.
        self._requested = self._received = self.stop = Flag.NONE
        self._stop_signals = STOP_FLAGS
        self.outgoing = torch.zeros(len(FLAGS), device=world.device)
        self.incoming = torch.zeros_like(self.outgoing)
        self._sums: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def note_signal(self, number: int) -> None:
        """Note a signal that this process has received, SIGINT or SIGTERM."""
        self.stop |= Flag.TERMINATE if number == signal.SIGTERM else Flag.INTERRUPT

    def ignore_interrupts(self) -> None:
        """From now on, only SIGTERM ends a pass without gradients."""
        self._stop_signals = Flag.TERMINATE

    def request(self, flags: Flag) -> None:
        """Add flags to those that are sent next: an engine may send once for several steps."""
        flags |= self._requested | self.stop
        if self._world.is_joined and flags != self._requested:
            self.outgoing.copy_(torch.tensor([float(flag in flags) for flag in FLAGS]))
        self._requested = flags

    def end_step(self) -> None:
        """Start to copy `incoming` to the host; the engine calls this after each step that has sent `outgoing`."""
        if not self._world.is_joined:
            return
        self._take_requested()
        sums, event = self.incoming.to("cpu", non_blocking=True, copy=True), None
        if self._world.device.type != "cpu":
            event = torch.Event(self._world.device)
            event.record()
        self._sums.append((sums, event))

    def check_stop(self) -> None:
        """Raise `Stopped` in a pass without gradients if a rank has received a signal; all ranks call this together."""
        stop = self.stop
        if self._world.is_joined:
            self.request(Flag.NONE)
            self.incoming.copy_(self._world.all_reduce(self.outgoing))
            self.end_step()
            stop = self.received()
            # Requests of the last training steps are for the loop.
            self._received |= stop & ~STOP_FLAGS
        if stop := stop & self._stop_signals:
            raise Stopped(signal.SIGTERM if Flag.TERMINATE in stop else signal.SIGINT)

    def exchange(self) -> None:
        """Exchange the flags at once, between the hosts; for engines whose steps run no all-reduce of their own."""
        for flags in self._world.all_gather_object(self._take_requested()):
            self._received |= flags

    def _take_requested(self) -> Flag:
        requested, self._requested = self._requested, Flag.NONE
        if self._world.is_joined and requested:
            self.outgoing.zero_()
        return requested

    def received(self) -> Flag:
        """Return all ranks' requests in the steps since the last call; `LAG` steps late on accelerators."""
        if not self._world.is_joined:
            return self._take_requested() | self.stop
        while len(self._sums) > (0 if self._world.device.type == "cpu" else LAG):
            sums, event = self._sums.popleft()
            if event:
                event.synchronize()
            for flag, number in zip(FLAGS, sums.tolist(), strict=True):
                self._received |= flag if number else Flag.NONE
        received, self._received = self._received, Flag.NONE
        return received


class World:
    """The ranks of a run, seen from one of them.

    Until the ranks have met (`is_joined`), or without `launched`, this one is alone, and every call returns at once.
    """

    def __init__(self, launched: Launched | None = None, device: torch.device | None = None) -> None:
        launched = launched or Launched()
        self.rank, self.size = launched.rank, launched.size
        self.local_rank, self.local_size = launched.local_rank, launched.local_size
        self.device = device or torch.device("cpu")
        # What adds up tensors: "memory", "gloo" or "nccl".
        self.backend = ""
        self.is_joined = False
        # Time spent in sums, including the wait for other ranks.
        self.seconds = 0.0
        # Seconds for which a collective of tensors waits for the other ranks.
        self.timeout = HANG_TIMEOUT + _MARGIN_SECONDS
        self.watch = current_watch()
        self.control = Control(self)
        self._memory: SharedMemory | None = None
        self._objects: Any = None
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

    def buckets(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Bucket]:
        """Return a bucket for each number and type of elements; every rank must start them in this order."""
        if self._memory is not None:
            return self._memory.buckets(sizes)
        return [Bucket(size, dtype, self.device) for size, dtype in sizes]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.is_joined:
            with torch.no_grad(), self.translate_errors("broadcast"):
                for tensor in tensors:
                    dense = tensor.detach().contiguous()
                    dist.broadcast(dense, src=0)
                    tensor.copy_(dense)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, all of one shape, stacked in the order of the ranks."""
        if not self.is_joined:
            return rows[None]
        gathered = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        with self.translate_errors("all_gather"):
            dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered.view(self.size, *rows.shape)

    # --- objects --------------------------------------------------------------------------------------------------

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return every rank's value, in the order of the ranks."""
        if not self.is_joined:
            return [value]
        values: list[Any] = [None] * self.size
        with self.translate_errors("all_gather_object"):
            dist.all_gather_object(values, value, group=self._objects)
        return values

    def broadcast_object(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.is_joined:
            return value
        box = [value]
        with self.translate_errors("broadcast_object"):
            dist.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_object(None)

    def from_main(self, make: Callable[[], Value]) -> Value:
        """Call a function in the main process; every rank returns its result or raises its InputError."""
        outcome: Any = None
        if self.is_main:
            try:
                with self.watch.paused():
                    outcome = make()
            except InputError as error:
                outcome = error
        outcome = self.broadcast_object(outcome)
        if isinstance(outcome, InputError):
            raise outcome
        return outcome

    # --- joining and leaving --------------------------------------------------------------------------------------

    def join(self, launched: Launched, *, shares_gpu: bool = False, hang_timeout: float = HANG_TIMEOUT) -> None:
        """Meet the other ranks; `shares_gpu` if several of this host use one GPU, which NCCL refuses."""
        self.backend = "nccl" if self.device.type == "cuda" and not shares_gpu else "gloo"
        is_one_host = self.local_size == self.size
        where = os.environ.get(STORE) or f"MASTER_ADDR {launched.address}, MASTER_PORT {launched.port}"
        self.timeout = hang_timeout + _MARGIN_SECONDS
        try:
            # gloo and NCCL listen only on the interface to the other ranks; between hosts the user may choose it.
            interface = interface_to("127.0.0.1" if is_one_host else launched.address, launched.port)
            for name, value in (("GLOO_SOCKET_IFNAME", interface), ("NCCL_SOCKET_IFNAME", f"={interface}")):
                if interface and (is_one_host or name not in os.environ):
                    os.environ[name] = value
            if not dist.is_initialized():
                name = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
                timeout = datetime.timedelta(seconds=self.timeout)
                # The keys of an earlier attempt are still in the launcher's store.
                store = PrefixStore(f"attempt_{restart_count()}", _open_store(launched))
                dist.init_process_group(name, timeout=timeout, store=store, rank=self.rank, world_size=self.size)
                self._owns_group = True
        except OSError as error:
            # Such as that of an ordinary Kubernetes service: the store would have to listen on all interfaces.
            fix = "MASTER_ADDR must be an address of the host of rank 0, and MASTER_PORT be free there"
            raise InputError(f"{where}: {error.strerror}; {fix}") from None
        except (dist.DistError, RuntimeError) as error:
            raise InputError(f"{where}: the ranks did not meet: {first_line(error)}") from None
        if (found := (dist.get_rank(), dist.get_world_size())) != (self.rank, self.size):  # of Ray Train, for one
            raise InputError(
                f"RANK={self.rank} and WORLD_SIZE={self.size}, but the process group that is initialised has this "
                f"process as rank {found[0]} of {found[1]}: both must come from the same launcher"
            )
        self._objects = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.is_joined = True
        self.watch.limit, self.watch.has_left = hang_timeout, False
        self.watch.start()
        if self.device.type == "cpu" and is_one_host:
            self._memory = SharedMemory(self)
            self.backend = "memory"

    def leave(self) -> None:
        """Leave the other ranks, which no longer need this one. All ranks call this after the same collective."""
        if not self.is_joined:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.watch.limit, self.watch.has_left = None, True
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        self._objects = None  # its threads end with it
        self.is_joined = False

    @contextlib.contextmanager
    def translate_errors(self, collective: str) -> Iterator[None]:
        """Mark a wait for the other ranks; raise `RankLost` if torch reports that one has ended."""
        began = time.monotonic()
        with self.watch.paused():
            try:
                yield
            except (dist.DistError, RuntimeError) as error:
                if isinstance(error, TrainingFailed) or is_out_of_memory(error):
                    raise
                seconds = time.monotonic() - began
                if seconds >= self.timeout:
                    raise PeerSilent(f"rank {self.rank} waited {seconds:.0f} s in {collective}") from error
                raise RankLost(f"rank {self.rank} lost touch with the others: {first_line(error)}") from error


ALONE = World()


def _open_store(launched: Launched) -> Store:
    """Return the store of the ranks; without one of a launcher, rank 0 serves it."""
    if STORE in os.environ:
        return FileStore(os.environ[STORE], launched.size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or launched.rank:
        return TCPStore(launched.address, launched.port, is_master=False)
    return serve_store(launched.address, launched.port)


def serve_store(address: str, port: int) -> TCPStore:
    """Return a TCPStore that listens on one address; torch's own would listen on all. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def interface_to(address: str, port: int) -> str:
    """Return the name of the network interface from which this host reaches an address."""
    # macOS refuses port 0.
    family, _, _, _, target = socket.getaddrinfo(address, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This looks up the route; no packet is sent.
        probe.connect(target)
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in {each.address.partition("%")[0] for each in addresses}:
            return name
    return ""
