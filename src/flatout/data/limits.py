"""Limits of image files, which keep damaged and hostile ones from taking the memory."""

import os
import threading

from flatout.data.bands import BadImage
from flatout.errors import InputError

LIMIT = "FLATOUT_MAX_PIXELS"
# Larger images (512 MiB of RGB) are refused from the header, before memory is taken; Pillow's limit for an error.
MAX_PIXELS = 2 * 89_478_485
# Larger images that Pillow decodes (4 bytes for each pixel) are decoded one at a time, and converted by parts.
LARGE_PIXELS = 2**25
# Larger files are refused without reading them: some other file, named as an image.
MAX_FILE_BYTES = 2**31

# Held while a large image is decoded.
ONE_LARGE_IMAGE = threading.Lock()


def max_pixels() -> int:
    """Return the largest number of pixels that an image may have.

    Raises:
        InputError: FLATOUT_MAX_PIXELS is no positive number.
    """
    text = os.environ.get(LIMIT, "").replace("_", "").replace(",", "").strip()
    if text and not (text.isdigit() and int(text)):
        raise InputError(f"{LIMIT} = {text!r}: must be a number of pixels, such as 400000000")
    return int(text or MAX_PIXELS)


def refuse_size(width: int, height: int) -> None:
    """Raise BadImage if an image has no pixels, or more than the limit."""
    if width < 1 or height < 1:
        raise BadImage(f"has {width} x {height} pixels")
    if width * height > max_pixels():
        raise BadImage(f"has {width} x {height} pixels, more than {max_pixels():,}, the limit ({LIMIT} sets it)")
