"""Data named by a URL of a web server, from a server on this machine that counts what it sends."""

import base64
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flatout.cli import main
from flatout.console import Console
from flatout.data import web
from flatout.data.cache import clear, entries
from flatout.data.load import find
from flatout.data.source import DataRef
from flatout.errors import DiskFull, InputError
from tests.data.web_server import Handler, Resource, Server


def npz(count: int = 60, size: int = 8, seed: int = 0) -> bytes:
    """Return images of two classes that differ in brightness, as an .npz file."""
    labels = np.arange(count) % 2
    pixels = np.random.default_rng(seed).integers(0, 128, (count, size, size), np.uint8)
    file = io.BytesIO()
    np.savez(file, images=pixels + (128 * labels[:, None, None]).astype(np.uint8), labels=labels)
    return file.getvalue()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(web, "_TIMEOUT_SECONDS", 0.5)
    return tmp_path / "cache"


def fetch(url: str, stream: io.StringIO | None = None) -> Path:
    found = find(url, console=Console(stream))
    assert isinstance(found, DataRef)
    return found.path


def downloads(cache: Path) -> list[Path]:
    """Return the files of complete downloads."""
    return [path for path in cache.glob("remote/*/*") if path.is_file() and path.name != ".download.json"]


def partial(cache: Path) -> list[Path]:
    return [path for path in cache.glob("remote/*.partial/*") if path.is_file()]


def message(url: str) -> str:
    with pytest.raises(InputError) as caught:
        fetch(url)
    return str(caught.value)


# --- once ---


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


# --- servers of all kinds ---


def test_a_cut_connection_continues_next_time(server: Server, cache: Path):
    server.resources["/photos.npz"] = Resource(npz(), cut_after=1000)
    url = server.url("/photos.npz")
    assert message(url) == f"{url}: cut off after 1,000 of {len(npz()):,} bytes; run the same command again"
    assert message(url) == f"{url}: cut off after 2,000 of {len(npz()):,} bytes; run the same command again"
    server.resources["/photos.npz"].cut_after = None
    assert fetch(url).read_bytes() == npz()
    assert server.sent == len(npz())


@pytest.mark.parametrize("kind", ["no ranges", "no version"])
def test_what_cannot_be_continued_starts_again(server: Server, kind: str):
    etag = None if kind == "no version" else '"1"'
    here = Resource(npz(), etag=etag, ranges=kind != "no ranges", cut_after=1000)
    server.resources["/photos.npz"] = here
    assert "cut off" in message(server.url("/photos.npz"))
    here.cut_after = None
    assert fetch(server.url("/photos.npz")).read_bytes() == npz()
    assert server.sent == 1000 + len(npz())


@pytest.mark.parametrize("change", [{"etag": '"2"'}, {"content": npz(count=62)}], ids=["etag", "size"])
@pytest.mark.parametrize("when", ["between two requests", "while continuing"])
def test_a_source_that_changes_is_refused(server: Server, cache: Path, change: dict, when: str):
    url = server.url("/photos.npz")
    changed = Resource(**{"content": npz(seed=1), **change})
    if when == "while continuing":
        server.resources["/photos.npz"] = Resource(npz(), cut_after=1000)
        assert "cut off" in message(url)
        # HEAD still gives what it was, as caches in between may.
        server.resources["/photos.npz"] = Resource(npz(), methods=("HEAD",))
    else:
        server.resources["/photos.npz"] = Resource(npz())
    here = server.resources["/photos.npz"]

    def answer(handler: Handler, original=Handler.answer) -> None:
        server.resources["/photos.npz"] = here if handler.command == "HEAD" else changed
        original(handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "answer", answer)
        assert message(url).startswith(f"{url}: changed during the download; run the same command again")
    assert not partial(cache) and not downloads(cache)
    server.resources["/photos.npz"] = changed
    assert fetch(url).read_bytes() == changed.content


def test_servers_that_refuse_head(server: Server):
    server.resources["/photos.npz"] = Resource(npz(), methods=("GET",))
    assert fetch(server.url("/photos.npz?signature=secret")).read_bytes() == npz()
    assert server.gets() == ["bytes=0-0", None]


