"""Image files of all formats but JPEG, `.npy` and TIFF files of many bands: decoded by Pillow."""

import codecs
import contextlib
import io
import itertools
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

import numpy as np

from flatout.data.bands import TIFF_STARTS, BadImage
from flatout.data.limits import LARGE_PIXELS, ONE_LARGE_IMAGE, refuse_size
from flatout.data.pixels import with_bits
from flatout.data.resize import MIN_REDUCTION_LEFT, Target, resized_to, upright

EXIF_ORIENTATION = 0x0112
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")


class _StrictPillow(AbstractContextManager):
    """While active, Pillow refuses incomplete files, leaves the limit of pixels to us, and emits no warnings.

    These are settings of the whole process: the first thread changes them, the last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def __enter__(self) -> None:
        from PIL import Image, ImageFile

        with self._lock:
            if self._inside == 0:
                self._before = contextlib.ExitStack()
                self._before.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
                for module, name, value in (
                    (ImageFile, "LOAD_TRUNCATED_IMAGES", False),
                    (Image, "MAX_IMAGE_PIXELS", None),
                ):
                    self._before.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()


STRICT_PILLOW = _StrictPillow()


def open_image(file: BinaryIO, start: bytes):
    """Return a PIL.Image.Image of which only the header has been read and checked."""
    from PIL import Image, UnidentifiedImageError

    if start[4:8] == b"ftyp" and start[8:12] in HEIF_BRANDS:
        with contextlib.suppress(ImportError):
            import pillow_heif  # pyright: ignore[reportMissingImports]

            pillow_heif.register_heif_opener()
    try:
        image = Image.open(file)
    except UnidentifiedImageError:
        raise BadImage(_what_it_is(start[:512])) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's many formats raise nearly every built-in error on a damaged header
        raise BadImage(f"is truncated or damaged: {error}") from None
    try:
        refuse_size(image.width, image.height)
        if start.startswith(TIFF_STARTS) and sum(map(_area, image.tile)) < image.width * image.height:
            raise BadImage("is truncated or damaged: some of its pixels are not there")
    except BadImage:
        image.close()
        raise
    return image


def _area(tile) -> int:
    """Return the number of pixels of a part of a file, as Pillow lists them."""
    left, top, right, bottom = tile[1]
    return (right - left) * (bottom - top)


def decode(data: bytes, target: Target) -> np.ndarray:
    """Return the image; raise BadImage where it is damaged or no image."""
    with STRICT_PILLOW:
        image = open_image(io.BytesIO(data), data)
        is_large = image.width * image.height > LARGE_PIXELS
        with ONE_LARGE_IMAGE if is_large else nullcontext(), image:
            try:
                image.load()
                orientation = orientation_of(image)
                target = target.turned(orientation)
                image_HWC = _to_array(image, target, is_large=is_large)
            except (BadImage, MemoryError):
                raise
            except Exception as error:  # as for the header: any error here means a damaged file
                raise BadImage(f"is truncated or damaged: {error}") from None
    del image  # and its memory, before the resize takes some
    return upright(resized_to(image_HWC[None], target)[0], orientation)


def orientation_of(image) -> int:
    """Return the EXIF orientation (1 is upright) of a PIL.Image.Image."""
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # damaged metadata does not spoil the pixels
        return 1


def _to_array(image, target: Target, *, is_large: bool) -> np.ndarray:
    """Return a loaded PIL.Image.Image as uint8 [H, W, 1, 3 or 4], or uint16 [H, W, 1]; a large one averaged."""
    if image.mode == "F":
        raise BadImage("has floating-point pixels, which have no agreed range; convert it to 8 or 16 bits")
    highest = 0
    if image.mode.startswith("I"):
        lowest, highest = image.getextrema()
        if lowest < 0 or highest > 0xFFFF:
            raise BadImage("has 32-bit or negative pixels, which have no agreed range; convert it to 8 or 16 bits")
        if target.bits == 16:
            return np.asarray(image).astype(np.uint16)[..., None]
    if not is_large:
        return _part_to_eight_bits(image, highest, 1, target.channels)
    width, height, left = image.width, image.height, 2 * MIN_REDUCTION_LEFT
    factor = max(1, int(min(height / (left * target.height), width / (left * target.width))))
    part_pixels = LARGE_PIXELS // 8
    columns = min(width, max(factor, part_pixels // factor * factor))
    rows = max(factor, part_pixels // columns // factor * factor)
    pixels = np.empty(0)
    for top, start in itertools.product(range(0, height, rows), range(0, width, columns)):
        box = start, top, min(start + columns, width), min(top + rows, height)
        part = _part_to_eight_bits(image.crop(box), highest, factor, target.channels)
        if not pixels.size:
            pixels = np.empty((-(-height // factor), -(-width // factor), part.shape[2]), np.uint8)
        y, x = top // factor, start // factor
        pixels[y : y + part.shape[0], x : x + part.shape[1]] = part
    return pixels


def _part_to_eight_bits(image, highest: int, factor: int, channels: int) -> np.ndarray:
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray(with_bits(np.asarray(image).astype(np.uint16), 8, highest))
    elif image.has_transparency_data and channels != 4:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    if channels != 4 or not image.has_transparency_data:
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if channels == 4:
        image = image.convert("RGBA")
    if factor > 1:
        image = image.reduce(factor)
    return np.array(image).reshape(image.height, image.width, -1)


def _what_it_is(start: bytes) -> str:
    text = start.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if text.startswith(b"<!doctype html") or b"<html" in text:
        return "is HTML, not an image"
    if text.startswith((b"<svg", b"<?xml")):
        return "is XML or SVG, which is not supported"
    if text.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not an image: run git lfs pull"
    if start[4:8] == b"ftyp" and start[8:12] in HEIF_BRANDS:
        return "is HEIC, which needs the package pillow-heif: pip install pillow-heif"
    if start[4:12] in (b"ftypavif", b"ftypavis"):
        return "is AVIF, which this Pillow cannot decode: pip install pillow-avif-plugin, or a newer Pillow"
    if start.startswith(TIFF_STARTS):
        return "is a damaged TIFF file, or one of a rare kind, such as floating-point bands: convert it to 8 or 16 bits"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "is WebP, which this Pillow cannot decode: install a Pillow that has WebP"
    return f"is not an image of a known format (it begins with {start[:8]!r})"
