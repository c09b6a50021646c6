"""Decoding: against Pillow, unusual images, and large ones."""

import subprocess
import sys
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from flatout.data import pillow
from flatout.data.decode import decode_image
from flatout.data.pixels import resize_images
from tests.data.pictures import saved, smooth_picture


def reference(image: Image.Image, size: int, channels: int, resize: str = "squash") -> np.ndarray:
    """What Pillow makes of it, int [size, size, channels]; the crop begins where `decode_image` says it does."""
    image = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
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


# Against Pillow, on real photographs


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("channels", [3, 1])
def test_photographs_are_as_pillow_makes_them_within_the_stated_bound(shared_data, channels, resize):
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
        assert "DCT" in differences
        assert "from 2" in differences
        for kind, parts in differences.items():
            values = np.concatenate(parts)
            highest, mean = bounds[kind]
            assert values.max() <= highest, (folder, kind)
            assert values.mean() <= mean, (folder, kind)


def test_arrays_are_resized_as_files_are(tmp_path):
    picture = smooth_picture(90, 70)
    file = saved(picture, tmp_path / "a.png")
    images = np.stack([np.asarray(picture)] * 3)
    images.flags.writeable = False
    for size in (16, 70, 128):
        for channels in (1, 3):
            for resize in ("squash", "crop"):
                expected = decode_image(file, size=size, channels=channels, resize=resize)
                got = resize_images(images, size=size, channels=channels, resize=resize)
                assert got.flags.c_contiguous
                assert np.array_equal(got, np.stack([expected] * 3))
                assert np.abs(expected - reference(picture, size, channels, resize)).max() <= 1


def test_an_image_of_the_right_size_is_not_changed():
    images = np.random.default_rng(1).integers(0, 256, (5, 28, 28, 1), np.uint8)
    assert np.array_equal(resize_images(images, size=28, channels=1, resize="squash"), images)
    coloured = resize_images(images, size=28, channels=3, resize="crop")
    assert np.array_equal(coloured, np.repeat(images, 3, axis=-1))


# Unusual images, each decoded in one documented way


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_exif_orientation_is_applied(tmp_path, orientation, suffix, resize):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(smooth_picture(96, 64), tmp_path / f"a.{suffix}", exif=exif)
    assert distance(file, 32, resize=resize).max() <= 2
    upright = decode_image(saved(smooth_picture(96, 64), tmp_path / f"b.{suffix}"), size=32, channels=3, resize=resize)
    turned = decode_image(file, size=32, channels=3, resize=resize)
    assert (orientation == 1) == np.array_equal(turned, upright)


@pytest.mark.parametrize("tiff", [b"", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff\1\x12"])
def test_damaged_exif_leaves_the_image_as_stored(tmp_path, tiff):
    file = saved(smooth_picture(40, 40), tmp_path / "a.jpg", exif=b"Exif\0\0" + tiff)
    plain = saved(smooth_picture(40, 40), tmp_path / "b.jpg")
    decoded, expected = (decode_image(path, size=40, channels=3, resize="squash") for path in (file, plain))
    assert np.array_equal(decoded, expected)


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_cmyk_is_converted(tmp_path, suffix):
    file = saved(smooth_picture(60, 60).convert("CMYK"), tmp_path / f"a.{suffix}")
    assert distance(file, 30).max() <= 1


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_grey_is_scaled(tmp_path, suffix):
    values = (np.arange(64 * 64, dtype=np.uint32) * 16).reshape(64, 64).astype(np.uint16)
    file = saved(Image.fromarray(values), tmp_path / f"a.{suffix}")
    expected = np.round(values / 257)
    for channels in (1, 3):
        decoded = decode_image(file, size=64, channels=channels, resize="squash")
        assert np.array_equal(decoded, np.repeat(expected[..., None], channels, axis=-1))


@pytest.mark.parametrize(("highest", "top"), [(4095, 4095), (3000, 4095), (255, 255), (4096, 65535), (65535, 65535)])
def test_16_bit_grey_is_scaled_by_the_bits_in_use(tmp_path, highest, top):
    values = np.linspace(0, highest, 64 * 64).astype(np.uint16).reshape(64, 64)
    decoded = decode_image(saved(Image.fromarray(values), tmp_path / "a.tif"), size=64, channels=1, resize="squash")
    assert np.abs(decoded[..., 0] - values * (255 / top)).max() <= 0.5


def test_transparency_is_laid_over_white(tmp_path):
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


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    file = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert np.array_equal(decode_image(file, size=1, channels=3, resize="squash"), [[[255, 0, 0]]])


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 3000), (3000, 1), (2, 3)])
def test_the_smallest_and_thinnest_images(tmp_path, suffix, width, height):
    file = saved(Image.new("RGB", (width, height), (200, 200, 200)), tmp_path / f"a.{suffix}")
    for resize in ("squash", "crop"):
        decoded = decode_image(file, size=16, channels=3, resize=resize)
        assert np.abs(decoded.astype(int) - 200).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "LA", "RGBA"])
