"""One image file as one array: decoded, turned upright, brought to its channels, bits and size.

JPEG files, nearly all of what people train on, are decoded by libjpeg-turbo (simplejpeg); `.npy` files and TIFF files
of many bands, or of several with 16 bits, by `data.bands`; everything else by Pillow. All then go through one resize.
Everything expensive runs in compiled code that releases the GIL, so threads use all cores.

Unusual images are always treated in the same way: EXIF orientation is applied; CMYK and YCCK are converted to RGB;
transparency is laid over white, unless there are 4 channels; of an animation the first frame is taken. A file that is
damaged, incomplete, no image, or larger than the limit is a `BadImage` with the reason.

Shape letters: N images, H height, W width, C channels.
"""

import codecs
import contextlib
import io
import os
import stat
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from flatout.data import bands
from flatout.data.bands import BadImage
from flatout.data.pixels import with_bits
from flatout.errors import InputError
from flatout.settings import Size, sides

if TYPE_CHECKING:
    from flatout.data.members import Encoded

# The exact method, part of every pack. Change it whenever a pixel can change.
RESIZE_METHOD = (
    "bilinear, antialiased (triangle filter as wide as the reduction), 8-bit, torch.nn.functional.interpolate; "
    "JPEG by libjpeg-turbo: scaled in the DCT by 1/2, 1/4 or 1/8 where at least 1.3 times the target remains, "
    "chroma replicated where the whole reduction is at least 2; other formats over 2^25 pixels averaged by a whole "
    "factor first where at least 2.6 times the target remains; 16-bit grey by its bits in use; version 3; "
    "16 bits in 32-bit floats"
)

LIMIT = "FLATOUT_MAX_PIXELS"
# Larger images (512 MiB of RGB) are refused from the header, before memory is taken; Pillow's limit for an error.
MAX_PIXELS = 2 * 89_478_485
# Larger images that Pillow decodes (4 bytes for each pixel) are decoded one at a time, and converted by strips.
LARGE_PIXELS = 2**25
# Larger files are refused without reading them: some other file, named as an image.
MAX_FILE_BYTES = 2**31

# Files whose headers are read to find the usual shape, channels and bits.
SAMPLED = 64

# What the cheaper ways to decode leave out is hidden by the antialiased resize behind them, if that still reduces by
# this much after scaling in the DCT, or in all where chroma is replicated rather than interpolated.
MIN_REDUCTION_LEFT = 1.3
MIN_REDUCTION_FOR_REPLICATED_CHROMA = 2

JPEG_START = b"\xff\xd8\xff"
EXIF_ORIENTATION = 0x0112
# The orientations of images whose rows are stored as columns.
TURNED = (5, 6, 7, 8)
_EXIF_WITHIN_BYTES = 2**18
# The headers of most files are no longer; those of JPEG files with a thumbnail are.
_HEADER_BYTES = 4096
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")

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


def decode_image(path: "Encoded | bytes", *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
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
    return image if image is not None else _decode_with_pillow(data, target)


def read_header(path: "Encoded | bytes") -> ImageHeader:
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
            _refuse_bomb(found.width, found.height)
            mode = f"{found.channels} x {found.type}"
            size = {"width": found.width, "height": found.height}
            return ImageHeader(**size, mode=mode, channels=found.channels, bits=8 * found.type.itemsize)
        file.seek(0)
        with _open_with_pillow(file, start) as image:
            width, height = image.size
            if _orientation(image) in TURNED:
                width, height = height, width
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
    _refuse_bomb(int(width), int(height))
    if _jpeg_orientation(start) in TURNED:
        width, height = height, width
    return ImageHeader(width=int(width), height=int(height), mode=mode, channels=1 if mode == "L" else 3, bits=8)


def read_headers(paths: "Sequence[Encoded]") -> list[ImageHeader]:
    """Return the headers of up to `SAMPLED` files, spread evenly; those that cannot be read are left out."""
    headers = []
    for position in np.unique(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED)).astype(int)):
        with contextlib.suppress(BadImage):
            headers.append(read_header(paths[position]))
    return headers


def resize_images(images_NHWC: np.ndarray, *, size: Size, channels: int, resize: str, bits: int = 8) -> np.ndarray:
    """Return decoded images as uint8 or uint16 [N, height, width, channels], resized as `decode_image` does."""
    return _resized(images_NHWC, Target(*sides(size), channels, resize, bits))


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


