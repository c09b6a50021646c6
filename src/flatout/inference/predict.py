"""Classify images with a finished run: files, folders, or images in memory.

Shape letters: N images, H height, W width, C channels, K classes.
"""

import csv
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from flatout.config.settings import nearest
from flatout.data.decode import EXIF_ORIENTATION, decode_image, orientation_of
from flatout.data.formats.folders import is_image_name
from flatout.data.pixels import BadImage, channels_last, range_of, resize_images, to_pixels
from flatout.inference.calibration import COVERAGE_STEPS, MIN_COVERAGE, MIN_IMAGES, set_threshold
from flatout.inference.explain import HeatmapWriter
from flatout.utils.errors import DiskFull, InputError
from flatout.utils.files import NO_SPACE
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from flatout.config import Recipe
    from flatout.inference.run import Run

ON_BAD_IMAGE = ("stop", "skip")
_MAX_AT_ONCE = 256  # decoded images in memory


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of a model for N images: probabilities float32 [N, K]; logits are None for several models.

    `unknown_score` is the OOD score of each image, [N]; None without a detector.
    """

    probabilities: np.ndarray
    logits: np.ndarray | None = None
    unknown_score: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """The classes of one image with their probabilities, best first; or in regression its number, `value`.

    `unknown`: whether the image is unlike the training images; None without a detector. `classes_in_set` are the
    classes of the prediction set with the wanted `coverage`. `explanation` is the picture of its heatmap. `error` is
    the reason why an image cannot be read; then nothing else is set.
    """

    file: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    value: float | None = None
    unknown: bool | None = None
    coverage: float | None = None
    classes_in_set: tuple[str, ...] = ()
    explanation: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.file}: cannot be read: {self.error}"
        if self.value is not None:
            return f"{self.file}: {self.value:.6g}" if abs(self.value) < 1e6 else f"{self.file}: {self.value:.0f}"
        pairs = zip(self.classes, self.probabilities, strict=True)
        classes = ", ".join(f"{name} {probability:.3f}" for name, probability in pairs) or "none"
        text = f"{self.file}: {'unknown; most like ' if self.unknown else ''}{classes}"
        if self.coverage is not None:
            text += f"; {100 * self.coverage:g} % set: {', '.join(self.classes_in_set) or 'empty'}"
        return text

    def __repr__(self) -> str:
        # A list of them is readable in a notebook.
        return f"<{self}>"

    def to_dict(self) -> JsonObject:
        """Return plain values for JSON."""
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        pairs = zip(self.classes, self.probabilities, strict=True)
        answers = [{"class": c, "probability": p} for c, p in pairs] if self.value is None else None
        found = {"value": self.value, "predictions": answers, "explanation": self.explanation, "unknown": self.unknown}
        if self.coverage is not None:
            found |= {"coverage": self.coverage, "set": list(self.classes_in_set)}
        return {"file": self.file, **{key: value for key, value in found.items() if value is not None}}


def predict(
    run: "Run",
    images: object,
    *,
    top: int = 5,
    tta: bool = False,
    coverage: float | None = None,
    explain: str | Path | None = None,
    on_bad_image: str = "stop",
    note: Callable[[str], object] = warnings.warn,
) -> Iterator[Prediction]:
    """Check the arguments of `Run.predict`, and return an iterator; `note` receives what the run lacks."""
    if not top >= 1:
        raise InputError(f"--top {top}: must be at least 1")
    if on_bad_image not in ON_BAD_IMAGE:
        raise InputError(f"--on-bad-image {on_bad_image}: {nearest(on_bad_image, ON_BAD_IMAGE)}")
    if coverage is not None:
        _check_coverage(run, coverage)
    if run.calibration and run.calibration.remark:
        note(run.calibration.remark)
    heatmaps = None if explain is None else HeatmapWriter(run, explain)

    def predicted(named: list[tuple[str, np.ndarray]]) -> list[Prediction]:
        names, pixels = [name for name, _ in named], np.stack([image for _, image in named])
        outputs = run.outputs(pixels, tta=tta)
        fields: list[JsonObject] = [run.task.answer(row, run.classes, top) for row in outputs.probabilities]
        if outputs.unknown_score is not None and run.unknown_threshold is not None:
            for one, is_unknown in zip(fields, outputs.unknown_score > run.unknown_threshold, strict=True):
                one["unknown"] = bool(is_unknown)
        if coverage is not None and run.calibration and outputs.logits is not None:
            inside = run.calibration.in_set(outputs.logits, coverage)
            for one, row, is_in in zip(fields, outputs.probabilities, inside, strict=True):
                best = [int(k) for k in np.argsort(-row, kind="stable") if is_in[k]]
                one |= {"coverage": coverage, "classes_in_set": tuple(run.classes[k] for k in best)}
        if heatmaps:
            # The first class of each answer: views and thresholds may prefer another one than the network alone.
            rows = zip(fields, outputs.probabilities, strict=True)
            first = [run.classes.index(c[0]) if (c := one.get("classes")) else int(row.argmax()) for one, row in rows]
            for one, path in zip(fields, heatmaps.write(names, pixels, np.array(first)), strict=True):
                one["explanation"] = path
        return [Prediction(file=name, **one) for name, one in zip(names, fields, strict=True)]

    return _predictions(run.recipe, images, predicted, stops=on_bad_image == "stop")


def _predictions(
    recipe: "Recipe",
    images: object,
    predicted: Callable[[list[tuple[str, np.ndarray]]], list[Prediction]],
    *,
    stops: bool,
) -> Iterator[Prediction]:
    """Yield a prediction for each image; if `stops`, raise InputError that names all images that cannot be read."""
    named, count = _named(images, recipe), 0
    bad: list[str] = []
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(named, min(_MAX_AT_ONCE, recipe.batch_size))):
            count += len(batch)
            decoded = list(pool.map(lambda item: _pixels(recipe, *item), batch))
            if stops:
                bad += [f"{one.file}: {one.error}" for one in decoded if isinstance(one, Prediction)]
            if bad:  # the rest is decoded only to name every bad file
                continue
            readable = [one for one in decoded if not isinstance(one, Prediction)]
            found = iter(predicted(readable) if readable else ())
            yield from (one if isinstance(one, Prediction) else next(found) for one in decoded)
    if bad:
        raise InputError("\n".join(["these images cannot be read:", *bad]))
    if not count:
        raise InputError("no image to classify: name files or folders")


def _check_coverage(run: "Run", coverage: float) -> None:
    flag = f"--coverage {coverage:g}"
    if run.calibration is None:
        raise InputError(
            f"{flag}: {run.path} has no prediction sets: they need one class for each image, and one run with at least "
            f"{MIN_IMAGES} validation images"
        )
    thresholds = run.calibration.set_thresholds
    if set_threshold(thresholds, coverage) is None:
        highest = MIN_COVERAGE + (len(thresholds) - 1) / COVERAGE_STEPS
        raise InputError(
            f"{flag}: must be from {MIN_COVERAGE} to {highest:g}, the highest for the {run.calibration.images:,} "
            f"validation images of {run.path}"
        )


# --- a table ----------------------------------------------------------------------------------------------------------


def write_csv(path: Path, run: "Run", predictions: Iterable[Prediction], *, top: int) -> dict[str, int]:
    """Write a row per image to a new CSV file as predictions are made; see `docs/trust.md` for the columns.

    Returns the numbers of `images` and of `unreadable` ones. If the disk becomes full, earlier rows are kept.
    """
    counts = {"images": 0, "unreadable": 0}
    columns = {"regression": ["value"], "multi-label": ["classes", "probabilities"]}.get(run.task.name)
    if columns is None:
        ranks = range(1, min(top, len(run.classes)) + 1)
        columns = [f"{name}_{rank}" for rank in ranks for name in ("class", "probability")]
    if path.exists():
        raise InputError(f"{path}: exists; choose another --csv, or remove it")
    # Wrong arguments are reported before there is a file.
    predictions = iter(predictions)
    first = list(islice(predictions, 1))
    try:
        with path.open("x", newline="", encoding="utf-8", errors="backslashreplace") as file:
            table = csv.DictWriter(file, ["file", *columns, "unknown", "set", "explanation", "error"])
            table.writeheader()
            for one in chain(first, predictions):
                table.writerow(_row(one, numbered="class_1" in columns))
                counts["images"] += 1
                counts["unreadable"] += one.error is not None
    except InputError:
        path.unlink()
        raise
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        if error.errno in NO_SPACE:
            raise DiskFull(f"{message}; free disk space") from None
        raise InputError(f"{message}; choose another --csv") from None
    return counts


def _row(one: Prediction, *, numbered: bool) -> JsonObject:
    row: JsonObject = {"file": one.file, "explanation": one.explanation, "error": one.error}
    if one.unknown is not None:
        row["unknown"] = str(one.unknown).lower()
    if one.coverage is not None:
        row["set"] = "|".join(one.classes_in_set)
    if one.value is not None:
        row["value"] = one.value
    elif numbered:
        for rank, (name, probability) in enumerate(zip(one.classes, one.probabilities, strict=True), start=1):
            row |= {f"class_{rank}": name, f"probability_{rank}": probability}
    else:
        row |= {"classes": "|".join(one.classes), "probabilities": "|".join(map(str, one.probabilities))}
    return row


# --- images -----------------------------------------------------------------------------------------------------------


def _named(images: object, recipe: "Recipe") -> Iterator[tuple[str, Any]]:
    """Yield every image with its name: the file's, or its position."""
    if isinstance(images, np.ndarray | torch.Tensor):
        yield from _rows(images, recipe)
        return
    if isinstance(images, str | bytes | Path) or hasattr(images, "convert"):
        images = [images]
    if not isinstance(images, Iterable) or isinstance(images, Mapping | io.IOBase):
        raise InputError(f"images: {type(images).__name__} given; give files, folders, PIL images, arrays or tensors")
    for i, image in enumerate(images):
        if isinstance(image, str | Path):
            yield from ((str(file), file) for file in _files(Path(image)))
        elif isinstance(image, bytes | np.ndarray | torch.Tensor) or hasattr(image, "convert"):
            yield str(i), image
        else:
            raise InputError(f"images: item {i} is of {type(image).__name__}; give a file, a PIL image or an array")


