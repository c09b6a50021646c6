"""Fixtures of the system tests."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from flatout.train.request import Options

# What a run may take to end once something is wrong with it; and its start on a busy machine.
END_SECONDS, START_SECONDS = 15, 60


def eventually(condition: Callable[[], Any], seconds: float = END_SECONDS) -> Any:
    """Wait for a condition; return its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Change the default of an option, which the processes of ranks get as well."""
    patch.setattr(Options.__init__, "__kwdefaults__", {**(Options.__init__.__kwdefaults__ or {}), "report": False})


def draw_small_pictures(patch: pytest.MonkeyPatch) -> None:
    """Write blank pictures, as drawing takes seconds; the report stays as it is."""
    for name in ("draw_curves", "draw_predictions", "draw_answers"):
        patch.setattr(f"flatout.report.pictures.{name}", lambda path, *_: Image.new("L", (3, 2)).save(path))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures and report, which take longer than a small run."""
    leave_out_pictures(monkeypatch)


@pytest.fixture(scope="module")
def one_picture_in_module() -> Iterator[None]:
    """Draw one small picture instead of all and the report, in all runs of a module."""

    def draw(run: Path) -> None:
        for name in ("curves.png", "confusion.png"):
            Image.new("L", (3, 2)).save(run / name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.report.page.draw_all", draw)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with random images of three classes, as files of arrays."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    np.save(folder / "images.npy", rng.integers(0, 256, (120, 8, 8, 1), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(120) % 3)
    return folder


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
