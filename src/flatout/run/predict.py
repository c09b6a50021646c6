"""Classify new images with a trained run, a batch at a time."""

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.recipe import Recipe
    from flatout.run.folder import Run

_MOST_AT_ONCE = 256  # decoded images in memory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The classes of one image with their probabilities, best first; or in regression its number, `value`."""

    file: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    value: float | None = None

    def __str__(self) -> str:
        pairs = zip(self.classes, self.probabilities, strict=True)
        classes = ", ".join(f"{name} {probability:.3f}" for name, probability in pairs) or "none"
        return f"{self.file}: {classes if self.value is None else format(self.value, '.6g')}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        if self.value is not None:
            return {"file": self.file, "value": self.value}
        pairs = zip(self.classes, self.probabilities, strict=True)
        return {"file": self.file, "predictions": [{"class": c, "probability": p} for c, p in pairs]}


def predict(run: "Run", images: Any, *, top: int, tta: bool = False) -> list[Prediction]:
    """See `Run.predict`."""
    if not top >= 1:
        raise InputError(f"--top {top}: must be at least 1")
    named = _named(images, run.recipe)
    results, bad = [], []
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(named, min(_MOST_AT_ONCE, run.recipe.batch_size))):
            decoded = list(pool.map(lambda item: _pixels(run, *item), batch))
            bad += [error for error in decoded if isinstance(error, str)]
            if bad:  # the rest is decoded only to name every bad file
                continue
            for (name, _), row in zip(batch, run.probabilities(np.stack(decoded), tta=tta), strict=True):
                results.append(Prediction(file=name, **run.task.answer(row, run.classes, top)))
    if bad:
        raise InputError("\n".join(["these images cannot be read:", *bad]))
    if not results:
        raise InputError("no image to classify: name files or folders")
    return results


def _named(images: Any, recipe: "Recipe") -> Iterator[tuple[str, Any]]:
    """Yield every image with its name: the file's, or its position."""
    if isinstance(images, np.ndarray) or hasattr(images, "detach"):
        yield from _rows(images, recipe)
        return
    if isinstance(images, str | bytes | Path) or hasattr(images, "convert"):
        images = [images]
    if not isinstance(images, Iterable):
        raise InputError(f"images: a {type(images).__name__}; give files, folders, PIL images, arrays or tensors")
    for i, image in enumerate(images):
        if isinstance(image, str | Path):
            yield from ((str(file), file) for file in _files(Path(image)))
        elif isinstance(image, bytes | np.ndarray) or hasattr(image, "convert") or hasattr(image, "detach"):
            yield str(i), image
        else:
            raise InputError(f"images: item {i} is a {type(image).__name__}; give a file, a PIL image or an array")


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
    from flatout.data.decode import BadImage, decode_image, resize_images

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
