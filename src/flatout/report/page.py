"""The report of a run, made from the files of its folder: missing or damaged ones are reported in their place.

Pages are self-contained, from the templates of this folder, which escape all text from data. The only script, which
filters a table, is allowed by its hash.
"""

import base64
import hashlib
import io
import re
from decimal import Decimal
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flatout.engine.pixels import centre
from flatout.report import pictures
from flatout.report.pictures import SMOOTH_FROM_PIXELS
from flatout.report.verdict import CHECKED, stages
from flatout.tasks import Task, task_named
from flatout.utils.console import duration
from flatout.utils.errors import InputError
from flatout.utils.files import write_atomically
from flatout.utils.run_files import REPORT, SUMMARY, JsonObject, Predictions, RunFiles, read_run
from flatout.utils.style import finite, number, plain, shorten

CLASSES_SHOWN, PAIRS_SHOWN, SKIPPED_SHOWN = 20, 10, 100
SPLIT_NAMES = {"test": "test", "valid": "validation"}
SET_COLUMNS = ("wanted", "sets with the right class", "sets of one class", "classes per set")
# Shorter parts of the time are not listed: they would read "0.0 s".
MIN_SECONDS = 0.05
THUMBNAIL_PIXELS = 192  # twice the width of an image on the page, for dense screens
FILTER_SCRIPT = """
document.querySelector("input[type=search]").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  for (const row of document.querySelectorAll("#all-classes tbody tr"))
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
"""


def draw_all(run: Path) -> None:
    """Draw predictions.png, curves.png, confusion.png and report.html from the other files of the run folder."""
    files = read_run(run)
    task = task_named(files.summary.get("task") or files.recipe.get("task"))
    names, shown = files.summary.get("classes") or [], files.predictions
    if files.metrics:
        pictures.draw_curves(run / "curves.png", files.metrics, files.summary, task)
    answers: JsonObject = {"split": "", "mistakes": [], "unanswered": 0}
    if shown:
        picked = shown.sample[shown.grid]
        actual, predicted = shown.labels[picked], shown.predicted[picked]
        pictures.draw_predictions(run / "predictions.png", shown.images[shown.grid], actual, predicted, names, task)
        pictures.draw_answers(run / "confusion.png", shown, names, task)
        answers = _answers(files, shown, names, task)
    write_page(run / REPORT, "page.html.j2", _content(files, task, answers["unanswered"]) | answers)


def _content(files: RunFiles, task: Task, unanswered: int) -> JsonObject:
    summary = files.summary
    remark = f"For {unanswered:,} images the model's answer was not a number; they count as wrong."
    # A head that was fitted to features, and no more, has no curve.
    has_epochs = any(line.get("epoch") for line in files.metrics)
    curves = ["loss", task.metric_names[0]] * has_epochs
    curves += ["learning_rate"] * pictures.learning_rate_changes(files.metrics)
    return {
        "job": summary.get("job") or files.recipe.get("job") or files.run.name,
        "model": files.recipe.get("model") or "",
        "folder": files.run.resolve().name,
        "date": str(summary.get("date") or "").replace("T", " ")[: len("2026-01-31 12:00")],
        "missing": files.missing,
        "task": task.name,
        "metric": task.metric_title,
        "headline": _headline(files, task),
        "folds": _folds(summary, task) if summary.get("folds") else [],
        "facts": _facts(summary),
        "stopped": summary.get("stopped"),
        "checked": CHECKED[task.name + " head" * (not has_epochs)],
        "verdict": [*(summary.get("verdict") or ()), *[remark] * bool(unanswered)],
        "curves": {name: pictures.curve_svg(files.metrics, summary, name, task) for name in curves},
        "stages": stages(summary, files.recipe),
        "time": _time(summary),
        "recipe": re.split(r"\n\n(?=\[)", files.recipe_text.strip()),
        "environment": _environment(summary),
        "notes": [*(summary.get("runs_on") or ()), *(summary.get("notes") or ())],
        "skipped": list((summary.get("skipped_images") or {}).items()),
        "skipped_shown": SKIPPED_SHOWN,
    }


