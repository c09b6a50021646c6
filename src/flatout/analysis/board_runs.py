"""The runs below a folder, read again only where something has changed.

Every file of a run is replaced by renaming, which changes the time of its folder. So a look at all runs is one `stat`
for each folder; only folders with another time are listed and read again.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.errors import InputError
from flatout.lr import chart
from flatout.plan import plan
from flatout.report import run_files
from flatout.report.run_files import METRICS, RECIPE, SUMMARY, WEIGHTS, RunFiles
from flatout.run.claim import Holder, holder
from flatout.scale import scale
from flatout.style import finite
from flatout.tasks import task_named

# Runs are found so many folders deep, among so many folders.
MOST_DEEP, MOST_FOLDERS = 5, 20_000
# Of a run on another host, which cannot be asked whether it still lives, something is written at least so often.
SILENT_SECONDS = 120.0
# A folder that changed so recently may change again without another time.
CLOCK_SECONDS = 0.1
SPARK_POINTS = 32
# Charts that other commands write, with their figures: kind, file of figures, picture.
CHARTS = (
    ("scaling", scale.RESULT, scale.CHART),
    ("plan", plan.RESULT, plan.CHART),
    ("learning rate", chart.RESULT, chart.CHART),
)
_OF_A_RUN = {RECIPE, METRICS, SUMMARY, WEIGHTS}
_NOT_RUNS = {run_files.CHECKPOINTS, run_files.LOGS}


@dataclass
class _Folder:
    """A folder as it was last listed."""

    changed: int  # st_mtime_ns; -1 where it may have changed since
    folders: list[Path] = field(default_factory=list)
    files: set[str] = field(default_factory=set)


class Store:
    """The runs below a folder and their charts, as plain values. Every change gets a version number.

    Attributes:
        root: the folder; it may appear later.
        version: that of the last change.
        is_complete: whether all folders have been read once.
        notes: what is to be said about the folder as a whole.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version, self.is_complete = 0, False
        self.notes: list[str] = []
        self._folders: dict[Path, _Folder] = {}
        self._runs: dict[str, dict[str, Any]] = {}
        self._charts: dict[str, list[dict[str, Any]]] = {}
        self._versions: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        self._charts_version = 0
        self._lock = threading.Lock()

    def path_of(self, run: str) -> Path:
        """Return the folder of a run or a chart. Raises InputError where there is none of this name."""
        if run not in self._runs and run not in self._charts:
            raise InputError(f"{run}: there is no such run in {self.root}")
        return self.root / run

    def row(self, run: str) -> dict[str, Any]:
        """Return the figures of a run. Raises InputError where there is none of this name."""
        self.path_of(run)
        return self._runs[run]

    def since(self, version: int) -> dict[str, Any]:
        """Return what has changed after a version: `runs` and names in `removed`; `charts` only if they have."""
        with self._lock:
            changed = {
                "version": self.version,
                "complete": self.is_complete,
                "exists": self.root.is_dir(),
                "notes": list(self.notes),
                "runs": [self._runs[name] for name, v in self._versions.items() if v > version],
                "removed": [name for name, v in self._removed.items() if v > version],
            }
            if self._charts_version > version or not version:
                changed["charts"] = [chart for charts in self._charts.values() for chart in charts]
            return changed

    def refresh(self) -> None:
        """Look for changes: one `stat` for each folder, and the files of those that have changed."""
        changed, self.notes = [], []
        if len(self._folders) >= MOST_FOLDERS:
            self.notes.append(f"Only the first {MOST_FOLDERS:,} folders are read; name a folder that holds only runs.")
        visited = set()
        for path in self._walk():
            folder = self._folders[path]
            visited.add(path)
            if folder.changed == -1 or self._has_died(path):
                changed.append((path, folder))
        # The newest come first: they are at the top of the page while the rest is read.
        for path, folder in sorted(changed, key=lambda item: -self._age_key(item[0])):
            self._read(path, folder)
        for path in self._folders.keys() - visited:
            del self._folders[path]
            self._forget(self._name(path))
        if not self.is_complete:
            self.is_complete, self.version = True, self.version + 1

    # --- folders --------------------------------------------------------------------------------------------------

    def _walk(self) -> Iterator[Path]:
        """Yield every folder, after listing it again if its time has changed; `changed` is then -1."""
        waiting = [(self.root, 0)]
        while waiting:
            path, depth = waiting.pop()
            known = self._folders.get(path)
            if known is None and len(self._folders) >= MOST_FOLDERS:
                continue
            try:
                changed = path.stat().st_mtime_ns
                if known is None or known.changed != changed:
                    known = self._folders[path] = _list(path, depth)
            except OSError:
                continue
            yield path
            waiting += [(folder, depth + 1) for folder in known.folders]
            if known.changed == -1 and time.time_ns() - changed > CLOCK_SECONDS * 1e9:
                known.changed = changed

    @staticmethod
    def _age_key(path: Path) -> int:
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return 0

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _has_died(self, path: Path) -> bool:
        """Return whether a run has ended without a change of its folder: its process was killed."""
        row = self._runs.get(self._name(path))
        if row is None or row["status"] != "running":
            return False
        return not _is_alive(path, holder(path))

    # --- files ----------------------------------------------------------------------------------------------------

    def _read(self, path: Path, folder: _Folder) -> None:
        name, charts = self._name(path), []
        for kind, result, picture in CHARTS:
            if result in folder.files:
                charts.append(_chart(name, path, kind, result, picture if picture in folder.files else None))
        is_run = bool(folder.files & (_OF_A_RUN - {RECIPE})) or (RECIPE in folder.files and not charts)
        row = _row(name, path) if is_run else None
        with self._lock:
            if charts != self._charts.get(name, []):
                self.version += 1
                self._charts_version = self.version
                self._charts[name] = charts
            if row is not None and row != self._runs.get(name):
                self.version += 1
                self._runs[name], self._versions[name] = row, self.version
                self._removed.pop(name, None)
            if row is None:
                self._forget_run(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._forget_run(name)
            if self._charts.pop(name, None):
                self.version += 1
                self._charts_version = self.version

    def _forget_run(self, name: str) -> None:
        if self._runs.pop(name, None):
            self.version += 1
            del self._versions[name]
            self._removed[name] = self.version


def _list(path: Path, depth: int) -> _Folder:
    listed = _Folder(changed=-1)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                listed.files.add(entry.name)
            elif depth < MOST_DEEP:
                listed.folders.append(Path(entry.path))
    if listed.files & _OF_A_RUN:
        listed.folders = [folder for folder in listed.folders if folder.name not in _NOT_RUNS]
    return listed


def _chart(name: str, path: Path, kind: str, result: str, picture: str | None) -> dict[str, Any]:
    """Return a chart that another command wrote, with its figures as far as they can be read."""
    found: dict[str, Any] = {"id": name, "kind": kind, "figures": result, "picture": picture}
    try:
        content = json.loads((path / result).read_text(encoding="utf-8"))
        found |= {key: content.get(key) for key in ("job", "model", "date", "ended")}
        found["findings"] = [str(sentence) for sentence in content.get("findings") or ()]
    except (OSError, ValueError, AttributeError) as error:
        found["problem"] = f"{result} cannot be read: {error}."
    return found


def _row(name: str, path: Path) -> dict[str, Any]:
    """Return the figures of a run for the table; `problems` are sentences about what is missing or damaged."""
    row: dict[str, Any] = {"id": name, "name": path.name or path.resolve().name, "problems": [], "job": "", "model": ""}
    process = holder(path)
    try:
        files = run_files.read_run(path, predictions=False)
    except (InputError, OSError) as error:
        # The path is on the page already.
        problem = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")
        problem = f"It {problem}" if problem.startswith("has ") else problem
        is_running = _is_alive(path, process)
        recipe = run_files.read_recipe(path)[1]
        row |= {"status": "running" if is_running else "broken", "date": path.stat().st_mtime, "spark": []}
        row |= {
            key: recipe[key] for key in ("job", "model", "task", "epochs") if isinstance(recipe.get(key), str | int)
        }
        row["epochs_trained"] = 0
        no_epoch = not (path / METRICS).exists() and not (path / SUMMARY).exists()
        if not is_running and no_epoch:
            row["status"] = "incomplete"
        if not (is_running and no_epoch):
            row["problems"] = [f"{problem}."]
        return row
    summary, recipe = files.summary, files.recipe
    row["status"] = status = _status(files, process)
    row["problems"] = _problems(files, status)
    last = files.metrics[-1] if files.metrics else {}
    row |= _result(files)
    row |= {
        "job": summary.get("job") or recipe.get("job") or "",
        "model": recipe.get("model") or "",
        "task": summary.get("task") or recipe.get("task") or "",
        "note": summary.get("stopped") or "",
        "date": _time_of(summary, path),
        "epochs": recipe.get("epochs") or summary.get("epochs"),
        "epochs_trained": len(files.metrics),
        "images_per_second": finite(summary.get("images_per_second")) or finite(last.get("images_per_second")),
        "train_seconds": finite(summary.get("train_seconds"))
        or sum(finite(line.get("seconds")) or 0.0 for line in files.metrics),
        "wall_seconds": finite(summary.get("wall_seconds")),
        "parameters": summary.get("parameters"),
        "devices": summary.get("devices") or "",
        "world_size": summary.get("world_size"),
        "engine": summary.get("engine") or "",
        "seed": recipe.get("seed"),
        "folds": len(summary.get("folds") or ()),
    }
    return row


def _result(files: RunFiles) -> dict[str, Any]:
    """Return the main metric: of the test images, else the validation images, else the last epoch's; and its course."""
    summary, task = files.summary, task_named(files.summary.get("task") or files.recipe.get("task"))
    metric = task.metric_names[0]
    found: dict[str, Any] = {"metric": task.metric_title.lower(), "score": None, "split": "", "loss": None}
    for split in ("test", "valid"):
        keys = f"{split}_{metric}", f"{split}_loss"
        sources = (summary, *reversed(files.metrics[-1:]))
        for source in sources:
            if found["score"] is None and finite(source.get(keys[0])) is not None:
                found |= {"score": finite(source[keys[0]]), "split": split, "loss": finite(source.get(keys[1]))}
    wanted = [f"{split}_{metric}" for split in ("valid", "test")] + [f"train_{task.step_metric}"]
    for key in wanted:
        values = [value for line in files.metrics if (value := finite(line.get(key))) is not None]
        if values:
            step = max(1, len(values) // SPARK_POINTS)
            return {**found, "spark": [round(value, 4) for value in values[::step]]}
    return {**found, "spark": []}


def _status(files: RunFiles, process: Holder | None) -> str:
    """Return "running", "finished", "failed", "stopped" or "incomplete"."""
    if _is_alive(files.run, process):
        return "running"
    if not files.summary:
        return "broken" if (files.run / SUMMARY).is_file() else "incomplete"
    ended = files.summary.get("stopped") or ""
    if ended.startswith("failed"):
        return "failed"
    return "finished" if not ended or ended.startswith("early stopping") else "stopped"


def _is_alive(run: Path, process: Holder | None) -> bool:
    """Return whether the process that holds a run lives here, or, on another host, has written something lately."""
    if process is None:
        return False
    if (is_alive := process.is_alive()) is not None:
        return is_alive
    written = [path.stat().st_mtime for path in (run / METRICS, run / run_files.LIVE, run / RECIPE) if path.exists()]
    written += [log.stat().st_mtime for log in (run / run_files.LOGS).glob("rank-0.log")]
    return bool(written) and time.time() - max(written) < SILENT_SECONDS


def _problems(files: RunFiles, status: str) -> list[str]:
    """Return sentences about absent and damaged files, and about a version that this one does not know."""
    missing = dict(files.missing)
    if status == "running":
        missing = {name: why for name, why in missing.items() if (files.run / name).is_file() and name != METRICS}
    if files.summary.get("folds"):
        missing.pop(METRICS, None)  # its folds have them
    problems = list(missing.values())
    if not files.recipe:
        problems.append("recipe.toml is damaged: it is no TOML.")
    version = (files.summary.get("versions") or {}).get("flatout") or ""
    if _numbers(version) > _numbers(__version__):
        problems.append(f"Written by flatout {version}, which is newer than this one ({__version__}): update flatout.")
    return problems


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".") if part.isdecimal()]


def _time_of(summary: dict[str, Any], path: Path) -> float:
    """Return when a run ended, or was last written, in seconds since 1970."""
    try:
        return datetime.fromisoformat(summary.get("date") or "").timestamp()
    except ValueError:
        return path.stat().st_mtime
