"""What other users of a machine can reach of a run: torch unpickles what they write into its store."""

import contextlib
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.distributed import shared_memory
from flatout.distributed.environment import Launched
from flatout.distributed.world import World, serve_store
from flatout.engine.factory import run_on_devices
from flatout.utils.console import Console
from flatout.utils.errors import RankLost
from tests.system import rank_functions as ranks
from tests.system.conftest import START_SECONDS, children, eventually, listening

pytestmark = pytest.mark.usefixtures("nothing_left")


def is_store(port: int) -> bool:
    """Return whether a TCPStore of torch's answers a ping."""
    magic, nonce = struct.pack("<I", 0x3C85F7CE), b"flat"
    with socket.create_connection(("127.0.0.1", port), timeout=2) as outsider, contextlib.suppress(OSError):
        outsider.sendall(b"\x00" + magic + b"\x0d" + nonce)
        return outsider.recv(4) == nonce
    return False


def abstract_sockets(processes: list[psutil.Process]) -> list[str]:
    """Return the names, in a space that all users share, of the Unix sockets of some processes."""
    named = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        inode, *name = line.split()[6:]
        if name and name[0].startswith("@"):
            named[f"socket:[{inode}]"] = name[0]
    opened = {str(path.readlink()) for p in processes for path in Path(f"/proc/{p.pid}/fd").iterdir()}
    return [name for link, name in named.items() if link in opened]


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="reads what Linux shows of sockets")
@pytest.mark.slow
def test_nothing_of_a_run_on_one_host_takes_what_others_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As for runs on several hosts.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", next((name for name in psutil.net_if_addrs() if name != "lo"), "lo"))
    options: dict[str, Any] = {"spec": "2xcpu", "engine": "torch", "console": Console()}
    assert is_store(serve_store("127.0.0.1", 0).port)
    known, old = children(), listening()
    run = threading.Thread(target=run_on_devices, args=(ranks.meet_until_told, (tmp_path,)), kwargs=options)
    run.start()
    try:
        assert eventually(lambda: len(list(tmp_path.glob("met-*"))) == 2, START_SECONDS)
        started = [psutil.Process(pid) for pid in children() - known]
        found = [c for process in started for c in process.net_connections() if c.status == "LISTEN"]
        assert {c.laddr.ip for c in found} == {"127.0.0.1"}
        ports = {c.laddr.port for c in found} | (listening() - old)
        stores = [port for port in ports if is_store(port)]
        abstract = abstract_sockets(started)
    finally:
        (tmp_path / "told").touch()
        run.join(START_SECONDS)
    assert len(started) == 2
    assert stores == []
    assert abstract == []


class FirstOfTwo(World):
    """The world of the first of two ranks; `act` gets the address where the second one should connect."""

    def __init__(self, act: Callable[[str], object]) -> None:
        super().__init__(Launched(rank=0, size=2, local_rank=0, local_size=2, address="", port=0))
        self._act = act

    def all_gather_object(self, value: Any) -> list[Any]:
        self._act(value)
        return [value, ""]


def test_the_socket_of_the_sums_is_closed_to_others_and_waits_for_no_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "CONNECT_SECONDS", 0.2)
    modes: list[int] = []
    with socket.socket(socket.AF_UNIX) as silent:
        for act in (lambda address: modes.append(Path(address).parent.stat().st_mode), silent.connect):
            with pytest.raises(RankLost, match="did not connect: timed out"):
                shared_memory.SharedMemory(FirstOfTwo(act))
    assert [stat.S_IMODE(mode) for mode in modes] == [0o700]
