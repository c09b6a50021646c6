"""The hosts of a run, as the command line describes them."""

import socket
from dataclasses import dataclass

from flatout.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        nodes: the number of hosts, `N` or `MIN:MAX`.
        node_rank: the position of this host among them. None: the host with the rendezvous address is the first.
        rendezvous: HOST:PORT of the first host; needed for several hosts.
        timeout: seconds in which all must have come.
    """

    nodes: str = "1"
    node_rank: int | None = None
    rendezvous: str = ""
    timeout: float = 120.0

    def __post_init__(self) -> None:
        parts = self.nodes.split(":")
        if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts) or not 1 <= self.least <= self.most:
            raise InputError(f"--nodes {self.nodes}: must be a number of hosts or MIN:MAX, from 1")
        if self.node_rank is not None and not 0 <= self.node_rank < self.most:
            raise InputError(f"--node-rank {self.node_rank}: must be from 0 to {self.most - 1}, as there are {self.most} nodes")
        if not self.timeout > 0:
            raise InputError(f"--rendezvous-timeout {self.timeout:g}: must be more than 0 seconds")
        if self.most == 1:
            return
        if not self.rendezvous:
            raise InputError(f"--nodes {self.nodes}: needs --rendezvous HOST:PORT, an address of the first host")
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"--rendezvous {self.rendezvous}: must be HOST:PORT, with a port from 1 to 65535")

    @property
    def least(self) -> int:
        """The smallest number of hosts that the run continues with."""
        return int(self.nodes.split(":")[0])

    @property
    def most(self) -> int:
        """The largest number of hosts."""
        return int(self.nodes.split(":")[-1])

    @property
    def name(self) -> str:
        """This host, for messages."""
        return socket.gethostname() if self.node_rank is None else f"node {self.node_rank}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store of several hosts."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)
