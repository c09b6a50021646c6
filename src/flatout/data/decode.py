"""Decode an image file to an array: upright, with the wanted channels, bits and size.

JPEG files, nearly all of what people train on, are decoded by libjpeg-turbo (simplejpeg); TIFF files of which Pillow
would lose bands or bits by tifffile; everything else by Pillow. All then go through one resize (`data.pixels`).
Everything expensive runs in compiled code that releases the GIL, so threads use all cores.

Unusual images are always treated in the same way: EXIF orientation is applied; CMYK and YCCK are converted to RGB;
transparency is composed over white, unless there are 4 channels; of an animation the first frame is taken. A file that
is damaged, incomplete, not an image, or larger than the limit is a `BadImage` with the reason.

Shape letters: N images, H height, W width, C channels.
"""

import io
import logging
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from flatout.config.settings import Size, sides
from flatout.data.pixels import (
    MIN_REDUCTION_LEFT,
    TURNED,
    BadImage,
    Target,
    placed_in,
    resized_to,
    upright,
    with_bits,
    with_channels,
)
from flatout.utils.errors import InputError

# Version of the decoding, recorded in every pack. Change it whenever a pixel can change.
RESIZE_METHOD = (
    "bilinear, antialiased (triangle filter as wide as the reduction), 8-bit, torch.nn.functional.interpolate; "
    "JPEG by libjpeg-turbo: scaled in the DCT by 1/2, 1/4 or 1/8 where at least 1.3 times the target remains, "
    "chroma replicated where the whole reduction is at least 2; other formats over 2^25 pixels averaged by a whole "
    "factor first where at least 2.6 times the target remains; 16-bit grey by its bits in use; version 4; "
    "16 bits in 32-bit floats"
)
# Chroma is replicated rather than interpolated if the total reduction is at least this.
MIN_REDUCTION_FOR_REPLICATED_CHROMA = 2
# Files whose headers are read to find the usual shape, channels and bits.
SAMPLED = 64

# Limits that keep damaged and hostile files from exhausting memory.
LIMIT = "FLATOUT_MAX_PIXELS"
# Larger images (512 MiB of RGB) are refused by their header, before allocating memory; Pillow's limit.
MAX_PIXELS = 2 * 89_478_485
# Larger images of other formats than JPEG are decoded one at a time, and averaged before they are resized.
LARGE_PIXELS = 2**25
# Larger files are refused unread: they are not images.
MAX_FILE_BYTES = 2**31
# Larger arrays, in bytes, are refused before allocation.
MAX_ARRAY_BYTES = 2**31
_ONE_LARGE_IMAGE = threading.Lock()

JPEG_START = b"\xff\xd8\xff"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
EXIF_ORIENTATION = 0x0112
_EXIF_WITHIN_BYTES = 2**18
# Enough bytes to detect the format.
_START_BYTES = 512
# libjpeg's warnings that mean lost pixels. The others (an odd JFIF version, stray bytes between segments) do not, and
# such files are common: Pillow decodes those, and itself refuses an incomplete file.
_JPEG_LOST_PIXELS = ("premature end", "bad huffman code", "instead of rst")
# Tags of TIFF 6.0, and the values of pictures: grey or RGB, and the kinds of alpha band.
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SAMPLES, _EXTRA, _FORMAT = 256, 257, 258, 262, 277, 338, 339
_GREY, _RGB, _ALPHA, _UNSIGNED = (0, 1), 2, (1, 2), 1

