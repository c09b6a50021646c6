"""A web server on this machine that counts what it sends."""

import ssl
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
    cut_after: int | None = None  # bytes of each answer, after which the connection ends
    stalls: bool = False  # instead, nothing comes until the server ends
    then: "Resource | None" = None  # what is there after the first GET


class Handler(BaseHTTPRequestHandler):
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

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Serves in a thread while its context lasts, encrypted with a context of `ssl`."""

    daemon_threads = True

    def __init__(self, encryption: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        if encryption:
            self.socket = encryption.wrap_socket(self.socket, server_side=True)
        self.resources: dict[str, Resource] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"

    def gets(self) -> list[str]:
        """Return the paths of the GET requests."""
        return [path for method, path, _ in self.requests if method == "GET"]
