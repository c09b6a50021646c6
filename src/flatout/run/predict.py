"""Classify new images with a trained run, a batch at a time."""

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError
from flatout.numerics.calibration import LEAST_COVERAGE, MOST_COVERAGE, highest_coverage, set_threshold
from flatout.run.explain import Pictures

if TYPE_CHECKING:
    from flatout.recipe import Recipe
    from flatout.run.folder import Run

_MOST_AT_ONCE = 256  # decoded images in memory


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model says of N images.

    Attributes:
        probabilities: as `Task.probabilities` returns them, float32 [N, K].
        logits: float32 [N, outputs]; None for several models.
        features: what the head of the network reads, float32 [N, F]; None where that is not known.
    """

    probabilities: np.ndarray
    logits: np.ndarray | None = None
    features: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """The classes of one image with their probabilities, best first; or in regression its number, `value`.

    `unknown` says whether the image is unlike the training images; None where the run does not know. `classes_in_set`
    are the classes of the prediction set with the wanted `coverage`. `explanation` is the picture of its reasons.
    """

    file: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    value: float | None = None
    unknown: bool | None = None
    coverage: float | None = None
    classes_in_set: tuple[str, ...] = ()
    explanation: str | None = None

    def __str__(self) -> str:
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        more: dict[str, Any] = {} if self.explanation is None else {"explanation": self.explanation}
        if self.value is not None:
            return {"file": self.file, "value": self.value, **more}
        pairs = zip(self.classes, self.probabilities, strict=True)
        found: dict[str, Any] = {
            "file": self.file,
            "predictions": [{"class": c, "probability": p} for c, p in pairs],
            **more,
        }
        found |= {} if self.unknown is None else {"unknown": self.unknown}
        return found | ({} if self.coverage is None else {"coverage": self.coverage, "set": list(self.classes_in_set)})


def predict(
    run: "Run",
    images: Any,
    *,
    top: int,
    tta: bool = False,
    coverage: float | None = None,
    explain: str | Path | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> list[Prediction]:
    """See `Run.predict`; `note` takes a sentence about what the run lacks."""
    if not top >= 1:
        raise InputError(f"--top {top}: must be at least 1")
    if coverage is not None:
        check_coverage(run, coverage)
    if run.trust and run.trust.remark:
        note(run.trust.remark)
    pictures = None if explain is None else Pictures(run, explain)
    named = _named(images, run.recipe)
    results, bad = [], []
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(named, min(_MOST_AT_ONCE, run.recipe.batch_size))):
            decoded = list(pool.map(lambda item: _pixels(run, *item), batch))
            bad += [error for error in decoded if isinstance(error, str)]
            if bad:  # the rest is decoded only to name every bad file
                continue
            stored = np.stack(decoded)
            outputs = run.outputs(stored, tta=tta)
            more = _more(run, outputs, coverage)
            if pictures:
                for fields, path in zip(more, pictures.write([name for name, _ in batch], stored), strict=True):
                    fields["explanation"] = path
            for (name, _), row, fields in zip(batch, outputs.probabilities, more, strict=True):
                results.append(Prediction(file=name, **run.task.answer(row, run.classes, top), **fields))
    if bad:
        raise InputError("\n".join(["these images cannot be read:", *bad]))
    if not results:
        raise InputError("no image to classify: name files or folders")
    return results


def check_coverage(run: "Run", coverage: float) -> None:
    """Raise InputError where a run has no prediction sets of a coverage."""
    flag = f"--coverage {coverage:g}"
    if not LEAST_COVERAGE <= coverage <= MOST_COVERAGE:
        raise InputError(f"{flag}: must be from {LEAST_COVERAGE} to {MOST_COVERAGE}, such as 0.95")
    if run.task.name != "single-label":
        raise InputError(f"{flag}: prediction sets are for one class for each image; {run.path} is {run.task.name}")
    if run.trust is None:
        reason = "a cross-validation has none" if len(run.members) > 1 else "it had too few validation images for them"
        raise InputError(
            f"{flag}: {run.path} has no prediction sets: {reason}; train a run with --set data.valid_fraction=0.1"
        )
    if set_threshold(run.trust.set_thresholds, coverage) is None:
        raise InputError(
            f"{flag}: too high for the {run.trust.images:,} validation images of {run.path}; the highest is "
            f"{highest_coverage(run.trust.set_thresholds):g}, or train with more validation images"
        )


def _more(run: "Run", outputs: Outputs, coverage: float | None) -> list[dict[str, Any]]:
    """Return the fields of each `Prediction` that the run's `Trust` adds."""
    fields: list[dict[str, Any]] = [{} for _ in outputs.probabilities]
    if run.trust is None or outputs.logits is None:
        return fields
    if (unknown := run.trust.is_unknown(outputs.logits, outputs.features)) is not None:
        fields = [{"unknown": bool(one)} for one in unknown]
    if coverage is not None and (inside := run.trust.in_set(outputs.logits, coverage)) is not None:
        for one, row, is_in in zip(fields, outputs.probabilities, inside, strict=True):
            best = [int(k) for k in np.argsort(-row, kind="stable") if is_in[k]]
            one |= {"coverage": coverage, "classes_in_set": tuple(run.classes[k] for k in best)}
    return fields


