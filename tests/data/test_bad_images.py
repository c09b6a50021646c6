"""Files that are not images, damaged or too large: refused with the reason."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from flatout.data.decode import MAX_PIXELS, decode_image, read_header
from flatout.data.pixels import BadImage
from flatout.utils.errors import InputError
from tests.data.pictures import refusal, saved, smooth_picture


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp", "tif"])
def test_a_truncated_file_is_refused_even_where_pillow_was_made_lenient(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    file = saved(Image.fromarray(noise), tmp_path / f"a.{suffix}")
    data = file.read_bytes()
    for length in (len(data) // 2, len(data) * 9 // 10):
        file.write_bytes(data[:length])
        assert "truncated or damaged" in refusal(file)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_a_jpeg_with_lost_pixels_is_refused(tmp_path):
    file = saved(smooth_picture(64, 64), tmp_path / "a.jpg", quality=95)
    data = file.read_bytes()
    for kept in (3, 10, 100, -2):
        file.write_bytes(data[:kept])
        assert refusal(file)
    file.write_bytes(data[:-400] + b"\xff\xd5" + data[-398:])
    assert "truncated or damaged" in refusal(file)
    found = 0
    for place in range(len(data) - 300, len(data) - 2):
        damaged = data[:place] + b"\xff\0" + data[place + 2 :]
        try:
            simplejpeg.decode_jpeg(damaged, strict=True)
        except ValueError as error:
            if "huffman" in str(error).lower():  # which Pillow decodes without a word
                file.write_bytes(damaged)
                assert "truncated or damaged" in refusal(file)
                found += 1
    assert found


def test_what_is_no_image_or_cannot_be_read_is_refused_without_waiting(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_bytes(b"\n<!DOCTYPE html><html><body>404</body></html>")
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "circle.png").symlink_to("circle.png")
    reasons = {
        "empty.jpg": "is empty",
        "page.jpg": r"is not an image of a known format (it begins with b'\n<!DOCTYPE html><html><body>404</body></'",
        "fifo.png": "is not a regular file",
        "zero.png": "is not a regular file",
        ".": "is not a regular file",
        "circle.png": "cannot be read: Too many levels of symbolic links",
        "missing.jpg": "cannot be read: No such file or directory",
    }
    for name, reason in reasons.items():
        assert refusal(tmp_path / name).startswith(reason)
        with pytest.raises(BadImage):
            read_header(tmp_path / name)
    file = saved(Image.fromarray(np.ones((5, 5), np.float32)), tmp_path / "float.tif")
    assert refusal(file).startswith("has floating-point pixels, which have no agreed range; convert it to 8 or 16 bits")


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg_header(tmp_path: Path, width: int, height: int) -> bytes:
    data = bytearray(saved(smooth_picture(16, 16), tmp_path / "small.jpg").read_bytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def test_a_decompression_bomb_is_refused_from_its_header(tmp_path):
    side = int(MAX_PIXELS**0.5) + 1
    for content in (png_header(side, side), jpeg_header(tmp_path, side, side), jpeg_header(tmp_path, 65535, 65535)):
        (tmp_path / "bomb").write_bytes(content)
        assert f"{MAX_PIXELS:,}" in refusal(tmp_path / "bomb")
        with pytest.raises(BadImage, match=f"{MAX_PIXELS:,}, the limit .FLATOUT_MAX_PIXELS sets it"):
            read_header(tmp_path / "bomb")
    (tmp_path / "a.png").write_bytes(png_header(10_000, 10_000))  # Pillow warns from 89 million pixels on
    assert read_header(tmp_path / "a.png").width == 10_000


def test_the_limit_of_pixels_can_be_set(tmp_path, monkeypatch):
    file = saved(smooth_picture(40, 30), tmp_path / "a.png")
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "1000")
    assert refusal(file) == "has 40 x 30 pixels, more than 1,000, the limit (FLATOUT_MAX_PIXELS sets it)"
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "1200")
    decode_image(file, size=8, channels=3, resize="squash")
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "many")
    with pytest.raises(InputError, match="FLATOUT_MAX_PIXELS = 'many': must be a number of pixels"):
        decode_image(file, size=8, channels=3, resize="squash")
