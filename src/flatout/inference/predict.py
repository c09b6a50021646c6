"""Classify images with a finished run: files, folders, or images in memory; and explain the answers by heatmaps.

Shape letters: N or B images, H height, W width, C channels, K classes or outputs, h and w a grid.
"""

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from flatout.config.settings import nearest
from flatout.data.decode import EXIF_ORIENTATION, decode_image, orientation_of
from flatout.data.formats.folders import is_image_name
from flatout.data.pixels import BadImage, channels_last, range_of, resize_images, to_pixels
from flatout.engine import augment, pixels
from flatout.inference.calibration import COVERAGE_STEPS, MIN_COVERAGE, MIN_IMAGES, set_threshold
from flatout.models.keras import KerasModule
from flatout.report.pictures import overlaid
from flatout.utils.errors import DiskFull, InputError
from flatout.utils.files import NO_SPACE, check_free, default_folder, make_folder, write_atomically
from flatout.utils.run_files import JsonObject, visible

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
    """Yield the predictions of `Run.predict`; `note` receives what the run lacks."""
    if not top >= 1:
        raise InputError(f"--top {top}: must be at least 1")
    if on_bad_image not in ON_BAD_IMAGE:
        raise InputError(f"--on-bad-image {on_bad_image}: {nearest(on_bad_image, ON_BAD_IMAGE)}")
    if coverage is not None:
        _check_coverage(run, coverage)
    if run.calibration and run.calibration.remark:
        note(run.calibration.remark)
    folder = None if explain is None else Path(explain or default_folder("explain"))
    check_free(folder, "--explain")
    recipe, named, count, answered = run.recipe, _named(images, run.recipe), 0, 0
    bad: list[str] = []
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(named, min(_MAX_AT_ONCE, recipe.batch_size))):
            decoded = list(pool.map(lambda item: _pixels(recipe, *item), batch))
            if on_bad_image == "stop":
                bad += [f"{one.file}: {one.error}" for one in decoded if isinstance(one, Prediction)]
            readable = [one for one in decoded if not isinstance(one, Prediction)]
            if not bad:  # else the rest is decoded only to name every bad file
                fields = iter(_answers(run, readable, top, tta, coverage, folder, start=answered) if readable else ())
                yield from (one if isinstance(one, Prediction) else Prediction(**next(fields)) for one in decoded)
            count, answered = count + len(batch), answered + len(readable)
    if bad:
        raise InputError("\n".join(["these images cannot be read:", *bad]))
    if not count:
        raise InputError("no image to classify: name files or folders")


def _answers(
    run: "Run",
    named: list[tuple[str, np.ndarray]],
    top: int,
    tta: bool,
    coverage: float | None,
    folder: Path | None,
    *,
    start: int,
) -> list[JsonObject]:
    """Return the fields of `Prediction` for images with their names; `start` is the number of the first heatmap."""
    names, images = [name for name, _ in named], np.stack([image for _, image in named])
    outputs, found, explained = run.outputs(images, tta=tta), list[JsonObject](), list[int]()
    for i, row in enumerate(outputs.probabilities):
        one = {"file": names[i], **run.task.answer(row, run.classes, top)}
        if outputs.unknown_score is not None:
            one["unknown"] = bool(outputs.unknown_score[i] > run.unknown_threshold)
        if coverage is not None and run.calibration and outputs.logits is not None:
            is_in = run.calibration.in_set(outputs.logits[i : i + 1], coverage)[0]
            best = [int(k) for k in np.argsort(-row, kind="stable") if is_in[k]]
            one |= {"coverage": coverage, "classes_in_set": tuple(run.classes[k] for k in best)}
        found.append(one)
        # Views and thresholds may prefer another class than the network alone.
        explained.append(run.classes.index(one["classes"][0]) if one.get("classes") else int(row.argmax()))
    if folder:
        paths = write_heatmaps(run, folder, names, images, np.array(explained), start=start)
        found = [{**one, "explanation": path} for one, path in zip(found, paths, strict=True)]
    return found


