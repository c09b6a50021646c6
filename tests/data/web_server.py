"""A web server on this machine that counts what it sends."""

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Resource:
    """What the server has at a path, and how it behaves there."""

    content: bytes
    etag: str | None = '"1"'
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    methods: tuple[str, ...] = ("HEAD", "GET")
    status: int = 200
    cut_after: int | None = None
    """Bytes of each answer after which the connection ends."""
    stall_after: int | None = None
    """Bytes of each answer after which nothing comes until the server ends."""
    then: "Resource | None" = None
    """What is there after the first GET."""


class Handler(BaseHTTPRequestHandler):
    server: "Server"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, self.path, self.headers.get("Range"), dict(self.headers)))
        here = self.server.resources.get(path)
        if here is None or here.status >= 400 or self.command not in here.methods:
            self.send_error(404 if here is None else here.status if here.status >= 400 else 405)
            return
        if self.command == "GET" and here.then:
            self.server.resources[path] = here.then
        body, wanted = here.content, self.headers.get("Range")
        if here.ranges and wanted and here.status == 200:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            body = body[int(first) : int(last) + 1 if last else None]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(here.content)}")
        else:
            self.send_response(here.status)
        if here.etag:
            self.send_header("ETag", here.etag)
        for name, value in here.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.send(body, here)

    def send(self, body: bytes, here: Resource) -> None:
        limits = [limit for limit in (here.cut_after, here.stall_after) if limit is not None]
        body = body[: min(limits, default=len(body))]
        self.wfile.write(body)
        self.server.sent += len(body)
        if here.stall_after is not None:
            self.server.ended.wait(30)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.resources: dict[str, Resource] = {}
        self.requests: list[tuple[str, str, str | None, dict[str, str]]] = []
        self.sent = 0
        self.ended = threading.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"

    def gets(self) -> list[str | None]:
        """Return the ranges of the GET requests."""
        return [wanted for method, _, wanted, _ in self.requests if method == "GET"]
