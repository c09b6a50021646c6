"""Images that are arrays of numbers: `.npy` files, and TIFF files of any number of bands.

Shape letters: H height, W width, C channels.
"""

import contextlib
import io
import logging
import math
from typing import BinaryIO, NamedTuple

import numpy as np

NPY_START = b"\x93NUMPY"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Arrays that would take more bytes are refused before they take memory.
MAX_BYTES = 2**31
# Fewer rows than columns and channels, and no more than these, are channels that come first; patches are square.
_MOST_ROWS_OF_CHANNELS = 16
# Tags of TIFF 6.0, and the values that make the bands a picture: grey or RGB, and the kinds of an alpha band.
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _EXTRA, _FORMAT = 256, 257, 258, 262, 274, 277, 338, 339
_GREY, _RGB, _ALPHA, _UNSIGNED = (0, 1), 2, (1, 2), 1


class BadImage(ValueError):
    """A file that cannot be used as an image; the message is the reason, without the file's name."""


class Header(NamedTuple):
    """What the header of a file says.

    Attributes:
        height, width, channels: of the image.
        type: of its pixels.
        is_tiff: whether it is a TIFF file, or a `.npy` file.
        is_picture: whether Pillow can decode it, if not with all of its bands, or with 8 bits only.
        has_alpha: whether a band is transparency, or the colours are others than grey or RGB.
        orientation: that of EXIF, which is not applied yet.
    """

    height: int
    width: int
    channels: int
    type: np.dtype
    is_tiff: bool
    is_picture: bool
    has_alpha: bool
    orientation: int = 1


def read_header(file: BinaryIO, start: bytes) -> Header | None:
    """Return the header of a `.npy` file or a TIFF file; None for others, and for TIFF files that are left to Pillow.

    Raises:
        BadImage: it is a `.npy` file, and damaged or none of an image.
    """
    if start.startswith(NPY_START):
        shape, _, dtype = _npy_header(file)
        channels = shape[2] if len(shape) == 3 else 1
        return Header(shape[0], shape[1], channels, dtype, is_tiff=False, is_picture=False, has_alpha=False)
    return _tiff_header(file) if start.startswith(TIFF_STARTS) else None


def read(data: bytes, header: Header) -> np.ndarray:
    """Return the image of a file with such a header, uint8 or uint16 [H, W, C].

    Raises:
        BadImage: the file is damaged, incomplete, or compressed in a way that needs another package.
    """
    if math.prod(header[:3]) * header.type.itemsize > MAX_BYTES:
        raise BadImage(f"has {header.channels} channels of {header.height} x {header.width} pixels, more than 2 GiB")
    return (_read_tiff if header.is_tiff else _read_npy)(data)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, order and type of the array of a `.npy` file, which is checked to be an image."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # NumPy raises nearly every built-in error on a damaged header
        raise BadImage(f"is a damaged NumPy file: {error}") from None
    if dtype.hasobject:
        raise BadImage("holds Python objects, which could run code when read; save plain numbers")
    if dtype.newbyteorder("=") not in (np.uint8, np.uint16, np.bool_):
        raise BadImage(f"holds {dtype} values; save uint8 or uint16")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"holds an array of shape {shape}; save one image as [height, width] or [height, width, C]")
    if len(shape) == 3 and shape[0] < min(shape[1:]) and shape[0] <= _MOST_ROWS_OF_CHANNELS < shape[2]:
        raise BadImage(f"holds an array of shape {shape}, channels first by its looks; save it as [height, width, C]")
    return shape, is_fortran, dtype


def _read_npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    shape, is_fortran, dtype = _npy_header(file)
    # The header's own length decides, so that a wrong one cannot ask for memory.
    needed, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if needed != there:
        raise BadImage(f"is a damaged NumPy file: its header promises {needed:,} bytes, and {there:,} are there")
    pixels = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
    if dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    pixels = pixels.astype(dtype.newbyteorder("=") if dtype != np.bool_ else np.uint8, copy=False)
    return np.ascontiguousarray(pixels.reshape(*shape[:2], -1))


def _tiff_header(file: BinaryIO) -> Header | None:
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    with contextlib.suppress(Exception):  # Pillow names what is damaged
        start = file.read(8)
        if 43 in start[2:4]:  # BigTIFF
            start += file.read(8)
        tags = ImageFileDirectory_v2(start)
        file.seek(tags.next)
        tags.load(file)
        samples, bits = int(tags.get(_SAMPLES, 1)), set(tags.get(_BITS, (1,)))
        if samples < 2 or not (bits <= {8} or bits <= {16}) or set(tags.get(_FORMAT, (_UNSIGNED,))) != {_UNSIGNED}:
            return None
        height, width, extra = int(tags[_HEIGHT]), int(tags[_WIDTH]), tags.get(_EXTRA, ())
        photometric = tags.get(_PHOTOMETRIC)
        is_grey, is_rgb = photometric in _GREY, photometric == _RGB
        is_picture = samples <= 4 and not (is_grey and (samples > 2 or bits == {16})) and not (is_rgb and samples < 3)
        has_alpha = bool(set(extra) & set(_ALPHA)) or not (is_grey or is_rgb)
        dtype = np.dtype(np.uint16 if bits == {16} else np.uint8)
        header = Header(height, width, samples, dtype, is_tiff=True, is_picture=is_picture, has_alpha=has_alpha)
        return header._replace(orientation=int(tags.get(_ORIENTATION, 1)))
    return None


def _read_tiff(data: bytes) -> np.ndarray:
    import tifffile  # pyright: ignore[reportMissingImports]

    # What it logs about damaged files becomes the reason, or does not matter.
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
