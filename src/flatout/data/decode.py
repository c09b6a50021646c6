"""Decode an image file to an array: upright, with the wanted channels, bits and size.

JPEG files are decoded by libjpeg-turbo, TIFF files of which Pillow would lose bands or bits by tifffile, all else by
Pillow; all then go through one resize. A file that cannot be used is a `BadImage` with the reason.
"""

import io
import logging
import os
import stat
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, UnidentifiedImageError

from flatout.config.settings import Size, sides
from flatout.data import pixels
from flatout.data.pixels import MIN_REDUCTION_LEFT, TURNED, BadImage, Target
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from tifffile import TiffPage

# Version of the decoding, recorded in every pack. Change it whenever a pixel can change.
RESIZE_METHOD = (
    "bilinear, antialiased (triangle filter as wide as the reduction), 8-bit, torch.nn.functional.interpolate; "
    "JPEG by libjpeg-turbo: scaled in the DCT by 1/2, 1/4 or 1/8 where at least 1.3 times the target remains, "
    "chroma replicated where the whole reduction is at least 2; other formats over 2^25 pixels averaged by a whole "
    "factor first where at least 2.6 times the target remains; 16-bit grey by its bits in use; version 4; "
    "16 bits in 32-bit floats"
)
SAMPLED = 64  # files whose headers are read to find the usual shape, channels and bits

# Limits that keep damaged and hostile files from exhausting memory.
LIMIT = "FLATOUT_MAX_PIXELS"
MAX_PIXELS = 2 * 89_478_485  # larger images (512 MiB of RGB) are refused by their header; Pillow's limit
LARGE_PIXELS = 2**25  # larger images, but for JPEG, are decoded one at a time, and averaged before they are resized
MAX_FILE_BYTES = MAX_ARRAY_BYTES = 2**31  # larger files are refused unread, larger arrays before allocation
_ONE_LARGE_IMAGE = threading.Lock()

JPEG_START = b"\xff\xd8\xff"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
EXIF_ORIENTATION = 0x0112
# libjpeg's warnings that mean lost pixels. The others (an odd JFIF version, stray bytes between segments) do not, and
# such files are common: Pillow decodes those, and itself refuses an incomplete file.
_JPEG_LOST_PIXELS = ("premature end", "bad huffman code", "instead of rst")
# Tags of TIFF 6.0, and their values: grey or RGB, the kinds of alpha band, unsigned integers.
_WIDTH, _HEIGHT = 256, 257
# tifffile's log about damaged files becomes the reason, or is ignored.
logging.getLogger("tifffile").addHandler(logging.NullHandler())
_GREY, _RGB, _ALPHA, _UNSIGNED = (0, 1), 2, (1, 2), 1


