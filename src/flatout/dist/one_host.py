"""The rendezvous of a run on one host, where torch's would open a store that runs the pickles of whoever reaches it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from flatout.dist.heartbeat import RankState


class OneHost(RendezvousHandler):
    """Counts the attempts and names a new file for each, in which the ranks meet; there are no other hosts.

    Attributes: see `Rendezvous`.
    """

    are_several = is_stuck = is_closing = False
    failure = silent = store_file = ""
    others: Sequence[RankState] = ()
    attempt = -1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch. The agent's own store is in its memory, and nothing listens at the address."""
        self.attempt += 1
        self.store_file = str(self._folder / f"store-{self.attempt}")
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def get_backend(self) -> str:
        """See torch."""
        return "flatout"

    def get_run_id(self) -> str:
        """See torch."""
        return "flatout"

    def is_closed(self) -> bool:
        """See torch."""
        return False

    def set_closed(self) -> None:
        """See torch."""

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return 0

    def shutdown(self) -> bool:
        """See torch."""
        return True

    # --- what hosts tell each other -------------------------------------------------------------------------------

    def check(self) -> None:
        """See `Rendezvous`."""

    def exchange(self, rank: int, size: int, read: Callable[[], list[RankState]]) -> None:
        """See `Rendezvous`."""

    def look(self) -> str:
        """See `Rendezvous`."""
        return ""

    def hear(self, seconds: float) -> str:
        """See `Rendezvous`."""
        return ""

    def missing(self) -> str:
        """See `Rendezvous`."""
        return ""

    def end_run(self, failure: str) -> None:
        """See `Rendezvous`."""

    def leave(self) -> None:
        """See `Rendezvous`."""