_HEIF = re.compile(rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
# Files often found among images: patterns of their first bytes in lower case, and the message.
_STRANGERS = {
    rb"\s*(\xef\xbb\xbf)?\s*(<!doctype html|.*<html|<svg|<\?xml)": "is HTML, XML or SVG, not an image",
    rb"version https://git-lfs": "is a pointer of Git LFS, not an image: run git lfs pull",
    _HEIF.pattern: "is HEIC, which needs the package pillow-heif: pip install pillow-heif",
    rb"....ftypavi[fs]|riff....webp": "is AVIF or WebP, which this Pillow cannot decode: pip install -U pillow",
    rb"ii[*+]\0|mm\0[*+]": "is a damaged TIFF file, or of a rare kind, such as floats: convert it to 8 or 16 bits",
}


class ImageBytes(Protocol):
    """An encoded image: a `pathlib.Path` or a part of another file; `str()` is its name in messages."""

    def read_bytes(self) -> bytes:
        """Return the bytes; raises OSError."""
        ...


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


def decode_image(path: ImageBytes | bytes, *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return the image in `path` as uint8 [height, width, channels], or uint16.

    Args:
        path: the file or part of a container, or its bytes; the content decides the format, not the name.
        size: height and width of the result, in pixels.
        channels: 1 (ITU-R 601 luma), 3 (RGB), 4 (RGBA), or the file's number of bands.
        resize: "squash" (to the shape of the result); "crop" (the largest centred part of that shape, then resized; the
            same as resizing and cropping the centre, but cheaper); or "pad" (resized to fit into the result, then
            centred on black). The centre is kept to a pixel of the file, or to the divisor where a JPEG was scaled in
            the DCT, which is less than half a pixel of the result.
        bits: 8 or 16. 8-bit pixels are multiplied by 257 for 16, so that white stays white; 16-bit pixels are scaled to
            8 by the bits in use.

    docs/data.md has the largest differences from Pillow's `convert`, `crop` and `resize(..., BILINEAR)`.

    Raises:
        BadImage: the file cannot be read, is not an image, is damaged or incomplete, too large, of an unsupported kind,
            or has other channels.
    """
    target = Target(*sides(size), channels, resize, bits)
    data, image = path if isinstance(path, bytes) else read_file(path), None
    if data.startswith(JPEG_START):
        image = _decode_jpeg(data, target)
    elif data.startswith(TIFF_STARTS):
        image = _decode_bands(data, target)
    return image if image is not None else _decode_with_pillow(data, target)


def read_header(path: ImageBytes | bytes) -> ImageHeader:
    """Return the header of an image file, a part of a container, or bytes; raises BadImage."""
    if not isinstance(path, bytes | Path):
        path = read_file(path)
    start = path[:_START_BYTES] if isinstance(path, bytes) else read_file(path, length=_START_BYTES)
    with io.BytesIO(path) if isinstance(path, bytes) else path.open("rb") as file, STRICT_PILLOW:
        bands = _bands_of(file) if start.startswith(TIFF_STARTS) else None
        if bands and (not bands.is_picture or bands.bits == 16):
            refuse_size(bands.width, bands.height)
            width, height = _turned(bands.width, bands.height, bands.orientation)
            mode = f"{bands.count} x uint{bands.bits}"
            return ImageHeader(width=width, height=height, mode=mode, channels=bands.count, bits=bands.bits)
        file.seek(0)
        with _open_with_pillow(file, start) as image:
            # Some versions of Pillow have already transposed the size, for TIFF images only.
            size = (tags[_WIDTH], tags[_HEIGHT]) if (tags := getattr(image, "tag_v2", None)) else image.size
            width, height = _turned(*size, _orientation_of(image))
            bits = 16 if image.mode.startswith("I") else 8
            channels = 1 if bits == 16 or image.mode in ("1", "L", "LA", "La") else 3
            return ImageHeader(width=width, height=height, mode=image.mode, channels=channels, bits=bits)


def read_headers(paths: Sequence[ImageBytes]) -> list[ImageHeader]:
    """Return the headers of up to `SAMPLED` files, spread evenly; those that cannot be read are left out."""
    headers = []
    for position in np.unique(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED)).astype(int)):
        with suppress(BadImage):
            headers.append(read_header(paths[position]))
    return headers


def read_file(path: ImageBytes, length: int = -1) -> bytes:
    """Return the first `length` bytes of a file, or all bytes of a file or of a part of a container.

    Raises:
        BadImage: it cannot be read, is empty, too large or not a regular file.
    """
    try:
        if isinstance(path, Path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a FIFO would block, a device would never end
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


def refuse_size(width: int, height: int) -> None:
    """Raise BadImage if an image has no pixels, or more than FLATOUT_MAX_PIXELS; InputError if that is not a number."""
    text = os.environ.get(LIMIT, "")
    if text and not (text.isdecimal() and int(text)):
        raise InputError(f"{LIMIT} = {text!r}: must be a number of pixels, such as 400000000")
    most = int(text or MAX_PIXELS)
    if width < 1 or height < 1:
        raise BadImage(f"has {width} x {height} pixels")
    if width * height > most:
        raise BadImage(f"has {width} x {height} pixels, more than {most:,}, the limit ({LIMIT} sets it)")


def _turned(width: int, height: int, orientation: int) -> tuple[int, int]:
    return (height, width) if orientation in TURNED else (width, height)


# JPEG


def _decode_jpeg(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image, or None for rare kinds that Pillow must decode."""
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
    start = data.find(b"Exif\0\0", 0, _EXIF_WITHIN_BYTES)
    if start >= 0:
        with STRICT_PILLOW, suppress(Exception):  # damaged metadata does not affect the pixels
            exif = Image.Exif()
            exif.load(data[start : start + 2**16])
            return int(exif.get(EXIF_ORIENTATION, 1))
    return 1


# TIFF files of any number of bands


class _Bands(NamedTuple):
    """The header of a TIFF file of several bands of 8 or 16 bits.

    `is_picture`: Pillow can decode it, possibly losing bands or bits. `has_alpha`: a band is transparency, or the
    colours are neither grey nor RGB. `orientation` is the EXIF orientation, not applied yet.
    """

    height: int
    width: int
    count: int
    bits: int
    is_picture: bool
    has_alpha: bool
    orientation: int


def _decode_bands(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image of a TIFF file of which Pillow would lose bands or bits; else None."""
    found = _bands_of(io.BytesIO(data))
    is_plain = target.channels in (1, 3)
    if found is None or (found.is_picture and is_plain and 8 in (found.bits, target.bits)):
        return None
    if found.is_picture and found.bits == 8 and (found.has_alpha or found.count != target.channels):
        return None
    refuse_size(found.width, found.height)
    values = math.prod(found[:3])
    if values * found.bits // 8 > MAX_ARRAY_BYTES:
        raise BadImage(f"has {found.count} channels of {found.height} x {found.width} pixels, more than 2 GiB")
    with _ONE_LARGE_IMAGE if values > 3 * LARGE_PIXELS else nullcontext():
        return resized_to(upright(_read_tiff(data), found.orientation)[None], target)[0]


def _bands_of(file: BinaryIO) -> _Bands | None:
    """Return the header of a TIFF file; None for those that Pillow decodes, and for damaged ones, which it names."""
    try:
        start = file.read(8)
        if 43 in start[2:4]:  # BigTIFF
            start += file.read(8)
        tags = ImageFileDirectory_v2(start)
        file.seek(tags.next)
        tags.load(file)
        samples, bits = int(tags.get(_SAMPLES, 1)), set(tags.get(_BITS, (1,)))
        if samples < 2 or bits not in ({8}, {16}) or set(tags.get(_FORMAT, (_UNSIGNED,))) != {_UNSIGNED}:
            return None
        is_grey, is_rgb = tags.get(_PHOTOMETRIC) in _GREY, tags.get(_PHOTOMETRIC) == _RGB
        has_other_bands = (is_grey and (samples > 2 or bits == {16})) or (is_rgb and samples < 3)
        return _Bands(
            height=int(tags[_HEIGHT]),
            width=int(tags[_WIDTH]),
            count=samples,
            bits=bits.pop(),
            is_picture=samples <= 4 and not has_other_bands,
            has_alpha=bool(set(tags.get(_EXTRA, ())) & set(_ALPHA)) or not (is_grey or is_rgb),
            orientation=int(tags.get(EXIF_ORIENTATION, 1)),
        )
    except Exception:
        return None


def _read_tiff(data: bytes) -> np.ndarray:
    import tifffile

    # Its log about damaged files becomes the reason, or is ignored.
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            parts = zip(page.dataoffsets, page.databytecounts, strict=True)
            if not all(offset + count <= len(data) for offset, count in parts):
                raise BadImage("is truncated: some of its pixels are not there")
            axes, pixels = page.axes, page.asarray(maxworkers=1)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # as with Pillow, any error here means a damaged file, or a missing package
        if "imagecodecs" in str(error):
            raise BadImage(f"needs the package imagecodecs, pip install imagecodecs: {error}") from None
        raise BadImage(f"is truncated or damaged: {error}") from None
    if axes not in ("YXS", "SYX"):
        raise BadImage(f"has bands in the order {axes}; save them as YXS or SYX")
    return np.ascontiguousarray(pixels if axes == "YXS" else pixels.transpose(1, 2, 0))


# All other formats


class _StrictPillow:
    """While active, Pillow refuses incomplete files, has no pixel limit of its own, and emits no warnings.

    These settings are global: the first thread changes them, the last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
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


def _decode_with_pillow(data: bytes, target: Target) -> np.ndarray:
    with STRICT_PILLOW:
        image = _open_with_pillow(io.BytesIO(data), data)
        with _ONE_LARGE_IMAGE if image.width * image.height > LARGE_PIXELS else nullcontext(), image:
            try:
                image.load()
                orientation = _orientation_of(image)
                target = target.turned(orientation)
                image_HWC = _to_array(image, target)
            except (BadImage, MemoryError):
                raise
            except Exception as error:  # as for the header: any error here means a damaged file
                raise BadImage(f"is truncated or damaged: {error}") from None
    del image  # free the memory before the resize
    return upright(resized_to(image_HWC[None], target)[0], orientation)


def _open_with_pillow(file: BinaryIO, start: bytes) -> Image.Image:
    if _HEIF.match(start):
        with suppress(ImportError):
            import pillow_heif  # pyright: ignore[reportMissingImports]

            pillow_heif.register_heif_opener()
    try:
        image = Image.open(file)
    except UnidentifiedImageError:
        start = start[:_START_BYTES]
        known = (message for pattern, message in _STRANGERS.items() if re.match(pattern, start.lower(), re.DOTALL))
        raise BadImage(next(known, f"is not an image of a known format (it begins with {start[:8]!r})")) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's many formats raise nearly every built-in error on a damaged header
        raise BadImage(f"is truncated or damaged: {error}") from None
    try:
        refuse_size(image.width, image.height)
        if start.startswith(TIFF_STARTS):
            boxes = [tile[1] for tile in getattr(image, "tile", ())]
            stored = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
            if stored < image.width * image.height:
                raise BadImage("is truncated or damaged: some of its pixels are not there")
    except BadImage:
        image.close()
        raise
    return image


def _orientation_of(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # damaged metadata does not affect the pixels
        return 1


def _to_array(image: Image.Image, target: Target) -> np.ndarray:
    """Return a loaded image as uint8 [H, W, 1, 3 or 4] or uint16 [H, W, 1], box-averaged if large."""
    if image.mode == "F":
        raise BadImage("has floating-point pixels, which have no agreed range; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadImage("has 32-bit or negative pixels, which have no agreed range; convert it to 8 or 16 bits")
        values = values.astype(np.uint16)
        if target.bits == 16:
            return values[..., None]
        image = Image.fromarray(with_bits(values, 8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if target.channels != 4:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    else:
        mode = "L" if image.mode in ("1", "L") else "RGB"
        image = image if image.mode == mode else image.convert(mode)
        image = image.convert("RGBA") if target.channels == 4 else image
    if image.width * image.height > LARGE_PIXELS:
        left = 2 * MIN_REDUCTION_LEFT
        factor = int(min(image.height / (left * target.height), image.width / (left * target.width)))
        image = image.reduce(factor) if factor > 1 else image
    if target.channels == 1 and image.mode == "RGB":
        image = image.convert("L")  # see `with_channels`; takes less memory
    return np.array(image).reshape(image.height, image.width, -1)
