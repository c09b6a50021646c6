"""Decoding: against Pillow, unusual, large and bad images. `test_shapes` has other shapes, channels and bits."""

import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from flatout.data import decode
from flatout.data.decode import MAX_PIXELS, decode_image, read_header
from flatout.data.pixels import BadImage, resize_images
from flatout.utils.errors import InputError
from tests.data.pictures import refusal, saved, smooth_picture


def reference(image: Image.Image, size: int, channels: int, resize: str = "squash") -> np.ndarray:
    """What Pillow makes of it, int [size, size, channels]; the crop begins where `decode_image` says it does."""
    image = image.convert("RGB" if channels == 3 else "L")
    if resize == "crop":
        side = min(image.size)
        grid = next((k for k in (8, 4, 2) if side >= 1.3 * k * size), 1)
        left, top = ((extent - side) // 2 // grid * grid for extent in image.size)
        image = image.crop((left, top, left + side, top + side))
    resized = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(resized).reshape(size, size, channels).astype(int)


def distance(path: Path, size: int, channels: int = 3, resize: str = "squash") -> np.ndarray:
    with Image.open(path) as image:
        expected = reference(image, size, channels, resize)
    got = decode_image(path, size=size, channels=channels, resize=resize)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    return np.abs(got - expected)


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("channels", [3, 1])
def test_photographs_are_as_pillow_makes_them_within_the_documented_bound(shared_data, channels, resize):
    bounds = {"under 2": (2, 0.05) if channels == 3 else (16, 0.1), "from 2": (16, 0.2), "DCT": (40, 1.2)}
    for folder in ("cats-dogs/training_set", "caltech101", "oct"):
        differences = defaultdict(list)
        files = sorted(p for p in (shared_data / folder).rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
        for file in files[:: len(files) // 24]:
            with Image.open(file) as image:
                shorter = min(image.size)
            for size in (32, 64, 128, 224):
                reduction = shorter / size
                kind = "DCT" if reduction >= 2.6 else "from 2" if reduction >= 2 else "under 2"
                differences[kind].append(distance(file, size, channels, resize).ravel())
        assert {"DCT", "from 2"} <= set(differences)
        for kind, parts in differences.items():
            values = np.concatenate(parts)
            highest, mean = bounds[kind]
            assert values.max() <= highest, (folder, kind)
            assert values.mean() <= mean, (folder, kind)


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("channels", [3, 1])
def test_arrays_are_resized_as_files_are(tmp_path, channels, resize):
    picture = smooth_picture(90, 70)
    file = saved(picture, tmp_path / "a.png")
    images = np.stack([np.asarray(picture)] * 3)
    images.flags.writeable = False
    same = resize_images(images, size=(70, 90), channels=3, resize=resize)
    assert np.array_equal(same, images)  # of the right size already
    for size in (16, 70, 128):
        expected = decode_image(file, size=size, channels=channels, resize=resize)
        got = resize_images(images, size=size, channels=channels, resize=resize)
        assert got.flags.c_contiguous
        assert np.array_equal(got, np.stack([expected] * 3))
        assert np.abs(expected - reference(picture, size, channels, resize)).max() <= 1


# Unusual images, each decoded in one documented way


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [
        *((mode, "a.png", {}) for mode in ("1", "L", "P", "RGB", "LA", "RGBA")),
        ("CMYK", "a.jpg", {}),
        ("CMYK", "a.tif", {}),
        ("RGB", "progressive.jpg", {"progressive": True, "quality": 95}),
        ("RGB", "full-chroma.jpg", {"subsampling": "4:4:4", "quality": 95}),
        ("RGB", "restarts.jpg", {"restart_marker_blocks": 2, "quality": 95}),
        ("RGB", "wrong-suffix.jpg", {"format": "PNG"}),
    ],
)
def test_every_mode_and_kind_of_file(tmp_path, mode, name, options):
    file = saved(smooth_picture(200, 150).convert(mode), tmp_path / name, **options)
    assert distance(file, 100).max() <= (2 if options else 1)
    assert distance(file, 100, channels=1).max() <= (3 if options else 1)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(("highest", "top"), [(4095, 4095), (3000, 4095), (255, 255), (4096, 65535), (65535, 65535)])
def test_16_bit_grey_is_scaled_by_the_bits_in_use(tmp_path, suffix, highest, top):
    values = np.linspace(0, highest, 64 * 64).astype(np.uint16).reshape(64, 64)
    file = saved(Image.fromarray(values), tmp_path / f"a.{suffix}")
    for channels in (1, 3):
        decoded = decode_image(file, size=64, channels=channels, resize="squash")
        assert np.abs(decoded - (values * (255 / top))[..., None]).max() <= 0.5


def test_transparency_is_composed_over_white(tmp_path):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:, :2] = (10, 20, 30, 255)
    rgba[:, 2] = (255, 0, 0, 0)
    rgba[:, 3] = (0, 0, 0, 128)
    image = Image.fromarray(rgba)
    palette = image.convert("RGBA").quantize(8)
    assert palette.mode == "P"
    for file in (saved(image, tmp_path / "rgba.png"), saved(palette, tmp_path / "palette.png")):
        decoded = decode_image(file, size=4, channels=3, resize="squash")
        assert np.abs(decoded[0].astype(int) - [[10, 20, 30], [10, 20, 30], [255] * 3, [127] * 3]).max() <= 1
    decoded = decode_image(saved(image.convert("LA"), tmp_path / "la.png"), size=4, channels=1, resize="squash")
    assert np.abs(decoded[0, :, 0].astype(int) - [19, 19, 255, 127]).max() <= 1


def test_a_jpeg_with_harmless_oddities_is_decoded(tmp_path):
    data = saved(smooth_picture(64, 64), tmp_path / "a.jpg").read_bytes()
    expected = decode_image(tmp_path / "a.jpg", size=64, channels=3, resize="squash")
    version = data.index(b"JFIF\0") + 5
    revision = data[:version] + b"\x09" + data[version + 1 :]
    for content in (revision, data[:-2] + bytes(200) + data[-2:], data + b"something else"):
        assert np.array_equal(decode_image(content, size=64, channels=3, resize="squash"), expected)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp"])
def test_the_smallest_and_thinnest_images_and_the_first_of_an_animation(tmp_path, suffix):
    for shape in ((1, 1), (1, 3000), (3000, 1), (2, 3)):
        grey, black = Image.new("RGB", shape, (200, 200, 200)), Image.new("RGB", shape)
        more = {"save_all": True, "append_images": [black]} if suffix in ("gif", "webp") else {}
        file = saved(grey, tmp_path / f"a.{suffix}", **more)
        for resize in ("squash", "crop"):
            decoded = decode_image(file, size=16, channels=3, resize=resize)
            assert np.abs(decoded.astype(int) - 200).max() <= 2


# Large images


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA"])
def test_large_images_are_averaged_before_they_are_resized(tmp_path, monkeypatch, mode):
    file = saved(smooth_picture(210, 132).convert(mode), tmp_path / "a.png")
    shapes = [{"channels": channels, "resize": resize} for channels in (1, 3) for resize in ("squash", "crop")]
    whole = [decode_image(file, size=16, **shape) for shape in shapes]
    narrow = saved(smooth_picture(3000, 7).convert(mode), tmp_path / "b.png")
    unchanged = [decode_image(narrow, size=(8, 64), **shape) for shape in shapes]
    monkeypatch.setattr(decode, "LARGE_PIXELS", 1600)
    averaged = [decode_image(file, size=16, **shape) for shape in shapes]
    assert all(np.abs(a.astype(int) - b).max() <= 3 for a, b in zip(averaged, whole, strict=True))
    assert not all(map(np.array_equal, averaged, whole))
    again = [decode_image(narrow, size=(8, 64), **shape) for shape in shapes]  # too narrow to be averaged
    assert all(map(np.array_equal, again, unchanged))


@pytest.mark.slow
def test_large_images_take_less_memory_than_their_number(tmp_path):
    """Also in several threads: they are decoded one at a time."""
    files = [
        saved(Image.new("RGB", (6000, 6000), (1, 2, 3)), tmp_path / "a.png", compress_level=1),
        saved(Image.new("RGB", (99, 99)), tmp_path / "b.png"),
    ]
    code = (
        "import sys\nfrom concurrent.futures import ThreadPoolExecutor\nfrom pathlib import Path\n"
        "from flatout.data.decode import decode_image\nfrom flatout.utils.host import peak_rss_bytes\n"
        "def decode(path): return decode_image(Path(path), size=64, channels=3, resize='squash')\n"
        "decode(sys.argv[2])\n"
        "before = peak_rss_bytes()\n"
        "with ThreadPoolExecutor(3) as pool: found = list(pool.map(decode, [sys.argv[1]] * 3))\n"
        "assert all((image == (1, 2, 3)).all() for image in found)\n"
        "print(peak_rss_bytes() - before)"
    )
    run = subprocess.run([sys.executable, "-c", code, *map(str, files)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2.5 * 4 * 6000 * 6000


# What is not an image, damaged or too large: refused with the reason


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


@pytest.mark.parametrize(("suffix", "numbers"), [("bmp", "<ii"), ("jpg", ">HH")])
def test_a_decompression_bomb_is_refused_from_its_header(tmp_path, suffix, numbers):
    file = saved(smooth_picture(1234, 1234), tmp_path / f"a.{suffix}")
    before, size = file.read_bytes(), struct.pack(numbers, 1234, 1234)
    assert before.count(size) == 1
    for side in (int(MAX_PIXELS**0.5) + 1, 65_535):
        file.write_bytes(before.replace(size, struct.pack(numbers, side, side)))
        assert f"{MAX_PIXELS:,}" in refusal(file)
        with pytest.raises(BadImage, match=f"{MAX_PIXELS:,}, the limit .FLATOUT_MAX_PIXELS sets it"):
            read_header(file)
    file.write_bytes(before.replace(size, struct.pack(numbers, 10_000, 10_000)))
    assert read_header(file).width == 10_000  # Pillow warns from 89 million pixels on


def test_the_limit_of_pixels_can_be_set(tmp_path, monkeypatch):
    file = saved(smooth_picture(40, 30), tmp_path / "a.png")
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "1000")
    assert refusal(file) == "has 40 x 30 pixels, more than 1,000, the limit (FLATOUT_MAX_PIXELS sets it)"
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "1200")
    decode_image(file, size=8, channels=3, resize="squash")
    monkeypatch.setenv("FLATOUT_MAX_PIXELS", "many")
    with pytest.raises(InputError, match="FLATOUT_MAX_PIXELS = 'many': must be a number of pixels"):
        decode_image(file, size=8, channels=3, resize="squash")
