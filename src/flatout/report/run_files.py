"""A run folder on disk: the names of its files, writing them, and reading them as far as they exist.

Shape letters: N predicted images, M of them kept as pictures, K classes, H, W, C an image.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import InputError
from flatout.files import write_atomically

RECIPE, METRICS, SUMMARY, WEIGHTS = "recipe.toml", "metrics.jsonl", "summary.json", "weights.safetensors"
PREDICTIONS, CHECKPOINTS, LOGS, REPORT = "predictions.npz", "checkpoints", "logs", "report.html"
PICTURES = ("predictions.png", "curves.png", "confusion.png")
# The values of summary.json that the report reads, by an example of their type. Each may be missing or null.
_SUMMARY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("job", "date", "stopped", "engine", "precision"), ""),
    **dict.fromkeys(("test_accuracy", "valid_accuracy", "images_per_second", "train_seconds", "wall_seconds"), 0.0),
    **dict.fromkeys(
        ("test_correct", "test_count", "epochs", "parameters", "best_epoch", "kept_epoch", "world_size"), 0
    ),
    **dict.fromkeys(("peak_rss_bytes", "peak_device_bytes", "threads_per_rank"), 0.0),
    **{key: [""] for key in ("classes", "verdict", "notes", "runs_on")},
    **{key: {"": ""} for key in ("versions", "skipped_images")},
    "machine": {},
    "time_seconds": {"": 0.0},
    "train_loss_by_step": [[0.0]],
}
_TYPE_NAMES = {
    str: "text",
    float: "a number",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "a boolean",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """The model's answers on one split, and the images kept to show them.

    Attributes:
        split: "test" or "valid".
        probabilities: float32 [N, K].
        labels: int64 [N].
        predicted: int64 [N]; -1 where the probabilities are not finite.
        sample: int64 [M], the index of each kept image among the N.
        images: uint8 [M, H, W, C].
        grid, mistakes: positions among the M.
    """

    split: str
    probabilities: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    sample: np.ndarray
    images: np.ndarray
    grid: np.ndarray
    mistakes: np.ndarray

    def confusion(self) -> np.ndarray:
        """Return counts int64 [K, K], a row per actual class, without the answers that are not finite."""
        K = self.probabilities.shape[1]
        answered = self.predicted >= 0
        cells = self.labels[answered] * K + self.predicted[answered]
        return np.bincount(cells, minlength=K * K).reshape(K, K)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFiles:
    """The content of a run folder. `missing` maps the name of each absent or damaged file to the reason."""

    run: Path
    recipe: str
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    predictions: Predictions | None
    missing: dict[str, str]

    @property
    def classes(self) -> list[str]:
        """The class names; empty without a summary."""
        return [str(name) for name in self.summary.get("classes") or ()]


def read_run(run: Path) -> RunFiles:
    """Read a run folder for its report.

    Raises:
        InputError: `run` is no folder, or has no recipe.toml, or neither summary.json nor metrics.jsonl, or a
            value in summary.json has the wrong type.
    """
    if not run.is_dir():
        raise InputError(f"{run}: there is no such run folder; give the folder that `flatout train` wrote")
    recipe = run / RECIPE
    if not recipe.is_file():
        raise InputError(
            f"{run}: is not a run folder: it has no recipe.toml; give the folder that `flatout train` wrote"
        )
    if not (run / SUMMARY).is_file() and not (run / METRICS).is_file():
        raise InputError(
            f"{run}: has neither summary.json nor metrics.jsonl: no epoch was finished, nothing can be shown"
        )
    missing: dict[str, str] = {}
    summary = read_summary(run, missing)
    _check_types(run / SUMMARY, summary, _SUMMARY_TYPES)
    return RunFiles(
        run=run,
        recipe=recipe.read_text(encoding="utf-8", errors="replace"),
        summary=summary,
        metrics=read_metrics(run, missing),
        predictions=_read_predictions(run / PREDICTIONS, len(summary.get("classes") or ()), missing),
        missing=missing,
    )


def _check_types(path: Path, value: Any, example: Any, name: str = "") -> None:
    """Raise InputError where a value has another type than its example; an object or a list is checked inside."""
    if value is None:
        return
    types = (int, float) if isinstance(example, float) else type(example)
    if isinstance(value, bool) or not isinstance(value, types):
        found = _TYPE_NAMES.get(type(value), "true or false")
        raise InputError(
            f"{path}: {name} is {found}, not {_TYPE_NAMES[type(example)]}: restore the file, or remove {name} from it"
        )
    if isinstance(example, dict):
        for key, inner in value.items():
            expected = example.get(key, example.get(""))
            if expected is not None:
                _check_types(path, inner, expected, f"{name}.{key}" if name else key)
    elif isinstance(example, list):
        for index, inner in enumerate(value):
            _check_types(path, inner, example[0], f"{name}[{index}]")


def read_summary(run: Path, missing: dict[str, str]) -> dict[str, Any]:
    """Return the content of summary.json; empty, with the reason added to `missing`, where it cannot be read."""
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        if isinstance(summary, dict):
            return summary
        missing[SUMMARY] = "summary.json is damaged: it does not contain a JSON object."
    except FileNotFoundError:
        missing[SUMMARY] = "There is no summary.json: the run did not finish."
    except (OSError, ValueError) as error:
        missing[SUMMARY] = f"summary.json cannot be read: {error}."
    return {}


def read_metrics(run: Path, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; reasons for absent or damaged ones are added to `missing`."""
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        missing[METRICS] = "There is no metrics.jsonl: no epoch was finished."
        return []
    except (OSError, ValueError) as error:
        missing[METRICS] = f"metrics.jsonl cannot be read: {error}."
        return []
    metrics = []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("epoch"), int):
            metrics.append(line)
        else:
            missing[METRICS] = f"Line {number} of metrics.jsonl is damaged and left out."
    if not metrics:
        missing.setdefault(METRICS, "metrics.jsonl is empty: no epoch was finished.")
    return metrics


def _read_predictions(path: Path, K: int, missing: dict[str, str]) -> Predictions | None:
    try:
        with np.load(path) as arrays:
            probabilities, labels = arrays["probabilities"], arrays["labels"]
            if not len(labels):
                missing[path.name] = "There was no test data."
                return None
            if probabilities.shape != (len(labels), K):
                raise ValueError(f"its probabilities have shape {probabilities.shape}, not ({len(labels)}, {K})")
            if "predicted" in arrays:
                predicted = arrays["predicted"]
            else:  # runs written before labels were stored
                finite_N = np.isfinite(probabilities).all(axis=1)
                predicted = np.where(finite_N, probabilities.argmax(axis=1), -1)
            return Predictions(
                split=str(arrays["split"]),
                probabilities=probabilities,
                labels=labels,
                predicted=predicted,
                **{name: arrays[name] for name in ("sample", "images", "grid", "mistakes")},
            )
    except FileNotFoundError:
        missing[path.name] = "There was no test data, or the run ended before the model was tested."
    except Exception as error:  # NumPy and zipfile raise a dozen types for a damaged archive; the page names it
        missing[path.name] = f"predictions.npz cannot be read: {error}."
    return None


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity become null."""
    write_atomically(path, (json.dumps(_finite(content), indent=2) + "\n").encode())


def write_metrics(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a JSON object a line, atomically."""
    write_atomically(path, "".join(json.dumps(_finite(record)) + "\n" for record in records).encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