def _answers(files: RunFiles, shown: Predictions, names: list[str], task: Task) -> JsonObject:
    summary = files.summary
    keys = ("class", "support", "precision", "recall", "f1")
    rows = [tuple(row[key] for key in keys) for row in task.per_class(shown.predicted, shown.labels, names)]
    rows = sorted((row for row in rows if row[1]), key=lambda row: (row[4], -row[1]))  # the worst first
    pairs: list[JsonObject] = []
    if len(names) > pictures.NUMBERS_UP_TO_CLASSES:  # else the confusion matrix shows the numbers
        pairs = task.confused_pairs(shown.predicted, shown.labels, names)[:PAIRS_SHOWN]
    mistakes = _tiles(shown, shown.mistakes, names, task)
    try:
        calibration = {
            "trust": trust(summary, "test" if shown.split == "test" else "valid"),
            "sets": prediction_sets(summary),
            "trust_charts": pictures.trust_charts(summary.get("trust") or {}, shown, task, names),
        }
    except (KeyError, TypeError, ValueError):  # edited by hand
        where = files.run / SUMMARY
        raise InputError(f"{where}: trust is incomplete: restore the file, or remove trust from it") from None
    return {
        "split": SPLIT_NAMES.get(shown.split, shown.split),
        "grid": _tiles(shown, shown.grid, names, task),
        "mistakes": mistakes,
        "unanswered": int((~np.isfinite(shown.probabilities)).any(axis=1).sum()),
        "explained": _explained(shown, mistakes),
        "heat_scale": ", ".join("#{:02x}{:02x}{:02x}".format(*colour) for colour in pictures.heat_scale()[0].tolist()),
        **calibration,
        "set_columns": SET_COLUMNS,
        "confusion": data_uri("image/png", (files.run / "confusion.png").read_bytes()),
        "pairs": [tuple(row.values()) for row in pairs],
        "worst": rows[:CLASSES_SHOWN],
        "all_classes": sorted(rows) if len(rows) > CLASSES_SHOWN else [],
    }


def _headline(files: RunFiles, task: Task) -> tuple[str, str, str] | None:
    """Return a metric, its name and a remark: on test images, else validation images, else the last epoch's."""
    summary = files.summary
    metric, name = task.metric_names[0], task.metric_title.lower()
    test, valid = finite(summary.get(f"test_{metric}")), finite(summary.get(f"valid_{metric}"))
    if summary.get("folds") and valid is not None:
        remark = f"{_spread(summary, f'valid_{metric}')} over {len(summary['folds'])} folds"
        return number(valid), f"{name} on held-out images", remark
    if test is not None:
        digits = 4 if (summary.get("test_count") or 0) >= 1000 else 3
        return number(test, digits), f"test {name}", task.remark("test", summary)
    if valid is not None:
        return number(valid), f"validation {name}", "there is no test result"
    of_an_epoch = {f"valid_{metric}": f"validation {name}"}
    of_an_epoch[f"train_{task.step_metric}"] = f"training {task.step_metric.replace('_', ' ')}"
    for line, (key, words) in product(reversed(files.metrics), of_an_epoch.items()):
        if (value := finite(line.get(key))) is not None:
            return number(value), f"{words}, epoch {line['epoch']}", "there is no test result"
    return None


def _spread(summary: JsonObject, key: str) -> str:
    mean, std = (finite((summary.get(part) or {}).get(key)) for part in ("mean", "std"))
    return "—" if mean is None or std is None else f"{number(mean)} ± {plain(float(f'{std:.2g}'))}"


