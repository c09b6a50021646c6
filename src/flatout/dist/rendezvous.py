"""torch's rendezvous of several hosts, over a store that listens on one address only; and what the hosts tell each other."""

import contextlib
import datetime
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from flatout.dist.env import serve_store
from flatout.dist.heartbeat import BEAT_SECONDS, SILENT_SECONDS, RankState
from flatout.dist.hosts import Hosts
from flatout.errors import InputError

# A rendezvous of elastic hosts waits this long for one more host; a host without a heartbeat for LOST_SECONDS is left out.
_LAST_CALL_SECONDS, _LOST_SECONDS = 2, 8
# The host with the store waits this long for the others to read why the run ended.
_FAREWELL_SECONDS = 5.0
_RETRY_SECONDS = 0.25


class Rendezvous(DynamicRendezvousHandler):
    """torch's rendezvous over a store that flatout opens: torch's own would listen on all interfaces.

    The ranks use the same store. Meanwhile a thread tells the other hosts how the ranks of this one are.

    Attributes:
        attempt: how often the ranks have been started before, the same number on all hosts.
        store_file: where the ranks meet, if not in that store.
        others: the states of the ranks of other hosts.
        failure: why another host has ended the run.
        silent: which host no longer answers.
    """

    hosts: Hosts
    base: TCPStore
    is_server: bool
    attempt = 0
    failure = silent = store_file = ""
    is_closing = False
    are_several = True
    others: Sequence[RankState] = ()
    _answered, _waiting = 0.0, 0

    @classmethod
    def open(cls, hosts: Hosts) -> "Rendezvous":
        """Open the store or connect to it.

        Raises:
            InputError: this is not possible.
        """
        store, is_server = _open_store(hosts)
        # The ranks of the first host come first, also after a restart: it has the run folder.
        position = hosts.node_rank if hosts.node_rank is not None else 0 if is_server else hosts.most
        timeout = RendezvousTimeout(
            join=datetime.timedelta(seconds=hosts.timeout), last_call=datetime.timedelta(seconds=_LAST_CALL_SECONDS)
        )
        made = cls.from_backend(
            "flatout",
            store,
            C10dRendezvousBackend(store, "flatout"),
            hosts.least,
            hosts.most,
            f"{position:06d} {socket.gethostname()}",
            timeout,
            keep_alive_interval=1,
            keep_alive_max_attempt=_LOST_SECONDS,
        )
        made.hosts, made.base, made.is_server = hosts, store, is_server
        made._stop = threading.Event()
        return made

    def check(self) -> None:
        """Check that the hosts agree on --nodes; raises InputError if not."""
        self.base.add("came", 1)
        if self.hosts.node_rank is not None:
            self.base.set(f"node {self.hosts.node_rank}", "")
        nodes = self.base.compare_set("nodes", "", self.hosts.nodes).decode()
        if nodes != self.hosts.nodes:
            problem = f"hosts disagree on --nodes: {nodes} and {self.hosts.nodes}"
            self.end_run(problem)
            raise InputError(problem)

    @property
    def use_agent_store(self) -> bool:
        """See torch; the ranks are clients of this store."""
        return True

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return self.base

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        self._stop.set()
        # torch tells the address in the first round only, so hosts that come later would wait for it.
        self._bootstrap_store_info = None
        info = super().next_rendezvous()
        if info.rank == 0:
            info.store.set("attempt", str(self.base.add("attempts", 1) - 1))
        self.attempt = int(info.store.get("attempt"))
        store = RendezvousStoreInfo(self.hosts.address[0], self.base.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, store)

    def num_nodes_waiting(self) -> int:
        """See torch; the thread has asked, as the store may not answer."""
        return 0 if self.is_closing else self._waiting

    # --- what hosts tell each other -------------------------------------------------------------------------------

    def exchange(self, rank: int, size: int, read: Callable[[], list[RankState]]) -> None:
        """Start to tell the other hosts the states of this host's ranks, and to read theirs."""
        self.others, self.failure, self.silent, self._waiting = [], "", "", 0
        self._answered = time.monotonic()
        self._stop = threading.Event()
        threading.Thread(target=self._exchange, args=(rank, size, read, self._stop), daemon=True).start()

    def _exchange(self, rank: int, size: int, read: Callable[[], list[RankState]], stop: threading.Event) -> None:
        store = PrefixStore(f"attempt {self.attempt}", self.base)
        seen: dict[int, tuple[str, float]] = {}
        with contextlib.suppress(Exception):  # `look` reports a store that does not answer
            while not stop.wait(BEAT_SECONDS):
                store.set(f"ranks {rank}", json.dumps([time.monotonic(), *(asdict(state) for state in read())]))
                if self.base.check(["failure"]):
                    self.failure = self.base.get("failure").decode()
                others: list[RankState] = []
                for host in set(range(size)) - {rank}:
                    text = store.get(f"ranks {host}").decode() if store.check([f"ranks {host}"]) else "[0]"
                    if text != seen.get(host, ("", 0.0))[0]:
                        seen[host] = (text, time.monotonic())
                    elif time.monotonic() - seen[host][1] > SILENT_SECONDS:
                        self.silent = f"host {host} of {size} no longer answers"
                    others += [RankState(**fields) for fields in json.loads(text)[1:]]
                self._waiting = super().num_nodes_waiting()
                self.others, self._answered = others, time.monotonic()

    def look(self) -> str:
        """Return why the ranks of this host cannot go on: another host has failed or no longer answers; empty if not."""
        if not self.is_server and time.monotonic() - self._answered > SILENT_SECONDS:
            self.silent = f"the host at --rendezvous {self.hosts.rendezvous} no longer answers"
        return self.failure or self.silent

    @property
    def is_stuck(self) -> bool:
        """Whether the store does not answer, so that a call of it might never return."""
        return self.silent.startswith("the host at")

    def missing(self) -> str:
        """Return which hosts have not come, for messages."""
        least = self.hosts.least
        if self.hosts.node_rank is None:
            return f"only {self.base.add('came', 0)} of {least} hosts came"
        nodes = [str(node) for node in range(least) if not self.base.check([f"node {node}"])]
        return f"node {', '.join(nodes)} did not come"

    def end_run(self, failure: str) -> None:
        """End the run on all hosts; the first reason counts."""
        if not self.is_stuck:
            with contextlib.suppress(RuntimeError):
                self.base.compare_set("failure", "", f"{self.hosts.name}: {failure}")

    def hear(self, seconds: float) -> str:
        """Return the reason why another host has ended the run; wait for it a little."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.is_stuck and not self.base.check(["failure"]) and time.monotonic() < until:
                time.sleep(BEAT_SECONDS / 5)
            return self.failure or self.base.get("failure").decode() if self.base.check(["failure"]) else ""
        return ""

    def leave(self) -> None:
        """Leave the run for good; the host with the store waits a little for the others."""
        self._stop.set()
        if self.is_stuck:
            return
        with contextlib.suppress(Exception):
            self.shutdown()
            left, came = self.base.add("left", 1), self.base.add("came", 0)
            until = time.monotonic() + _FAREWELL_SECONDS
            while self.is_server and not self.silent and left < came and time.monotonic() < until:
                time.sleep(BEAT_SECONDS / 5)
                left = self.base.add("left", 0)


def _open_store(hosts: Hosts) -> tuple[TCPStore, bool]:
    """Return the store, and whether this host keeps it."""
    address, port = hosts.address
    where = f"--rendezvous {hosts.rendezvous}"
    if not hosts.node_rank:
        try:
            return serve_store(address, port), True
        except OSError as error:
            if hosts.node_rank == 0 or isinstance(error, socket.gaierror):
                raise InputError(
                    f"{where}: this host cannot listen there: {error.strerror}; it must be a free port of an address of "
                    "the host with --node-rank 0"
                ) from None
    deadline = time.monotonic() + hosts.timeout
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.1)):
                break
        except OSError as error:
            if time.monotonic() > deadline - _RETRY_SECONDS:
                raise InputError(
                    f"{where}: no answer in {hosts.timeout:g} s ({error.strerror or error}); start the host with that "
                    "address (--node-rank 0), and make it reachable from this one"
                ) from None
        time.sleep(_RETRY_SECONDS)
    try:
        return TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=30)), False
    except RuntimeError:
        raise InputError(f"{where}: another program than flatout answers; is it the right port?") from None
