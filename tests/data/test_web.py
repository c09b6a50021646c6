"""Web servers of all kinds: those that cut, refuse, redirect, change or fall silent."""

import base64
import hashlib
from pathlib import Path

import pytest

from flatout.errors import InputError
from tests.data.downloads import downloads, fetch, message, npz, partial
from tests.data.web_server import Handler, Resource, Server

pytestmark = pytest.mark.usefixtures("cache")


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


# Refusals


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
        ("s3://", "s3://: names no host, bucket or repository; give the whole URL"),
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
