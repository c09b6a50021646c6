"""Data named by a URL of an object store: servers of S3's and Hugging Face's kinds on this machine."""

import base64
import hashlib
import io
import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from huggingface_hub import HfFileSystem
from PIL import Image

from flatout.cli import main
from flatout.data import object_stores
from flatout.errors import InputError
from tests.data.downloads import fetch, message
from tests.hubs import using_hub

pytestmark = [
    pytest.mark.usefixtures("cache"),
    # Of the libraries, in their use of each other and of sockets.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def photo(grey: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (9, 8), grey).save(file, "png")
    return file.getvalue()


PHOTOS = {f"{name}/{i}.png": photo(grey + i) for name, grey in (("cat", 0), ("dog", 100)) for i in range(3)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- S3 ---


class Counted:
    """A WSGI application that counts the bytes of objects which it sends, and may deny them after some."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app, self.sent, self.most = app, 0, sys.maxsize
        self.after_first: Callable[[], None] = lambda: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if "HTTP_RANGE" not in environ:
            return self.app(environ, start_response)
        if self.sent >= self.most:
            start_response("403 Forbidden", [])
            return [b""]
        body = b"".join(self.app(environ, start_response))
        self.sent += len(body)
        self.after_first()
        return [body]


class Bucket:
    """The bucket `photos`."""

    def __init__(self, client: Any, server: Counted) -> None:
        self.client, self.server = client, server
        client.create_bucket(Bucket="photos")

    def put(self, files: dict[str, bytes]) -> None:
        for key, content in files.items():
            self.client.put_object(Bucket="photos", Key=key, Body=content)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[str, Counted]]:
    pytest.importorskip("s3fs", reason="needs s3fs")
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    counted = Counted(moto.DomainDispatcherApplication(moto.create_backend_app))
    served = pytest.importorskip("werkzeug.serving").make_server("127.0.0.1", 0, counted, threaded=True)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}", counted
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture
def bucket(endpoint: tuple[str, Counted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    url, counted = endpoint
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(f"{url}/moto-api/reset", b"", timeout=10).close()
    counted.__init__(counted.app)
    # Otherwise a file system of an earlier test, with its environment, is used again.
    sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
    return Bucket(pytest.importorskip("boto3").client("s3"), counted)


def test_a_folder_is_downloaded_once(bucket: Bucket, cache: Path, capfd: pytest.CaptureFixture[str]):
    bucket.put({f"sets/pets/{name}": content for name, content in PHOTOS.items()})
    bucket.put({"sets/pets/": b"", "sets/petshop/other.png": b"another"})
    output = io.StringIO()
    folder = fetch("s3://photos/sets/pets/", output)
    assert folder.name == "pets"
    assert folder.is_relative_to(cache)
    assert contents(folder) == PHOTOS
    assert fetch("s3://photos/sets/pets", output) == folder
    assert main(["check", "s3://photos/sets/pets/", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["images"]["train"] == 6
    assert bucket.server.sent == sum(map(len, PHOTOS.values()))
    assert [line.partition(": ")[0] for line in output.getvalue().splitlines()] == [
        "downloading s3://photos/sets/pets (0.0 MB)",
        "s3://photos/sets/pets",
    ]
    bucket.put({"sets/pets/cat/4.png": photo(4)})
    assert contents(fetch("s3://photos/sets/pets/")) == {**PHOTOS, "cat/4.png": photo(4)}


def test_a_file_continues(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_stores, "_CHUNK_BYTES", 1000)
    content = bytes(range(256)) * 20
    bucket.put({"set/classes.txt": b"cat\ndog\n", "set/data.bin": content})
    bucket.server.most = 3000
    assert "s3://photos/set/data.bin: access is denied (" in message("s3://photos/set/")
    sent = bucket.server.sent
    assert sent >= 3000
    bucket.server.most = sys.maxsize
    output = io.StringIO()
    with pytest.raises(InputError, match="holds nothing recognisable"):
        fetch("s3://photos/set/", output)
    assert output.getvalue().startswith("continuing at 0.0 MB: s3://photos/set")
    assert bucket.server.sent == len(content) + len(b"cat\ndog\n")


@pytest.mark.parametrize("while_continuing", [False, True])
def test_an_object_that_changes_is_refused(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, while_continuing: bool
):
    monkeypatch.setattr(object_stores, "_CHUNK_BYTES", 1000)
    bucket.put({"photos.npz": b"1" * 5000})
    if while_continuing:
        bucket.server.most = 2000
        assert "access is denied" in message("s3://photos/photos.npz")
        bucket.server.most = sys.maxsize
    bucket.server.after_first = lambda: bucket.put({"photos.npz": b"2" * 5000})
    assert message("s3://photos/photos.npz").startswith("s3://photos/photos.npz: changed during the download; ")
    assert not list(cache.glob("remote/*/*"))


def test_shards_by_braces(bucket: Bucket):
    bucket.put({f"sets/{split}/{i}.bin": f"{split} {i}".encode() for split in ("train", "test") for i in range(12)})
    with pytest.raises(InputError) as caught:
        fetch("s3://photos/sets/{train,test}/{1..11}.bin")
    # The message is about the local copy.
    folder = Path(str(caught.value).partition(": ")[0]).parent.parent
    names = {f"{split}/{i}.bin" for split in ("train", "test") for i in range(1, 12)}
    assert contents(folder).keys() - {".download.json"} == names
    assert (folder / "test" / "11.bin").read_bytes() == b"test 11"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://photos/none", "there is no such file or folder; check the URL"),
        ("s3://photos", "the folder holds no files; check the URL"),
        ("s3://no-such-bucket/a", "there is no such file or folder; check the URL"),
    ],
)
def test_nothing_there(bucket: Bucket, url: str, words: str):
    assert message(url) == f"{url}: {words}"


def test_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    bucket.put({"photos.npz": b"1"})
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "access is denied (Unable to locate credentials); set AWS_ACCESS_KEY_ID" in message("s3://photos/photos.npz")


def test_a_store_that_does_not_answer(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "127.0.0.1:1" in message("s3://photos/photos.npz")


@pytest.mark.parametrize("key", ["set/../../evil.png", "set/../evil.png", "set//cat/0.png"])
def test_names_that_leave_the_folder_are_refused(bucket: Bucket, cache: Path, key: str):
    bucket.put({key: b"evil", "set/cat/0.png": b"1"})
    assert "rename" in message("s3://photos/set/")
    assert not list(cache.glob("remote/*/*"))


# --- Google Cloud Storage ---


class Object(io.BytesIO):
    details: dict[str, Any]


class Google(fsspec.AbstractFileSystem):
    """What flatout uses of gcsfs, with objects in memory."""

    protocol = "gs"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **kwargs: Any) -> Any:
        return {name: self.info(name) for name in self.objects if name.startswith(path)}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        digest = base64.b64encode(hashlib.md5(photo(1)).digest()).decode()
        return {"name": path, "type": "file", "size": len(photo(1)), "generation": "17", "md5Hash": digest}

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        file = Object(self.objects[path])
        file.details = self.info(path)
        return file


def test_google_digests_are_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", Google)
    Google.objects |= {"sets/pets/cat/1.png": photo(1), "sets/pets/dog/1.png": photo(1)}
    assert contents(fetch("gs://sets/pets")) == {"cat/1.png": photo(1), "dog/1.png": photo(1)}
    Google.objects |= {"sets/pets/dog/2.png": photo(2)}
    assert "damaged on the way, or has changed: run the same command again" in message("gs://sets/pets")


# --- Hugging Face ---


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hugging Face hub does for the data set `user/pets` with PHOTOS in it; dogs are large files."""

    server: "HubServer"

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        path = unquote(urlsplit(self.path).path)
        name = path.removeprefix("/datasets/user/pets/resolve/main/")
        if path == "/api/datasets/user/pets/tree/main":
            self.answer(json.dumps([self.entry(*photo) for photo in self.server.photos.items()]).encode())
        elif path == "/api/datasets/user/pets":
            self.answer(json.dumps({"id": "user/pets", "sha": "c0ffee" * 6 + "c0ff", "siblings": []}).encode())
        elif name in self.server.photos:
            self.answer(self.server.photos[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        digest = {"oid": hashlib.sha256(PHOTOS[name]).hexdigest(), "size": len(content), "pointerSize": 134}
        large = {"lfs": digest} if name.startswith("dog") else {}
        return {"type": "file", "path": name, "size": len(content), "oid": f"{hash(content):x}", **large}

    def answer(self, body: bytes) -> None:
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    requests: list[str]
    photos: dict[str, bytes]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(("127.0.0.1", 0), Hub) as server:
        server.requests, server.photos = [], dict(PHOTOS)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        HfFileSystem.clear_instance_cache()
        with using_hub(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch):
            yield server
        HfFileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()


def test_a_data_set_of_the_hub(hub: HubServer):
    folder = fetch("hf://datasets/user/pets")
    assert folder.name == "pets"
    assert contents(folder) == PHOTOS
    assert fetch("hf://datasets/user/pets") == folder
    assert sum("/tree/" in request for request in hub.requests) == 2
    assert sum("/resolve/" in request for request in hub.requests) == len(PHOTOS)
    hub.photos["cat/0.png"] = photo(7)
    assert contents(fetch("hf://datasets/user/pets")) == {**PHOTOS, "cat/0.png": photo(7)}
    hub.photos["dog/0.png"] = photo(7)
    assert "dog/0.png: the file there has SHA256" in message("hf://datasets/user/pets")
    assert message("hf://datasets/user/none").endswith("/none: there is no such file or folder; check the URL")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    assert f"needs the package {package}: pip install" in message(f"{scheme}://photos/set")
