"""One image file as one array: decoded, turned upright, brought to its channels and size.

JPEG files, nearly all of what people train on, are decoded by libjpeg-turbo (simplejpeg); everything else by Pillow.
Both then go through one resize, `resize_images`. Everything expensive runs in compiled code that releases the GIL, so
threads use all cores.

Unusual images are always treated in the same way: EXIF orientation is applied; CMYK and YCCK are converted to RGB;
16-bit grey is scaled to 8 bits; transparency is laid over white; of an animation the first frame is taken. A file that
is damaged, incomplete, no image, or larger than the limit is a `BadImage` with the reason.

Shape letters: N images, H height, W width, C channels.
"""

import codecs
import contextlib
import io
import os
import stat
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.data.members import Encoded

# The exact method, part of every pack. Change it whenever a pixel can change.
RESIZE_METHOD = (
    "bilinear, antialiased (triangle filter as wide as the reduction), 8-bit, torch.nn.functional.interpolate; "
    "JPEG by libjpeg-turbo: scaled in the DCT by 1/2, 1/4 or 1/8 where at least 1.3 times the target remains, "
    "chroma replicated where the whole reduction is at least 2; other formats over 2^25 pixels averaged by a whole "
    "factor first where at least 2.6 times the target remains; 16-bit grey by its bits in use; version 3"
)

LIMIT = "FLATOUT_MAX_PIXELS"
# Larger images (512 MiB of RGB) are refused from the header, before memory is taken; Pillow's limit for an error.
MAX_PIXELS = 2 * 89_478_485
# Larger images that Pillow decodes (4 bytes for each pixel) are decoded one at a time, and converted by strips.
LARGE_PIXELS = 2**25
# Larger files are refused without reading them: some other file, named as an image.
MAX_FILE_BYTES = 2**31

# What the cheaper ways to decode leave out is hidden by the antialiased resize behind them, if that still reduces by
# this much after scaling in the DCT, or in all where chroma is replicated rather than interpolated.
MIN_REDUCTION_LEFT = 1.3
MIN_REDUCTION_FOR_REPLICATED_CHROMA = 2

JPEG_START = b"\xff\xd8\xff"
EXIF_ORIENTATION = 0x0112
_EXIF_WITHIN_BYTES = 2**18

# libjpeg's warnings that mean lost pixels. The others (an odd JFIF version, stray bytes between segments) do not, and
# such files are common: Pillow decodes those, and itself refuses an incomplete file.
_JPEG_LOST_PIXELS = ("premature end", "bad huffman code", "instead of rst")


class BadImage(ValueError):
    """A file that cannot be used as an image; the message is the reason, without the file's name."""


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """The header of an image file: pixels as stored (before EXIF orientation) and Pillow's mode."""

    width: int
    height: int
    mode: str


def decode_image(path: "Encoded | bytes", *, size: int, channels: int, resize: str) -> np.ndarray:
    """Return the image in `path` as uint8 [size, size, channels].

    Args:
        path: the file or part of a container, or its bytes; the content decides the format, not the name.
        size: height and width of the result, in pixels.
        channels: 1 (ITU-R 601 luma) or 3 (RGB).
        resize: "stretch" (to the square), or "crop" (the largest centred square, then resized; the same as resizing the
            shorter side and cropping the centre, but cheaper). The centre is kept to a pixel of the file, or to the
            divisor where a JPEG was scaled in the DCT, which is less than half a pixel of the result.

    docs/data.md has the largest differences from Pillow's `convert`, `crop` and `resize(..., BILINEAR)`.

    Raises:
        BadImage: the file cannot be read, is no image, is damaged or incomplete, too large, or of an unsupported kind.
    """
    assert channels in (1, 3)
    assert resize in ("stretch", "crop")
    data = path if isinstance(path, bytes) else read_file(path)
    image = _decode_jpeg(data, size, channels, resize) if data.startswith(JPEG_START) else None
    return image if image is not None else _decode_with_pillow(data, size, channels, resize)


def read_header(path: "Encoded | bytes") -> ImageHeader:
    """Return the header of an image file, a part of a container, or bytes, without decoding the image.

    Raises:
        BadImage: the file cannot be read, is no image, or too large.
    """
    if isinstance(path, Path):
        file, start = path, read_file(path, length=512)
    else:
        start = path if isinstance(path, bytes) else read_file(path)
        file = io.BytesIO(start)
    with _STRICT_PILLOW, _open_with_pillow(file, start) as image:
        return ImageHeader(width=image.width, height=image.height, mode=image.mode)


def resize_images(images_NHWC: np.ndarray, *, size: int, channels: int, resize: str) -> np.ndarray:
    """Return decoded images as uint8 [N, size, size, channels], resized as `decode_image` does."""
    images_NHWC = _with_channels(images_NHWC, channels)
    if resize == "crop":
        top, left, side = _centre(*images_NHWC.shape[1:3])
        images_NHWC = images_NHWC[:, top : top + side, left : left + side]
    return _resample(images_NHWC, size, *images_NHWC.shape[1:3])


