"""The web application: JSON about the runs of a folder, a stream of changes, images, and the page.

Every request needs the token, in the address or in the cookie that the first request sets, and a Host header of this
machine, so that no page of another site can read anything. What a user can cause is answered with a message.
"""

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from importlib.resources import files
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

from flatout.board.answers import ORDERS, answers_of
from flatout.board.details import Watch, compare, details
from flatout.board.store import CHARTS, Store
from flatout.errors import InputError
from flatout.report import run_files

HOSTS = ["127.0.0.1", "localhost"]
LOOK_SECONDS = 1.0
# A line without meaning keeps the stream open, and shows when the reader has gone.
IDLE_SECONDS = 15.0
MOST_UPLOAD_BYTES = 64 * 2**20
MODELS_KEPT = 2
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report has its own policy; as a file of a run it gets no access to the board.
FILE_POLICY = "sandbox allow-scripts allow-popups"
SERVED = {run_files.REPORT, *run_files.PICTURES, *(picture for _, _, picture in CHARTS)}
STATIC = Path(str(files("flatout.board"))) / "static"
STYLE = Path(str(files("flatout.report"))) / "style.css.j2"
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


class Board:
    """The handlers of requests.

    Args:
        is_ending: tells when streams end, since the server ends.
        classify: answers an image; a parameter for tests without a model.
    """

    def __init__(self, store: Store, is_ending: Callable[[], bool], classify: Classify | None = None) -> None:
        self.store, self.is_ending = store, is_ending
        self.classify = classify or predictions_of
        self._looking = asyncio.Lock()
        self._looked = 0.0

    async def look(self) -> None:
        """Look for changes, once a second for all readers together."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked >= 0.9 * LOOK_SECONDS:
                await run_in_threadpool(self.store.refresh)
                self._looked = asyncio.get_running_loop().time()

    async def page(self, request: Request) -> Response:
        """Answer with the page."""
        return FileResponse(STATIC / "index.html", headers={"content-security-policy": POLICY})

    async def style(self, request: Request) -> Response:
        """Answer with the style of reports, which the page shares."""
        return FileResponse(STYLE, media_type="text/css")

    async def runs(self, request: Request) -> Response:
        """Answer with all runs that have been read so far."""
        return JSONResponse({"folder": str(self.store.root.absolute()), **self.store.since(0)})

    async def events(self, request: Request) -> Response:
        """Answer with a stream: changes of runs after `since`, and what the files of `run` gain."""
        since = int(request.headers.get("last-event-id") or request.query_params.get("since") or 0)
        run = request.query_params.get("run")
        watch = None
        if run is not None:
            log = request.query_params.get("log", "rank-0.log")
            path = self.store.path_of(run)
            if not (log.startswith("rank-") and log.endswith(".log") and "/" not in log):
                raise InputError(f"{log}: is no log of a run")
            watch = Watch(path, log)
        return StreamingResponse(
            self._stream(since, watch), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _stream(self, version: int, watch: Watch | None) -> AsyncIterator[str]:
        quiet = 0.0
        while not self.is_ending():
            if watch is not None and (news := await run_in_threadpool(watch.news)):
                yield f"event: run\ndata: {json.dumps(news)}\n\n"
            if self.store.version != version:
                changes = self.store.since(version if version <= self.store.version else 0)
                version, quiet = changes["version"], 0.0
                yield f"event: runs\nid: {version}\ndata: {json.dumps(changes)}\n\n"
            elif quiet >= IDLE_SECONDS:
                quiet = 0.0
                yield ": \n\n"
            await asyncio.sleep(LOOK_SECONDS if self.store.is_complete else 0.1)
            quiet += LOOK_SECONDS
            if self.store.is_complete:
                await self.look()

    async def details(self, request: Request) -> Response:
        """Answer with the recipe and the figures of a run."""
        return JSONResponse(await run_in_threadpool(details, self._path(request)))

    async def compare(self, request: Request) -> Response:
        """Answer with the metrics of several runs, and how their recipes differ."""
        paths = {name: self.store.path_of(name) for name in request.query_params.getlist("run")}
        return JSONResponse(await run_in_threadpool(compare, paths))

    async def answers(self, request: Request) -> Response:
        """Answer with classes and confusion matrix of a run."""
        found = await run_in_threadpool(answers_of, self._path(request))
        return JSONResponse(await run_in_threadpool(found.summary))

    async def samples(self, request: Request) -> Response:
        """Answer with a page of images, by class, prediction and error; or with one of them."""
        found = await run_in_threadpool(answers_of, self._path(request))
        if "index" in request.query_params:
            return JSONResponse(found.sample(_number(request, "index") or 0))
        given = request.query_params
        show, order = given.get("show", "all"), given.get("order", ORDERS[0])
        if show not in ("all", "wrong", "right") or order not in ORDERS:
            raise InputError("show is all, wrong or right, and order is one of " + ", ".join(ORDERS))
        result = await run_in_threadpool(
            lambda: found.samples(
                actual=_number(request, "actual"),
                predicted=_number(request, "predicted"),
                show=show,
                order=order,
                offset=_number(request, "offset") or 0,
                limit=_number(request, "limit") or 100,
            )
        )
        return JSONResponse(result)

    async def image(self, request: Request) -> Response:
        """Answer with an image of the gallery."""
        index, full = _number(request, "index") or 0, "full" in request.query_params

        def encoded() -> tuple[str, bytes]:
            return answers_of(self._path(request)).image(index, full=full)

        kind, content = await run_in_threadpool(encoded)
        return Response(content, media_type=kind, headers={"cache-control": "private, max-age=3600"})

    async def file(self, request: Request) -> Response:
        """Answer with the report or a picture."""
        name = request.query_params.get("name", "")
        path = self._path(request) / name
        if name not in SERVED or not path.is_file():
            raise InputError(f"there is no {name} in {path.parent}")
        return FileResponse(path, headers={"content-security-policy": FILE_POLICY, "cache-control": "no-cache"})

    async def ask(self, request: Request) -> Response:
        """Answer what a run's model makes of the image in the body."""
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > MOST_UPLOAD_BYTES:
                raise InputError(f"the image has more than {MOST_UPLOAD_BYTES >> 20} MiB")
        if not content:
            raise InputError("the file is empty")
        return JSONResponse(await run_in_threadpool(self.classify, self._path(request), bytes(content)))

    def _path(self, request: Request) -> Path:
        return self.store.path_of(request.query_params.get("run", ""))


