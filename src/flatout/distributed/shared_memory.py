"""Sums of the CPU ranks of one host through shared memory, ten times as fast as TCP over loopback.

The memory has no name; the sockets have one only while the ranks connect, in a folder that other users cannot enter.
"""

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flatout.distributed.rank import PeerSilent
from flatout.utils.errors import RankLost
from flatout.utils.host import usable_cores

if TYPE_CHECKING:
    from flatout.distributed.world import World

# Bytes of a row for small sums (batch statistics, counts); larger tensors are sent in pieces.
ROW_BYTES = 1 << 20
# Spin this long before sleeping until a byte arrives: waking up takes 20 to 50 µs.
SPIN_SECONDS = 0.002
ALIGNMENT = 64
# Ranks connect simultaneously; one that does not within this time is lost.
CONNECT_SECONDS = 60.0

_SUM, _READY, _DONE = range(3)


class SharedMemory:
    """The shared memory of all ranks, which are on one host's CPU.

    Every rank writes its numbers into a row, signals that, waits for the others, and adds up the rows in rank order, so
    that results are bitwise equal. Rows are double-buffered: no rank reaches the third use before all have finished the
    first. A signal is a byte on a Unix socket: the kernel orders it after the memory written before it, and the death
    of a rank is noticed at once.
    """

    def __init__(self, world: "World") -> None:
        self.rank, self.size = world.rank, world.size
        self._watch, self._barrier, self._timeout = world.watch, world.barrier, world.timeout
        self._peers = _connect(world)
        self._received = {peer: [0] * 3 for peer in self._peers}
        self._sent = [0] * 3
        self._spin = SPIN_SECONDS if usable_cores() >= self.size else 0.0
        self._rows = self._allocate(2 * self.size * ROW_BYTES).view(2, self.size, ROW_BYTES)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        pieces = flat.split(ROW_BYTES // flat.element_size())
        return torch.cat([self._sum_row(piece) for piece in pieces]).view(tensor.shape)

    def _sum_row(self, values: torch.Tensor) -> torch.Tensor:
        rows = self._rows[self._sent[_SUM] % 2].view(values.dtype)[:, : len(values)]
        rows[self.rank] = values
        self.wait(_SUM, self.signal(_SUM))
        return rows.sum(0, dtype=values.dtype)

    def buckets(self, sizes: Sequence[tuple[int, torch.dtype]]) -> "list[Bucket]":
        """See `World.buckets`."""
        rooms = [-(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT for size, dtype in sizes]
        blocks = self._allocate(2 * self.size * sum(rooms)).split([2 * self.size * room for room in rooms])
        rows = [block.view(2, self.size, -1).view(dtype) for block, (_, dtype) in zip(blocks, sizes, strict=True)]
        return [SharedBucket(self, each[:, :, :size]) for each, (size, _) in zip(rows, sizes, strict=True)]

    def signal(self, event: int) -> int:
        """Signal to the other ranks that this one has reached an event; return its count."""
        self._sent[event] += 1
        for peer, connection in self._peers.items():
            try:
                connection.send(bytes([event]))
            except OSError:
                raise RankLost(f"rank {peer} is gone") from None
        return self._sent[event]

    def wait(self, event: int, times: int) -> None:
        """Wait until every other rank has reached an event `times` times."""
        for peer, received in self._received.items():
            spin_until = time.perf_counter() + self._spin
            while received[event] < times:
                for byte in self._read(peer, is_spinning=time.perf_counter() < spin_until):
                    received[byte] += 1

    def _read(self, peer: int, *, is_spinning: bool) -> bytes:
        """Return the signals of a peer; unless spinning, wait for one."""
        try:
            if is_spinning:
                signals = self._peers[peer].recv(4096, socket.MSG_DONTWAIT)
            else:
                with self._watch.paused():
                    signals = self._peers[peer].recv(4096)
        except BlockingIOError:
            if is_spinning:
                return b""
            raise PeerSilent(f"rank {peer} did not answer for {self._timeout:.0f} s") from None
        except OSError:
            signals = b""
        if not signals:
            raise RankLost(f"rank {peer} is gone")
        return signals

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 zeros [nbytes] shared by all ranks."""
        # The descriptor is sent over the signal sockets, so no rank may still be waiting for a signal.
        self._barrier()
        if self.rank == 0:
            file = _anonymous_file(nbytes)
            for connection in self._peers.values():
                socket.send_fds(connection, [b"m"], [file])
        else:
            _, files, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            if not files:
                raise RankLost("rank 0 is gone")
            file = files[0]
        try:
            return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        finally:
            os.close(file)

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()


class Bucket:
    """A flat tensor that torch.distributed sums over the ranks asynchronously: the caller writes `input`, [n]."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.input = torch.zeros(size, dtype=dtype, device=device)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Start the sum; the input is complete."""
        self._work = dist.all_reduce(self.input, async_op=True)

    def add(self) -> None:
        """Compute this rank's part of the sum, once all inputs are complete."""

    def finish(self) -> torch.Tensor:
        """Wait for the sum, [n]; it is valid until `input` is written again."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        return self.input


class SharedBucket(Bucket):
    """A bucket in shared memory. Every rank sums its part of the elements for all."""

    def __init__(self, memory: SharedMemory, rows: torch.Tensor) -> None:
        self._memory, self._rows, self._turn = memory, rows, 0
        self.input = rows[0, memory.rank]
        size = rows.shape[2]
        self._part = slice(memory.rank * size // memory.size, (memory.rank + 1) * size // memory.size)
        self._started = self._added = 0

    def start(self) -> None:
        self._started = self._memory.signal(_READY)

    def add(self) -> None:
        self._memory.wait(_READY, self._started)
        first, *others = self._rows[self._turn, :, self._part]
        for row in others:
            first += row
        self._added = self._memory.signal(_DONE)

    def finish(self) -> torch.Tensor:
        # `input` is the other half of the memory from now on, so the sum is valid until the next `start` but one.
        self._memory.wait(_DONE, self._added)
        total, self._turn = self._rows[self._turn, 0], 1 - self._turn
        self.input = self._rows[self._turn, self._memory.rank]
        return total


def _connect(world: "World") -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as temporary, contextlib.ExitStack() as kept:
        folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="flatout-"))
        listener = temporary.enter_context(socket.socket(socket.AF_UNIX))
        opened = os.open(folder, os.O_RDONLY)
        temporary.callback(os.close, opened)
        # An address has at most 107 bytes, and the path of the folder may be longer.
        place = f"/proc/{os.getpid()}/fd/{opened}" if Path("/proc/self/fd").is_dir() else folder
        listener.settimeout(CONNECT_SECONDS)
        listener.bind(f"{place}/socket")
        listener.listen()
        addresses = world.all_gather_object(f"{place}/socket")
        try:
            for rank in range(world.rank):
                peers[rank] = kept.enter_context(socket.socket(socket.AF_UNIX))
                peers[rank].connect(addresses[rank])
                peers[rank].sendall(struct.pack("i", world.rank))
            while len(peers) < world.size - 1:
                connection = kept.enter_context(listener.accept()[0])
                connection.settimeout(CONNECT_SECONDS)
                (rank,) = struct.unpack("i", connection.recv(4))
                peers[rank] = connection
        except (OSError, struct.error) as error:
            raise RankLost(f"the ranks of this host did not connect: {error}") from None
        # Keep listening until all ranks are connected.
        world.barrier()
        kept.pop_all()
    # Not by `settimeout`, with which a socket no longer knows MSG_DONTWAIT.
    limit = struct.pack("@ll", int(world.timeout), int(world.timeout % 1 * 1e6))
    for connection in peers.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return peers


def _anonymous_file(nbytes: int) -> int:
    """Return a descriptor of an unnamed file in memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("flatout")
    else:
        file, name = tempfile.mkstemp(prefix="flatout-")
        os.unlink(name)  # noqa: PTH108
    os.ftruncate(file, max(1, nbytes))
    if hasattr(os, "posix_fallocate"):
        # Detects a lack of memory now, rather than by a bus error during a step.
        os.posix_fallocate(file, 0, max(1, nbytes))
    return file
