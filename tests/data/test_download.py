"""Fetching public data, from a server on this machine."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flatout.data.download import PUBLIC, PUBLIC_NAMES, PublicData, download, where_to_get
from flatout.errors import InputError
from flatout.jobs import builtin_jobs

CONTENT = {"a.bin": b"a" * 300_000, "b.bin": b"b" * 5}


class Handler(BaseHTTPRequestHandler):
    """/good/ has the files, /wrong/ has others of these names, /cut/ stops in the middle, the rest is not found."""

    def do_GET(self) -> None:
        _, place, name = self.path.split("/")
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        body = {"good": CONTENT[name], "wrong": b"other", "cut": CONTENT[name]}.get(place)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if place == "cut" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    requests: list[str]

    def data(self, *places: str) -> PublicData:
        return PublicData(
            base_urls=tuple(f"http://127.0.0.1:{self.server_port}/{place}/" for place in places),
            files={name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()},
        )


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".download.lock"}


def test_success_and_nothing_fetched_twice(server: Server, tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    lines: list[str] = []
    assert download(server.data("good"), folder, lines.append) == folder
    assert contents(folder) == CONTENT
    assert len(lines) == 2
    assert "/good/a.bin" in lines[0]
    download(server.data("good"), folder, lines.append)
    assert len(server.requests) == len(lines) == 2


def test_damaged_file_is_fetched_again(server: Server, tmp_path: Path):
    download(server.data("good"), tmp_path, lambda _: None)
    (tmp_path / "a.bin").write_bytes(b"damaged")
    download(server.data("good"), tmp_path, lambda _: None)
    assert contents(tmp_path) == CONTENT
    assert server.requests == ["/good/a.bin", "/good/b.bin", "/good/a.bin"]


@pytest.mark.parametrize("first", ["missing", "wrong", "cut"])
def test_next_place_is_tried(server: Server, tmp_path: Path, first: str):
    download(server.data(first, "good"), tmp_path, lambda _: None)
    assert contents(tmp_path) == CONTENT
    assert server.requests[:2] == [f"/{first}/a.bin", "/good/a.bin"]


def test_all_places_fail(server: Server, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        download(server.data("missing", "wrong", "cut"), tmp_path, lambda _: None)
    message = str(caught.value)
    assert "/missing/a.bin (the server answers 404 Not Found)" in message
    assert "/wrong/a.bin (the file there has MD5" in message
    assert "/cut/a.bin (cut off after 150,000 of 300,000 bytes)" in message
    assert f"get a.bin, b.bin by other means, put them into {tmp_path}" in message
    assert contents(tmp_path) == {}


def test_no_server_at_all(server: Server, tmp_path: Path):
    data = PublicData(base_urls=("http://127.0.0.1:1/",), files={"a.bin": "0"})
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:1/a\.bin \(.*refused"):
        download(data, tmp_path, lambda _: None)


def test_folder_that_cannot_be_made(server: Server, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/folder: cannot write"):
        download(server.data("good"), tmp_path / "file" / "folder", lambda _: None)


def test_two_at_once_fetch_once(server: Server, tmp_path: Path):
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(download, server.data("good"), tmp_path, lambda _: None) for _ in range(2)]
    assert [job.result() for job in jobs] == [tmp_path, tmp_path]
    assert contents(tmp_path) == CONTENT
    assert len(server.requests) == 2


def test_public_sets_are_complete():
    for data in PUBLIC.values():
        assert len(data.base_urls) > 1
        assert all(url.endswith("/") for url in data.base_urls)
        assert len(data.files) == 4
        assert all(len(md5) == 32 for md5 in data.files.values())


def test_every_job_has_data():
    for job in builtin_jobs():
        if job in PUBLIC_NAMES:
            assert PUBLIC_NAMES[job] in PUBLIC
        elif job != "digits":
            assert "https://" in where_to_get(job)
            assert where_to_get(job).endswith(f"flatout train {job} --data FOLDER")