def _folds(summary: JsonObject, task: Task) -> list[tuple[str, str, list[str]]]:
    """Return rows of a name, the linked report, and cells; the first row has the column names."""
    wanted = [f"{split}_{name}" for split in ("valid", "test") for name in ("loss", *task.metric_names)]
    keys = [key for key in wanted if key in (summary.get("mean") or {})]

    def cells(figures: JsonObject) -> list[str]:
        return ["—" if (value := finite(figures.get(key))) is None else number(value) for key in keys]

    titles = [key.replace("valid_", "held-out ").replace("_", " ") for key in keys]
    rows = [("fold", "", [*titles, "training images", "training time"])]
    for fold in summary["folds"]:
        images, seconds = f"{fold.get('train_images', 0):,}", duration(fold.get("train_seconds") or 0.0)
        rows.append((str(fold["fold"]), f"{fold['folder']}/{REPORT}", [*cells(fold), images, seconds]))
    rows.append(("mean ± standard deviation", "", [*(_spread(summary, key) for key in keys), "", ""]))
    return [*rows, ("together", "", [*cells(summary), "", ""])]


def _facts(summary: JsonObject) -> list[tuple[str, str]]:
    epochs, trained = summary.get("epochs"), summary.get("epochs_trained")
    unit, seconds = "epoch" if epochs == 1 else "epochs", summary.get("time_seconds") or {}
    fitted = [value for name in ("features", "head") if (value := finite(seconds.get(name))) is not None]
    shown: JsonObject = {}
    if epochs == 0 and fitted:
        shown["features and head"] = duration(sum(fitted))
        summary = {**summary, "epochs": None, "train_seconds": None}
    for name, key, text in (
        ("images per second", "images_per_second", "{:,.0f}".format),
        ("training time", "train_seconds", duration),
        ("everything included", "wall_seconds", duration),
        (unit, "epochs", "{:,.0f}".format),
        ("parameters", "parameters", "{:,.0f}".format),
    ):
        if (value := finite(summary.get(key))) is not None:
            shown[name] = text(value)
    if trained not in (None, epochs) and unit in shown:
        shown[unit] = f"{trained:,} of {shown[unit]}"
    if devices := summary.get("devices"):
        shown["devices"] = devices
    return list(shown.items())


def _tiles(shown: Predictions, positions: np.ndarray, names: list[str], task: Task) -> list[JsonObject]:
    tiles, right = [], task.is_right(shown.predicted, shown.labels)
    for position in positions.tolist():
        index = int(shown.sample[position])
        actual, predicted = shown.labels[index], shown.predicted[index]
        tiles.append(
            {
                "image": thumbnail(shown.images[position]),
                "tiny": max(shown.images.shape[1:3]) < SMOOTH_FROM_PIXELS,
                "actual": task.text(actual, names),
                "predicted": task.text(predicted, names),
                "colour": "" if right is None else "right" if right[index] else "wrong",
                "probability": task.confidence(predicted, shown.probabilities[index]),
                "file": "" if shown.name is None else str(shown.name[index]),
            }
        )
    return tiles


def trust(summary: JsonObject, split: str) -> list[tuple[str, str]]:
    """Return intervals, further metrics and calibration of a split, each with its name."""
    found = summary.get("trust") or {}
    rows: list[tuple[str, str]] = []
    if interval := summary.get(f"{split}_accuracy_interval"):
        rows.append(("95 % confidence interval", "–".join(f"{end:.3f}" for end in interval)))
    values = {
        "balanced accuracy": summary.get(f"{split}_balanced_accuracy"),
        "top-5 accuracy": summary.get(f"{split}_top5_accuracy"),
        "area under ROC": summary.get(f"{split}_roc_auc"),
        "calibration error": found.get("ece_after"),
        "before temperature scaling": found.get("ece_before"),
        "temperature": found.get("temperature"),
    }
    rows += [(name, f"{value:.3f}") for name, raw in values.items() if (value := finite(raw)) is not None]
    if "unknown" in found:
        rows.append(("images answered “unknown”", f"{100 * found['unknown']['flagged']:.1f}\u00a0%"))
    return rows