def _named(images: Any, recipe: "Recipe") -> Iterator[tuple[str, Any]]:
    """Yield every image with its name: the file's, or its position."""
    images = _content(images)
    if isinstance(images, np.ndarray) or hasattr(images, "detach"):
        yield from _rows(images, recipe)
        return
    if isinstance(images, str | bytes | Path) or hasattr(images, "convert"):
        images = [images]
    if not isinstance(images, Iterable) or isinstance(images, Mapping):
        raise InputError(f"images: {type(images).__name__} given; give files, folders, PIL images, arrays or tensors")
    for i, image in enumerate(map(_content, images)):
        if isinstance(image, str | Path):
            yield from ((str(file), file) for file in _files(Path(image)))
        elif isinstance(image, bytes | np.ndarray) or hasattr(image, "convert") or hasattr(image, "detach"):
            yield str(i), image
        else:
            raise InputError(f"images: item {i} is of {type(image).__name__}; give a file, a PIL image or an array")


def _content(image: Any) -> Any:
    """Return the bytes of an open file or a buffer; anything else as it is."""
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    return image.read() if isinstance(image, io.IOBase) or hasattr(image, "readinto") else image


def _rows(images: Any, recipe: "Recipe") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the images of one array or tensor, whose values have one range; three axes are one image if they can be."""
    from flatout.data.pixels import channels_last, range_of, to_pixels

    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
    channels = recipe.channels
    ends = (images.shape[0], images.shape[-1]) if channels > 1 else images.shape[-1:]
    if images.ndim == 2 or (images.ndim == 3 and channels in ends):
        images = images[None]
    images = channels_last(images, "images", channels)
    scale = range_of(images, "images")
    for i in range(len(images)):
        yield str(i), to_pixels(images[i : i + 1], scale, "images")[0]


def _files(path: Path) -> list[Path]:
    from flatout.data.formats.folders import is_image_name, without_arrays

    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    files = [path]
    if path.is_dir():
        files = sorted(without_arrays([p for p in path.rglob("*") if is_image_name(p.name) and p.is_file()]))
    if not files:
        raise InputError(f"{path}: holds no images")
    return files


def _pixels(run: "Run", name: str, image: Any) -> np.ndarray | str:
    """Return one image as the model takes it, [H, W, C], or a message."""
    from flatout.data.decode import decode_image
    from flatout.data.pixels import BadImage, resize_images

    recipe = run.recipe
    shape: dict[str, Any] = {
        "size": recipe.stored_sides,
        "channels": recipe.channels,
        "resize": recipe.data.resize,
        "bits": recipe.data.bits,
    }
    try:
        if hasattr(image, "convert"):
            # As a file, so that its mode, transparency and orientation are treated as those of files.
            file = io.BytesIO()
            image.save(file, "PNG" if image.mode[0] in "1LPRI" else "TIFF", compress_level=1, exif=image.getexif())
            image = file.getvalue()
        if isinstance(image, bytes | Path):
            return decode_image(image, **shape)
        _, pixels = next(_rows(image[None], recipe))
        return resize_images(pixels[None], **shape)[0]
    except (BadImage, InputError, OSError) as error:
        return f"{name}: {error}"
