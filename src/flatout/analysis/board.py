"""`flatout board`: a local web page over all runs of a folder, until Ctrl-C. Nothing is written.

Every request needs the token, in the address or in the cookie that the first request sets, and a Host header of this
machine, so that no page of another site can read anything. Errors are answered with a message.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice, product
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flatout import report
from flatout.tasks import task_named
from flatout.train.run_dir import holder
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.run_files import METRICS, RECIPE, SUMMARY, WEIGHTS, JsonObject, RunFiles
from flatout.utils.style import finite

HOST, PORT, PORTS_TRIED = "127.0.0.1", 8420, 100
# Time limit of open requests when the server ends.
GRACE_SECONDS = 1
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report has its own policy, without access to the board.
REPORT_POLICY = "sandbox allow-scripts allow-popups"
STATIC = Path(__file__).parent / "static"
STYLE = Path(report.__path__[0]) / "style.css.j2"
NO_TOKEN = "This page needs its token: open the address that `flatout board` has printed.\n"

# Maximum depth of runs, and maximum number of folders.
MAX_DEPTH, MAX_FOLDERS = 5, 20_000
# A run on another host, whose process cannot be checked, counts as running while it writes at least this often.
SILENT_SECONDS = 120.0
# A folder changed this recently may change again with the same time.
CLOCK_SECONDS = 0.1
SPARK_POINTS = 32
# Values of the summary on a run's page, besides those of its row.
FIGURES = (
    *("test_count", "valid_count", "input_wait_fraction", "peak_rss_bytes", "peak_device_bytes"),
    *("verdict", "notes"),
)
# Bytes at the end of logs and live metrics that a page receives.
TAIL_BYTES = 2**19


# --- all runs ---------------------------------------------------------------------------------------------------------


class RunStore:
    """The runs below a folder, which may appear later.

    Every file of a run is replaced by renaming, which changes the time of its folder. So folders are listed each time,
    and files are read only where that time is another, or a run was running.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._rows: dict[str, tuple[int | None, JsonObject]] = {}  # by name: the time of the folder, and what it holds
        self._lock = threading.Lock()

    def path_of(self, run: str) -> Path:
        """Return the folder of a run that `content` has named; raise InputError for others."""
        if run not in self._rows:
            raise InputError(f"{run}: there is no such run in {self.root}")
        return self.root / run

    def content(self, version: str = "") -> JsonObject:
        """Return `runs`, `folder`, `exists`, `notes` and their `version`; only that if it is the given one."""
        with self._lock:
            folders, rows = list(islice(self._folders(), MAX_FOLDERS)), {}
            for path, changed, is_run in folders:
                if is_run:
                    name = path.relative_to(self.root).as_posix()
                    before, row = self._rows.get(name, (None, {}))
                    if before != changed or row["status"] == "running":
                        row = _row(name, path, changed / 1e9)
                    is_settled = time.time_ns() - changed > CLOCK_SECONDS * 1e9
                    rows[name] = (changed if is_settled else None, row)
            self._rows = rows
        few = f"Only the first {MAX_FOLDERS:,} folders are read; name a folder that holds only runs."
        found = {
            "folder": str(self.root.absolute()),
            "exists": self.root.is_dir(),
            "notes": [few] if len(folders) == MAX_FOLDERS else [],
            "runs": [row for _, row in rows.values()],
        }
        now = hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()
        return {"version": now} | (found if now != version else {})

    def _folders(self) -> Iterator[tuple[Path, int, bool]]:
        """Yield every folder, its time in nanoseconds, and whether it is a run."""
        waiting = [(self.root, 0)]
        while waiting:
            path, depth = waiting.pop()
            try:
                changed = path.stat().st_mtime_ns
                with os.scandir(path) as entries:
                    visible = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith(".")}
            except OSError:
                continue
            # `flatout scale` writes a recipe next to the folders of its runs.
            has_recipe = RECIPE in visible and run_files.SCALING not in visible
            is_run = has_recipe or not visible.keys().isdisjoint((METRICS, SUMMARY, WEIGHTS))
            yield path, changed, is_run
            if depth < MAX_DEPTH:
                skipped = (run_files.CHECKPOINTS, run_files.LOGS) if is_run else ()
                waiting += [(path / n, depth + 1) for n, is_folder in visible.items() if is_folder and n not in skipped]


