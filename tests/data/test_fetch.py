"""Data named by a URL, and public data: downloaded once into the cache, from servers of every kind on this machine."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flatout.config.jobs import builtin_jobs
from flatout.data.cache import entries, remove
from flatout.data.detect import find
from flatout.data.fetch import PUBLIC, PUBLIC_NAMES, PublicData, download_public, where_to_get
from flatout.data.source import DataSource
from flatout.utils.console import Console
from flatout.utils.errors import DiskFull, InputError
from tests.conftest import Command
from tests.data.packs import Recorder, files_limited_to
from tests.data.small_sets import png
from tests.data.web_server import Resource, Server
from tests.hubs import using_hub

pytestmark = [
    pytest.mark.usefixtures("cache"),
    # Of the libraries, in their use of each other and of sockets.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


CHECK = [sys.executable, "-m", "flatout", "check"]


def npz(count: int = 60, seed: int = 0) -> bytes:
    """Return images of two classes that differ in brightness, as an .npz file."""
    labels = np.arange(count) % 2
    pixels = np.random.default_rng(seed).integers(0, 128, (count, 8, 8), np.uint8)
    file = io.BytesIO()
    np.savez(file, images=pixels + (128 * labels[:, None, None]).astype(np.uint8), labels=labels)
    return file.getvalue()


@pytest.fixture
def photos(server: Server) -> str:
    """Return the URL of images on the server."""
    server.resources["/set/photos.npz"] = Resource(npz())
    return server.url("/set/photos.npz")


def fetch(url: str, stream: io.StringIO | None = None) -> Path:
    found = find(url, console=Console(stream))
    assert isinstance(found, DataSource)
    return found.path


def message(url: str) -> str:
    with pytest.raises(InputError) as caught:
        fetch(url)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".download.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- web servers ---


def test_a_file_is_downloaded_once(server: Server, photos: str, cache: Path):
    output = io.StringIO()
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(fetch, [photos] * 4))
    assert (path.name, path.parents[1], path.read_bytes()) == ("photos.npz", cache / "remote", npz())
    assert fetch(photos, output) == path
    assert len(server.gets()) == 1
    assert output.getvalue().endswith("/set/photos.npz: unchanged since it was downloaded into the cache\n")


def test_another_version_is_another_entry(server: Server):
    """Without an ETag, the time of the last change tells."""
    for seed in (1, 2, 1):
        time_stamp = {"Last-Modified": f"Sun, 0{seed} Nov 2026 08:00:00 GMT"}
        server.resources["/etag.npz"] = Resource(npz(seed=seed), etag=f'"{seed}"')
        server.resources["/time.npz"] = Resource(npz(seed=seed), etag=None, headers=time_stamp)
        for path in ("/etag.npz", "/time.npz"):
            assert fetch(server.url(path)).read_bytes() == npz(seed=seed)
    assert len(server.gets()) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_killed_download_keeps_complete_files(server: Server, cache: Path, number: int, code: int):
    for i in range(3):
        server.resources[f"/{i}.tar"] = Resource(b"%d" % i * 1000)
    server.resources["/2.tar"].cut_after, server.resources["/2.tar"].stalls = 500, True
    url = server.url("/{0..2}.tar")
    process = subprocess.Popen([*CHECK, url])
    try:
        deadline = time.monotonic() + 60
        while sum(file.stat().st_size == 1000 for file in cache.glob("remote/*.partial/?.tar")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(number)
    assert process.wait(10) == code
    server.resources["/2.tar"] = Resource(b"2" * 1000)
    output = io.StringIO()
    with pytest.raises(InputError):  # no tar archives
        fetch(url, output)
    assert output.getvalue().startswith("continuing after 2 files: ")
    assert sorted(server.gets()) == ["/0.tar", "/1.tar", "/2.tar", "/2.tar"]
    (folder,) = cache.glob("remote/*/")
    assert contents(folder) == {f"{i}.tar": b"%d" % i * 1000 for i in range(3)}


@pytest.mark.parametrize("change", [{"etag": '"2"'}, {"content": npz(count=62)}], ids=["etag", "size"])
def test_a_file_that_changes_is_refused(server: Server, cache: Path, change: dict):
    changed = Resource(**{"content": npz(seed=1), **change})
    server.resources["/photos.npz"] = Resource(npz(), then=changed)
    url = server.url("/photos.npz")
    assert message(url).startswith(f"{url}: changed during the download")
    assert not list(cache.glob("remote/*/*"))
    assert fetch(url).read_bytes() == changed.content


@pytest.mark.parametrize(
    ("path", "name", "how"),
    [
        ("/..%2F..%2Fphotos.npz", "photos.npz", {"methods": ("GET",)}),  # the server refuses HEAD
        ("/my%20photos.npz?token=a/b.c", "my photos.npz", {"tells_size": False}),
        ("/.hidden.npz", "hidden.npz", {}),
    ],
)
def test_names_of_files(server: Server, cache: Path, path: str, name: str, how: dict):
    server.resources[path.partition("?")[0]] = Resource(npz(), **how)
    found = fetch(server.url(path))
    assert (found.name, found.read_bytes()) == (name, npz())
    assert found.parent.parent == cache / "remote"


def test_shards_by_braces(server: Server):
    for name in ("train/00", "train/01", "test/00"):
        server.resources[f"/set/{name}.bin"] = Resource(name.encode())
    words = message(server.url("/set/{train,test}/{00..01}.bin?token=1"))
    assert words.startswith(f"{server.url('/set/test/01.bin')}: the server answers 404 Not Found; check the URL")
    local = Path(message(server.url("/set/train/{00..01}.bin?token=1")).partition(": ")[0])
    assert local.name == "{00..01}.bin"
    assert contents(local.parent) == {"00.bin": b"train/00", "01.bin": b"train/01"}


def test_what_a_server_refuses_or_does_not_finish(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.data.fetch._TIMEOUT_SECONDS", 0.5)
    loop = {"status": 302, "headers": {"Location": server.url("/loop.npz")}}
    for name, here, words in (
        ("cut.npz", Resource(npz(), cut_after=1000), "ClientPayloadError.*run the same command again"),
        ("silent.npz", Resource(npz(), cut_after=1000, stalls=True), "Timeout.*check the URL and the network"),
        ("closed.npz", Resource(b"", status=403), "the server answers 403 Forbidden; .*netrc"),
        ("page.npz", Resource(b"<html>", headers={"Content-Type": "text/html; charset=utf-8"}), "is a web page or"),
        ("folder/", Resource(b"{}"), "is a web page or a folder, not a file; give the URL of the file itself"),
        ("loop.npz", Resource(b"", **loop), "TooManyRedirects"),
        ("local.npz", Resource(b"", status=302, headers={"Location": "file:///etc/passwd"}), "file:///etc/passwd"),
    ):
        server.resources[f"/{name}"] = here
        said = message(server.url(f"/{name}?signature=secret"))
        assert re.search(f"/{name}: .*{words}", said)
        assert "secret" not in said
    assert "Cannot connect to host 127.0.0.1:1 " in message("http://127.0.0.1:1/photos.npz?signature=secret")
    assert "http://host.invalid/photos.npz: " in message("http://host.invalid/photos.npz")
    server.resources["/cut.npz"].cut_after = None
    assert fetch(server.url("/cut.npz")).read_bytes() == npz()


@pytest.mark.parametrize("url", ["http://user:secret@host/photos.npz", "s3://", "ftp://host/photos.npz"])
def test_urls_that_are_refused(url: str):
    said = message(url)
    assert re.search(r"is not read; give a local path or http://\.\.\..*~/\.netrc, not in the URL", said)
    assert "secret" not in said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_redirects_to_another_host_do_not_take_credentials_along(server: Server, tmp_path: Path, host: str):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    to = {"Location": server.url("/there/photos.npz", host)}
    server.resources["/photos.npz"] = Resource(b"", status=302, headers=to)
    server.resources["/there/photos.npz"] = Resource(npz())
    assert fetch(server.url("/photos.npz")).read_bytes() == npz()
    login = f"Basic {base64.b64encode(b'me:secret').decode()}"
    sent = {path: headers.get("Authorization") for _, path, headers in server.requests}
    assert sent == {"/photos.npz": login, "/there/photos.npz": login if host == "127.0.0.1" else None}


def test_a_redirect_from_https_to_http_is_refused(server: Server, tmp_path: Path):
    """aiohttp would send the password of the host without encryption."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    (tmp_path / "netrc").write_text("machine localhost login me password secret\n")
    with Server(context) as encrypted:
        to = server.url("/photos.npz?signature=secret", "localhost")
        encrypted.resources["/photos.npz"] = Resource(b"", status=302, headers={"Location": to})
        url = encrypted.url("/photos.npz", "localhost").replace("http:", "https:")
        # aiohttp reads the certificates that it trusts when it is imported.
        environment = os.environ | {"SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        ended = subprocess.run([*CHECK, url], env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr.startswith(f"flatout: {url}: redirects to {to.partition('?')[0]}, without encryption")
    assert ended.returncode == 2
    assert not server.requests


# --- the disk and the cache ---


def test_a_full_disk_and_a_cache_that_cannot_be_written(server: Server, cache: Path):
    server.resources["/large.npz"] = Resource(b"", headers={"Content-Length": str(2**60)}, tells_size=False)
    with pytest.raises(DiskFull, match="needs 1,152,921,504,606,846,976 bytes"):
        fetch(server.url("/large.npz"))
    server.resources["/photos.npz"] = Resource(npz(count=20_000))
    words = "the disk is full, or a limit reached: .* set FLATOUT_CACHE"
    with files_limited_to(100_000), pytest.raises(DiskFull, match=words):
        fetch(server.url("/photos.npz"))
    assert not list(cache.glob("remote/*/*"))
    shutil.rmtree(cache)
    cache.touch()
    assert f"{cache / 'remote'}: cannot be written" in message(server.url("/photos.npz"))


def test_a_download_is_not_removed_while_it_is_used(photos: str, cache: Path):
    used = find(photos, console=Console(None))
    (entry,) = (entry for entry in entries(cache) if entry.is_limited)
    assert (entry.what, remove(entry.path)) == (photos, False)
    del used
    assert remove(entry.path)


def test_commands(server: Server, photos: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.report.page.draw_all", lambda run: None)
    run, changes = tmp_path / "run", ["--epochs", "1", "--batch-size", "8", "--devices", "cpu"]
    command("train", photos, "--model", "fast-cnn-16", "--out", run, *changes)
    recipe = (run / "recipe.toml").read_text()
    assert f'path = "{photos}"' in recipe and 'job = "photos"' in recipe
    command("train", photos, "--out", run, "--resume", "--devices", "cpu")
    assert json.loads(command("evaluate", run, "--devices", "cpu", "--json"))["test_count"] == 6
    assert json.loads(command("pack", photos, "--size", "8", "--out", tmp_path / "pack", "--json"))["images"] == 60
    assert len(server.gets()) == 1
    said = command("train", "fashion-mnist", "--data", server.url("/missing.npz"), code=2)
    assert said.startswith(f"flatout: {server.url('/missing.npz')}: the server answers 404 Not Found; ")
    assert said.count("\n") == 1


# --- object stores ---

PHOTOS = {f"{name}/{i}.png": png(grey + i) for name, grey in (("cat", 0), ("dog", 100)) for i in range(3)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="needs s3fs")
    store = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer("127.0.0.1", 0)
    store.start()
    yield "http://{}:{}".format(*store.get_host_and_port())
    store.stop()


@pytest.fixture
def put(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], None]:
    """Return a function that puts files into the empty bucket `photos`."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"", timeout=10).close()
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket="photos")

    def put(files: dict[str, bytes]) -> None:
        for key, content in files.items():
            client.put_object(Bucket="photos", Key=key, Body=content)

    return put


def test_a_folder_of_a_store(put: Callable[..., None], cache: Path):
    put({f"sets/pets/{name}": content for name, content in PHOTOS.items()})
    put({"sets/pets/": b"", "sets/petshop/other.png": b"another"})
    folder = fetch("s3://photos/sets/pets/")
    assert folder.name == "pets"
    assert folder.is_relative_to(cache)
    assert contents(folder) == PHOTOS
    output = io.StringIO()
    assert fetch("s3://photos/sets/pets", output) == folder
    assert output.getvalue().endswith("unchanged since it was downloaded into the cache\n")
    put({"sets/pets/cat/4.png": png(4)})
    assert contents(fetch("s3://photos/sets/pets/")) == {**PHOTOS, "cat/4.png": png(4)}


def test_a_store_that_has_nothing_denies_access_or_does_not_answer(
    put: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    for url in ("s3://photos/none", "s3://no-such-bucket/a"):
        assert message(url).startswith(f"{url}: there is no such file or folder; check the URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "127.0.0.1:1" in message("s3://photos/photos.npz")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert re.search("Unable to locate credentials.*set AWS_ACCESS_KEY_ID", message("s3://photos/photos.npz"))


@pytest.mark.parametrize("key", ["set/../../evil.png", "set/../evil.png", "set//cat/0.png"])
def test_names_that_leave_the_folder_are_refused(put: Callable[..., None], cache: Path, key: str):
    put({key: b"evil", "set/cat/0.png": b"1"})
    assert "rename" in message("s3://photos/set/")
    assert not list(cache.glob("remote/*/*"))


def test_a_data_set_of_the_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def publish(photos: dict[str, bytes]) -> None:
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in photos.items()
        ]
        server.resources["/api/datasets/user/pets/tree/main"] = Resource(json.dumps(files).encode())
        for name, content in photos.items():
            server.resources[f"/datasets/user/pets/resolve/main/{name}"] = Resource(content)

    about = {"id": "user/pets", "sha": "c0ffee" * 6 + "c0ff", "siblings": []}
    server.resources["/api/datasets/user/pets"] = Resource(json.dumps(about).encode())
    publish(PHOTOS)
    with using_hub(server.url(""), tmp_path, monkeypatch):
        folder = fetch("hf://datasets/user/pets")
        assert (folder.name, contents(folder)) == ("pets", PHOTOS)
        assert fetch("hf://datasets/user/pets") == folder
        assert sum("/resolve/" in path for path in server.gets()) == len(PHOTOS)
        publish({**PHOTOS, "cat/0.png": png(7)})
        assert contents(fetch("hf://datasets/user/pets")) == {**PHOTOS, "cat/0.png": png(7)}


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    assert f"needs the package {package}: pip install" in message(f"{scheme}://photos/set")


# --- public data ---

FILES = {"a.bin": b"a" * 300_000, "b.bin": b"b" * 5}


@pytest.fixture
def mirrors(server: Server) -> Callable[..., PublicData]:
    """Return a function from names of mirrors to public data; mirrors of other names have nothing."""
    for name, content in FILES.items():
        server.resources[f"/good/{name}"] = Resource(content)
        server.resources[f"/wrong/{name}"] = Resource(b"other")
        server.resources[f"/cut/{name}"] = Resource(content, cut_after=len(content) // 2)
    digests = {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()}
    return lambda *names: PublicData(base_urls=tuple(server.url(f"/{name}/") for name in names), files=digests)


def test_public_data_is_downloaded_once(server: Server, tmp_path: Path, mirrors: Callable[..., PublicData]):
    folder = tmp_path / "new" / "folder"
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(lambda _: download_public(mirrors("good"), folder, Recorder()), range(2))) == {folder}
    assert contents(folder) == FILES
    (folder / "a.bin").write_bytes(b"damaged")
    download_public(mirrors("good"), folder, Recorder())
    assert contents(folder) == FILES
    assert server.gets() == ["/good/a.bin", "/good/b.bin", "/good/a.bin"]


def test_mirrors_are_tried_in_turn(tmp_path: Path, mirrors: Callable[..., PublicData]):
    with pytest.raises(InputError) as caught:
        download_public(mirrors("missing", "wrong", "cut"), tmp_path / "data", Recorder())
    for words in ("missing/a.bin: there is no", "wrong/a.bin: the file there has MD5", "cut/a.bin: cannot be"):
        assert words in str(caught.value)
    assert f"get a.bin, b.bin by other means, put them into {tmp_path / 'data'}" in str(caught.value)
    assert contents(tmp_path / "data") == {}
    with files_limited_to(1000), pytest.raises(DiskFull, match=r"the data needs more bytes and .* are free; make room"):
        download_public(mirrors("good"), tmp_path / "data", Recorder())
    download_public(mirrors("missing", "wrong", "cut", "good"), tmp_path / "data", Recorder())
    assert contents(tmp_path / "data") == FILES
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/folder: cannot be written"):
        download_public(mirrors("good"), tmp_path / "file" / "folder" / "x", Recorder())


def test_every_job_has_data():
    for job in builtin_jobs():
        if job in PUBLIC_NAMES:
            assert PUBLIC_NAMES[job] in PUBLIC
        elif job != "digits":
            assert "https://" in where_to_get(job)
            assert where_to_get(job).endswith(f"flatout train {job} --data FOLDER")
