"""A run folder as the report needs it: read as far as it is there.

Shape letters: N predicted images, M of them kept as pictures, K classes, H, W, C an image.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What the trained model answered, and the pictures kept to show it.

    Attributes:
        split: "test" or "valid".
        probabilities: float32 [N, K].
        labels: int64 [N].
        predicted: int64 [N]; -1 where the probabilities are not numbers.
        sample: int64 [M], which of the N each picture is.
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
        """Return counts int64 [K, K], a row per actual class, without the answers that are not numbers."""
        K = self.probabilities.shape[1]
        answered = self.predicted >= 0
        cells = self.labels[answered] * K + self.predicted[answered]
        return np.bincount(cells, minlength=K * K).reshape(K, K)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFiles:
    """The content of a run folder as far as it is there; `missing` says what is not, and why, by name of the file."""

    run: Path
    recipe: str
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    predictions: Predictions | None
    missing: dict[str, str]

    @property
    def classes(self) -> list[str]:
        """The class names; empty where there is no summary."""
        return [str(name) for name in self.summary.get("classes") or ()]


def read_run(run: Path) -> RunFiles:
    """Read what a run folder holds.

    Raises:
        InputError: `run` is no folder, or has no recipe.toml, or neither summary.json nor metrics.jsonl.
    """
    if not run.is_dir():
        raise InputError(f"{run}: there is no such run folder; give the folder that `flatout train` wrote")
    recipe = run / "recipe.toml"
    if not recipe.is_file():
        raise InputError(
            f"{run}: is not a run folder: it has no recipe.toml; give the folder that `flatout train` wrote"
        )
    if not (run / "summary.json").is_file() and not (run / "metrics.jsonl").is_file():
        raise InputError(
            f"{run}: has neither summary.json nor metrics.jsonl: no epoch was finished, nothing can be shown"
        )
    missing: dict[str, str] = {}
    summary = _read_summary(run / "summary.json", missing)
    return RunFiles(
        run=run,
        recipe=recipe.read_text(encoding="utf-8", errors="replace"),
        summary=summary,
        metrics=_read_metrics(run / "metrics.jsonl", missing),
        predictions=_read_predictions(run / "predictions.npz", len(summary.get("classes") or ()), missing),
        missing=missing,
    )


def _read_summary(path: Path, missing: dict[str, str]) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(summary, dict):
            return summary
        missing[path.name] = "summary.json is damaged: it holds no table of figures."
    except FileNotFoundError:
        missing[path.name] = "There is no summary.json: the run did not come to its end."
    except (OSError, ValueError) as error:
        missing[path.name] = f"summary.json cannot be read: {error}."
    return {}


def _read_metrics(path: Path, missing: dict[str, str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        missing[path.name] = "There is no metrics.jsonl: no epoch was finished."
        return []
    except (OSError, ValueError) as error:
        missing[path.name] = f"metrics.jsonl cannot be read: {error}."
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
            missing[path.name] = f"Line {number} of metrics.jsonl is damaged and left out."
    if not metrics:
        missing.setdefault(path.name, "metrics.jsonl is empty: no epoch was finished.")
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
            finite_N = np.isfinite(probabilities).all(axis=1)
            return Predictions(
                split=str(arrays["split"]),
                probabilities=probabilities,
                labels=labels,
                predicted=np.where(finite_N, probabilities.argmax(axis=1), -1),
                **{name: arrays[name] for name in ("sample", "images", "grid", "mistakes")},
            )
    except FileNotFoundError:
        missing[path.name] = "There was no test data, or the run ended before the model was tested."
    except Exception as error:  # NumPy and zipfile raise a dozen types for a damaged archive; the page names it
        missing[path.name] = f"predictions.npz cannot be read: {error}."
    return None