def _row(name: str, path: Path, date: float) -> JsonObject:
    """Return the figures of a run for the table; `problems` are sentences about missing and damaged files."""
    is_alive = _is_alive(path)
    row: JsonObject = {"id": name, "name": path.name or path.resolve().name, "date": date, "spark": []}
    try:
        files = run_files.read_run(path, predictions=False)
    except (InputError, OSError) as error:
        has_epochs, recipe = any((path / file).exists() for file in (METRICS, SUMMARY)), run_files.read_recipe(path)[1]
        row |= {key: str(recipe.get(key) or "") for key in ("job", "model")}
        row |= {"epochs": finite(recipe.get("epochs")), "epochs_trained": 0}
        if is_alive:
            return row | {"status": "running", "problems": []}
        return row | {"status": "broken" if has_epochs else "incomplete", "problems": [f"{error}."]}
    summary, recipe, missing = files.summary, files.recipe, dict(files.missing)
    last = files.metrics[-1] if files.metrics else {}
    if is_alive:
        missing = {name: why for name, why in missing.items() if (path / name).is_file() and name != METRICS}
    if summary.get("folds"):
        missing.pop(METRICS, None)  # its folds have them
    with contextlib.suppress(ValueError):
        row["date"] = datetime.fromisoformat(summary.get("date") or "").timestamp()
    row |= {
        **{key: summary.get(key) for key in ("parameters", "devices")},
        **_result(files),
        "images_per_second": summary.get("images_per_second") or last.get("images_per_second"),
        "train_seconds": summary.get("train_seconds") or sum(finite(e.get("seconds")) or 0.0 for e in files.metrics),
        "status": "running" if is_alive else _status(files),
        "problems": [*missing.values(), *["recipe.toml is damaged: it is not valid TOML."] * (not recipe)],
        "job": summary.get("job") or recipe.get("job") or "",
        "model": recipe.get("model") or "",
        "note": summary.get("stopped") or "",
        "epochs": recipe.get("epochs", summary.get("epochs")),
        "epochs_trained": sum(bool(line.get("epoch")) for line in files.metrics),  # 0 is a fitted head
        "folds": len(summary.get("folds") or ()),
    }
    return run_files.plain(row)