def _rows(images: Any, recipe: "Recipe") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the images of one array or tensor, whose values have one range; three axes are one image if they can be."""
    if isinstance(images, torch.Tensor):
        # NumPy lacks bfloat16.
        images = (images.float() if images.dtype == torch.bfloat16 else images).detach().cpu().numpy()
    channels = recipe.channels
    ends = (1, 3, 4, channels)
    if images.ndim == 2 or (images.ndim == 3 and (images.shape[-1] in ends or images.shape[0] == channels > 1)):
        images = images[None]
    images = channels_last(images, "images", channels)
    scale = range_of(images, "images")
    for i in range(len(images)):
        yield str(i), to_pixels(images[i : i + 1], scale, "images")[0]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if is_image_name(p.name) and p.is_file())
    if not files:
        raise InputError(f"{path}: holds no images")
    return files


def _pixels(recipe: "Recipe", name: str, image: Any) -> tuple[str, np.ndarray] | Prediction:
    """Return name and stored pixels [H, W, C] of an image; if it cannot be read, a `Prediction` with the reason."""
    shape: dict[str, Any] = {"size": recipe.stored_sides, "channels": recipe.channels}
    shape |= {"resize": recipe.data.resize, "bits": recipe.data.bits}
    try:
        if hasattr(image, "convert"):
            # As a file, so that its mode, transparency and orientation are treated as those of files.
            file, exif = io.BytesIO(), Image.Exif()
            exif[EXIF_ORIENTATION] = orientation_of(image)
            image.save(file, "PNG" if image.mode[0] in "1LPRI" else "TIFF", compress_level=1, exif=exif)
            image = file.getvalue()
        if isinstance(image, bytes | Path):
            return name, decode_image(image, **shape)
        _, pixels = next(_rows(image[None], recipe))
        return name, resize_images(pixels[None], **shape)[0]
    except (BadImage, InputError, OSError) as error:
        return Prediction(file=name, error=str(error))
