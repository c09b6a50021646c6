"""The runs below a folder for the board, read again only after changes; nothing is written.

Every file of a run is replaced by renaming, which changes the time of its folder. So a refresh lists the folders, and
reads the files of those with another time.

Shape letters: N samples, K classes, H height, W width, C channels.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.analysis.scale import SCALE_RESULT
from flatout.data.pack import open_pack
from flatout.report import html
from flatout.report.page import SPLIT_NAMES
from flatout.tasks import Task, confusion, task_named
from flatout.train.run_dir import Holder, holder
from flatout.utils import run_files
from flatout.utils.errors import InputError
from flatout.utils.run_files import METRICS, PREDICTIONS, RECIPE, SUMMARY, WEIGHTS, Predictions, RunFiles, visible
from flatout.utils.style import finite

# Maximum depth of runs, and maximum number of folders.
MAX_DEPTH, MAX_FOLDERS = 5, 20_000
# A run on another host, whose process cannot be checked, counts as running while it writes at least this often.
SILENT_SECONDS = 120.0
# A folder changed this recently may change again with the same time.
CLOCK_SECONDS = 0.1
SPARK_POINTS = 32
_OF_A_RUN = {METRICS, SUMMARY, WEIGHTS}
_NOT_RUNS = {run_files.CHECKPOINTS, run_files.LOGS}
# Metrics on a run's page, except for the main one.
FIGURES = (
    *("test_loss", "valid_loss", "test_count", "valid_count", "train_images", "images_trained", "best_epoch"),
    *("kept_epoch", "input_wait_fraction", "communication_fraction", "peak_rss_bytes", "peak_device_bytes"),
    *("setup_seconds", "precision", "batch_size", "runs_on", "verdict", "notes", "machine", "versions"),
)
# Bytes at the end of logs and live metrics that a page receives.
TAIL_BYTES = 2**19
# Runs whose predictions are kept, and images of a cell of the confusion matrix that are shown.
KEPT_RUNS, MAX_IMAGES = 4, 200


# --- all runs ---------------------------------------------------------------------------------------------------------


class RunStore:
    """The runs below a folder, as plain values.

    Attributes:
        root: the folder; it may appear later.
        version: a number that every change increases, above those of boards that were started earlier.
        is_complete: whether all folders have been read once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = time.time_ns() // 1000
        self.is_complete = False
        self._times: dict[Path, int | None] = {}
        self._runs: dict[str, dict[str, Any]] = {}
        self._folder: dict[str, Any] = {"folder": str(root.absolute()), "complete": False, "exists": False, "notes": []}
        self._lock = threading.Lock()

    def path_of(self, run: str) -> Path:
        """Return the folder of a run. Raises InputError for an unknown name."""
        if run not in self._runs:
            raise InputError(f"{run}: there is no such run in {self.root}")
        return self.root / run

    def content(self, version: int = 0) -> dict[str, Any]:
        """Return `runs` and the state of the folder; if `version` is the present one, only that."""
        with self._lock:
            if version == self.version:
                return {"version": version}
            return {"version": self.version, **self._folder, "runs": list(self._runs.values())}

    def refresh(self) -> None:
        """Look for changes."""
        found = {path: (changed, files) for path, changed, files in self._folders()}
        now = time.time_ns()
        # The newest are first, at the top of the page, while the rest is read.
        for path, (changed, files) in sorted(found.items(), key=lambda item: -item[1][0]):
            if self._times.get(path) != changed or self._has_died(path):
                # `flatout scale` writes a recipe next to the folders of its runs.
                is_run = bool(files & _OF_A_RUN) or (RECIPE in files and SCALE_RESULT not in files)
                self._keep(self._name(path), _row(self._name(path), path) if is_run else None)
                self._times[path] = changed if now - changed > CLOCK_SECONDS * 1e9 else None
        for path in self._times.keys() - found.keys():
            del self._times[path]
            self._keep(self._name(path), None)
        few = f"Only the first {MAX_FOLDERS:,} folders are read; name a folder that holds only runs."
        notes = [few] if len(found) >= MAX_FOLDERS else []
        self.is_complete = True
        folder = self._folder | {"complete": True, "exists": self.root.is_dir(), "notes": notes}
        with self._lock:
            self.version += folder != self._folder
            self._folder = folder

    def _folders(self) -> Iterator[tuple[Path, int, set[str]]]:
        """Yield every folder with its time in nanoseconds and the names of its files."""
        waiting, count = [(self.root, 0)], 0
        while waiting and count < MAX_FOLDERS:
            path, depth = waiting.pop()
            count += 1
            try:
                changed = path.stat().st_mtime_ns
                with os.scandir(path) as entries:
                    visible = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
            except OSError:
                continue
            files = {name for name, is_folder in visible if not is_folder}
            yield path, changed, files
            skipped = _NOT_RUNS if files & {RECIPE, *_OF_A_RUN} else ()
            if depth < MAX_DEPTH:
                waiting += [(path / n, depth + 1) for n, is_folder in visible if is_folder and n not in skipped]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _has_died(self, path: Path) -> bool:
        row = self._runs.get(self._name(path))
        return row is not None and row["status"] == "running" and not _is_alive(path, holder(path))

    def _keep(self, name: str, row: dict[str, Any] | None) -> None:
        with self._lock:
            if row != self._runs.get(name):
                self.version += 1
                self._runs.pop(name, None)
                if row is not None:
                    self._runs[name] = row


