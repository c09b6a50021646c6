"""The one-page report of a run: work out what to show and fill the template.

The page is one file that fetches nothing and runs nothing; whatever comes from data (class names, paths, notes) is
escaped by the template. A piece that is missing or damaged is left out with a sentence that says why.
"""

import base64
import io
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from flatout.console import duration
from flatout.files import write_atomically
from flatout.report import pictures
from flatout.report.pictures import finite, shorten
from flatout.report.run_files import Predictions, RunFiles, read_run

THUMBNAIL_PIXELS = 192  # twice the width a picture has on the page, for dense screens
CLASSES_SHOWN = 20
SKIPPED_SHOWN = 100
SPLIT_NAMES = {"test": "test", "valid": "validation"}
TIME_NAMES = {
    "start": "start-up", "read": "finding the data", "pack": "packing", "compile": "compiling", "train": "training",
    "evaluate": "evaluation", "pictures": "pictures", "other": "everything else",
}  # fmt: skip


def draw_all(run: Path) -> None:
    """Draw predictions.png, curves.png, confusion.png and report.html again from the other files of the run folder.

    Raises:
        InputError: `run` is no run folder, or a file cannot be written.
    """
    run = Path(run)
    files = read_run(run)
    if files.metrics:
        pictures.draw_curves(run / "curves.png", files.metrics, files.summary.get("best_epoch"))
    shown = files.predictions
    if shown is not None:
        picked = shown.sample[shown.grid]
        actual, predicted = shown.labels[picked].tolist(), shown.predicted[picked].tolist()
        images = shown.images[shown.grid]
        pictures.draw_predictions(run / "predictions.png", images, actual, predicted, files.classes)
        pictures.draw_confusion(run / "confusion.png", shown.confusion(), files.classes)
    _write_page(files)


def write_page(run: Path) -> Path:
    """Write report.html from the files of the run folder and return its path; confusion.png is embedded as it is.

    Raises:
        InputError: `run` is no run folder, or the page cannot be written.
    """
    return _write_page(read_run(Path(run)))


def _write_page(files: RunFiles) -> Path:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flatout.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "breakable": _breakable, "shorten": shorten}
    html = environment.get_template("page.html.j2").render(_content(files))
    path = files.run / "report.html"
    write_atomically(path, html.encode())
    return path


def _content(files: RunFiles) -> dict[str, Any]:
    """Return everything the template shows, by name."""
    summary, shown = files.summary, files.predictions
    return {
        "job": summary.get("job") or _recipe_value(files.recipe, "job") or files.run.name,
        "model": _recipe_value(files.recipe, "model") or "",
        "folder": files.run.resolve().name,
        "date": _date(files),
        "missing": files.missing,
        "headline": _headline(files),
        "facts": _facts(summary),
        "stopped": summary.get("stopped"),
        "verdict": [*(summary.get("verdict") or ()), *_unanswered(shown)],
        "notes": list(summary.get("notes") or ()),
        "curves": _curves(files),
        "split": SPLIT_NAMES.get(shown.split, shown.split) if shown else "test",
        "grid": _tiles(files, shown.grid) if shown else [],
        "mistakes": _tiles(files, shown.mistakes) if shown else [],
        "confusion": _embedded(files.run / "confusion.png"),
        "class_table": _class_table(shown, files.classes) if shown else [],
        "classes_shown": CLASSES_SHOWN,
        "time": _time(summary),
        "recipe": re.split(r"\n\n(?=\[)", files.recipe.strip()),
        "environment": _environment(summary),
        "skipped": list((summary.get("skipped_images") or {}).items()),
        "skipped_shown": SKIPPED_SHOWN,
    }


def _headline(files: RunFiles) -> dict[str, str] | None:
    """Return the accuracy to head the page with: on test images, else validation images, else the last epoch's."""
    summary = files.summary
    test, valid = finite(summary.get("test_accuracy")), finite(summary.get("valid_accuracy"))
    correct, count = summary.get("test_correct"), summary.get("test_count")
    if test is not None:
        told = f"{correct:,} of {count:,} right" if isinstance(correct, int) and isinstance(count, int) else ""
        return {"value": f"{test:.4f}" if (count or 0) >= 1000 else f"{test:.3f}", "of": "test accuracy", "told": told}
    if valid is not None:
        return {"value": f"{valid:.3f}", "of": "validation accuracy", "told": "there is no test result"}
    for line in reversed(files.metrics):
        train = finite(line.get("train_accuracy"))
        if train is not None:
            told = "there is no test or validation result"
            return {"value": f"{train:.3f}", "of": f"training accuracy, epoch {line['epoch']}", "told": told}
    return None


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rate, train = finite(summary.get("images_per_second")), finite(summary.get("train_seconds"))
    wall, epochs, parameters = finite(summary.get("wall_seconds")), summary.get("epochs"), summary.get("parameters")
    facts = [
        ("images per second", f"{rate:,.0f}" if rate is not None else None),
        ("training time", duration(train) if train is not None else None),
        ("everything included", duration(wall) if wall is not None else None),
        ("epochs", f"{epochs:,}" if isinstance(epochs, int) else None),
        ("parameters", f"{parameters:,}" if isinstance(parameters, int) else None),
        ("devices", _text(summary.get("devices"))),
    ]
    return [(name, value) for name, value in facts if value]


