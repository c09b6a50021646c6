"""Rendezvous handlers of torch's elastic agent, and the files of its ranks."""

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from flatout.distributed.environment import DEVICE, STORE, Hosts
from flatout.distributed.world import serve_store
from flatout.utils.errors import InputError

# Elastic hosts wait this long for one more host; a host without a heartbeat for _LOST_SECONDS is left out.
_LAST_CALL_SECONDS, _LOST_SECONDS = 2, 5
# Time for other hosts to read from the store why the run ended.
_FAREWELL_SECONDS = 5.0
_RETRY_SECONDS = 0.25
# Keeps torch from opening another store, which would listen on all interfaces.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Rendezvous(RendezvousHandler):
    """The rendezvous on a single host: a file in the launcher's private folder, new in each attempt."""

    # Whether there may be several hosts, and whether this one waits for others.
    are_several = is_waiting = False
    # Earlier starts of the ranks, equal on all hosts.
    attempt = -1

    def next_rendezvous(self) -> RendezvousInfo:
        # The agent's own store is in its memory, and nothing listens at the address.
        self.attempt += 1
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def get_backend(self) -> str:
        return "flatout"

    def get_run_id(self) -> str:
        return "flatout"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def end_run(self, reason: str) -> None:
        """End the run on all hosts; the first reason counts."""

    def reason(self, seconds: float = 0.0) -> str:
        """Return why a host has ended the run, for which it may wait; empty if none has."""
        return ""

    def missing(self) -> str:
        """Return the missing hosts, for messages."""
        return ""

    def leave(self) -> None:
        """Leave the run permanently."""


class SeveralHosts(Rendezvous):
    """torch's rendezvous over a store that flatout opens on one address; the ranks use the same store."""

    are_several = True

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._is_ending = hosts, False
        self._store, self._is_server = _open_store(hosts)
        self._handler = self._torch_handler()
        self._store.add("came", 1)
        nodes = self._store.compare_set("nodes", "", hosts.nodes).decode()
        if nodes != hosts.nodes:
            problem = f"hosts disagree on --nodes: {nodes} and {hosts.nodes}; start all with the same"
            if self._store.add("attempts", 0):
                self._store.add("left", 1)  # a run that has begun goes on without this host
            else:
                self.end_run(problem)
                self.leave()
            raise InputError(problem)
        os.environ[_NO_SHARED_STORE] = "1"

    def _torch_handler(self) -> DynamicRendezvousHandler:
        hosts = self._hosts
        timeout = RendezvousTimeout(
            join=datetime.timedelta(seconds=hosts.timeout), last_call=datetime.timedelta(seconds=_LAST_CALL_SECONDS)
        )
        return DynamicRendezvousHandler.from_backend(
            self.get_run_id(),
            self._store,
            C10dRendezvousBackend(self._store, self.get_run_id()),
            hosts.least,
            hosts.most,
            # The first host's ranks are first, also after a restart: it has the run folder.
            f"{int(not self._is_server)} {socket.gethostname()}",
            timeout,
            keep_alive_interval=1,
            keep_alive_max_attempt=_LOST_SECONDS,
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.is_waiting = True
        try:
            info = self._handler.next_rendezvous()
        finally:
            self.is_waiting = False
        if info.rank == 0:
            info.store.set("attempt", str(self._store.add("attempts", 1) - 1))
        self.attempt = int(info.store.get("attempt"))
        store = RendezvousStoreInfo(self._hosts.address[0], self._store.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, store)

    def num_nodes_waiting(self) -> int:
        return 0 if self._is_ending else self._handler.num_nodes_waiting()

    def end_run(self, reason: str) -> None:
        # Ends waiting for hosts, here and elsewhere.
        self._is_ending = True
        with contextlib.suppress(RuntimeError, RendezvousError):  # the store, and so the run, has ended
            self._store.compare_set("end", "", f"{socket.gethostname()}: {reason}")
            # Another handler closes the rendezvous, as the agent's thread may be using its own.
            self._torch_handler().shutdown()

    def reason(self, seconds: float = 0.0) -> str:
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self._store.check(["end"]):
                if time.monotonic() >= until:
                    return ""
                time.sleep(_RETRY_SECONDS)
            return self._store.get("end").decode()
        return ""

    def missing(self) -> str:
        return f"only {self._store.add('came', 0)} of {self._hosts.least} hosts joined"

    def leave(self) -> None:
        # The host with the store waits briefly for the others.
        os.environ.pop(_NO_SHARED_STORE, None)
        with contextlib.suppress(RuntimeError):
            self._handler.shutdown()
            left, until = self._store.add("left", 1), time.monotonic() + _FAREWELL_SECONDS
            while self._is_server and left < self._store.add("came", 0) and time.monotonic() < until:
                time.sleep(_RETRY_SECONDS / 2)
                left = self._store.add("left", 0)


def _open_store(hosts: Hosts) -> tuple[TCPStore, bool]:
    """Return the store, and whether this host serves it."""
    address, port = hosts.address
    where = f"--rendezvous {hosts.rendezvous}"
    with contextlib.suppress(OSError):  # the address of another host
        return serve_store(address, port), True
    deadline = time.monotonic() + hosts.timeout
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.1)):
                break
        except OSError as error:
            if time.monotonic() > deadline - _RETRY_SECONDS:
                raise InputError(
                    f"{where}: no answer in {hosts.timeout:g} s ({error.strerror or error}); start flatout on the host "
                    "with that address, and make it reachable from this one"
                ) from None
        time.sleep(_RETRY_SECONDS)
    try:
        return TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=30)), False
    except RuntimeError:
        raise InputError(f"{where}: something other than flatout answers; is it the right port?") from None


class RankFiles(LogsSpecs):
    """The files of the ranks of this host, which are new in each attempt, and the variables that they need."""

    def __init__(
        self, folder: Path, names: Sequence[str], variables: Mapping[str, str], rendezvous: Rendezvous
    ) -> None:
        super().__init__()
        self._folder, self._names, self._variables, self._rendezvous = folder, names, variables, rendezvous

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder, attempt = self._folder, self._rendezvous.attempt
        for path in (p for kind in ("outcome", "output", "position", "ready") for p in folder.glob(f"{kind}-*")):
            path.unlink()
        # torch only counts the restarts of one agent; a host that joins later must resume as well.
        own = {**self._variables, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        if not self._rendezvous.are_several:
            own[STORE] = str(folder / f"store-{attempt}")
        # Never written: the ranks write outcomes.
        errors = {i: str(folder / f"error-{i}") for i in envs}
        for i, variables in envs.items():
            variables |= {**own, DEVICE: self._names[i], "TORCHELASTIC_ERROR_FILE": errors[i]}
        # Ranks write their output to files themselves, because torch does not close its log files.
        return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""), error_files=errors)
