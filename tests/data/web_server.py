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
    methods: tuple[str, ...] = ("HEAD", "GET")
    status: int = 200
    tells_size: bool = True
    cut_after: int | None = None
    """Bytes of each answer after which the connection ends."""
    stall_after: int | None = None
    """Bytes of each answer after which nothing comes until the server ends."""
    then: "Resource | None" = None
    """What is there after the first GET."""


class Handler(BaseHTTPRequestHandler):
    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        here = self.server.resources.get(path)
        if here is None or here.status >= 400 or self.command not in here.methods:
            self.send_error(404 if here is None else here.status if here.status >= 400 else 405)
            return
        if self.command == "GET" and here.then:
            self.server.resources[path] = here.then
        self.send_response(206 if "Range" in self.headers and here.status == 200 else here.status)
        for name, value in {**({"ETag": here.etag} if here.etag else {}), **here.headers}.items():
            self.send_header(name, value)
        if here.tells_size:
            self.send_header("Content-Length", str(len(here.content)))
        self.end_headers()
        if self.command == "GET":
            limits = [limit for limit in (here.cut_after, here.stall_after) if limit is not None]
            self.wfile.write(here.content[: min(limits, default=len(here.content))])
            if here.stall_after is not None:
                self.server.ended.wait(30)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.resources: dict[str, Resource] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.ended = threading.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"

    def gets(self) -> list[str]:
        """Return the paths of the GET requests."""
        return [path for method, path, _ in self.requests if method == "GET"]
