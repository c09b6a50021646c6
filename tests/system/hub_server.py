"""A hub of models on loopback, as far as huggingface_hub talks to it: repositories, commits, downloads."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.servers import LoopbackServer, Quiet

TOKEN = "hf_secret"


class Repository:
    """Commits, the newest last, each a dict of files."""

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self.commits: list[dict[str, bytes]] = [{".gitattributes": b""}]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    def sha(self, number: int = -1) -> str:
        position = number % len(self.commits)
        return hashlib.sha1(f"{id(self)} {position}".encode()).hexdigest()


class Refused(Exception):
    """The answer to a request: an HTTP status, and what huggingface_hub tells errors by."""

    def __init__(self, status: int, why: str, code: str = "") -> None:
        super().__init__(why)
        self.status, self.why, self.code = status, why, code


class Hub(LoopbackServer):
    """`trouble` maps a part of a URL to the status that requests for it get; "cut" closes the connection instead."""

    def __init__(self) -> None:
        super().__init__(_Answer)
        self.repositories: dict[str, Repository] = {}
        self.trouble: dict[str, int | str] = {}
        self.requests: list[tuple[str, str]] = []


class _Answer(Quiet, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def answer_request(self) -> None:
        try:
            self.answer()
        except Refused as refused:
            self.send(refused.status, {"error": refused.why}, {"X-Error-Code": refused.code})

    def answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        hub.requests.append((self.command, path))
        for part, trouble in hub.trouble.items():
            if part in f"{self.command} {path}":
                if trouble == "cut":
                    self.close_connection = True
                    return
                raise Refused(int(trouble), "trouble")
        if self.headers["Authorization"] not in (None, f"Bearer {TOKEN}"):
            raise Refused(401, "Invalid credentials")
        for pattern, do in _ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                do(self, body, **match.groupdict())
                return
        raise Refused(404, f"no route for {self.command} {path}")

    do_GET = do_HEAD = do_POST = answer_request  # noqa: N815  (names of http.server)

    def send(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- what is asked ---

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        if not self.headers["Authorization"]:
            raise Refused(401, "no token")
        name = f"{wanted['organization']}/{wanted['name']}"
        exists = name in self.server.repositories
        if not exists:
            private = wanted.get("private") or wanted.get("visibility") == "private"
            self.server.repositories[name] = Repository(private=bool(private))
        self.send(409 if exists else 200, {"url": f"{self.server.url()}/{name}"})

    def check_card(self, body: bytes) -> None:
        self.send(200, {"errors": [], "warnings": []})

    def found(self, name: str, revision: str = "main") -> tuple[Repository, str, dict[str, bytes]]:
        """Return a repository, the commit of a revision, and its files."""
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.headers["Authorization"]):
            raise Refused(404 if self.headers["Authorization"] else 401, "Repository not found", "RepoNotFound")
        commit = repository.sha() if revision == "main" else revision
        files = {repository.sha(number): files for number, files in enumerate(repository.commits)}
        return repository, commit, files[commit]

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        repository, commit, files = self.found(name, revision)
        about = {"id": name, "modelId": name, "sha": commit, "private": repository.private, "tags": []}
        siblings = [{"rfilename": path} for path in files]
        self.send(200, {**about, "downloads": 0, "likes": 0, "siblings": siblings})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        _, _, files = self.found(name, revision)
        about = {
            path: {"size": len(content), "oid": hashlib.sha1(content).hexdigest()} for path, content in files.items()
        }
        self.send(200, [{"type": "file", "path": path, **each} for path, each in about.items()])

    def preupload(self, body: bytes, name: str) -> None:
        self.found(name)
        about = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        files = [{"path": file["path"], **about} for file in json.loads(body)["files"]]
        self.send(200, {"files": files})

    def commit(self, body: bytes, name: str) -> None:
        repository, _, _ = self.found(name)
        lines = [json.loads(line) for line in body.splitlines()]
        header, files = lines[0]["value"], dict(repository.files)
        if header.get("parentCommit") not in (None, repository.sha()):
            raise Refused(412, "the branch has moved")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repository.commits.append(files)
        oid = repository.sha()
        self.send(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url()}/{name}/commit/{oid}"})

    def download(self, body: bytes, name: str, revision: str, path: str) -> None:
        _, commit, files = self.found(name, revision)
        etag = hashlib.sha256(files[path]).hexdigest()
        self.send(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "none"})


_MODEL = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", _Answer.create),
    (r"POST /api/validate-yaml", _Answer.check_card),
    (rf"GET {_MODEL}", _Answer.info),
    (rf"GET {_MODEL}/revision/(?P<revision>[^/]+)", _Answer.info),
    (rf"GET {_MODEL}/tree/(?P<revision>[^/]+)", _Answer.tree),
    (rf"POST {_MODEL}/preupload/main", _Answer.preupload),
    (rf"POST {_MODEL}/commit/main", _Answer.commit),
    (r"(?:HEAD|GET) /(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Answer.download),
]