def max_pixels() -> int:
    """Return the largest number of pixels that an image may have.

    Raises:
        InputError: FLATOUT_MAX_PIXELS is no positive number.
    """
    text = os.environ.get(LIMIT, "").replace("_", "").replace(",", "").strip()
    if text and not (text.isdigit() and int(text)):
        raise InputError(f"{LIMIT} = {text!r}: must be a number of pixels, such as 400000000")
    return int(text or MAX_PIXELS)


def read_file(path: "Encoded", length: int = -1) -> bytes:
    """Return the first `length` bytes of a file, or all of a file or a part of a container.

    Raises:
        BadImage: it cannot be read, is empty, too large or no regular file.
    """
    try:
        if isinstance(path, Path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a FIFO would block, a device never end
                raise BadImage("is not a regular file")
            if status.st_size > MAX_FILE_BYTES:
                raise BadImage(f"has {status.st_size:,} bytes, more than {MAX_FILE_BYTES:,}, the limit")
            with path.open("rb", buffering=0) as file:
                data = file.read(length)
        else:
            data = path.read_bytes()
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from None
    if not data:
        raise BadImage("is empty")
    return data


# JPEG


def _decode_jpeg(data: bytes, size: int, channels: int, resize: str) -> np.ndarray | None:
    """Return the image, or None where it is a rare kind that Pillow must decode."""
    import simplejpeg

    try:
        header = simplejpeg.decode_jpeg_header(data)
        height, width, colorspace = int(header[0]), int(header[1]), header[2]
        _refuse_bomb(width, height)
        if colorspace in ("CMYK", "YCCK"):
            return None
        top, left, side = _centre(height, width)
        reduction = (side if resize == "crop" else min(height, width)) / size
        divisor = next((k for k in (8, 4, 2) if reduction >= k * MIN_REDUCTION_LEFT), 1)
        image_HWC = simplejpeg.decode_jpeg(
            data,
            colorspace="GRAY" if channels == 1 else "RGB",
            fastupsample=reduction >= MIN_REDUCTION_FOR_REPLICATED_CHROMA,
            min_height=-(-height // divisor),
            min_width=-(-width // divisor),
            min_factor=divisor,
            strict=True,
        )
    except BadImage:
        raise
    except ValueError as error:
        if any(words in str(error).lower() for words in _JPEG_LOST_PIXELS):
            raise BadImage(f"is truncated or damaged: {error}") from None
        return None
    if resize == "crop":
        top, left, scaled_side = top // divisor, left // divisor, -(-side // divisor)
        image_HWC = image_HWC[top : top + scaled_side, left : left + scaled_side]
        height = width = side
    resized = _resample(image_HWC[None], size, height / divisor, width / divisor)[0]
    return _upright(resized, _jpeg_orientation(data))


def _jpeg_orientation(data: bytes) -> int:
    """Return the EXIF orientation (1 is upright)."""
    from PIL import Image

    start = data.find(b"Exif\0\0", 0, _EXIF_WITHIN_BYTES)
    if start >= 0:
        with _STRICT_PILLOW, contextlib.suppress(Exception):  # damaged metadata does not spoil the pixels
            exif = Image.Exif()
            exif.load(data[start : start + 2**16])
            return int(exif.get(EXIF_ORIENTATION, 1))
    return 1


# Everything else


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


_STRICT_PILLOW = _StrictPillow()
_ONE_LARGE_IMAGE = threading.Lock()


def _open_with_pillow(file: Path | io.BytesIO, start: bytes):
    """Return a PIL.Image.Image of which only the header has been read and checked."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file)
    except UnidentifiedImageError:
        raise BadImage(_what_it_is(start[:512])) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's many formats raise nearly every built-in error on a damaged header
        raise BadImage(f"is truncated or damaged: {error}") from None
    try:
        _refuse_bomb(image.width, image.height)
    except BadImage:
        image.close()
        raise
    return image


def _decode_with_pillow(data: bytes, size: int, channels: int, resize: str) -> np.ndarray:
    with _STRICT_PILLOW:
        image = _open_with_pillow(io.BytesIO(data), data)
        is_large = image.width * image.height > LARGE_PIXELS
        with _ONE_LARGE_IMAGE if is_large else nullcontext(), image:
            try:
                image.load()
                image_HWC = _to_eight_bits(image, size if is_large else None)
            except (BadImage, MemoryError):
                raise
            except Exception as error:  # as for the header: any error here means a damaged file
                raise BadImage(f"is truncated or damaged: {error}") from None
            try:
                orientation = int(image.getexif().get(EXIF_ORIENTATION, 1))
            except Exception:  # damaged metadata does not spoil the pixels
                orientation = 1
    return _upright(resize_images(image_HWC[None], size=size, channels=channels, resize=resize)[0], orientation)


def _to_eight_bits(image, reduce_for: int | None) -> np.ndarray:
    """Return a loaded PIL.Image.Image as uint8 [H, W, 1 or 3]; a large one averaged for a target of that size."""
    if image.mode == "F":
        raise BadImage("has floating-point pixels, which have no agreed range; convert it to 8 or 16 bits")
    highest = 0
    if image.mode.startswith("I"):
        lowest, highest = image.getextrema()
        if lowest < 0 or highest > 0xFFFF:
            raise BadImage("has 32-bit pixels, which have no agreed range; convert it to 8 or 16 bits")
        # Cameras and scanners store 12 bits in 16; scaled by 16 bits, 17 grey levels would remain.
        highest = next(top for top in (0xFF, 0xFFF, 0xFFFF) if highest <= top)
    if reduce_for is None:
        return _strip_to_eight_bits(image, highest, 1)
    factor = max(1, int(min(image.size) / (2 * MIN_REDUCTION_LEFT * reduce_for)))
    rows = max(factor, LARGE_PIXELS // 8 // image.width // factor * factor)
    boxes = ((0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows))
    return np.concatenate([_strip_to_eight_bits(image.crop(box), highest, factor) for box in boxes])


def _strip_to_eight_bits(image, highest: int, factor: int) -> np.ndarray:
    from PIL import Image

    if image.mode.startswith("I"):
        grey_HW = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((grey_HW * 255 + highest // 2) // highest).astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if factor > 1:
        image = image.reduce(factor)
    return np.array(image).reshape(image.height, image.width, -1)


def _what_it_is(start: bytes) -> str:
    text = start.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if text.startswith(b"<!doctype html") or b"<html" in text:
        return "is HTML, not an image"
    if text.startswith((b"<svg", b"<?xml")):
        return "is XML or SVG, which is not supported"
    return f"is not an image of a known format (it begins with {start[:8]!r})"


# Both


def _refuse_bomb(width: int, height: int) -> None:
    if width * height > max_pixels():
        raise BadImage(f"has {width} x {height} pixels, more than {max_pixels():,}, the limit ({LIMIT} sets it)")


def _centre(height: int, width: int) -> tuple[int, int, int]:
    """Return top, left and side of the largest centred square."""
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side


def _with_channels(images_NHWC: np.ndarray, channels: int) -> np.ndarray:
    if images_NHWC.shape[-1] == channels:
        return images_NHWC
    if channels == 3:
        return np.repeat(images_NHWC, 3, axis=-1)
    # ITU-R 601 luma in 16-bit fixed point, rounded: what Pillow computes.
    luma = images_NHWC.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
    return ((luma + 0x8000) >> 16).astype(np.uint8)[..., None]


def _resample(images_NHWC: np.ndarray, size: int, height: float, width: float) -> np.ndarray:
    """Return images resized to uint8 [N, size, size, C].

    `height` and `width` are the extent of the content in pixels of `images_NHWC`. A JPEG of odd width, halved in the
    DCT, has a last column that is half empty: resized by its array's size it would be off by up to half a pixel.
    """
    import torch
    from torch.nn.functional import interpolate

    if (size, size) == images_NHWC.shape[1:3] == (height, width):
        return np.ascontiguousarray(images_NHWC)
    writable = images_NHWC if images_NHWC.flags.writeable else images_NHWC.copy()  # torch warns about read-only memory
    # NHWC permuted to NCHW is what torch calls channels_last, for which it has vectorised 8-bit kernels. It tells by
    # the strides, and NumPy gives the axis of a single image any stride.
    single = len(writable) == 1
    images = torch.from_numpy(writable[0]).unsqueeze(0) if single else torch.from_numpy(writable)
    images_NCHW = images.permute(0, 3, 1, 2)
    # torch derives the result's size, rounded down, from the scales. The excess keeps a product like 127.99999999 from
    # being rounded to 127, and moves no pixel.
    scale = ((size + 1e-6) / height, (size + 1e-6) / width)
    resized_NCHW = interpolate(images_NCHW, scale_factor=scale, mode="bilinear", antialias=True)
    return np.ascontiguousarray(resized_NCHW.permute(0, 2, 3, 1).numpy())


def _upright(image_HWC: np.ndarray, orientation: int) -> np.ndarray:
    """Return a square image turned and mirrored as its EXIF orientation says."""
    if orientation in (5, 6, 7, 8):
        image_HWC = image_HWC.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image_HWC = image_HWC[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image_HWC = image_HWC[::-1]
    return np.ascontiguousarray(image_HWC)
