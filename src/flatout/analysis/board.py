"""`flatout board`: a local web page over all runs of a folder, until Ctrl-C.

Every request needs the token, in the address or in the cookie that the first request sets, and a Host header of this
machine, so that no page of another site can read anything. Errors are answered with a message.
"""

import contextlib
import errno
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from flatout import report
from flatout.analysis.board_runs import (
    RunStore,
    StoredPredictions,
    compare_runs,
    read_changes,
    read_stored,
    run_details,
)
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError

HOST, PORT, PORTS_TRIED = "127.0.0.1", 8420, 100
# Time limit of open requests when the server ends.
GRACE_SECONDS = 1
LOOK_SECONDS = 1.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report has its own policy, without access to the board.
FILE_POLICY = "sandbox allow-scripts allow-popups"
SERVED = {run_files.REPORT, *run_files.PICTURES}
STATIC = Path(__file__).parent / "static"
STYLE = Path(report.__path__[0]) / "style.css.j2"
NO_TOKEN = "This page needs its token: open the address that `flatout board` has printed.\n"


class Gate:
    """Refuses requests without the token; the first one with it in the address gets a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        # Cookies are shared by all ports of a host.
        cookie = f"flatout-board-{(scope.get('server') or ('', 0))[1]}"
        given = request.query_params.get("token", "")
        response: Response | None = None
        if request.url.path == "/" and secrets.compare_digest(given.encode(), self.token.encode()):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(cookie, self.token, httponly=True, samesite="lax")
        elif not secrets.compare_digest(request.cookies.get(cookie, "").encode(), self.token.encode()):
            response = PlainTextResponse(NO_TOKEN, status_code=403)
        elif request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and request.url.path != "/":
            response = PlainTextResponse("Requests from other sites are refused.\n", status_code=403)
        await (response or self.app)(scope, receive, send)


class BoardApp:
    """The handlers of requests; Starlette calls each in a thread."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._looking, self._looked = threading.Lock(), 0.0

    def routes(self) -> list[Route]:
        """Return the addresses and their handlers."""
        handlers = {
            "/": self._page,
            "/style.css": self._style,
            "/api/runs": self._runs,
            "/api/changes": self._changes,
            "/api/run": self._details,
            "/api/compare": self._compare,
            "/api/answers": self._predictions,
            "/api/samples": self._samples,
            "/api/image": self._image,
            "/api/file": self._file,
        }
        return [Route(path, handler) for path, handler in handlers.items()]

    def look(self) -> None:
        """Look for changes, once a second for all readers together."""
        with self._looking:
            if time.monotonic() - self._looked >= 0.9 * LOOK_SECONDS:
                self.store.refresh()
                self._looked = time.monotonic()

    def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"content-security-policy": POLICY})

    def _style(self, request: Request) -> Response:
        return FileResponse(STYLE, media_type="text/css")

    def _runs(self, request: Request) -> Response:
        version = _number(request, "version") or 0
        if self.store.is_complete:  # else `look` is still reading, and the page shows what it has found
            self.look()
        return JSONResponse(self.store.content(version))

    def _changes(self, request: Request) -> Response:
        name = request.query_params.get("name", "rank-0.log")
        if not re.fullmatch(r"rank-[\w.-]+\.log", name):
            raise InputError(f"{name}: is not a run log")
        stamps = {key: request.query_params.get(key, "") for key in ("metrics", "live", "log")}
        return JSONResponse(read_changes(self._path(request), name, stamps))

    def _details(self, request: Request) -> Response:
        return JSONResponse(run_details(self._path(request)))

    def _compare(self, request: Request) -> Response:
        return JSONResponse(compare_runs({run: self.store.path_of(run) for run in request.query_params.getlist("run")}))

    def _predictions(self, request: Request) -> Response:
        return JSONResponse(self._stored(request).summary())

    def _samples(self, request: Request) -> Response:
        actual, predicted = (_number(request, name) for name in ("actual", "predicted"))
        return JSONResponse(self._stored(request).samples(actual, predicted))

    def _image(self, request: Request) -> Response:
        kind, content = self._stored(request).image(_number(request, "index") or 0)
        return Response(content, media_type=kind, headers={"cache-control": "private, max-age=3600"})

    def _file(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        path = self._path(request) / name
        if name not in SERVED or not path.is_file():
            raise InputError(f"there is no {name} in {path.parent}")
        return FileResponse(path, headers={"content-security-policy": FILE_POLICY, "cache-control": "no-cache"})

    def _path(self, request: Request) -> Path:
        return self.store.path_of(request.query_params.get("run", ""))

    def _stored(self, request: Request) -> StoredPredictions:
        return read_stored(self._path(request))


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InputError(f"{name} = {text!r}: must be a whole number")
    return int(text)


def _refuse(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404 if isinstance(error, InputError) else 500)


def _fail(request: Request, error: Exception) -> Response:
    # Unexpected errors are answered by name, and the server continues.
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)


def make_app(store: RunStore, token: str) -> Starlette:
    """Return the application, which reads the runs when it starts."""
    board = BoardApp(store)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        threading.Thread(target=board.look, daemon=True).start()
        yield

    handlers: dict[Any, Any] = {InputError: _refuse, OSError: _refuse, Exception: _fail}
    return Starlette(
        routes=[*board.routes(), Mount("/static", StaticFiles(directory=STATIC))],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
            Middleware(Gate, token=token),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers=handlers,
        lifespan=lifespan,
    )


def serve_board(folder: Path, port: int | None, console: Console) -> None:
    """Show the runs below a folder on a port, or the next free one, until the process is interrupted.

    Raises:
        InputError: the folder is a file, or no port is free.
    """
    import uvicorn

    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give the folder that holds the runs")
    with _listen(PORT if port is None else port) as listening:
        free, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        if port not in (None, 0, free):
            console.note(f"port {port} is in use: using {free}")
        if not folder.is_dir():
            console.note(f"{folder} does not exist yet: runs are shown as soon as they appear")
        config = uvicorn.Config(
            make_app(RunStore(folder), token),
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws="none",
        )
        console.note(f"the runs in {folder}: http://{HOST}:{free}/?token={token}")
        console.note("Ctrl-C ends the board")
        uvicorn.Server(config).run(sockets=[listening])


def _listen(port: int) -> socket.socket:
    """Return a socket of this machine on a port, or on the next free one; 0 is any."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be from 0 to 65535")
    for number in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            # Ports in TIME_WAIT may be used again.
            return socket.create_server((HOST, number), backlog=128)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise InputError(f"--port {number}: {error.strerror}") from None
    raise InputError(f"--port {port}: it and the next ports are in use or need more rights; choose another --port")
