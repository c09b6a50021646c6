"""Fixtures of the system tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flatout.dist import heartbeat
from flatout.train.request import Options
from tests.system.launchers import LauncherServer, eventually

# A rank that is gone need not be waited for where the others wait for ever.
SHORT_LIMITS = {"SILENT_SECONDS": 2.5, "STALLED_SECONDS": 2.5, "GRACE_SECONDS": 0.5}


@pytest.fixture(scope="session", autouse=True)
def short_stacks() -> Iterator[None]:
    """Spare launchers most of a second: for its log, torch reads the source of every frame, of pytest's too."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "")
        yield


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Change the default of an option, which the processes of ranks get as well."""
    patch.setattr(Options.__init__, "__kwdefaults__", {**(Options.__init__.__kwdefaults__ or {}), "report": False})


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures and report, which take longer than a small run."""
    leave_out_pictures(monkeypatch)


@pytest.fixture(scope="module")
def no_pictures_in_module() -> Iterator[None]:
    """Leave them out of all runs of a module, those of its fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        yield


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher in this process take ranks for lost sooner."""
    for name, seconds in SHORT_LIMITS.items():
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture(scope="module")
def launchers() -> Iterator[LauncherServer]:
    server = LauncherServer()
    yield server
    server.close()


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no process, no temporary file and no listening socket outlives a test."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before, listened = children(), listening()
    yield
    assert eventually(lambda: children() <= before)
    assert eventually(lambda: not list(temporary.iterdir())), list(temporary.iterdir())
    assert eventually(lambda: listening() <= listened)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def listening() -> set[int]:
    """Return the ports on which this process listens; groups of torch's that other tests made may be among them."""
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}