def prediction_sets(summary: JsonObject) -> list[tuple[Any, ...]]:
    """Return a row of `SET_COLUMNS` for each coverage."""
    return [
        (f"{100 * row['coverage']:g}\u00a0%", row["covered"], row["single"], Decimal(f"{row['mean_size']:.2f}"))
        for row in (summary.get("trust") or {}).get("prediction_sets") or ()
    ]


def _explained(shown: Predictions, mistakes: list[JsonObject]) -> list[JsonObject]:
    if shown.heatmaps is None:
        return []
    images = centre(shown.images[shown.mistakes[: len(shown.heatmaps)]], *shown.heatmaps.shape[1:])
    pairs = zip(mistakes, images, shown.heatmaps, strict=False)
    return [tile | {"image": thumbnail(pictures.overlaid(image, heat / 255))} for tile, image, heat in pairs]


def _time(summary: JsonObject) -> list[tuple[str, float, float]]:
    """Return key, seconds and share of each part."""
    parts = {name: finite(value) or 0.0 for name, value in (summary.get("time_seconds") or {}).items()}
    rest = (finite(summary.get("wall_seconds")) or 0.0) - sum(parts.values())
    if parts and rest > 0.01 * sum(parts.values()):
        parts["other"] = rest
    total = sum(parts.values())
    return [(key, seconds, seconds / total) for key, seconds in parts.items() if seconds >= MIN_SECONDS]


def _environment(summary: JsonObject) -> list[tuple[str, str]]:
    machine = summary.get("machine") or {}
    rows: list[tuple[str, Any]] = [
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("memory", _bytes(machine.get("memory_bytes"))),
        ("GPU", machine.get("gpu")),
        ("engine", summary.get("engine")),
        ("devices", summary.get("devices")),
        ("processes", summary.get("world_size")),
        ("threads per process", summary.get("threads_per_rank")),
        ("most memory used", _bytes(summary.get("peak_rss_bytes"))),
        ("most device memory used", _bytes(summary.get("peak_device_bytes"))),
        *(summary.get("versions") or {}).items(),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _bytes(value: object) -> str | None:
    size = finite(value)
    return None if not size else f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# --- pages ------------------------------------------------------------------------------------------------------------


def page(template: str, content: JsonObject) -> str:
    """Return a template of this folder, such as `page.html.j2`, filled in."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flatout.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "breakable": _breakable, "shorten": shorten}
    digest = base64.b64encode(hashlib.sha256(FILTER_SCRIPT.encode()).digest()).decode()
    environment.globals |= {"script": FILTER_SCRIPT, "script_hash": digest}
    return environment.get_template(template).render(content)


def framed(html: str) -> str:
    """Return a page in a frame, for notebooks: which isolates the page's style."""
    # IPython warns about HTML that begins with a frame; its own IFrame only supports addresses.
    return f'<div><iframe srcdoc="{escape(html)}" style="width:100%;height:50em;border:0"></iframe></div>'


def write_page(path: Path, template: str, content: JsonObject) -> None:
    """Write a page. Raises InputError if it cannot be written."""
    write_atomically(path, page(template, content).encode())


def thumbnail(image_HWC: np.ndarray) -> str:
    """Return a picture of at most `THUMBNAIL_PIXELS` as a data URI: PNG for tiny images, JPEG for photographs."""
    image = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC)
    buffer = io.BytesIO()
    if max(image.size) < SMOOTH_FROM_PIXELS:
        image.save(buffer, format="png", optimize=True)
        return data_uri("image/png", buffer.getvalue())
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    image.save(buffer, format="jpeg", quality=88)
    return data_uri("image/jpeg", buffer.getvalue())


def data_uri(kind: str, content: bytes) -> str:
    """Return a file as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _breakable(text: str) -> Any:
    """Return the text escaped; lines may break after characters that join words, but not within numbers."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=\S[_/-])(?=\w)|(?<=\.)(?=[^\W\d])", "<wbr>", str(escape(text))))
