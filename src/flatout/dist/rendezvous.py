"""Where the processes of a run meet: one host by itself, or several that find each other."""

import contextlib
import datetime
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flatout.errors import InputError
from flatout.dist.heartbeat import Phase, Vital
from flatout.dist.watchdog import SILENT_SECONDS

_LOOPBACK = "127.0.0.1"
# Seconds between two tries to reach the rendezvous, and that its keeper waits for the others at the end.
_RETRY_SECONDS = 0.25
_FAREWELL_SECONDS = 10.0


Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        nodes: how many there are.
        node_rank: which of them this one is.
        rendezvous: HOST:PORT on the host with node rank 0; needed for more than one host.
        timeout: seconds in which all must have come there.
    """

    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise InputError(f"--nodes {self.nodes}: must be 1 or more")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(
                f"--node-rank {self.node_rank}: must be from 0 to {self.nodes - 1}, as there are {self.nodes} nodes"
            )
        if not self.timeout > 0:
            raise InputError(f"--rendezvous-timeout {self.timeout:g}: must be more than 0 seconds")
        if self.nodes == 1 and not self.rendezvous:
            return
        if not self.rendezvous:
            raise InputError(
                f"--nodes {self.nodes}: needs --rendezvous HOST:PORT, where the host with node rank 0 listens"
            )
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"--rendezvous {self.rendezvous}: must be HOST:PORT, with a port from 1 to 65535")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        if self.nodes == 1:
            return _LOOPBACK, 0
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


class Meeting:
    """The store that all processes of a run reach, and this host's place among the others.

    Attributes:
        address, port: of the store.
        first_rank: the rank of this host's first process.
        world_size: the number of processes of all hosts.
        interface: the network interface that leads to the other processes.
    """

    def __init__(self, hosts: Hosts, local_size: int) -> None:
        self.hosts = hosts
        self.address, self.port = hosts.address
        self._deadline = time.monotonic() + hosts.timeout
        self._looked = time.monotonic()
        # What each other node said last, and for how long it has said nothing new.
        self._heard: dict[int, tuple[str, float]] = {}
        self._store: Any = None
        self._is_stuck = False
        try:
            if hosts.node_rank == 0:
                self._serve()
            else:
                self._connect()
            sizes = self._exchange(local_size)
        except BaseException:
            self.close()
            raise
        self.first_rank, self.world_size = sum(sizes[: hosts.node_rank]), sum(sizes)
        self.interface = interface_to(self.address, self.port)

    def tell(self, failure: str) -> None:
        """Tell the other hosts why this one has failed; the first to tell is heard."""
        if self.hosts.nodes > 1:
            with contextlib.suppress(RuntimeError):
                if self._is_stuck:
                    return
                self._store.compare_set("failed", "", f"node {self.hosts.node_rank}: {failure}")

    def exchange(self, here: Sequence[Vital]) -> tuple[list[Vital], str]:
        """Tell the other hosts how the ranks of this one are.

        Returns:
            How theirs are, and why one of them has failed: what it told, or that it no longer answers; empty while all
            is well.
        """
        if self.hosts.nodes == 1:
            return [], ""
        looked, self._looked = self._looked, time.monotonic()
        try:
            if self._is_stuck:
                raise RuntimeError
            others, told = self._answered(lambda: self._exchange_vitals(here, min(self._looked - looked, 1.0)))
        except RuntimeError:
            others, told = [], f"node 0: its launcher no longer answers at {self.hosts.rendezvous}"
        return others, "" if told.startswith(f"node {self.hosts.node_rank}:") else told

    def _exchange_vitals(self, here: Sequence[Vital], passed: float) -> tuple[list[Vital], str]:
        others: list[Vital] = []
        self._store.set(f"vitals {self.hosts.node_rank}", json.dumps([self._looked, *map(asdict, here)]))
        told = self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        for node in (node for node in range(self.hosts.nodes) if node != self.hosts.node_rank):
            key = f"vitals {node}"
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            before, silent = self._heard.get(node, ("", 0.0))
            silent = 0.0 if text != before else silent + passed
            self._heard[node] = (text, silent)
            if silent > SILENT_SECONDS and not told and not self._store.check([f"left {node}"]):
                told = f"node {node}: its launcher does not answer"
            others += [Vital(**fields | {"phase": Phase(fields["phase"])}) for fields in json.loads(text or "[0]")[1:]]
        return others, told

    def _answered(self, ask: Callable[[], Answer]) -> Answer:
        """Return what the store answers; a cable may be pulled, and torch then waits for ever.

        Raises:
            RuntimeError: it does not answer, and is not asked again.
        """
        answers: list[Answer] = []
        failures: list[RuntimeError] = []

        def run() -> None:
            try:
                answers.append(ask())
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="rendezvous", daemon=True)
        thread.start()
        thread.join(SILENT_SECONDS)
        self._is_stuck = thread.is_alive()
        if not answers:
            raise failures[0] if failures else RuntimeError("the store does not answer")
        return answers[0]

    def close(self) -> None:
        """Leave; the host that keeps the store waits a little for those that have come to it and still answer."""
        if self.hosts.nodes > 1 and self._store is not None and not self._is_stuck:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left {self.hosts.node_rank}", "")
                self._store.add("left", 1)
                until = time.monotonic() + _FAREWELL_SECONDS
                while self.hosts.node_rank == 0 and time.monotonic() < until and self._is_awaited():
                    time.sleep(_RETRY_SECONDS / 5)
        self._store = None

    def _is_awaited(self) -> bool:
        """Return whether a host has come, has not left, and is not known to be silent."""
        silent = sum(seconds > SILENT_SECONDS for _, seconds in self._heard.values())
        return self._store.add("left", 0) < self._store.add("came", 0) - silent

    def _serve(self) -> None:
        """Keep the store, and listen on the one address that is needed: torch by itself listens on all."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        where = f"--rendezvous {self.hosts.rendezvous}"
        try:
            family, _, _, _, target = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise InputError(f"{where}: {error.strerror}") from None
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise InputError(
                f"{where}: this host cannot listen there: {error.strerror}; it must be a free port on an address "
                "of the host with --node-rank 0, which one host alone may have"
            ) from None
        self.address, self.port = listener.getsockname()[:2]
        timeout = datetime.timedelta(seconds=max(self.hosts.timeout, 1))
        # The store owns the socket from here on, and closes it.
        self._store = TCPStore(
            self.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )

    def _connect(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        while True:
            try:
                with socket.create_connection((self.address, self.port), timeout=max(self._left(), 0.1)):
                    break
            except OSError as error:
                if self._left() <= _RETRY_SECONDS:
                    raise InputError(
                        f"--rendezvous {self.hosts.rendezvous}: nobody answered in {self.hosts.timeout:g} s "
                        f"({error.strerror or error}); start the host with --node-rank 0, and let this one reach it"
                    ) from None
            time.sleep(_RETRY_SECONDS)
        timeout = datetime.timedelta(seconds=max(self._left(), 1))
        try:
            self._store = TCPStore(self.address, self.port, is_master=False, timeout=timeout)
        except RuntimeError:
            raise InputError(
                f"--rendezvous {self.hosts.rendezvous}: what answers there is no flatout; is it the right port?"
            ) from None

    def _exchange(self, local_size: int) -> list[int]:
        """Tell the other hosts how many processes there are here; return the numbers of all hosts."""
        hosts = self.hosts
        if hosts.nodes == 1:
            return [local_size]
        try:
            self._store.add("came", 1)
            if self._store.add(f"taken {hosts.node_rank}", 1) > 1:
                self._refuse(f"--node-rank {hosts.node_rank}: two hosts have this node rank; each needs its own")
            if int(self._store.compare_set("nodes", "", str(hosts.nodes))) != hosts.nodes:
                self._refuse(
                    f"--nodes {hosts.nodes}: the host with --node-rank {hosts.node_rank} says so, but not all do"
                )
            self._store.set(f"size {hosts.node_rank}", str(local_size))
            keys = [f"size {node}" for node in range(hosts.nodes)]
            while not self._store.check(keys):
                if self._store.check(["problem"]):
                    raise InputError(self._store.get("problem").decode())
                if self._left() <= 0:
                    missing = ", ".join(str(node) for node, key in enumerate(keys) if not self._store.check([key]))
                    raise InputError(
                        f"--rendezvous {hosts.rendezvous}: node {missing} did not come in {hosts.timeout:g} s; start "
                        "the same command there, with its --node-rank, or wait longer with --rendezvous-timeout"
                    )
                time.sleep(_RETRY_SECONDS / 5)
            return [int(self._store.get(key)) for key in keys]
        except RuntimeError:
            raise InputError(
                f"--rendezvous {hosts.rendezvous}: the host with node rank 0 has gone again; it says why"
            ) from None

    def _refuse(self, problem: str) -> None:
        """Tell all hosts what is wrong with them."""
        self._store.set("problem", problem)
        raise InputError(problem)

    def _left(self) -> float:
        return self._deadline - time.monotonic()


def interface_to(address: str, port: int) -> str:
    """Return the name of the network interface from which this host reaches an address."""
    import psutil

    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # No packet is sent: this asks the routing table.
        probe.connect(target)
        own = ipaddress.ip_address(probe.getsockname()[0])
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and ipaddress.ip_address(each.address.partition("%")[0]) == own:
                return name
    return ""
