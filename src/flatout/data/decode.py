"""One image file as one array: decoded, turned upright, brought to its channels, bits and size.

JPEG files, nearly all of what people train on, are decoded by libjpeg-turbo (simplejpeg); `.npy` files and TIFF files
of many bands, or of several with 16 bits, by `data.bands`; everything else by Pillow (`data.pillow`). All then go
through one resize (`data.resize`).
Everything expensive runs in compiled code that releases the GIL, so threads use all cores.

Unusual images are always treated in the same way: EXIF orientation is applied; CMYK and YCCK are converted to RGB;
transparency is laid over white, unless there are 4 channels; of an animation the first frame is taken. A file that is
damaged, incomplete, no image, or larger than the limit is a `BadImage` with the reason.

Shape letters: N images, H height, W width, C channels.
"""

import contextlib
import io
import stat
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.data import bands, pillow
from flatout.data.bands import BadImage
from flatout.data.limits import LARGE_PIXELS, MAX_FILE_BYTES, ONE_LARGE_IMAGE, refuse_size
from flatout.data.pillow import EXIF_ORIENTATION, STRICT_PILLOW
from flatout.data.pixels import with_bits
from flatout.data.resize import MIN_REDUCTION_LEFT, TURNED, Target, placed_in, resized_to, upright, with_channels
from flatout.settings import Size, sides

if TYPE_CHECKING:
    from flatout.data.image_bytes import ImageBytes

# The exact method, part of every pack. Change it whenever a pixel can change.
RESIZE_METHOD = (
    "bilinear, antialiased (triangle filter as wide as the reduction), 8-bit, torch.nn.functional.interpolate; "
    "JPEG by libjpeg-turbo: scaled in the DCT by 1/2, 1/4 or 1/8 where at least 1.3 times the target remains, "
    "chroma replicated where the whole reduction is at least 2; other formats over 2^25 pixels averaged by a whole "
    "factor first where at least 2.6 times the target remains; 16-bit grey by its bits in use; version 4; "
    "16 bits in 32-bit floats"
)

# Files whose headers are read to find the usual shape, channels and bits.
SAMPLED = 64

# Chroma is replicated rather than interpolated where the whole reduction is at least this.
MIN_REDUCTION_FOR_REPLICATED_CHROMA = 2

JPEG_START = b"\xff\xd8\xff"
_EXIF_WITHIN_BYTES = 2**18
# The headers of most files are no longer; those of JPEG files with a thumbnail are.
_HEADER_BYTES = 4096

# libjpeg's warnings that mean lost pixels. The others (an odd JFIF version, stray bytes between segments) do not, and
# such files are common: Pillow decodes those, and itself refuses an incomplete file.
_JPEG_LOST_PIXELS = ("premature end", "bad huffman code", "instead of rst")


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """The header of an image file.

    Attributes:
        width, height: pixels of the upright image.
        mode: Pillow's, or a number of bands and their type.
        channels: 1 for grey images, 3 for colour, else the number of bands.
        bits: 8 or 16 per channel.
    """

    width: int
    height: int
    mode: str
    channels: int
    bits: int