def _row(name: str, path: Path) -> dict[str, Any]:
    """Return the figures of a run for the table; `problems` are sentences about missing and damaged files."""
    row: dict[str, Any] = {"id": name, "name": path.name or path.resolve().name, "problems": [], "job": "", "model": ""}
    process = holder(path)
    try:
        files = run_files.read_run(path, predictions=False)
    except (InputError, OSError) as error:
        return row | _unreadable(path, error, is_running=_is_alive(path, process))
    summary, recipe, status = files.summary, files.recipe, _status(files, process)
    last = files.metrics[-1] if files.metrics else {}
    copied = ("parameters", "devices", "world_size", "engine", "wall_seconds", "train_seconds", "images_per_second")
    row |= {key: summary.get(key) for key in copied}
    row["images_per_second"] = row["images_per_second"] or last.get("images_per_second")
    row["train_seconds"] = row["train_seconds"] or sum(finite(line.get("seconds")) or 0.0 for line in files.metrics)
    row |= {
        **_result(files),
        "status": status,
        "problems": _problems(files, status),
        **{key: summary.get(key) or recipe.get(key) or "" for key in ("job", "task")},
        "model": recipe.get("model") or "",
        "note": summary.get("stopped") or "",
        "date": _time_of(summary, path),
        "epochs": recipe.get("epochs") or summary.get("epochs"),
        "epochs_trained": len(files.metrics),
        "seed": recipe.get("seed"),
        "folds": len(summary.get("folds") or ()),
    }
    return run_files.plain(row)


def _unreadable(path: Path, error: Exception, *, is_running: bool) -> dict[str, Any]:
    recipe = run_files.read_recipe(path)[1]
    has_epochs = (path / METRICS).exists() or (path / SUMMARY).exists()
    return {
        **{key: recipe[key] for key in ("job", "model", "task", "epochs") if isinstance(recipe.get(key), str | int)},
        "status": "running" if is_running else "broken" if has_epochs else "incomplete",
        "problems": [f"{error}."] if has_epochs or not is_running else [],
        "date": path.stat().st_mtime,
        "epochs_trained": 0,
        "spark": [],
    }


