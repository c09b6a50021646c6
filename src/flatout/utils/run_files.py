"""The files of a run folder: their names, writing them, and reading those that exist."""

import contextlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from flatout.utils.errors import InputError
from flatout.utils.files import write_atomically

RECIPE, METRICS, SUMMARY, WEIGHTS = "recipe.toml", "metrics.jsonl", "summary.json", "weights.safetensors"
PREDICTIONS, CHECKPOINTS, LOGS, REPORT = "predictions.npz", "checkpoints", "logs", "report.html"
SPLITS = "splits.csv"  # the files of the images of each split
TENSORBOARD, TRACKER_IDS = "tensorboard", "trackers.json"  # event files, and in `logs` the ids to continue with
LIVE, LOCK = f"{LOGS}/live.jsonl", ".lock"  # metrics within epochs, the process that writes; see `LiveFile`, `Holder`
DEVICES = f"{LOGS}/devices"  # of a host, as --devices names them, for a resume without --devices
KNOWN = "known.safetensors"  # the statistics of the OOD detector
FOLD = "fold-{}"  # the runs of a cross-validation, in its folder
SCALING = "scaling.json"  # the comparison of the runs in a folder of `flatout scale`
PICTURES = ("predictions.png", "curves.png", "confusion.png")
# An object of summary.json, a line of metrics.jsonl, or what --json prints.
JsonObject = dict[str, Any]
# Types of the values that reports read from the recipe and the summary; each may be missing or null.
_TYPES: dict[type | tuple[type, ...], str] = {
    str: "job task model date stopped engine precision pack pack_fingerprint",
    (int, float): "test_accuracy valid_accuracy test_correct test_count epochs parameters best_epoch kept_epoch"
    " world_size images_per_second train_seconds wall_seconds peak_rss_bytes peak_device_bytes threads_per_rank",
    list: "classes verdict notes runs_on folds train_loss_by_step",
    dict: "data versions skipped_images machine trust mean std time_seconds",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """The model's predictions on N images of one split, and M of these images, for display.

    Runs of earlier versions lack what may be None. The file has more, such as `unknown`, for other programs.
    """

    split: str  # "test", "valid", or "held-out" in a cross-validation
    probabilities: np.ndarray  # see `Task.probabilities`, with the run's temperature, float32 [N, K]
    labels: np.ndarray  # see `Pack.labels`
    predicted: np.ndarray  # like the labels; a class is -1 if the probabilities are not finite
    sample: np.ndarray  # int64 [M], the index of each kept image among the N
    images: np.ndarray  # uint8 [M, H, W, 1 or 3], as they are shown
    grid: np.ndarray  # positions among the M
    mistakes: np.ndarray  # likewise
    heatmaps: np.ndarray | None = None  # of the first mistakes, uint8 [.., H, W], of the centre of larger images
    row: np.ndarray | None = None  # int64 [N], of each image in the pack
    test_probabilities: np.ndarray | None = None  # of the test images, beside those that a fold holds out
    name: np.ndarray | None = None  # text [N], their files, if they are files
    brightness: np.ndarray | None = None  # the mean values of some images, to recognise them, float32 in 0..1


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFiles:
    """The content of a run folder. `missing` maps the name of each absent or damaged file to the reason."""

    run: Path
    recipe_text: str
    recipe: JsonObject
    summary: JsonObject
    metrics: list[JsonObject]
    predictions: Predictions | None
    missing: dict[str, str]


def read_run(run: Path, *, predictions: bool = True) -> RunFiles:
    """Read a run folder for its report; without `predictions`, which can be large, `missing` does not name them."""
    if not (run / RECIPE).is_file():
        raise InputError(f"{run}: not a run folder: recipe.toml is missing; give the folder that `flatout train` wrote")
    if not (run / SUMMARY).is_file() and not (run / METRICS).is_file():
        raise InputError(f"{run}: has neither summary.json nor metrics.jsonl: no epoch was finished")
    missing: dict[str, str] = {}
    recipe_text, recipe = read_recipe(run)
    summary = read_summary(run, missing)
    _check_types(run / RECIPE, recipe)
    _check_types(run / SUMMARY, summary)
    return RunFiles(
        run=run,
        recipe_text=recipe_text,
        recipe=recipe,
        summary=summary,
        metrics=read_metrics(run, missing),
        predictions=read_predictions(run, summary, missing) if predictions else None,
        missing=missing,
    )


def read_recipe(run: Path) -> tuple[str, JsonObject]:
    """Return the text and the content of recipe.toml; empty if it cannot be read."""
    text, recipe = "", {}
    with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
        text = (run / RECIPE).read_text(encoding="utf-8", errors="replace")
        recipe = tomllib.loads(text)
    return text, recipe


def _check_types(path: Path, content: dict[str, object]) -> None:
    for kind, names in _TYPES.items():
        for name in names.split():
            if content.get(name) is not None and not isinstance(content[name], kind):
                raise InputError(f"{path}: {name} has a wrong type: restore the file, or remove {name} from it")


def _read_text(path: Path, missing: dict[str, str], absent: str) -> str:
    """Return the text of a file; if unreadable, "", and the reason is added to `missing`."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        missing[path.name] = f"There is no {path.name}: {absent}."
    except (OSError, ValueError) as error:
        missing[path.name] = f"{path.name} cannot be read: {error}."
    return ""


def read_summary(run: Path, missing: dict[str, str]) -> JsonObject:
    """Return the content of summary.json; if unreadable, empty, and the reason is added to `missing`."""
    summary = json_object(_read_text(run / SUMMARY, missing, "the run did not finish"))
    if summary is None:
        missing.setdefault(SUMMARY, "summary.json cannot be read: it does not contain a JSON object.")
    return summary or {}


def read_metrics(run: Path, missing: dict[str, str]) -> list[JsonObject]:
    """Return the lines of metrics.jsonl; reasons for absent or damaged ones are added to `missing`."""
    metrics = []
    for number, text in enumerate(_read_text(run / METRICS, missing, "no epoch was finished").splitlines(), start=1):
        line = json_object(text) or {}
        if isinstance(line.get("epoch"), int):
            metrics.append(line)
        else:
            missing[METRICS] = f"Line {number} of metrics.jsonl is damaged and left out."
    if not metrics:
        missing.setdefault(METRICS, "metrics.jsonl is empty: no epoch was finished.")
    return metrics


def read_predictions(run: Path, summary: JsonObject, missing: dict[str, str]) -> Predictions | None:
    """Return the predictions on test or validation images; without any, None, and the reason is added to `missing`."""
    path, K = run / PREDICTIONS, len(summary.get("classes") or ()) or 1
    try:
        with np.load(path) as arrays:
            content: dict[str, Any] = dict(arrays)
        shape, N = content["probabilities"].shape, len(content["labels"])
        if not N:
            missing[path.name] = "There was no test data."
            return None
        if shape != (N, K):
            raise ValueError(f"its probabilities have shape {shape}, not ({N}, {K})")
        if "predicted" not in content:  # runs of earlier versions
            finite_N = np.isfinite(content["probabilities"]).all(axis=1)
            content["predicted"] = np.where(finite_N, content["probabilities"].argmax(axis=1), -1)
        content["split"], content["images"] = str(content["split"]), visible(content["images"])
        return Predictions(**{f.name: content[f.name] for f in fields(Predictions) if f.name in content})
    except FileNotFoundError:
        missing[path.name] = "There was no test data, or the run ended before the model was tested."
    except Exception as error:  # NumPy and zipfile raise a dozen types for a damaged archive; the page names it
        missing[path.name] = f"predictions.npz cannot be read: {error}."
    return None


def visible(images: np.ndarray) -> np.ndarray:
    """Return images [..., H, W, C] as uint8 with 1 or 3 channels: the first three of more, the first of two.

    With 16 bits, the highest value of all images becomes white, since many cameras use 12.
    """
    images = images[..., : 3 if images.shape[-1] >= 3 else 1]
    if images.dtype == np.uint8:
        return images
    return np.minimum(images * (255 / max(1, images.max(initial=0))), 255).astype(np.uint8)


def json_object(text: str) -> JsonObject | None:
    """Return the object that a JSON text describes; None for other texts."""
    with contextlib.suppress(ValueError):
        if isinstance(content := json.loads(text), dict):
            return content
    return None


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity become null."""
    write_atomically(path, (json.dumps(plain(content), indent=2) + "\n").encode())


def write_metrics(path: Path, records: Iterable[JsonObject]) -> None:
    """Write one JSON object per line, atomically."""
    write_atomically(path, "".join(json.dumps(plain(record)) + "\n" for record in records).encode())


def plain(value: object) -> Any:
    """Replace NaN and infinity by null in a JSON value."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