def _check_coverage(run: "Run", coverage: float) -> None:
    flag = f"--coverage {coverage:g}"
    if run.calibration is None:
        need = f"one class for each image, and one run with at least {MIN_IMAGES} validation images"
        raise InputError(f"{flag}: {run.path} has no prediction sets: they need {need}")
    thresholds, images = run.calibration.set_thresholds, f"the {run.calibration.images:,} validation images"
    if set_threshold(thresholds, coverage) is None:
        highest = MIN_COVERAGE + (len(thresholds) - 1) / COVERAGE_STEPS
        raise InputError(f"{flag}: must be from {MIN_COVERAGE} to {highest:g}, the highest for {images} of {run.path}")


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
    columns = ["file", *columns, "unknown", "set", "explanation", "error"]
    if path.exists():
        raise InputError(f"{path}: exists; choose another --csv, or remove it")
    # Wrong arguments are reported before there is a file.
    predictions = iter(predictions)
    first = list(islice(predictions, 1))
    try:
        with path.open("x", newline="", encoding="utf-8", errors="backslashreplace") as file:
            table = csv.DictWriter(file, columns, extrasaction="ignore")
            table.writeheader()
            for one in chain(first, predictions):
                table.writerow(_row(one))
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


def _row(one: Prediction) -> JsonObject:
    """Return the values of all columns, of which a task has some."""
    row = {"file": one.file, "value": one.value, "explanation": one.explanation, "error": one.error}
    row["unknown"] = None if one.unknown is None else str(one.unknown).lower()
    row |= {"classes": "|".join(one.classes), "probabilities": "|".join(map(str, one.probabilities))}
    for rank, (name, probability) in enumerate(zip(one.classes, one.probabilities, strict=True), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": probability}
    return row | {"set": "|".join(one.classes_in_set)}


# --- images -----------------------------------------------------------------------------------------------------------


def _named(images: object, recipe: "Recipe") -> Iterator[tuple[str, Any]]:
    """Yield every image with its name: the file's, or its position."""
    if isinstance(images, np.ndarray | torch.Tensor):
        yield from _rows(images, recipe)
        return
    if isinstance(images, str | bytes | Path | Image.Image):
        images = [images]
    if not isinstance(images, Iterable) or isinstance(images, Mapping | io.IOBase):
        raise InputError(f"images: {type(images).__name__} given; give files, folders, PIL images, arrays or tensors")
    for i, image in enumerate(images):
        if isinstance(image, str | Path):
            yield from ((str(file), file) for file in _files(Path(image)))
        elif isinstance(image, bytes | np.ndarray | torch.Tensor | Image.Image):
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
        if isinstance(image, Image.Image):
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


# --- heatmaps ---------------------------------------------------------------------------------------------------------

# Minimum cells on a grid's shorter side, if any layer has as many; coarser grids show little.
MIN_CELLS = 4
# The number of last layers whose gradients are computed.
MAX_LAYERS = 40
# A grid may differ from the shape of the image by this factor, since convolutions without padding cut edges.
SAME_SHAPE = 1.3
# Images per batch, whose activations are kept.
_EXPLAINED_AT_ONCE = 8
# Images are enlarged to at least this many pixels.
_MIN_PIXELS = 192


def layer_cam(model: nn.Module, images_BCHW: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return heatmaps float32 [B, H, W] in 0..1 of normalised images; None if no layer has positions.

    `score` maps logits [B, K] to the explained number of each image, [B]. The model does not change. In the last block
    of transformers the logits depend on the class token alone, so the layer is the last whose gradient is not zero.
    """
    height, width = images_BCHW.shape[2:]
    images = images_BCHW.detach().requires_grad_()
    with torch.enable_grad(), _recorded(model) as outputs:
        logits = model(images)
        grids = [(output, view) for output in outputs if (view := _as_grid(output, height, width, model))]
        grids = grids[-MAX_LAYERS:]
        if not grids:
            return None
        # Positions without influence on the logits have no gradient at all.
        gradients = torch.autograd.grad(score(logits).sum(), [output for output, _ in grids], allow_unused=True)
    maps = [
        (functional.relu(view(gradient)) * view(output.detach())).sum(dim=1).relu()
        for (output, view), gradient in zip(grids, gradients, strict=True)
        if gradient is not None and view(gradient).any()
    ]
    if not maps:
        return None
    fine = [found for found in maps if min(found.shape[1:]) >= MIN_CELLS and found.any()]
    # If all grids are coarse, the finest.
    chosen = fine[-1] if fine else max(maps, key=lambda found: found[0].numel())
    chosen = chosen.float() / chosen.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return functional.interpolate(chosen[:, None], size=(height, width), mode="bilinear", align_corners=False)[:, 0]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record the outputs of all modules in the order of their computation."""
    outputs: list[torch.Tensor] = []

    def record(module: nn.Module, arguments: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and output.is_floating_point():
            outputs.append(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if module is not model:
                hooks.enter_context(module.register_forward_hook(record))
        yield outputs


def _as_grid(
    output: torch.Tensor, height: int, width: int, model: nn.Module
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a view of an output (feature map or tokens) as [B, C, h, w]; None if it has no grid."""
    shape = height / width
    if output.ndim == 4:
        # Channels come second, or last in some transformers; sides are in the proportion of the image's.
        for axes in ((0, 1, 2, 3), (0, 3, 1, 2)):
            h, w = (output.shape[axis] for axis in axes[2:])
            if min(h, w) > 1 and max(h / w / shape, shape / (h / w)) <= SAME_SHAPE:
                return lambda x, axes=axes: x.permute(axes)
        return None
    if output.ndim != 3 or output.shape[2] != getattr(model, "num_features", output.shape[2]):
        return None
    for prefix in dict.fromkeys((getattr(model, "num_prefix_tokens", 0), 0, 1, 2, 5)):
        tokens = output.shape[1] - prefix
        h = round(math.sqrt(max(0, tokens) * shape))
        if h > 1 and tokens % h == 0 and tokens // h > 1 and round(h / shape) == tokens // h:
            size = (h, tokens // h)
            return lambda x, prefix=prefix, size=size: x[:, prefix:].transpose(1, 2).unflatten(2, size)
    return None


def heatmaps(run: "Run", pixels_NHWC: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return heatmaps float32 [N, H, W] in 0..1 for images in the stored size; the mean over a run's members.

    They explain the class of each image in `answers`, int64 [N]; in regression the number.
    """
    if len(run.members) > 1:
        return np.mean([heatmaps(member, pixels_NHWC, answers) for member in run.members], axis=0)
    try:
        return heatmaps_of(run.model, run.recipe, pixels_NHWC, answers)
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from None


def heatmaps_of(model: nn.Module, recipe: "Recipe", pixels_NHWC: np.ndarray, answers: np.ndarray | None) -> np.ndarray:
    """Compute `heatmaps` for a model of a recipe; without `answers`, of the most probable class of each image."""
    if isinstance(model, KerasModule):
        raise InputError("heatmaps need a torch network; this one is a Keras model")
    parts = []
    for start in range(0, len(pixels_NHWC), _EXPLAINED_AT_ONCE):
        images = normalised(recipe, torch.from_numpy(pixels_NHWC[start : start + _EXPLAINED_AT_ONCE]))
        wanted = None if answers is None else torch.from_numpy(answers[start : start + _EXPLAINED_AT_ONCE])
        found = layer_cam(model.eval(), images, lambda logits, wanted=wanted: _score(recipe.task, logits, wanted))
        if found is None:
            raise InputError(f"{recipe.model} has no layer with positions in the image to explain by")
        parts.append(found.numpy())
    return np.concatenate(parts)


def normalised(recipe: "Recipe", pixels_NHWC: torch.Tensor) -> torch.Tensor:
    """Return the input of a recipe's model, float32 [N, C, H, W], for images in the stored size."""
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    return augment.apply(pixels_NHWC, None, 1 / (255 * std), -mean / std, recipe.eval_sides)


def _score(task: str, logits: torch.Tensor, answers: torch.Tensor | None) -> torch.Tensor:
    """Return the logit of each image's class; for a single logit, its value or its negative."""
    if task == "regression":
        return logits[:, 0]
    if logits.shape[1] == 1:
        logits = torch.cat([-logits, logits], dim=1)
    return logits.gather(1, (logits.argmax(dim=1) if answers is None else answers)[:, None])[:, 0]


def write_heatmaps(
    run: "Run", folder: Path, names: list[str], pixels_NHWC: np.ndarray, answers: np.ndarray, *, start: int
) -> list[str]:
    """Write a PNG for each image, the model's input next to its heatmap, numbered from `start`; return their paths."""
    make_folder(folder, "--explain")
    paths, maps = [], heatmaps(run, pixels_NHWC, answers)
    shown = visible(pixels.centre(pixels_NHWC, *run.recipe.eval_sides))
    for number, (name, image, heatmap) in enumerate(zip(names, shown, maps, strict=True), start):
        path = folder / f"{number:05d}-{Path(name).stem[:80]}.png"
        write_atomically(path, _side_by_side(image, overlaid(image, heatmap)))
        paths.append(str(path))
    return paths


def _side_by_side(image_HWC: np.ndarray, overlay_HWC: np.ndarray) -> bytes:
    """Return a PNG of both; tiny images are enlarged by a whole factor."""
    factor = max(1, -(-_MIN_PIXELS // max(image_HWC.shape[:2])))
    first, second = (
        np.broadcast_to(one, (*one.shape[:2], 3)).repeat(factor, axis=0).repeat(factor, axis=1)
        for one in (image_HWC, overlay_HWC)
    )
    gap = np.full((len(first), 8, 3), 255, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([first, gap, second], axis=1)).save(buffer, format="png")
    return buffer.getvalue()
