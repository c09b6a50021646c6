"""What the page of a run shows, as plain values; and what was added to its files since the last look."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.errors import InputError
from flatout.report import run_files
from flatout.report.run_files import METRICS, RunFiles

LOG_BYTES = 64 * 1024
# Figures of a run that the page shows beside the main metric.
FIGURES = (
    *("test_loss", "valid_loss", "test_count", "valid_count", "train_images", "images_trained", "best_epoch"),
    *("kept_epoch", "input_wait_fraction", "communication_fraction", "peak_rss_bytes", "peak_device_bytes"),
    *("setup_seconds", "precision", "batch_size", "runs_on", "verdict", "notes", "machine", "versions"),
)


def details(path: Path) -> dict[str, Any]:
    """Return recipe, figures and verdict of a run. A run without an epoch has only what there is."""
    try:
        files = run_files.read_run(path, predictions=False)
    except InputError:
        text, recipe = run_files.read_recipe(path)
        files = RunFiles(
            run=path, recipe_text=text, recipe=recipe, summary={}, metrics=[], predictions=None, missing={}
        )
    return {
        "folder": str(path.resolve()),
        "recipe": files.recipe_text,
        "flat": run_files.plain(flat(files.recipe)),
        "figures": {key: run_files.plain(value) for key in FIGURES if (value := files.summary.get(key)) is not None},
        "logs": sorted(log.name for log in (path / run_files.LOGS).glob("rank-*.log")),
        "pictures": [name for name in (*run_files.PICTURES, run_files.REPORT) if (path / name).is_file()],
    }


def flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe with dotted keys, whatever version wrote it."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def differences(recipes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that differ between recipes by name, in their order, with their values."""
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    rows = [{"key": key, "values": [recipe.get(key) for recipe in recipes.values()]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def compare(paths: dict[str, Path]) -> dict[str, Any]:
    """Return the metrics of several runs by epoch, and how their recipes differ."""
    recipes, metrics = {}, {}
    for name, path in paths.items():
        try:
            files = run_files.read_run(path, predictions=False)
        except InputError:
            recipes[name], metrics[name] = {}, []
            continue
        recipes[name], metrics[name] = run_files.plain(flat(files.recipe)), run_files.plain(files.metrics)
    return {"metrics": metrics, "differences": differences(recipes)}


@dataclass
class Tail:
    """The end of a file that grows; `read` returns the whole lines added since."""

    path: Path
    most_bytes: int
    _offset: int = -1
    _inode: int = 0

    def read(self) -> tuple[list[str], bool]:
        """Return the lines, and whether they replace all before, as the file is new; one `stat` if it is as it was."""
        try:
            status = self.path.stat()
            is_new = self._offset < 0 or status.st_ino != self._inode or status.st_size < self._offset
            start = max(0, status.st_size - self.most_bytes) if is_new else self._offset
            if status.st_size == start and not is_new:
                return [], False
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read(self.most_bytes)
        except OSError:
            return [], False
        whole = content[: content.rfind(b"\n") + 1]
        self._offset, self._inode = start + len(whole), status.st_ino
        lines = whole.decode("utf-8", errors="replace").splitlines()
        return lines[1:] if is_new and start else lines, is_new


@dataclass
class Watch:
    """A run that someone looks at: `news` returns what its files have gained."""

    run: Path
    log: str = "rank-0.log"
    _metrics_changed: tuple[int, int] = (0, 0)
    _live: Tail = field(init=False)
    _log: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._live = Tail(self.run / run_files.LIVE, 2**20)
        self._log = Tail(self.run / run_files.LOGS / self.log, LOG_BYTES)

    def news(self) -> dict[str, Any]:
        """Return `metrics` (all lines), and `live` and `log` (new lines, and whether they replace all), if any."""
        found: dict[str, Any] = {}
        try:
            status = (self.run / METRICS).stat()
            changed = (status.st_mtime_ns, status.st_ino)
        except OSError:
            changed = (0, 0)
        if changed != self._metrics_changed:
            self._metrics_changed = changed
            lines = run_files.read_metrics(self.run, {})
            found["metrics"] = [run_files.plain(line) for line in lines]
        lines, is_new = self._live.read()
        if lines:
            found["live"] = {"lines": [line for text in lines if (line := _object(text))], "replace": is_new}
        lines, is_new = self._log.read()
        if lines:
            found["log"] = {"lines": lines, "replace": is_new}
        return found


def _object(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return run_files.plain(line) if isinstance(line, dict) else None