def decode_image(path: "ImageBytes | bytes", *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return the image in `path` as uint8 [height, width, channels], or uint16.

    Args:
        path: the file or part of a container, or its bytes; the content decides the format, not the name.
        size: height and width of the result, in pixels.
        channels: 1 (ITU-R 601 luma), 3 (RGB), 4 (RGBA), or the number of bands that the file has.
        resize: "squash" (to the shape of the result); "crop" (the largest centred part of that shape, then resized; the
            same as resizing and cropping the centre, but cheaper); or "pad" (resized to fit into the result, then
            centred on black). The centre is kept to a pixel of the file, or to the divisor where a JPEG was scaled in
            the DCT, which is less than half a pixel of the result.
        bits: 8 or 16. Pixels of 8 bits become 257 times as large in 16, so that white stays white; those of 16 are
            scaled to 8 by the bits that they use.

    docs/data.md has the largest differences from Pillow's `convert`, `crop` and `resize(..., BILINEAR)`.

    Raises:
        BadImage: the file cannot be read, is no image, is damaged or incomplete, too large, of an unsupported kind, or
            has other channels.
    """
    target = Target(*sides(size), channels, resize, bits)
    data = path if isinstance(path, bytes) else read_file(path)
    image = _decode_jpeg(data, target) if data.startswith(JPEG_START) else _decode_bands(data, target)
    return image if image is not None else pillow.decode(data, target)


def read_header(path: "ImageBytes | bytes") -> ImageHeader:
    """Return the header of an image file, a part of a container, or bytes, without decoding the image.

    Raises:
        BadImage: the file cannot be read, is no image, or too large.
    """
    if isinstance(path, Path):
        start = read_file(path, length=_HEADER_BYTES)
        if header := _usual_jpeg_header(start):
            return header
    else:
        path = path if isinstance(path, bytes) else read_file(path)
        start = path[:_HEADER_BYTES]
    with io.BytesIO(path) if isinstance(path, bytes) else path.open("rb") as file, STRICT_PILLOW:
        found = bands.read_header(file, start)
        if found and (not found.is_picture or found.type.itemsize == 2):
            refuse_size(found.width, found.height)
            width, height = _turned(found.width, found.height, found.orientation)
            mode, bits = f"{found.channels} x {found.type}", 8 * found.type.itemsize
            return ImageHeader(width=width, height=height, mode=mode, channels=found.channels, bits=bits)
        file.seek(0)
        with pillow.open_image(file, start) as image:
            # Some versions of Pillow have turned the size already, of TIFF images alone.
            size = (tags[256], tags[257]) if (tags := getattr(image, "tag_v2", None)) else image.size
            width, height = _turned(*size, pillow.orientation_of(image))
            is_grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
            bits = 16 if image.mode.startswith("I") else 8
            return ImageHeader(width=width, height=height, mode=image.mode, channels=1 if is_grey else 3, bits=bits)


def _usual_jpeg_header(start: bytes) -> ImageHeader | None:
    """Return the header of a JPEG file from its first bytes, several times as fast as Pillow; None if they are too few.

    The EXIF orientation comes before the size, so that it is among them.
    """
    import simplejpeg

    if not start.startswith(JPEG_START):
        return None
    try:
        header = simplejpeg.decode_jpeg_header(start)
    except ValueError:
        return None
    height, width, colorspace = int(header[0]), int(header[1]), header[2]
    mode = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}.get(colorspace)
    if mode is None:
        return None
    refuse_size(int(width), int(height))
    width, height = _turned(width, height, _jpeg_orientation(start))
    return ImageHeader(width=width, height=height, mode=mode, channels=1 if mode == "L" else 3, bits=8)


def _turned(width: int, height: int, orientation: int) -> tuple[int, int]:
    """Return width and height of the upright image."""
    return (height, width) if orientation in TURNED else (width, height)


def read_headers(paths: "Sequence[ImageBytes]") -> list[ImageHeader]:
    """Return the headers of up to `SAMPLED` files, spread evenly; those that cannot be read are left out."""
    headers = []
    for position in np.unique(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED)).astype(int)):
        with contextlib.suppress(BadImage):
            headers.append(read_header(paths[position]))
    return headers


def read_file(path: "ImageBytes", length: int = -1) -> bytes:
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


def _decode_jpeg(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image, or None where it is a rare kind that Pillow must decode."""
    import simplejpeg

    orientation = _jpeg_orientation(data)
    target = target.turned(orientation)
    try:
        header = simplejpeg.decode_jpeg_header(data)
        height, width, colorspace = int(header[0]), int(header[1]), header[2]
        refuse_size(width, height)
        if colorspace in ("CMYK", "YCCK"):
            return None
        top, left, used_height, used_width = target.used(height, width)
        filled_height, filled_width = target.filled(used_height, used_width)
        reduction = min(used_height / filled_height, used_width / filled_width)
        divisor = next((k for k in (8, 4, 2) if reduction >= k * MIN_REDUCTION_LEFT), 1)
        image_HWC = simplejpeg.decode_jpeg(
            data,
            colorspace={1: "GRAY", 4: "RGBA"}.get(target.channels, "RGB"),
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
    if target.resize == "crop":
        top, left = top // divisor, left // divisor
        image_HWC = image_HWC[top : top - (-used_height // divisor), left : left - (-used_width // divisor)]
    image_NHWC = with_bits(with_channels(image_HWC[None], target.channels), target.bits)
    return upright(placed_in(image_NHWC, target, used_height / divisor, used_width / divisor)[0], orientation)


def _jpeg_orientation(data: bytes) -> int:
    """Return the EXIF orientation (1 is upright)."""
    from PIL import Image

    start = data.find(b"Exif\0\0", 0, _EXIF_WITHIN_BYTES)
    if start >= 0:
        with STRICT_PILLOW, contextlib.suppress(Exception):  # damaged metadata does not spoil the pixels
            exif = Image.Exif()
            exif.load(data[start : start + 2**16])
            return int(exif.get(EXIF_ORIENTATION, 1))
    return 1


# Arrays and bands


def _decode_bands(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image of a `.npy` file, or of a TIFF file of which Pillow would lose bands or bits; else None."""
    with io.BytesIO(data) as file:
        found = bands.read_header(file, data)
    if found is None or _is_for_pillow(found, target):
        return None
    refuse_size(found.width, found.height)
    is_large = found.width * found.height * found.channels > 3 * LARGE_PIXELS
    with ONE_LARGE_IMAGE if is_large else nullcontext():
        return resized_to(upright(bands.read(data, found), found.orientation)[None], target)[0]


def _is_for_pillow(found: bands.Header, target: Target) -> bool:
    """Whether Pillow decodes a file without loss of what the target has."""
    if found.is_picture and found.type.itemsize == 1:
        return target.channels in (1, 3) or found.has_alpha or found.channels != target.channels
    return found.is_picture and target.channels in (1, 3) and target.bits == 8