def test_every_mode_becomes_grey_or_colour(tmp_path, mode):
    file = saved(smooth_picture(50, 40).convert(mode), tmp_path / "a.png")
    assert distance(file, 20).max() <= 1
    assert distance(file, 20, channels=1).max() <= 1


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": "4:4:4"}, {"restart_marker_blocks": 2}])
def test_every_kind_of_jpeg(tmp_path, options):
    file = saved(smooth_picture(200, 150), tmp_path / "a.jpg", quality=95, **options)
    assert distance(file, 100).max() <= 2


def test_a_jpeg_with_harmless_oddities_is_decoded(tmp_path):
    data = saved(smooth_picture(64, 64), tmp_path / "a.jpg").read_bytes()
    expected = decode_image(tmp_path / "a.jpg", size=64, channels=3, resize="squash")
    version = data.index(b"JFIF\0") + 5
    oddities = {
        "revision": data[:version] + b"\x09" + data[version + 1 :],
        "stray bytes": data[:-2] + bytes(200) + data[-2:],
        "appended": data + b"something else",
    }
    for content in oddities.values():
        (tmp_path / "b.jpg").write_bytes(content)
        assert np.array_equal(decode_image(tmp_path / "b.jpg", size=64, channels=3, resize="squash"), expected)


def test_the_content_decides_the_format_not_the_name(tmp_path):
    saved(smooth_picture(20, 20), tmp_path / "a.png").rename(tmp_path / "a.jpg")
    assert distance(tmp_path / "a.jpg", 20).max() == 0


def test_filters_for_warnings_are_as_before_after_many_threads(tmp_path):
    palette = smooth_picture(30, 30).quantize(16)
    file = saved(palette, tmp_path / "a.png", transparency=bytes(range(16)))
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: decode_image(file, size=8, channels=3, resize="crop"), range(200)))
        assert warnings.filters == before


# Large images


@pytest.mark.parametrize("large_pixels", [20_000, 1_600])  # by rows, and by rows and columns
@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA"])
def test_large_images_are_averaged_before_they_are_resized(tmp_path, monkeypatch, mode, large_pixels):
    file = saved(smooth_picture(210, 132).convert(mode), tmp_path / "a.png")
    expected = {resize: decode_image(file, size=16, channels=3, resize=resize) for resize in ("squash", "crop")}
    monkeypatch.setattr(pillow, "LARGE_PIXELS", large_pixels)
    for resize, whole in expected.items():
        assert np.abs(decode_image(file, size=16, channels=3, resize=resize).astype(int) - whole).max() <= 3


@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_that_are_too_narrow_to_be_averaged_give_the_same_pixels(tmp_path, monkeypatch, channels):
    file = saved(smooth_picture(3000, 7), tmp_path / "a.png")
    expected = decode_image(file, size=(8, 64), channels=channels, resize="squash")
    monkeypatch.setattr(pillow, "LARGE_PIXELS", 2000)
    np.testing.assert_array_equal(decode_image(file, size=(8, 64), channels=channels, resize="squash"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "channels", "bytes_per_pixel"),
    [(6000, 6000, 3, 4), (2_300_000, 16, 3, 7), (2_300_000, 16, 1, 8)],
    ids=["square", "narrow", "narrow, to grey"],
)
def test_large_images_take_little_more_than_their_pixels(tmp_path, width, height, channels, bytes_per_pixel):
    files = [
        saved(Image.new("RGB", (width, height), (1, 2, 3)), tmp_path / "a.png", compress_level=1),
        saved(Image.new("RGB", (99, 99)), tmp_path / "b.png"),
    ]
    code = (
        "import sys\nfrom pathlib import Path\nfrom flatout.data.decode import decode_image\n"
        "from flatout.host import peak_rss_bytes\n"
        f"def decode(path): return decode_image(Path(path), size=64, channels={channels}, resize='squash')\n"
        "decode(sys.argv[2])\n"
        "before = peak_rss_bytes()\n"
        f"assert (decode(sys.argv[1]) == {(1, 2, 3) if channels == 3 else 2}).all()\n"
        "print(peak_rss_bytes() - before)"
    )
    run = subprocess.run([sys.executable, "-c", code, *map(str, files)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1.5 * bytes_per_pixel * width * height


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    file = saved(smooth_picture(60, 50), tmp_path / "a.png")
    inside, most = [], []
    convert = pillow._to_array

    def observed(*arguments, **options):
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return convert(*arguments, **options)

    monkeypatch.setattr(pillow, "_to_array", observed)
    for limit, expected in ((2999, {1}), (3000, {1, 2, 3, 4})):
        monkeypatch.setattr(pillow, "LARGE_PIXELS", limit)
        most.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: decode_image(file, size=8, channels=3, resize="crop"), range(8)))
        assert set(most) <= expected
