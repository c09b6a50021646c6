"""`flatout board`: a local web page over all runs of a folder, until Ctrl-C.

Every request needs the token, in the address or in the cookie that the first request sets, and a Host header of this
machine, so that no page of another site can read anything. Errors are answered with a message.
"""

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from flatout import report
from flatout.analysis.board_runs import CHARTS, ORDERS, RunStore, Watch, compare_runs, read_stored, run_details
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError

HOST, PORT, PORTS_TRIED = "127.0.0.1", 8420, 100
# Time limit of open requests when the server ends.
GRACE_SECONDS = 1
LOOK_SECONDS = 1.0
# A comment line keeps the stream open, and detects a closed connection.
IDLE_SECONDS = 15.0
# Limits of images to classify: concurrent uploads, bytes, and seconds for each.
UPLOADS_AT_ONCE, MAX_UPLOAD_BYTES, UPLOAD_SECONDS = 2, 64 * 2**20, 60.0
MODELS_KEPT = 2
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report has its own policy, without access to the board.
FILE_POLICY = "sandbox allow-scripts allow-popups"
SERVED = {run_files.REPORT, *run_files.PICTURES, *(picture for _, _, picture in CHARTS)}
STATIC = Path(__file__).parent / "static"
STYLE = Path(report.__path__[0]) / "style.css.j2"
NO_TOKEN = "This page needs its token: open the address that `flatout board` has printed.\n"
Classify = Callable[[Path, bytes], dict[str, Any]]


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
    """The handlers of requests.

    Args:
        is_ending: returns whether streams must end because the server does.
        classify: classifies an image; a parameter for tests without a model.
    """

    def __init__(self, store: RunStore, is_ending: Callable[[], bool], classify: Classify | None = None) -> None:
        self.store, self.is_ending, self.classify = store, is_ending, classify or classify_image
        self._looking, self._looked = asyncio.Lock(), 0.0
        self._uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)

    def routes(self) -> list[Route]:
        """Return the addresses and their handlers."""
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._page,
            "/style.css": self._style,
            "/api/runs": self._runs,
            "/api/events": self._events,
            "/api/run": self._details,
            "/api/compare": self._compare,
            "/api/answers": self._predictions,
            "/api/samples": self._samples,
            "/api/image": self._image,
            "/api/file": self._file,
        }
        upload = Route("/api/classify", self._classify, methods=["POST"])
        return [*(Route(path, handler) for path, handler in handlers.items()), upload]

    async def look(self) -> None:
        """Look for changes, once a second for all readers together."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked >= 0.9 * LOOK_SECONDS:
                await run_in_threadpool(self.store.refresh)
                self._looked = asyncio.get_running_loop().time()

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"content-security-policy": POLICY})

    async def _style(self, request: Request) -> Response:
        return FileResponse(STYLE, media_type="text/css")

    async def _runs(self, request: Request) -> Response:
        return JSONResponse({"folder": str(self.store.root.absolute()), **self.store.since(0)})

    async def _events(self, request: Request) -> Response:
        version = _whole(request.headers.get("last-event-id", ""), "last-event-id") or _number(request, "since") or 0
        watch = None
        if run := request.query_params.get("run"):
            log = request.query_params.get("log", "rank-0.log")
            if not (log.startswith("rank-") and log.endswith(".log") and "/" not in log):
                raise InputError(f"{log}: is not a run log")
            watch = Watch(self.store.path_of(run), log)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._stream(version, watch), media_type="text/event-stream", headers=headers)

    async def _stream(self, version: int, watch: Watch | None) -> AsyncIterator[str]:
        quiet = 0.0
        while not self.is_ending():
            if watch is not None and (news := await run_in_threadpool(watch.news)):
                yield f"event: run\ndata: {json.dumps(news)}\n\n"
            if self.store.version != version:
                changes = self.store.since(version)
                version, quiet = changes["version"], 0.0
                yield f"event: runs\nid: {version}\ndata: {json.dumps(changes)}\n\n"
            elif quiet >= IDLE_SECONDS:
                quiet = 0.0
                yield ": \n\n"
            await asyncio.sleep(LOOK_SECONDS if self.store.is_complete else 0.1)
            quiet += LOOK_SECONDS
            if self.store.is_complete:
                await self.look()

    async def _details(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(run_details, self._path(request)))

    async def _compare(self, request: Request) -> Response:
        paths = {name: self.store.path_of(name) for name in request.query_params.getlist("run")}
        return JSONResponse(await run_in_threadpool(compare_runs, paths))

    async def _predictions(self, request: Request) -> Response:
        found = await run_in_threadpool(read_stored, self._path(request))
        return JSONResponse(await run_in_threadpool(found.summary))

    async def _samples(self, request: Request) -> Response:
        found = await run_in_threadpool(read_stored, self._path(request))
        if "index" in request.query_params:
            return JSONResponse(found.sample(_number(request, "index") or 0))
        given = request.query_params
        show, order = given.get("show", "all"), given.get("order", ORDERS[0])
        if show not in ("all", "wrong", "right") or order not in ORDERS:
            raise InputError("show is all, wrong or right, and order is one of " + ", ".join(ORDERS))
        chosen = {name: _number(request, name) for name in ("actual", "predicted")}
        part = {"offset": _number(request, "offset") or 0, "limit": _number(request, "limit") or 100}
        result = await run_in_threadpool(lambda: found.samples(**chosen, **part, show=show, order=order))
        return JSONResponse(result)

    async def _image(self, request: Request) -> Response:
        path, index, full = self._path(request), _number(request, "index") or 0, "full" in request.query_params
        kind, content = await run_in_threadpool(lambda: read_stored(path).image(index, full=full))
        return Response(content, media_type=kind, headers={"cache-control": "private, max-age=3600"})

    async def _file(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        path = self._path(request) / name
        if name not in SERVED or not path.is_file():
            raise InputError(f"there is no {name} in {path.parent}")
        return FileResponse(path, headers={"content-security-policy": FILE_POLICY, "cache-control": "no-cache"})

    async def _classify(self, request: Request) -> Response:
        path = self._path(request)
        async with self._uploads:
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    content = await _received(request)
            except TimeoutError:
                raise InputError(f"the image was not received within {UPLOAD_SECONDS:g} s") from None
            return JSONResponse(await run_in_threadpool(self.classify, path, content))

    def _path(self, request: Request) -> Path:
        return self.store.path_of(request.query_params.get("run", ""))


async def _received(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_UPLOAD_BYTES:
            raise InputError(f"the image has more than {MAX_UPLOAD_BYTES >> 20} MiB")
    if not content:
        raise InputError("the file is empty")
    return bytes(content)


# One image at a time, and few loaded models.
_classifying = threading.Lock()


def classify_image(path: Path, content: bytes) -> dict[str, Any]:
    """Return the `predictions` of one image. Raises InputError if the image or the run cannot be read."""
    weights = path / run_files.WEIGHTS
    with _classifying:
        run = _loaded(path, weights.stat().st_mtime_ns if weights.is_file() else 0)
        try:
            return run.predict(content)[0].to_dict()
        except InputError as error:
            # The image has no name here.
            raise InputError(str(error).replace("these images cannot be read:\n0: ", "the file ")) from None


@lru_cache(MODELS_KEPT)
def _loaded(path: Path, changed: int) -> Any:
    from flatout.inference.run import load

    return load(path)


def _number(request: Request, name: str) -> int | None:
    return _whole(request.query_params.get(name, ""), name)


def _whole(text: str, name: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InputError(f"{name} = {text!r}: must be a whole number")
    return int(text)


async def _refuse(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404 if isinstance(error, InputError) else 500)


async def _fail(request: Request, error: Exception) -> Response:
    # Unexpected errors are answered by name, and the server continues.
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)


def make_app(
    store: RunStore, token: str, *, is_ending: Callable[[], bool] = lambda: False, classify: Classify | None = None
) -> Starlette:
    """Return the application, which reads the runs when it starts."""
    board = BoardApp(store, is_ending, classify)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(board.look())
        yield
        reading.cancel()

    return Starlette(
        routes=[*board.routes(), Mount("/static", StaticFiles(directory=STATIC))],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
            Middleware(Gate, token=token),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers={InputError: _refuse, OSError: _refuse, Exception: _fail},
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
        app = make_app(RunStore(folder), token, is_ending=lambda: server.should_exit)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, ws="none"
        )
        server = uvicorn.Server(config)
        console.note(f"the runs in {folder}: http://{HOST}:{free}/?token={token}")
        console.note("Ctrl-C ends the board")
        server.run(sockets=[listening])


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