def _result(files: RunFiles) -> dict[str, Any]:
    """Return the main metric: on test images, else validation images, else of the last epoch; and its history."""
    task = task_named(files.summary.get("task") or files.recipe.get("task"))
    metric = task.metric_names[0]
    found: dict[str, Any] = {"metric": task.metric_title.lower(), "score": None, "split": "", "loss": None, "spark": []}
    for split, values in (
        (split, values) for split in ("test", "valid") for values in (files.summary, *files.metrics[-1:])
    ):
        if (score := finite(values.get(f"{split}_{metric}"))) is not None:
            found |= {"score": score, "split": split, "loss": finite(values.get(f"{split}_loss"))}
            break
    for key in (f"valid_{metric}", f"test_{metric}", f"train_{task.step_metric}"):
        course = [value for line in files.metrics if (value := finite(line.get(key))) is not None]
        if course:
            found["spark"] = [round(value, 4) for value in course[:: max(1, len(course) // SPARK_POINTS)]]
            break
    return found


def _status(files: RunFiles, process: Holder | None) -> str:
    if _is_alive(files.run, process):
        return "running"
    if not files.summary:
        return "broken" if (files.run / SUMMARY).is_file() else "incomplete"
    ended = files.summary.get("stopped") or ""
    if ended.startswith("failed"):
        return "failed"
    return "finished" if not ended or ended.startswith("early stopping") else "stopped"


def _is_alive(run: Path, process: Holder | None) -> bool:
    if process is None:
        return False
    if (is_alive := process.is_alive()) is not None:
        return is_alive
    files = (METRICS, run_files.LIVE, RECIPE, f"{run_files.LOGS}/rank-0.log")
    written = [path.stat().st_mtime for name in files if (path := run / name).exists()]
    return bool(written) and time.time() - max(written) < SILENT_SECONDS


def _problems(files: RunFiles, status: str) -> list[str]:
    missing = dict(files.missing)
    if status == "running":
        missing = {name: why for name, why in missing.items() if (files.run / name).is_file() and name != METRICS}
    if files.summary.get("folds"):
        missing.pop(METRICS, None)  # its folds have them
    return [*missing.values(), *["recipe.toml is damaged: it is not valid TOML."] * (not files.recipe)]


def _time_of(summary: dict[str, Any], path: Path) -> float:
    try:
        return datetime.fromisoformat(summary.get("date") or "").timestamp()
    except ValueError:
        return path.stat().st_mtime


# --- one run, and several ---------------------------------------------------------------------------------------------


def run_details(path: Path) -> dict[str, Any]:
    """Return recipe, figures and verdict of a run. A run without an epoch has only its recipe."""
    text, recipe = run_files.read_recipe(path)
    try:
        summary = run_files.read_run(path, predictions=False).summary
    except InputError:
        summary = {}
    return {
        "folder": str(path.resolve()),
        "recipe": text,
        "flat": run_files.plain(_flat(recipe)),
        "figures": {key: run_files.plain(value) for key in FIGURES if (value := summary.get(key)) is not None},
        "logs": sorted(log.name for log in (path / run_files.LOGS).glob("rank-*.log")),
        "pictures": [name for name in (*run_files.PICTURES, run_files.REPORT) if (path / name).is_file()],
    }


def _flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def compare_runs(paths: dict[str, Path]) -> dict[str, Any]:
    """Return the metrics of several runs by epoch, and the recipe keys that differ, with their values."""
    recipes, metrics = {}, {}
    for name, path in paths.items():
        try:
            files = run_files.read_run(path, predictions=False)
            recipes[name], metrics[name] = run_files.plain(_flat(files.recipe)), run_files.plain(files.metrics)
        except InputError:
            recipes[name], metrics[name] = {}, []
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    rows = [{"key": key, "values": [recipe.get(key) for recipe in recipes.values()]} for key in keys]
    differences = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    return {"metrics": metrics, "differences": differences}


def read_changes(run: Path, log: str, stamps: Mapping[str, str]) -> dict[str, Any]:
    """Return the lines of the files of a run that have changed: all `metrics`, the last ones of `live` and `log`.

    `stamps` are those of an earlier answer: inode, time and size of each file.
    """
    found: dict[str, Any] = {}
    files = {"metrics": run / METRICS, "live": run / run_files.LIVE, "log": run / run_files.LOGS / log}
    now = dict(stamps)
    for name, path in files.items():
        try:
            status = path.stat()
            now[name] = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
            if now[name] != stamps.get(name):
                found[name] = _last_lines(path)
        except OSError:
            continue
    if "metrics" in found:
        found["metrics"] = run_files.read_metrics(run, {})
    if "live" in found:
        found["live"] = [line for text in found["live"] if (line := _object(text))]
    return {**run_files.plain(found), "stamps": now}


def _last_lines(path: Path) -> list[str]:
    """Return the complete lines at the end of a growing file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).decode("utf-8", errors="replace").split("\n")
    return lines[1 if start else 0 : -1]


def _object(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPredictions:
    """The predictions of a run on test or validation images; `pack` has these images, [P, H, W, C], if it is there."""

    stored: Predictions
    task: Task
    classes: list[str]
    pack: np.ndarray | None

    def summary(self) -> dict[str, Any]:
        """Return classes, counts and, where each image has one class, the cells of the confusion matrix."""
        stored, K = self.stored, len(self.classes)
        right = self.task.is_right(stored.predicted, stored.labels)
        found: dict[str, Any] = {
            "split": SPLIT_NAMES.get(stored.split, stored.split),
            "classes": self.classes,
            "count": len(stored.labels),
            "wrong": None if right is None else int((~right).sum()),
            "kept": None if self.pack is not None else len(stored.sample),
            "tiny": max((stored.images if self.pack is None else self.pack).shape[1:3]) < html.SMOOTH_FROM_PIXELS,
        }
        if stored.labels.ndim == 1 and right is not None:
            matrix_KK = confusion(stored.predicted, stored.labels, K)
            rows, columns = np.nonzero(matrix_KK)
            found["cells"] = np.stack([rows, columns, matrix_KK[rows, columns]], axis=1).tolist()
            found["totals"] = np.bincount(stored.labels, minlength=K).tolist()
        return found

    def samples(self, actual: int | None, predicted: int | None) -> dict[str, Any]:
        """Return the images of a cell of the confusion matrix, the surest first; without one, the worst mistakes."""
        stored = self.stored
        if actual is None or predicted is None or stored.labels.ndim > 1:
            found = self.task.mistakes(stored.predicted, stored.labels, stored.probabilities)
        else:
            found = np.flatnonzero((stored.labels == actual) & (stored.predicted == predicted))
            found = found[np.argsort(-stored.probabilities[found].max(axis=1), kind="stable")]
        right = self.task.is_right(stored.predicted, stored.labels)
        samples = [
            {
                "i": i,
                "actual": self.task.text(stored.labels[i], self.classes),
                "predicted": self.task.text(stored.predicted[i], self.classes),
                "right": None if right is None else bool(right[i]),
                "confidence": run_files.plain(self.task.confidence(stored.predicted[i], stored.probabilities[i])),
                "image": self.pack is not None or i in stored.sample,
            }
            for i in found[:MAX_IMAGES].tolist()
        ]
        return {"total": len(found), "samples": samples}

    def image(self, i: int) -> tuple[str, bytes]:
        """Return type and content of an image, as PNG or JPEG. Raises InputError without it."""
        stored = self.stored
        if self.pack is not None and stored.row is not None and 0 <= i < len(stored.row):
            return html.encode(visible(np.asarray(self.pack[stored.row[i]])))
        place = np.flatnonzero(stored.sample == i)
        if not len(place):
            raise InputError(f"image {i} was not kept")
        return html.encode(stored.images[place[0]])


# A run is read once, even for concurrent requests.
_reading = threading.Lock()


def read_stored(run: Path) -> StoredPredictions:
    """Return the predictions of a run, read again when the file changes. Raises InputError if there are none."""
    path = run / PREDICTIONS
    with _reading:
        return _read_stored(run, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(KEPT_RUNS)
def _read_stored(run: Path, changed: int) -> StoredPredictions:
    missing: dict[str, str] = {}
    files = run_files.read_run(run, predictions=False)
    stored = run_files.read_predictions(run, files.summary, missing)
    if stored is None:
        raise InputError(missing[PREDICTIONS])
    return StoredPredictions(
        stored=stored,
        task=task_named(files.summary.get("task") or files.recipe.get("task")),
        classes=files.summary.get("classes") or [],
        pack=_pack_images(files.summary, stored),
    )


def _pack_images(summary: Mapping[str, Any], found: Predictions) -> np.ndarray | None:
    """Return the decoded images of the pack that a run names, or None if it is no longer in the cache."""
    if not summary.get("pack") or found.row is None:
        return None
    try:
        return open_pack(Path(summary["pack"]), verify=False).images
    except (InputError, OSError):
        return None