# One image at a time, and one model that is read.
_classifying = threading.Lock()


def predictions_of(path: Path, content: bytes) -> dict[str, Any]:
    """Return the `predictions` of one image. Raises InputError where the image or the run cannot be read."""
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
    """Return the run in a folder, whose weights changed at that time."""
    from flatout.inference.run import load

    return load(path)


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(f"{name} = {text!r}: must be a whole number")
    return int(text)


async def _refuse(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404 if isinstance(error, InputError) else 500)


async def _fail(request: Request, error: Exception) -> Response:
    """Answer a failure that nobody foresaw with its name: the server goes on."""
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)


def make_app(
    store: Store, token: str, *, is_ending: Callable[[], bool] = lambda: False, classify: Classify | None = None
) -> Starlette:
    """Return the application; it looks at the runs for the first time when it starts."""
    board = Board(store, is_ending, classify)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(board.look())
        yield
        reading.cancel()

    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": board.page,
        "/style.css": board.style,
        "/api/runs": board.runs,
        "/api/events": board.events,
        "/api/run": board.details,
        "/api/compare": board.compare,
        "/api/answers": board.answers,
        "/api/samples": board.samples,
        "/api/image": board.image,
        "/api/file": board.file,
    }
    return Starlette(
        routes=[
            *(Route(path, handler) for path, handler in handlers.items()),
            Route("/api/classify", board.ask, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(Gate, token=token),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers={InputError: _refuse, OSError: _refuse, Exception: _fail},
        lifespan=lifespan,
    )