def test_a_file_whose_size_is_not_told(server: Server):
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(npz())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "answer", answer)
        assert fetch(server.url("/photos.npz")).read_bytes() == npz()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-MD5": base64.b64encode(hashlib.md5(npz()).digest()).decode()},
        {"Repr-Digest": f"sha-256=:{base64.b64encode(hashlib.sha256(npz()).digest()).decode()}:"},
        {"x-goog-hash": f"crc32c=n03x6A==,md5={base64.b64encode(hashlib.md5(npz()).digest()).decode()}"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_digests_are_compared(server: Server, cache: Path, headers: dict[str, str]):
    server.resources["/photos.npz"] = Resource(npz(seed=1), headers=headers)
    assert "damaged on the way" in message(server.url("/photos.npz"))
    assert not partial(cache)
    server.resources["/photos.npz"] = Resource(npz(), headers=headers)
    assert fetch(server.url("/photos.npz")).read_bytes() == npz()


@pytest.mark.parametrize(
    ("path", "header", "name"),
    [
        ("/download?id=5", "attachment; filename=photos.npz", "photos.npz"),
        ("/download?id=5", 'attachment; filename="../../../photos.npz"', "photos.npz"),
        ("/..%2f..%2fphotos.npz", "", "photos.npz"),
        ("/my%20photos.npz?token=a/b.c", "", "my photos.npz"),
        ("/.hidden.npz", "", "hidden.npz"),
    ],
)
def test_names(server: Server, cache: Path, path: str, header: str, name: str):
    headers = {"Content-Disposition": header} if header else {}
    server.resources[path.partition("?")[0]] = Resource(npz(), headers=headers)
    found = fetch(server.url(path))
    assert found.name == name
    assert found.parent.parent == cache / "remote"


# --- refusals ---


@pytest.mark.parametrize(("status", "words"), [(403, "403 Forbidden; .*netrc"), (404, "404 Not Found; check the URL")])
def test_error_status(server: Server, cache: Path, status: int, words: str):
    server.resources["/photos.npz"] = Resource(b"", status=status)
    with pytest.raises(InputError, match=rf"/photos.npz: the server answers {words}") as caught:
        fetch(server.url("/photos.npz?signature=secret"))
    assert "secret" not in str(caught.value)
    assert not list(cache.glob("remote/*/*"))


def test_a_host_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Handler, "answer", lambda handler: server.ended.wait(30))
    assert "no answer for 0.5 s; check the URL and the network" in message(server.url("/photos.npz"))
    assert "refused" in message("http://127.0.0.1:1/photos.npz")
    assert "http://host.invalid/photos.npz: " in message("http://host.invalid/photos.npz")


def test_a_host_that_falls_silent(server: Server):
    server.resources["/photos.npz"] = Resource(npz(), stall_after=1000)
    assert "no answer for 0.5 s after 1,000 bytes; run the same command again" in message(server.url("/photos.npz"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:secret@host/photos.npz", r"http://host/photos.npz: a password in a URL .* ~/\.netrc"),
        ("ftp://host/photos.npz", r"ftp:// is not read; flatout downloads from http://, https://, s3://, gs://, hf://"),
    ],
)
def test_urls_that_are_refused(url: str, words: str):
    with pytest.raises(InputError, match=words) as caught:
        fetch(url)
    assert "secret" not in str(caught.value)


def test_web_pages_and_folders_are_refused(server: Server):
    server.resources["/photos.npz"] = Resource(b"<html>", headers={"Content-Type": "text/html; charset=utf-8"})
    assert "is a web page, not data; give the URL of the file itself" in message(server.url("/photos.npz"))
    server.resources["/login.npz"] = Resource(b" <!DOCTYPE html><html>Log in")
    assert "is a web page, not data" in message(server.url("/login.npz"))
    server.resources["/photos/"] = Resource(b"{}")
    assert "names no file" in message(server.url("/photos/"))
    server.resources["/again.npz"] = Resource(b"", status=302, headers={"Location": server.url("/again.npz")})
    assert "\n" not in message(server.url("/again.npz"))


@pytest.mark.parametrize("target", ["same", "other", "refusing", "file"])
def test_redirects_do_not_take_credentials_along(server: Server, tmp_path: Path, target: str):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    host = "127.0.0.1" if target == "same" else "localhost"
    to = "file:///etc/passwd" if target == "file" else server.url("/there/photos.npz", host)
    server.resources["/photos.npz"] = Resource(b"", status=302, headers={"Location": to})
    if target != "refusing":
        server.resources["/there/photos.npz"] = Resource(npz())
    if target in ("refusing", "file"):
        words = message(server.url("/photos.npz"))
        assert ("localhost" in words and "404" in words) if target == "refusing" else "file:///etc/passwd" in words
        return
    assert fetch(server.url("/photos.npz")).read_bytes() == npz()
    login = f"Basic {base64.b64encode(b'me:secret').decode()}"
    sent = {path: headers.get("Authorization") for _, path, _, headers in server.requests}
    assert sent == {"/photos.npz": login, "/there/photos.npz": login if target == "same" else None}
    assert {method for method, path, *_ in server.requests if path.startswith("/there")} == {"HEAD", "GET"}


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
    assert captured.out == ""
    assert captured.err.count(f"flatout: {server.url('/missing.npz')}: the server answers 404") == 2
    assert len(captured.err.splitlines()) == 2