def _unanswered(shown: Predictions | None) -> list[str]:
    count = int((shown.predicted < 0).sum()) if shown else 0
    return [f"For {count:,} images the model's answer was not a number; they count as wrong."] if count else []


def _curves(files: RunFiles) -> list[tuple[str, Any]]:
    from markupsafe import Markup

    if not files.metrics:
        return []
    quantities = ["loss", "accuracy"]
    if pictures.learning_rate_changes(files.metrics):
        quantities.append("learning_rate")
    best = files.summary.get("best_epoch")
    return [(quantity, Markup(pictures.curve_svg(files.metrics, quantity, best))) for quantity in quantities]


def _tiles(files: RunFiles, positions: np.ndarray) -> list[dict[str, Any]]:
    shown, classes = files.predictions, files.classes
    assert shown is not None
    tiles = []
    for position in positions.tolist():
        index = int(shown.sample[position])
        actual, predicted = int(shown.labels[index]), int(shown.predicted[index])
        tiles.append(
            {
                "image": _thumbnail(shown.images[position]),
                "tiny": max(shown.images.shape[1:3]) < pictures.SMOOTH_FROM_PIXELS,
                "actual": classes[actual],
                "predicted": classes[predicted] if predicted >= 0 else "none",
                "right": actual == predicted,
                "probability": float(shown.probabilities[index, predicted]) if predicted >= 0 else None,
            }
        )
    return tiles


def _thumbnail(image_HWC: np.ndarray) -> str:
    """Return a data URI: PNG for tiny images, every pixel exact; JPEG for photographs, a tenth of the size."""
    from PIL import Image

    image = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC)
    buffer = io.BytesIO()
    if max(image.size) < pictures.SMOOTH_FROM_PIXELS:
        image.save(buffer, format="png", optimize=True)
        return _data_uri("image/png", buffer.getvalue())
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    image.save(buffer, format="jpeg", quality=88)
    return _data_uri("image/jpeg", buffer.getvalue())


def _embedded(path: Path) -> str | None:
    return _data_uri("image/png", path.read_bytes()) if path.is_file() else None


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _class_table(shown: Predictions, classes: list[str]) -> list[dict[str, Any]]:
    """Return a row for each class that has images, the least accurate first."""
    matrix_KK = shown.confusion()
    counts_K = np.bincount(shown.labels, minlength=len(classes))
    wrong_KK = matrix_KK - np.diag(np.diag(matrix_KK))
    rows = []
    for label in np.flatnonzero(counts_K).tolist():
        right, count = int(matrix_KK[label, label]), int(counts_K[label])
        rival = int(wrong_KK[label].argmax())
        times = int(wrong_KK[label, rival])
        row = {"name": classes[label], "right": right, "count": count, "accuracy": right / count}
        rows.append(row | {"rival": classes[rival] if times else None, "times": times})
    return sorted(rows, key=lambda row: row["accuracy"])


def _time(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = {name: finite(value) or 0.0 for name, value in (summary.get("time_seconds") or {}).items()}
    rest = (finite(summary.get("wall_seconds")) or 0.0) - sum(parts.values())
    if parts and rest > 0.01 * sum(parts.values()):
        parts["other"] = rest
    total = sum(parts.values())
    return [
        {"key": name, "name": TIME_NAMES.get(name, name), "seconds": seconds, "share": seconds / total}
        for name, seconds in parts.items()
        if seconds > 0
    ]


def _environment(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = summary.get("machine") or {}
    rows: list[tuple[str, Any]] = [
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("memory", _bytes(machine.get("memory_bytes"))),
        ("GPU", machine.get("gpu")),
        ("engine", summary.get("engine")),
        ("devices", _text(summary.get("devices"))),
        ("processes", summary.get("world_size")),
        ("precision", summary.get("precision")),
        ("threads", summary.get("threads")),
        ("most memory used", _bytes(summary.get("peak_rss_bytes"))),
        ("most device memory used", _bytes(summary.get("peak_device_bytes"))),
        *(summary.get("versions") or {}).items(),
    ]
    return [(name, _text(value)) for name, value in rows if value not in (None, "")]


def _text(value: object) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        names = [str(item) for item in value]
        return ", ".join(f"{names.count(n)} × {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    return "" if value is None else str(value)


def _bytes(value: object) -> str | None:
    size = finite(value)
    return None if not size else f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _breakable(text: str) -> Any:
    """Return the text escaped; a line may end after the characters that join words in names of files and classes."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[_/.-])(?=\w)", "<wbr>", str(escape(text))))


def _date(files: RunFiles) -> str:
    """Return when the run ended: the summary's `date`, else when its figures were last written."""
    if date := str(files.summary.get("date") or ""):
        return date.replace("T", " ")[: len("2026-01-31 12:00")]
    source = "metrics.jsonl" if "summary.json" in files.missing else "summary.json"
    path = files.run / source if (files.run / source).is_file() else files.run / "recipe.toml"
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M")


def _recipe_value(recipe: str, key: str) -> str | None:
    try:
        value = tomllib.loads(recipe).get(key)
    except tomllib.TOMLDecodeError:
        return None
    return value if isinstance(value, str) else None
