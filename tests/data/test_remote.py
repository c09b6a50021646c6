"""Data named by a URL of a web server: downloaded once into the cache. `test_web` has servers of other kinds."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.console import Console
from flatout.data.build import find
from flatout.data.cache import clear, entries
from flatout.errors import DiskFull, InputError
from tests.data.downloads import downloads, fetch, message, npz, partial
from tests.data.web_server import Handler, Resource, Server

pytestmark = pytest.mark.usefixtures("cache")


def test_a_file_is_downloaded_once(server: Server, cache: Path):
    server.resources["/set/photos.npz"] = Resource(npz())
    output = io.StringIO()
    path = fetch(server.url("/set/photos.npz"), output)
    assert path.name == "photos.npz"
    assert path.is_relative_to(cache / "remote")
    assert path.read_bytes() == npz()
    assert fetch(server.url("/set/photos.npz"), output) == path
    assert server.sent == len(npz())
    first, second = output.getvalue().splitlines()
    assert first == f"downloading {server.url('/set/photos.npz')} (0.0 MB)"
    assert second.endswith("/set/photos.npz: unchanged since it was downloaded into the cache")


def test_another_version_is_another_entry(server: Server, cache: Path):
    server.resources["/photos.npz"] = Resource(npz())
    old = fetch(server.url("/photos.npz"))
    server.resources["/photos.npz"] = Resource(npz(seed=1), etag='"2"')
    new = fetch(server.url("/photos.npz"))
    assert (old.read_bytes(), new.read_bytes()) == (npz(), npz(seed=1))
    # Without an ETag, the time of the last change tells.
    for day in (1, 2, 1):
        time_stamp = {"Last-Modified": f"Sun, 0{day} Nov 2026 08:00:00 GMT"}
        server.resources["/photos.npz"] = Resource(npz(seed=day), etag=None, headers=time_stamp)
        assert fetch(server.url("/photos.npz")).read_bytes() == npz(seed=day)
    assert server.sent == 4 * len(npz())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_killed_download_continues(server: Server, cache: Path, number: int, code: int):
    content = npz(count=20_000)
    server.resources["/photos.npz"] = Resource(content, stall_after=700_000)
    command = [sys.executable, "-c", "import sys; from flatout.cli import main; sys.exit(main(sys.argv[1:]))"]
    process = subprocess.Popen([*command, "check", server.url("/photos.npz"), "--json"])
    try:
        deadline = time.monotonic() + 60
        while sum(path.stat().st_size for path in partial(cache)) < 700_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(number)
    assert process.wait() == code
    server.resources["/photos.npz"] = Resource(content)
    output = io.StringIO()
    assert fetch(server.url("/photos.npz"), output).read_bytes() == content
    assert output.getvalue().startswith("continuing at 0.7 MB: ")
    assert server.gets() == [None, "bytes=700000-"]
    assert server.sent == len(content)
    assert not partial(cache)


def test_several_at_once_download_once(server: Server, cache: Path):
    server.resources["/photos.npz"] = Resource(npz(count=5000))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(fetch, [server.url("/photos.npz")] * 4))
    assert len(paths) == 1
    assert server.sent == len(npz(count=5000))


def test_a_copy_is_named_when_the_server_is_gone(server: Server):
    server.resources["/photos.npz"] = Resource(npz())
    path = fetch(server.url("/photos.npz"))
    del server.resources["/photos.npz"]
    assert message(server.url("/photos.npz")).endswith(
        f"404 Not Found; check the URL; or give the path of the last copy: {path}"
    )
    assert "copy" not in message(server.url("/others.npz"))


def test_progress_reaches_the_whole(server: Server):
    class Progress(Console):
        def update(self, done: int, total: int, unit: str = "images", text: str = "") -> None:
            shown.append((done, total, unit))

    shown: list[tuple[int, int, str]] = []
    server.resources["/photos.npz"] = Resource(npz(count=40_000), stall_after=1_500_000)
    with pytest.raises(InputError):
        find(server.url("/photos.npz"), console=Progress())
    server.resources["/photos.npz"].stall_after = None
    find(server.url("/photos.npz"), console=Progress())
    assert shown == sorted(shown)
    assert {(1, 2, "MB"), (2, 2, "MB")} <= set(shown)


def test_shards_by_braces(server: Server):
    for name in ("train/00", "train/01", "test/00"):
        server.resources[f"/set/{name}.bin"] = Resource(name.encode())
    words = message(server.url("/set/{train,test}/{00..01}.bin?token=1"))
    assert words == f"{server.url('/set/test/01.bin')}: the server answers 404 Not Found; check the URL"
    with pytest.raises(InputError, match="holds nothing recognisable") as caught:
        fetch(server.url("/set/train/{00..01}.bin?token=1"))
    local = Path(str(caught.value).partition(": ")[0])
    assert local.name == "{00..01}.bin"
    assert [(local.parent / name).read_bytes() for name in ("00.bin", "01.bin")] == [b"train/00", b"train/01"]


# --- the disk and the cache ---


def test_a_full_disk(server: Server, cache: Path):
    server.resources["/photos.npz"] = Resource(npz(count=20_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(DiskFull, match=r"the disk is full, or a limit reached: .* set FLATOUT_CACHE"):
            fetch(server.url("/photos.npz"))
    finally:
        signal.signal(signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.glob("remote/*/*"))


def test_a_download_too_large_for_the_disk_does_not_begin(server: Server, monkeypatch: pytest.MonkeyPatch):
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(2**60))
        handler.end_headers()
        server.requests.append((handler.command, "", None, {}))

    monkeypatch.setattr(Handler, "answer", answer)
    with pytest.raises(DiskFull, match="needs 1,152,921,504,606,846,976 bytes"):
        fetch(server.url("/photos.npz"))
    assert not server.gets()


def test_a_cache_that_cannot_be_written(server: Server, cache: Path):
    server.resources["/photos.npz"] = Resource(npz())
    cache.write_bytes(b"")
    assert f"{cache / 'remote'}: cannot be written" in message(server.url("/photos.npz"))


def test_the_least_recently_used_download_is_removed(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch):
    for name in "abc":
        server.resources[f"/{name}.npz"] = Resource(npz())
    a, b = (fetch(server.url(f"/{name}.npz")) for name in "ab")
    for age, path in enumerate((b, a)):
        os.utime(path.parent, (age, age))
    used = find(server.url("/b.npz"), console=Console(None))
    os.utime(b.parent, (0, 0))
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", f"{2.5 * len(npz()) / 1000}k")
    output = io.StringIO()
    c = fetch(server.url("/c.npz"), output)
    # b is older, but in use.
    assert f"which is full: {server.url('/a.npz')}" in output.getvalue()
    assert sorted(path.name for path in downloads(cache)) == ["b.npz", "c.npz"]
    assert sorted(entry.what for entry in entries(cache)) == [server.url("/b.npz"), server.url("/c.npz")]
    removed, kept = clear(entries(cache))
    assert [entry.path for entry in removed] == [c.parent]
    assert [entry.path for entry in kept] == [b.parent]
    del used


# --- commands ---


def test_commands(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.report.page.draw_all", lambda run: None)
    server.resources["/photos.npz"] = Resource(npz())
    url, run = server.url("/photos.npz"), str(tmp_path / "run")
    assert main(["check", url, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["images"]["train"] == 60
    changes = ["--epochs", "1", "--batch-size", "8", "--devices", "cpu"]
    assert main(["train", url, "--model", "fast-cnn-16", "--out", run, *changes]) == 0
    assert f'path = "{url}"' in (tmp_path / "run" / "recipe.toml").read_text()
    assert 'job = "photos"' in (tmp_path / "run" / "recipe.toml").read_text()
    assert main(["train", url, "--out", run, "--resume", "--devices", "cpu"]) == 0
    capfd.readouterr()
    assert main(["evaluate", run, "--devices", "cpu", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["test_count"] == 6
    assert main(["pack", url, "--size", "8", "--out", str(tmp_path / "pack"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["images"] == 60
    assert server.sent == len(npz())


def test_exit_codes(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["train", server.url("/missing.npz")]) == 2
    assert main(["train", "fashion-mnist", "--data", server.url("/missing.npz")]) == 2
    captured = capfd.readouterr()
    assert captured.out.splitlines() == ["looking at missing.npz", "looking at fashion-mnist"]
    assert captured.err.count(f"flatout: {server.url('/missing.npz')}: the server answers 404") == 2
    assert len(captured.err.splitlines()) == 2
