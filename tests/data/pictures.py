"""A picture, files of it, and why a file cannot be decoded."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatout.data.decode import decode_image
from flatout.data.pixels import BadImage


def smooth_picture(width: int, height: int) -> Image.Image:
    """A picture without symmetry, whose colours survive JPEG."""
    y, x = np.mgrid[0:height, 0:width] / [[[height]], [[width]]]
    return Image.fromarray(np.stack([255 * x, 255 * y, 128 + 100 * x * y], axis=-1).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options) -> Path:
    image.save(path, **options)
    return path


def refusal(path: Path, **wanted) -> str:
    with pytest.raises(BadImage) as caught:
        decode_image(path, **{"size": 8, "channels": 3, "resize": "squash", **wanted})
    return str(caught.value)
