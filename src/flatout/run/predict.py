"""Classify new images with a trained run."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.run.folder import Prediction, Run


def predict(run: "Run", images: Any, *, top: int) -> "list[Prediction]":
    """See `Run.predict`."""
    from flatout.run.folder import Prediction

    if isinstance(images, str | Path):
        images = [images]
    if isinstance(images, np.ndarray):
        names, pixels = _from_array(run, images)
    else:
        names, pixels = _from_files(run, images)
    if not top >= 1:
        raise InputError(f"--top {top}: must be at least 1")
    results = []
    for name, probabilities in zip(names, run.probabilities(pixels), strict=True):
        best = np.argsort(-probabilities, kind="stable")[:top]
        classes = tuple(run.classes[i] for i in best)
        results.append(
            Prediction(file=name, classes=classes, probabilities=tuple(float(probabilities[i]) for i in best))
        )
    return results


def _from_files(run: "Run", paths: Iterable[str | Path]) -> tuple[list[str], np.ndarray]:
    from flatout.data.decode import BadImage, decode_image
    from flatout.data.formats.folders import is_image_name

    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_image_name(p.name) and p.is_file())
            if not inside:
                raise InputError(f"{path}: holds no images")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: there is no such file")
    if not files:
        raise InputError("no image to classify: name files or folders")
    recipe = run.recipe

    def decode(file: Path) -> np.ndarray | str:
        try:
            return decode_image(file, size=recipe.image_size, channels=recipe.channels, resize=recipe.data.resize)
        except BadImage as error:
            return f"{file}: {error}"

    with ThreadPoolExecutor() as pool:
        decoded = list(pool.map(decode, files))
    bad = [d for d in decoded if isinstance(d, str)]
    if bad:
        raise InputError("\n".join(["these files cannot be read as images:", *bad]))
    return [str(f) for f in files], np.stack([d for d in decoded if not isinstance(d, str)])


def _from_array(run: "Run", images: np.ndarray) -> tuple[list[str], np.ndarray]:
    recipe = run.recipe
    size, channels = recipe.image_size, recipe.channels
    if images.dtype != np.uint8:
        raise InputError(f"images have type {images.dtype}: must be uint8, 0..255")
    if images.shape[-1] != channels and channels == 1 and images.ndim < 4:
        images = images[..., None]
    if images.ndim == 3:
        images = images[None]
    if images.shape[1:] != (size, size, channels):
        raise InputError(f"images have shape {images.shape}: must be [N, {size}, {size}, {channels}]")
    return [str(i) for i in range(len(images))], images
