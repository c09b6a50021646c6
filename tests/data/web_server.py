"""A web server on this machine that counts what it sends."""

import ssl
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.servers import LoopbackServer, Quiet


@dataclass
class Resource:
    """What the server has at a path, and how it behaves there."""

    content: bytes
    etag: str | None = '"1"'
    headers: dict[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ("HEAD", "GET")
    status: int = 200
    tells_size: bool = True
    cut_after: int | None = None  # bytes of each answer, after which the connection ends
    stalls: bool = False  # instead, nothing comes until the server ends
    then: "Resource | None" = None  # what is there after the first GET


class Handler(Quiet, BaseHTTPRequestHandler):
    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        here = self.server.resources.get(path, Resource(b"", status=404))
        status = here.status if self.command in here.methods else 405
        if status >= 400:
            self.send_error(status)
            return
        if self.command == "GET" and here.then:
            self.server.resources[path] = here.then
        self.send_response(status)
        for name, value in {**({"ETag": here.etag} if here.etag else {}), **here.headers}.items():
            self.send_header(name, value)
        if here.tells_size:
            self.send_header("Content-Length", str(len(here.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(here.content[: here.cut_after])
            if here.stalls:
                self.server.ended.wait(30)


class Server(LoopbackServer):
    """Serves resources, encrypted with a context of `ssl`."""

    def __init__(self, encryption: ssl.SSLContext | None = None) -> None:
        super().__init__(Handler)
        if encryption:
            self.socket = encryption.wrap_socket(self.socket, server_side=True)
        self.resources: dict[str, Resource] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def gets(self) -> list[str]:
        """Return the paths of the GET requests."""
        return [path for method, path, _ in self.requests if method == "GET"]