class ImageBytes(Protocol):
    """An encoded image: a `pathlib.Path` or a part of another file; `str()` is its name in messages."""

    def read_bytes(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """The header of an image file; its size is upright."""

    width: int
    height: int
    mode: str  # Pillow's, or number and type of the bands
    channels: int
    bits: int


def decode_image(path: ImageBytes | bytes, *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return the image in `path` as uint8 [height, width, channels], or uint16 with 16 `bits`; raise BadImage.

    The content decides the format, not the name. `channels` are 1 (ITU-R 601 luma), 3 (RGB), 4 (RGBA), or the file's
    number of bands. `resize` is "squash" (to the shape of the result), "crop" (the largest centred part of that shape,
    then resized), or "pad" (resized to fit into the result, then centred on black). The centre is kept to less than
    half a pixel of the result. For the conversion of `bits` see `with_bits`.
    """
    target = Target(*sides(size), channels, resize, bits)
    data, image = path if isinstance(path, bytes) else read_file(path), None
    if data.startswith(JPEG_START):
        image = _decode_jpeg(data, target)
    elif data.startswith(TIFF_STARTS):
        image = _decode_bands(data, target)
    return image if image is not None else _decode_with_pillow(data, target)


def read_header(path: ImageBytes | bytes) -> ImageHeader:
    if not isinstance(path, bytes | Path):
        path = read_file(path)
    start = path if isinstance(path, bytes) else read_file(path, length=512)  # tells the format
    with io.BytesIO(path) if isinstance(path, bytes) else path.open("rb") as file, STRICT_PILLOW:
        page = _bands_of(file) if start.startswith(TIFF_STARTS) else None
        if page and (page.bitspersample == 16 or not _is_picture(page)):
            width, height, orientation = page.imagewidth, page.imagelength, page.tags.valueof(EXIF_ORIENTATION)
            refuse_size(width, height)
            channels, bits = page.samplesperpixel, page.bitspersample
            mode = f"{channels} x uint{bits}"
        else:
            file.seek(0)
            with _open_with_pillow(file, start) as image:
                # Some versions of Pillow have already transposed the size, for TIFF images only.
                tags = getattr(image, "tag_v2", None)
                width, height = (tags[_WIDTH], tags[_HEIGHT]) if tags else image.size
                mode, orientation = image.mode, orientation_of(image)
                bits = 16 if mode.startswith("I") else 8
                channels = 1 if bits == 16 or mode in ("1", "L", "LA", "La") else 3
    if orientation in TURNED:
        width, height = height, width
    return ImageHeader(width=width, height=height, mode=mode, channels=channels, bits=bits)


def read_headers(paths: Sequence[ImageBytes]) -> list[ImageHeader]:
    """Return the headers of up to `SAMPLED` files, spread evenly; those that cannot be read are left out."""
    headers = []
    for position in np.unique(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED)).astype(int)):
        with suppress(BadImage):
            headers.append(read_header(paths[position]))
    return headers


def read_file(path: ImageBytes, length: int = -1) -> bytes:
    """Return the first `length` bytes of a file, or all bytes of a file or of a part of a container."""
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


def over_white(image: Image.Image) -> Image.Image:
    """Return a transparent image over white, in mode RGB."""
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


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
            fastupsample=reduction >= 2,  # replicates the chroma
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
    image_NHWC = pixels.with_bits(pixels.with_channels(image_HWC[None], target.channels), target.bits)
    placed_NHWC = pixels.placed_in(image_NHWC, target, used_height / divisor, used_width / divisor)
    return pixels.upright(placed_NHWC[0], orientation)


def _jpeg_orientation(data: bytes) -> int:
    start = data.find(b"Exif\0\0", 0, 2**18)
    if start >= 0:
        with STRICT_PILLOW, suppress(Exception):  # damaged metadata does not affect the pixels
            exif = Image.Exif()
            exif.load(data[start : start + 2**16])
            return int(exif.get(EXIF_ORIENTATION, 1))
    return 1


# TIFF files of any number of bands


def _decode_bands(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image of a TIFF file of which Pillow would lose bands or bits; else None."""
    page = _bands_of(io.BytesIO(data))
    if page is None:
        return None
    count, bits = page.samplesperpixel, page.bitspersample
    if _is_picture(page):
        is_plain = target.channels in (1, 3) and 8 in (bits, target.bits)
        has_alpha = page.photometric not in (*_GREY, _RGB) or any(kind in _ALPHA for kind in page.extrasamples)
        if is_plain or (bits == 8 and (has_alpha or count != target.channels)):
            return None
    height, width = page.imagelength, page.imagewidth
    refuse_size(width, height)
    if height * width * count * bits // 8 > MAX_ARRAY_BYTES:
        raise BadImage(f"has {count} channels of {height} x {width} pixels, more than 2 GiB")
    with _ONE_LARGE_IMAGE if height * width * count > 3 * LARGE_PIXELS else nullcontext():
        with _damage_refused():
            parts = zip(page.dataoffsets, page.databytecounts, strict=True)
            if not all(offset + size <= len(data) for offset, size in parts):
                raise BadImage("is truncated: some of its pixels are not there")
            bands = page.asarray(maxworkers=1)
        if page.axes not in ("YXS", "SYX"):
            raise BadImage(f"has bands in the order {page.axes}; save them as YXS or SYX")
        image_HWC = bands if page.axes == "YXS" else bands.transpose(1, 2, 0)
        return pixels.resized_to(pixels.upright(image_HWC, page.tags.valueof(EXIF_ORIENTATION))[None], target)[0]


def _bands_of(file: BinaryIO) -> "TiffPage | None":
    """Return the first page of a TIFF file of several bands of 8 or 16 bits; None for others, and for damaged ones."""
    import tifffile

    with suppress(Exception):
        page: Any = tifffile.TiffFile(file).pages.first
        if page.samplesperpixel > 1 and page.bitspersample in (8, 16) and page.sampleformat == _UNSIGNED:
            return page
    return None


def _is_picture(page: "TiffPage") -> bool:
    """Whether Pillow can decode it, possibly losing bands or bits."""
    if page.photometric in _GREY:
        return page.samplesperpixel == 2 and page.bitspersample == 8
    return page.samplesperpixel in ((3, 4) if page.photometric == _RGB else (2, 3, 4))


# All other formats


class _StrictPillow:
    """While active, Pillow refuses incomplete files, has no pixel limit of its own, and emits no warnings.

    These settings are global: the first thread changes them, the last one restores them.
    """

    def __init__(self) -> None:
        self._lock, self._before, self._inside = threading.Lock(), ExitStack(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
                self._before.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
                self._before.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
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
        turn = _ONE_LARGE_IMAGE if image.width * image.height > LARGE_PIXELS else nullcontext()
        with turn, closing(image), _damage_refused():  # closing frees the pixels before the next image's turn
            image.load()
            orientation = orientation_of(image)
            target = target.turned(orientation)
            image_HWC = _to_array(image, target)
    return pixels.upright(pixels.resized_to(image_HWC[None], target)[0], orientation)


def _open_with_pillow(file: BinaryIO, start: bytes) -> Image.Image:
    if start[4:8] == b"ftyp":
        with suppress(ImportError):
            import pillow_heif  # pyright: ignore[reportMissingImports]

            pillow_heif.register_heif_opener()
    with _damage_refused():
        try:
            image = Image.open(file)
        except UnidentifiedImageError:
            fix = "; HEIC needs pip install pillow-heif" if start[4:8] == b"ftyp" else ""
            raise BadImage(f"is not an image of a known format (it begins with {start[:40]!r}){fix}") from None
    refuse_size(image.width, image.height)
    if start.startswith(TIFF_STARTS):
        boxes = [tile[1] for tile in getattr(image, "tile", ())]
        stored = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
        if stored < image.width * image.height:
            raise BadImage("is truncated or damaged: some of its pixels are not there")
    return image


@contextmanager
def _damage_refused() -> Iterator[None]:
    """Turn an error of a decoder into BadImage: on damaged files they raise nearly every built-in error."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        raise BadImage(f"is truncated or damaged, or needs another package: {error}") from None


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none, or it is damaged."""
    with suppress(Exception):  # damaged metadata does not affect the pixels
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    return 1


def _to_array(image: Image.Image, target: Target) -> np.ndarray:
    if image.mode == "F":
        raise BadImage("has floating-point pixels, which have no agreed range; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadImage("has 32-bit or negative pixels, which have no agreed range; convert it to 8 or 16 bits")
        values = values.astype(np.uint16)
        if target.bits == 16:
            if target.channels == 4:
                return np.stack([values, values, values, np.full_like(values, 0xFFFF)], axis=-1)
            return values[..., None]
        image = Image.fromarray(pixels.with_bits(values, 8))
    if image.has_transparency_data:
        image = image.convert("RGBA") if target.channels == 4 else over_white(image)
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
