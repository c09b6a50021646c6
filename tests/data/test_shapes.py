"""Images of any shape, number of channels and bits: decoding against Pillow and NumPy, packs, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from flatout.cli.main import main
from flatout.config import Data
from flatout.data.batches import measure
from flatout.data.build import build_pack, find, load_pack
from flatout.data.decode import decode_image, read_header
from flatout.data.pack import npy_header, open_pack
from flatout.data.pixels import resize_images
from flatout.data.splits import splits_of
from flatout.train.dataset_stats import measure_dataset
from flatout.utils.errors import InputError
from tests.data.packs import Recorder, settings
from tests.data.pictures import refusal, saved, smooth_picture

RNG = np.random.default_rng(4)
BANDS = RNG.integers(0, 65536, (12, 20, 5)).astype(np.uint16)


def npy(array: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


# Shapes


def shaped(image: Image.Image, height: int, width: int, resize: str) -> np.ndarray:
    """What Pillow makes of an upright image."""
    if resize == "pad":
        inner = ImageOps.contain(image, (width, height), Image.Resampling.BILINEAR)
        found = Image.new("RGB", (width, height))
        found.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
        return np.asarray(found).astype(int)
    if resize == "crop":
        scale = min(image.width / width, image.height / height)
        across, down = round(width * scale), round(height * scale)
        left, top = (image.width - across) // 2, (image.height - down) // 2
        image = image.crop((left, top, left + across, top + down))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).astype(int)


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("size", [(24, 40), (40, 24)])
@pytest.mark.parametrize(("suffix", "tolerance"), [("png", 2), ("jpg", 6)])
@pytest.mark.parametrize("shape", [(150, 100), (90, 200), (60, 60)])
def test_shapes_are_those_of_pillow(tmp_path, resize, size, suffix, tolerance, shape) -> None:
    file = saved(smooth_picture(*shape), tmp_path / f"a.{suffix}", **({"quality": 95} if suffix == "jpg" else {}))
    with Image.open(file) as image:
        expected = shaped(image.convert("RGB"), size[0], size[1], resize)
    found = decode_image(file, size=size, channels=3, resize=resize)
    assert found.shape == (*size, 3)
    edges = np.abs(found - expected).max(axis=2) > tolerance
    assert edges.mean() < 0.05, "but for the border of what is padded"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_orientation_counts_before_the_shape(tmp_path, orientation, suffix) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(smooth_picture(96, 60), tmp_path / f"a.{suffix}", exif=exif)
    with Image.open(file) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    for resize in ("squash", "crop", "pad"):
        found = decode_image(file, size=(16, 32), channels=3, resize=resize)
        assert (np.abs(found - shaped(upright, 16, 32, resize)).max(axis=2) > 8).mean() < 0.1
    header = read_header(file)
    assert (header.width, header.height, header.mode) == (*upright.size, "RGB")


# Channels and bits


def test_arrays_keep_channels_and_bits(tmp_path) -> None:
    file = npy(BANDS, tmp_path / "a.npy")
    found = decode_image(file, size=(12, 20), channels=5, resize="squash", bits=16)
    assert found.dtype == np.uint16
    assert np.array_equal(found, BANDS)
    header = read_header(file)
    assert (header.height, header.width, header.channels, header.bits, header.mode) == (12, 20, 5, 16, "5 x uint16")
    fortran = npy(np.asfortranarray(BANDS.astype(">u2")), tmp_path / "b.npy")
    assert np.array_equal(decode_image(fortran, size=(12, 20), channels=5, resize="squash", bits=16), BANDS)
    flags = npy(BANDS[..., 0] > 999, tmp_path / "c.npy")
    assert np.array_equal(
        decode_image(flags, size=(12, 20), channels=1, resize="squash")[..., 0], 255 * (BANDS[..., 0] > 999)
    )


def test_16_bits_are_resized_without_loss_of_bits() -> None:
    steps = np.linspace(0, 65535, 64 * 64).reshape(1, 64, 64, 1).astype(np.uint16)
    found = resize_images(steps, size=(16, 32), channels=1, resize="squash", bits=16)
    # The triangle of an antialiased resize by 4 and by 2, in the middle; a ramp stays a ramp.
    assert np.abs(np.diff(found[0, 2:-2, 5, 0].astype(int)) - 4 * 65535 / 64).max() < 10
    assert len(np.unique(found)) > 256


def test_bits_are_converted_by_the_range_of_colours(tmp_path) -> None:
    grey = saved(Image.fromarray(np.array([[0, 1, 255]], np.uint8)), tmp_path / "a.png")
    found = decode_image(grey, size=(1, 3), channels=1, resize="squash", bits=16)
    assert found.ravel().tolist() == [0, 257, 65535]
    deep = npy(np.array([[0, 4095]], np.uint16), tmp_path / "b.npy")
    assert decode_image(deep, size=(1, 2), channels=1, resize="squash").ravel().tolist() == [0, 255], "12 bits in use"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "CMYK", "RGB"])
def test_four_channels_are_rgba(tmp_path, mode) -> None:
    picture = smooth_picture(20, 12)
    picture.putalpha(Image.fromarray(np.full((12, 20), 100, np.uint8)))
    image = (picture if mode in ("RGBA", "LA") else picture.convert("RGB")).convert(mode)
    file = saved(image, tmp_path / ("a.tif" if mode == "CMYK" else "a.png"))
    found = decode_image(file, size=(12, 20), channels=4, resize="squash")
    with Image.open(file) as opened:
        colours = opened.convert("RGBA" if "A" in mode else "RGB")
        expected = np.asarray(colours.convert("RGBA"))
    assert np.array_equal(found, expected)
    assert (found[..., 3] == (100 if "A" in mode else 255)).all()


def test_files_of_other_channels_are_refused(tmp_path) -> None:
    assert refusal(npy(BANDS, tmp_path / "a.npy")) == "has 5 channels, but channels = 3"
    assert refusal(npy(BANDS, tmp_path / "a.npy"), channels=4, bits=16) == "has 5 channels, but channels = 4"
    assert refusal(saved(smooth_picture(9, 9), tmp_path / "a.jpg"), channels=5) == "has 3 channels, but channels = 5"
    assert refusal(saved(Image.new("L", (9, 9)), tmp_path / "a.png"), channels=2) == "has 1 channel, but channels = 2"


# TIFF


@pytest.mark.parametrize(("planar", "compression"), [("contig", None), ("separate", "zlib")])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_bands_of_tiff_files(tmp_path, compression, planar, bits, count) -> None:
    tifffile = pytest.importorskip("tifffile")
    bands = (BANDS[..., :count] >> (16 - bits)).astype(f"u{bits // 8}")
    file, rows = tmp_path / "a.tif", bands if planar == "contig" else bands.transpose(2, 0, 1)
    tifffile.imwrite(file, rows, planarconfig=planar, photometric="minisblack", compression=compression)
    found = decode_image(file, size=(12, 20), channels=count, resize="squash", bits=bits)
    assert np.array_equal(found, bands)


def test_bands_are_turned_upright(tmp_path) -> None:
    tifffile = pytest.importorskip("tifffile")
    turned, tags = np.ascontiguousarray(np.rot90(BANDS)), [(274, "H", 1, 6, True)]
    tifffile.imwrite(tmp_path / "a.tif", turned, planarconfig="contig", photometric="minisblack", extratags=tags)
    header = read_header(tmp_path / "a.tif")
    assert (header.height, header.width) == BANDS.shape[:2]
    found = decode_image(tmp_path / "a.tif", size=BANDS.shape[:2], channels=BANDS.shape[2], resize="crop", bits=16)
    assert np.array_equal(found, BANDS)


def test_damaged_tiff_files_are_refused(tmp_path) -> None:
    tifffile = pytest.importorskip("tifffile")
    file = tmp_path / "a.tif"
    tifffile.imwrite(file, BANDS, photometric="minisblack", planarconfig="contig")
    whole = file.read_bytes()
    for length in (200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert re.search("truncated|damaged TIFF", refusal(file, channels=5, bits=16))
    tifffile.imwrite(file, BANDS.astype(np.float32), photometric="minisblack", planarconfig="contig")
    assert "floating-point bands: convert it to 8 or 16 bits" in refusal(file, channels=5, bits=16)


# Damaged and hostile arrays


def test_arrays_that_are_no_images_are_refused(tmp_path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert refusal(file) == "holds Python objects, which could run code when read; save plain numbers"
    assert refusal(npy(BANDS.astype(np.float32), file)) == "holds float32 values; save uint8 or uint16"
    assert refusal(npy(BANDS[0, 0], file)).startswith("holds an array of shape (5,); save one image")
    channels_first = "holds an array of shape (5, 12, 20), channels first by its looks; save it as [height, width, C]"
    assert refusal(npy(BANDS.transpose(2, 0, 1), file)) == channels_first
    whole = npy(BANDS, file).read_bytes()
    file.write_bytes(whole[:-1])
    assert refusal(file) == "is a damaged NumPy file: its header promises 2,400 bytes, and 2,399 are there"
    file.write_bytes(whole[:20])
    assert "is a damaged NumPy file" in refusal(file)
    file.write_bytes(whole.replace(b"(12, 20, 5)", b"(10**6,1e6)"))
    assert "is a damaged NumPy file" in refusal(file)
    file.write_bytes(whole.replace(b"(12, 20, 5)", b"(12, (20, 5"))  # NumPy's reader raises tokenize.TokenError
    assert "is a damaged NumPy file" in refusal(file)
    header = npy_header((10**6, 10**6), np.dtype(np.uint8))
    file.write_bytes(header + bytes(100))
    assert "1000000 x 1000000 pixels, more than" in refusal(file)
    file.write_bytes(npy_header((10, 10, 10**10), np.dtype(np.uint8)) + bytes(100))
    assert "more than 2 GiB" in refusal(file, channels=3)


# Formats that need something


def test_avif_and_webp(tmp_path) -> None:
    for suffix in ("webp", "avif"):
        file = saved(smooth_picture(64, 48), tmp_path / f"a.{suffix}", quality=95)
        expected = np.asarray(smooth_picture(64, 48).resize((32, 24), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(decode_image(file, size=(24, 32), channels=3, resize="squash") - expected).max() < 16


def test_heic_names_its_package(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.heic"
    file.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    assert refusal(file) == "is HEIC, which needs the package pillow-heif: pip install pillow-heif"


def test_heic_is_decoded_where_its_package_is(tmp_path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(smooth_picture(64, 48)).save(tmp_path / "a.heic", quality=95)
    found = decode_image(tmp_path / "a.heic", size=(48, 64), channels=3, resize="squash")
    assert np.abs(found - np.asarray(smooth_picture(64, 48)).astype(int)).mean() < 4


# Data sets and packs


def folders(path: Path, shape: tuple[int, ...] = (12, 20, 5), count: int = 12) -> Path:
    for i in range(count):
        npy(RNG.integers(0, 65536, shape).astype(np.uint16), path / f"c{i % 2}" / f"{i}.npy")
    return path


def test_a_pack_keeps_shape_channels_and_bits(tmp_path) -> None:
    source = find(folders(tmp_path / "data")).read()  # type: ignore[union-attr]
    pack = build_pack(source, settings(size=(12, 20), channels=5), tmp_path / "pack", Recorder())
    files = source.files or ()
    assert pack.images.dtype == np.uint16
    assert np.array_equal(pack.images, np.stack([np.load(str(file)) for file in files]))
    about = json.loads((tmp_path / "pack" / "pack.json").read_text())
    assert (about["size"], about["channels"], about["bits"], about["format_version"]) == ([12, 20], 5, 16, 2)
    with pytest.raises(InputError, match=r"use --set image_size=\[12,20\] --set channels=5 --set data.bits=16, or"):
        load_pack(find(tmp_path / "pack"), settings(size=12, bits=8), cache=None, report=Recorder())
    mean, std = measure(splits_of(pack, Data(), 1)["train"])
    train = pack.images[splits_of(pack, Data(), 1)["train"].rows] / 65535
    np.testing.assert_allclose(mean, train.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(std, train.std((0, 1, 2)), atol=1e-6)


def test_arrays_of_16_bits_become_8_by_the_bits_in_use(tmp_path) -> None:
    images = np.arange(4 * 3 * 5, dtype=np.uint16).reshape(4, 3, 5) * 69  # up to 4071
    np.savez(tmp_path / "a.npz", images=images, labels=[0, 1, 0, 1])
    pack = load_pack(find(tmp_path / "a.npz"), settings(size=(3, 5), channels=1, bits=8), cache=None, report=Recorder())
    assert np.array_equal(pack.images, np.rint(images * (255 / 4095))[..., None])


def test_one_file_of_16_bits_makes_a_set_of_16(tmp_path) -> None:
    for i in range(8):
        kind = np.uint16 if i == 5 else np.uint8
        npy(np.full((4, 4), 100, kind), tmp_path / f"c{i % 2}" / f"{i}.npy")
    pack = load_pack(find(tmp_path), settings(size=4, channels=1), cache=None, report=Recorder())
    assert sorted(pack.images[:, 0, 0, 0].tolist()) == [100] + 7 * [25700]


@pytest.mark.parametrize(
    ("shapes", "size", "resize"),
    [
        ([(60, 100)] * 10, (60, 100), "squash"),
        ([(600, 1000)] * 9 + [(500, 500)], (96, 160), "squash"),
        ([(480, 640)] * 10, (96, 128), "squash"),
        ([(640, 480)] * 10, (128, 96), "squash"),
        ([(200, 210)] * 10, 128, "squash"),
        ([(200, 300), (300, 200)] * 5, 128, "squash"),
        ([(200, 300), (500, 200)] * 5, 128, "crop"),
    ],
)
def test_generated_recipes_choose_the_shape(tmp_path, shapes, size, resize) -> None:
    for i, (height, width) in enumerate(shapes):
        (tmp_path / f"c{i % 2}").mkdir(exist_ok=True)
        saved(Image.new("RGB", (width, height)), tmp_path / f"c{i % 2}" / f"{i}.png")
    facts = measure_dataset(find(tmp_path), accelerated=False)
    assert (facts.size, facts.resize) == (size, resize)
    assert facts.why_resize


# On the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "0"), "--size 0: must be N or HxW, such as 96x160, each from 1 to 8192 pixels"),
        (("--size", "8", "--channels", "0"), "--channels 0: must be from 1 to 1024"),
        (("--size", "8", "--channels", "3"), "has 5 channels, but channels = 3"),
    ],
)
def test_wrong_sizes_and_channels_are_one_message(tmp_path, capsys, arguments, message) -> None:
    data = folders(tmp_path / "data")
    assert main(["pack", str(data), "--out", str(tmp_path / "pack"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "pack").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_pack_and_check_of_any_shape(tmp_path, capsys) -> None:
    data = folders(tmp_path / "data")
    assert main(["pack", str(data), "--out", str(tmp_path / "pack"), "--size", "8x12"]) == 0
    assert open_pack(tmp_path / "pack").images.shape == (12, 8, 12, 5)
    assert main(["check", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "shapes: 12x20 12" in printed
    assert "modes: 5 x uint16 12" in printed


def test_mixed_channels_are_one_message(tmp_path, capsys) -> None:
    data = folders(tmp_path / "data")
    npy(BANDS[..., :4], data / "c0" / "other.npy")
    assert main(["train", str(data), "--out", str(tmp_path / "run")]) == 2
    assert "some images have 4 and 5 channels; give all of them as many" in capsys.readouterr().err