class Target(NamedTuple):
    """What an image is to become; see `decode_image`."""

    height: int
    width: int
    channels: int
    resize: str
    bits: int

    def turned(self, orientation: int) -> "Target":
        """Return what an image becomes before it is turned upright, given its EXIF orientation (1 is upright)."""
        return self._replace(height=self.width, width=self.height) if orientation in TURNED else self

    def used(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of what is used of an image: all, or the largest centred part."""
        if self.resize != "crop":
            return 0, 0, height, width
        # The whole of one side, and as much of the other as the target's shape has.
        if height * self.width <= width * self.height:
            used = height, max(1, round(height * self.width / self.height))
        else:
            used = max(1, round(width * self.height / self.width)), width
        return (height - used[0]) // 2, (width - used[1]) // 2, *used

    def filled(self, height: float, width: float) -> tuple[int, int]:
        """Return how much of the target the used part of an image fills: all, or less one way if it is to be padded."""
        if self.resize != "pad":
            return self.height, self.width
        if height * self.width <= width * self.height:
            return max(1, round(self.width * height / width)), self.width
        return self.height, max(1, round(self.height * width / height))


# JPEG


def _decode_jpeg(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image, or None where it is a rare kind that Pillow must decode."""
    import simplejpeg

    orientation = _jpeg_orientation(data)
    target = target.turned(orientation)
    try:
        header = simplejpeg.decode_jpeg_header(data)
        height, width, colorspace = int(header[0]), int(header[1]), header[2]
        _refuse_bomb(width, height)
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
    image_NHWC = with_bits(_with_channels(image_HWC[None], target.channels), target.bits)
    return _upright(_placed(image_NHWC, target, used_height / divisor, used_width / divisor)[0], orientation)


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


STRICT_PILLOW = _StrictPillow()
_ONE_LARGE_IMAGE = threading.Lock()


def _open_with_pillow(file: BinaryIO, start: bytes):
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
        _refuse_bomb(image.width, image.height)
    except BadImage:
        image.close()
        raise
    return image


def _decode_with_pillow(data: bytes, target: Target) -> np.ndarray:
    with STRICT_PILLOW:
        image = _open_with_pillow(io.BytesIO(data), data)
        is_large = image.width * image.height > LARGE_PIXELS
        with _ONE_LARGE_IMAGE if is_large else nullcontext(), image:
            try:
                image.load()
                orientation = _orientation(image)
                target = target.turned(orientation)
                image_HWC = _to_array(image, target, is_large=is_large)
            except (BadImage, MemoryError):
                raise
            except Exception as error:  # as for the header: any error here means a damaged file
                raise BadImage(f"is truncated or damaged: {error}") from None
    return _upright(_resized(image_HWC[None], target)[0], orientation)


def _orientation(image) -> int:
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
            raise BadImage("has 32-bit pixels, which have no agreed range; convert it to 8 or 16 bits")
        if target.bits == 16:
            return np.asarray(image).astype(np.uint16)[..., None]
    if not is_large:
        return _strip_to_eight_bits(image, highest, 1, target.channels)
    left = 2 * MIN_REDUCTION_LEFT
    factor = max(1, int(min(image.height / (left * target.height), image.width / (left * target.width))))
    rows = max(factor, LARGE_PIXELS // 8 // image.width // factor * factor)
    boxes = ((0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows))
    return np.concatenate([_strip_to_eight_bits(image.crop(box), highest, factor, target.channels) for box in boxes])


def _strip_to_eight_bits(image, highest: int, factor: int, channels: int) -> np.ndarray:
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
    if start[4:8] == b"ftyp" and start[8:12] in HEIF_BRANDS:
        return "is HEIC, which needs the package pillow-heif: pip install pillow-heif"
    if start[4:12] in (b"ftypavif", b"ftypavis"):
        return "is AVIF, which this Pillow cannot decode: pip install pillow-avif-plugin, or a newer Pillow"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "is WebP, which this Pillow cannot decode: install a Pillow that has WebP"
    return f"is not an image of a known format (it begins with {start[:8]!r})"


# Arrays and bands


def _decode_bands(data: bytes, target: Target) -> np.ndarray | None:
    """Return the image of a `.npy` file, or of a TIFF file of which Pillow would lose bands or bits; else None."""
    with io.BytesIO(data) as file:
        found = bands.read_header(file, data)
    if found is None or _is_for_pillow(found, target):
        return None
    _refuse_bomb(found.width, found.height)
    is_large = found.width * found.height * found.channels > 3 * LARGE_PIXELS
    with _ONE_LARGE_IMAGE if is_large else nullcontext():
        return _resized(bands.read(data, found)[None], target)[0]


def _is_for_pillow(found: bands.Header, target: Target) -> bool:
    """Whether Pillow decodes a file without loss of what the target has."""
    if found.is_picture and found.type.itemsize == 1:
        return target.channels in (1, 3) or found.has_alpha or found.channels != target.channels
    return found.is_picture and target.channels in (1, 3) and target.bits == 8


# All


def _refuse_bomb(width: int, height: int) -> None:
    if width * height > max_pixels():
        raise BadImage(f"has {width} x {height} pixels, more than {max_pixels():,}, the limit ({LIMIT} sets it)")


def _with_channels(images_NHWC: np.ndarray, channels: int) -> np.ndarray:
    found = images_NHWC.shape[-1]
    if found == channels:
        return images_NHWC
    if (found, channels) == (1, 3):
        return np.repeat(images_NHWC, 3, axis=-1)
    if (found, channels) != (3, 1):
        raise BadImage(f"has {found} channel{'s' * (found > 1)}, but channels = {channels}")
    # ITU-R 601 luma in 16-bit fixed point, rounded: what Pillow computes.
    luma = images_NHWC.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
    return ((luma + 0x8000) >> 16).astype(images_NHWC.dtype)[..., None]


def _resized(images_NHWC: np.ndarray, target: Target) -> np.ndarray:
    """Return images with the target's channels, bits and size."""
    images_NHWC = with_bits(_with_channels(images_NHWC, target.channels), target.bits)
    top, left, height, width = target.used(*images_NHWC.shape[1:3])
    return _placed(images_NHWC[:, top : top + height, left : left + width], target, height, width)


def _placed(images_NHWC: np.ndarray, target: Target, height: float, width: float) -> np.ndarray:
    """Return images resized and, if they do not fill the target, centred on black; arguments as of `_resample`."""
    filled = target.filled(height, width)
    resized = _resample(images_NHWC, *filled, height, width)
    if filled == (target.height, target.width):
        return resized
    images = np.zeros((len(resized), target.height, target.width, resized.shape[-1]), resized.dtype)
    top, left = (target.height - filled[0]) // 2, (target.width - filled[1]) // 2
    images[:, top : top + filled[0], left : left + filled[1]] = resized
    return images


def _resample(images_NHWC: np.ndarray, rows: int, columns: int, height: float, width: float) -> np.ndarray:
    """Return images resized to [N, rows, columns, C].

    `height` and `width` are the extent of the content in pixels of `images_NHWC`. A JPEG of odd width, halved in the
    DCT, has a last column that is half empty: resized by its array's size it would be off by up to half a pixel.
    """
    import torch
    from torch.nn.functional import interpolate

    if (rows, columns) == images_NHWC.shape[1:3] == (height, width):
        return np.ascontiguousarray(images_NHWC)
    is_wide = images_NHWC.dtype == np.uint16  # for which torch has no resize
    if is_wide:
        writable = images_NHWC.astype(np.float32)
    else:
        writable = images_NHWC if images_NHWC.flags.writeable else images_NHWC.copy()  # torch warns otherwise
    # NHWC permuted to NCHW is what torch calls channels_last, for which it has vectorised 8-bit kernels. It tells by
    # the strides, and NumPy gives the axis of a single image any stride.
    single = len(writable) == 1
    images = torch.from_numpy(writable[0]).unsqueeze(0) if single else torch.from_numpy(writable)
    images_NCHW = images.permute(0, 3, 1, 2)
    # torch derives the result's size, rounded down, from the scales. The excess keeps a product like 127.99999999 from
    # being rounded to 127, and moves no pixel.
    scale = ((rows + 1e-6) / height, (columns + 1e-6) / width)
    resized_NCHW = interpolate(images_NCHW, scale_factor=scale, mode="bilinear", antialias=True)
    resized = resized_NCHW.permute(0, 2, 3, 1).numpy()
    return np.rint(resized).clip(0, 0xFFFF).astype(np.uint16) if is_wide else np.ascontiguousarray(resized)


def _upright(image_HWC: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image turned and mirrored as its EXIF orientation says."""
    if orientation in TURNED:
        image_HWC = image_HWC.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image_HWC = image_HWC[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image_HWC = image_HWC[::-1]
    return np.ascontiguousarray(image_HWC)
