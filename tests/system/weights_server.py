"""A server on loopback that answers as the Hugging Face hub does, with the weights of one model."""

import hashlib
import re
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.servers import LoopbackServer, Quiet

REPOSITORY = "timm/test_resnet.r160_in1k"
COMMIT = "c0ffee" * 6 + "c0ff"


class Hub(LoopbackServer):
    """A hub with one file in one repository. `trouble` is what goes wrong; `requests` are the method, URL and token."""

    def __init__(self, content: bytes) -> None:
        super().__init__(Answer)
        self.content, self.sent, self.trouble = content, content, ""
        self.digest = hashlib.sha256(content).hexdigest()
        self.requests: list[tuple[str, str, str | None]] = []


class Answer(Quiet, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        if not path.startswith("/api/"):  # what huggingface_hub asks about the tool that uses it
            hub.requests.append((self.command, self.path, self.headers["Authorization"]))
        if hub.trouble == "hang":
            hub.ended.wait()
        elif hub.trouble.isdigit():
            self.answer(int(hub.trouble), {})
        elif path.startswith("/cdn/"):
            self.send_content()
        else:
            linked = {"X-Linked-Size": str(len(hub.content)), "X-Linked-Etag": f'"{hub.digest}"'}
            xet = {"X-Xet-Hash": hub.digest, "Link": f'<{hub.url()}/xet>; rel="xet-auth"'}
            # Files are on another host; a proxy gets whole URLs.
            host = f"localhost:{hub.server_port}" if self.path == path else "cdn.test"
            location = {"X-Repo-Commit": COMMIT, "Location": f"http://{host}/cdn/{hub.digest}"}
            self.answer(302, {**linked, **xet, **location})

    def do_GET(self) -> None:
        self.do_HEAD()

    def send_content(self) -> None:
        hub = self.server
        start = int(re.sub(r"\D", "", self.headers["Range"] or "0"))
        rest = hub.sent[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(hub.content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(hub.content) - 1}/{len(hub.content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(rest)
            self.wfile.flush()
            if hub.trouble == "hang in the file":
                hub.ended.wait()
            self.close_connection = True

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