def _result(files: RunFiles) -> JsonObject:
    """Return the main metric: on test images, else validation images, else of the last epoch; and its history."""
    task = task_named(files.summary.get("task") or files.recipe.get("task"))
    metric = task.metric_names[0]
    found: JsonObject = {"metric": task.metric_title.lower(), "score": None, "split": "", "loss": None, "spark": []}
    for split, values in product(("test", "valid"), (files.summary, *files.metrics[-1:])):
        if (score := finite(values.get(f"{split}_{metric}"))) is not None:
            found |= {"score": score, "split": split, "loss": finite(values.get(f"{split}_loss"))}
            break
    for key in (f"valid_{metric}", f"test_{metric}", f"train_{task.step_metric}"):
        course = [value for line in files.metrics if (value := finite(line.get(key))) is not None]
        if course:
            found["spark"] = [round(value, 4) for value in course[:: max(1, len(course) // SPARK_POINTS)]]
            break
    return found


def _status(files: RunFiles) -> str:
    """Return the status of a run that has ended."""
    if not files.summary:
        return "broken" if (files.run / SUMMARY).is_file() else "incomplete"
    ended = files.summary.get("stopped") or ""
    if ended.startswith("failed"):
        return "failed"
    return "finished" if not ended or ended.startswith("early stopping") else "stopped"


def _is_alive(run: Path) -> bool:
    process = holder(run)
    if process is None:
        return False
    if (is_alive := process.is_alive()) is not None:
        return is_alive
    files = (METRICS, run_files.LIVE, RECIPE, f"{run_files.LOGS}/rank-0.log")
    written = [path.stat().st_mtime for name in files if (path := run / name).exists()]
    return bool(written) and time.time() - max(written) < SILENT_SECONDS


# --- one run, and several ---------------------------------------------------------------------------------------------


def run_details(path: Path) -> JsonObject:
    """Return recipe, figures and verdict of a run. A run without an epoch has only its recipe."""
    summary: JsonObject = {}
    with contextlib.suppress(InputError):
        summary = run_files.read_run(path, predictions=False).summary
    return {
        "folder": str(path.resolve()),
        "recipe": run_files.read_recipe(path)[0],
        "figures": {key: run_files.plain(value) for key in FIGURES if (value := summary.get(key)) is not None},
        "report": (path / run_files.REPORT).is_file(),
    }


def compare_runs(paths: Mapping[str, Path]) -> JsonObject:
    """Return the metrics of several runs by epoch, and the recipe keys that differ, with their values."""
    recipes = [_flat(run_files.read_recipe(path)[1]) for path in paths.values()]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [{"key": key, "values": [recipe.get(key) for recipe in recipes]} for key in keys]
    return {
        "metrics": {name: run_files.plain(run_files.read_metrics(path, {})) for name, path in paths.items()},
        "differences": run_files.plain([row for row in rows if any(v != row["values"][0] for v in row["values"])]),
    }


def _flat(recipe: JsonObject, prefix: str = "") -> JsonObject:
    found: JsonObject = {}
    for key, value in recipe.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def read_changes(run: Path, stamps: Mapping[str, str]) -> JsonObject:
    """Return the lines of the files of a run that have changed: all `metrics`, the last ones of `live` and `log`.

    `stamps` are those of an earlier answer: inode, time and size of each file.
    """
    found: JsonObject = {}
    files = {"metrics": run / METRICS, "live": run / run_files.LIVE, "log": run / run_files.LOGS / "rank-0.log"}
    now: dict[str, str] = {}
    for name, path in files.items():
        with contextlib.suppress(OSError):
            status = path.stat()
            now[name] = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
            if now[name] != stamps.get(name):
                found[name] = run_files.read_metrics(run, {}) if name == "metrics" else _last_lines(path)
    if "live" in found:
        found["live"] = [line for text in found["live"] if (line := run_files.json_object(text))]
    return {**run_files.plain(found), "stamps": now}


def _last_lines(path: Path) -> list[str]:
    """Return the complete lines at the end of a growing file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).decode("utf-8", errors="replace").split("\n")
    return lines[1 if start else 0 : -1]


# --- the server -------------------------------------------------------------------------------------------------------


def _gate(token: str) -> Callable[[Request, RequestResponseEndpoint], Awaitable[Response]]:
    """Refuse requests without the token; the first one with it in the address gets a cookie."""

    async def answer(request: Request, call_next: RequestResponseEndpoint) -> Response:
        # Cookies are shared by all ports of a host.
        cookie, is_page = f"flatout-board-{(request.scope.get('server') or ('', 0))[1]}", request.url.path == "/"
        if is_page and secrets.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
            return response
        if not secrets.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            return PlainTextResponse(NO_TOKEN, status_code=403)
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_page:
            return PlainTextResponse("Requests from other sites are refused.\n", status_code=403)
        return await call_next(request)

    return answer


def make_app(store: RunStore, token: str) -> Starlette:
    """Return the application; Starlette calls each handler in a thread."""

    def path_of(request: Request) -> Path:
        return store.path_of(request.query_params.get("run", ""))

    contents: dict[str, Callable[[Request], JsonObject]] = {
        "/api/runs": lambda request: store.content(request.query_params.get("version", "")),
        "/api/changes": lambda request: read_changes(path_of(request), request.query_params),
        "/api/run": lambda request: run_details(path_of(request)),
        "/api/compare": lambda request: compare_runs(
            {run: store.path_of(run) for run in request.query_params.getlist("run")}
        ),
    }

    def content(request: Request) -> Response:
        return JSONResponse(contents[request.url.path](request))

    def report_of(request: Request) -> Response:
        path = path_of(request) / run_files.REPORT
        if not path.is_file():
            raise InputError(f"{path}: does not exist; flatout report writes it")
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY, "cache-control": "no-cache"})

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, InputError):
            return JSONResponse({"error": str(error)}, status_code=404)
        # Unexpected errors are answered by name, and the server continues.
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)

    return Starlette(
        routes=[
            Route(
                "/", lambda request: FileResponse(STATIC / "index.html", headers={"content-security-policy": POLICY})
            ),
            Route("/style.css", lambda _: FileResponse(STYLE, media_type="text/css")),
            *(Route(path, content) for path in contents),
            Route("/api/report", report_of),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
            Middleware(BaseHTTPMiddleware, dispatch=_gate(token)),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers=dict.fromkeys((InputError, Exception), failed),
    )


def serve_board(folder: Path, port: int | None, console: Console) -> None:
    """Show the runs below a folder on a port, or the next free one, until the process is interrupted."""
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
