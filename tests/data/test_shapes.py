"""Images of any shape, number of channels and bits: decoding against Pillow and NumPy, packs, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from flatout.config import Data
from flatout.data.batches import measure
from flatout.data.build import build_pack
from flatout.data.decode import decode_image, read_header
from flatout.data.detect import find
from flatout.data.pack import open_pack
from flatout.data.pixels import resize_images
from flatout.data.splits import splits_of
from flatout.train.auto_recipe import measure_dataset
from flatout.utils.errors import InputError
from tests.data.packs import Recorder, load, settings
from tests.data.pictures import refusal, saved, smooth_picture

RNG = np.random.default_rng(4)
BANDS = RNG.integers(0, 65536, (12, 20, 5)).astype(np.uint16)


def tiff(bands: np.ndarray, path: Path, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, bands, **{"photometric": "minisblack", "planarconfig": "contig", **options})
    return path


# Shapes


def shaped(image: Image.Image, height: int, width: int, resize: str) -> np.ndarray:
    """What Pillow makes of an upright image."""
    make = {"squash": Image.Image.resize, "crop": ImageOps.fit, "pad": ImageOps.pad}[resize]
    return np.asarray(make(image, (width, height), Image.Resampling.BILINEAR)).astype(int)


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
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp", "avif"])
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


def test_16_bits_are_resized_without_loss_and_8_bits_widened() -> None:
    steps = np.linspace(0, 65535, 64 * 64).reshape(1, 64, 64, 1).astype(np.uint16)
    found = resize_images(steps, size=(16, 32), channels=1, resize="squash", bits=16)
    # The triangle of an antialiased resize by 4 and by 2, in the middle; a ramp stays a ramp.
    assert np.abs(np.diff(found[0, 2:-2, 5, 0].astype(int)) - 4 * 65535 / 64).max() < 10
    assert len(np.unique(found)) > 256
    grey = np.array([0, 1, 255], np.uint8).reshape(1, 1, 3, 1)
    found = resize_images(grey, size=(1, 3), channels=1, resize="squash", bits=16)
    assert found.ravel().tolist() == [0, 257, 65535]


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


@pytest.mark.parametrize(("planar", "compression"), [("contig", None), ("separate", "zlib")])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_bands_of_tiff_files(tmp_path, compression, planar, bits, count) -> None:
    bands = (BANDS[..., :count] >> (16 - bits)).astype(f"u{bits // 8}")
    rows = bands if planar == "contig" else bands.transpose(2, 0, 1)
    file = tiff(rows, tmp_path / "a.tif", planarconfig=planar, compression=compression)
    found = decode_image(file, size=(12, 20), channels=count, resize="squash", bits=bits)
    assert np.array_equal(found, bands)


def test_bands_are_turned_upright(tmp_path) -> None:
    turned = np.ascontiguousarray(np.rot90(BANDS))
    file = tiff(turned, tmp_path / "a.tif", extratags=[(274, "H", 1, 6, True)])
    header = read_header(file)
    assert (header.height, header.width, header.channels, header.bits, header.mode) == (12, 20, 5, 16, "5 x uint16")
    found = decode_image(file, size=BANDS.shape[:2], channels=BANDS.shape[2], resize="crop", bits=16)
    assert np.array_equal(found, BANDS)


def test_other_channels_and_damaged_tiff_files_are_refused(tmp_path) -> None:
    file = tiff(BANDS, tmp_path / "a.tif")
    for channels in (3, 4):
        assert refusal(file, channels=channels, bits=16) == f"has 5 channels, but channels = {channels}"
    assert refusal(saved(smooth_picture(9, 9), tmp_path / "a.jpg"), channels=5) == "has 3 channels, but channels = 5"
    assert refusal(saved(Image.new("L", (9, 9)), tmp_path / "a.png"), channels=2) == "has 1 channel, but channels = 2"
    whole = file.read_bytes()
    for length in (200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert re.search("truncated|not an image of a known format", refusal(file, channels=5, bits=16))
    tiff(BANDS.astype(np.float32), file)
    assert "is not an image of a known format" in refusal(file, channels=5, bits=16)


def test_heic_names_its_package_or_is_decoded_where_that_is(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.heic"
    file.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "pillow_heif", None)
        assert refusal(file).endswith("HEIC needs pip install pillow-heif")
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(smooth_picture(64, 48)).save(file, quality=95)
    found = decode_image(file, size=(48, 64), channels=3, resize="squash")
    assert np.abs(found - np.asarray(smooth_picture(64, 48)).astype(int)).mean() < 4


# Data sets and packs


def in_class(folder: Path, index: int, image: Image.Image) -> None:
    (folder / f"c{index % 2}").mkdir(exist_ok=True)
    saved(image, folder / f"c{index % 2}" / f"{index}.png")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for i in range(12):
        tiff(RNG.integers(0, 65536, (12, 20, 5)).astype(np.uint16), tmp_path / "data" / f"c{i % 2}" / f"{i:02}.tif")
    return tmp_path / "data"


def test_a_pack_keeps_shape_channels_and_bits(tmp_path, data) -> None:
    source = find(data).read()  # type: ignore[union-attr]
    pack = build_pack(source, settings(size=(12, 20), channels=5), tmp_path / "pack", Recorder())
    assert pack.images.dtype == np.uint16
    assert np.array_equal(pack.images, np.stack([tifffile.imread(str(file)) for file in source.files or ()]))
    about = json.loads((tmp_path / "pack" / "pack.json").read_text())
    assert (about["size"], about["channels"], about["bits"], about["format_version"]) == ([12, 20], 5, 16, 2)
    fix = r"--set image_size=\[12,20\] --set channels=5 --set data.resize=squash --set data.bits=16, or"
    with pytest.raises(InputError, match=f"does not fit the recipe; use {fix}"):
        load(find(tmp_path / "pack"), None, settings(size=12, bits=8))
    mean, std = measure(splits_of(pack, Data(), 1)["train"])
    train = pack.images[splits_of(pack, Data(), 1)["train"].rows] / 65535
    np.testing.assert_allclose(mean, train.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(std, train.std((0, 1, 2)), atol=1e-6)


def test_arrays_of_16_bits_become_8_by_the_bits_in_use(tmp_path) -> None:
    images = np.arange(4 * 3 * 5, dtype=np.uint16).reshape(4, 3, 5) * 69  # up to 4071
    np.savez(tmp_path / "a.npz", images=images, labels=[0, 1, 0, 1])
    pack = load(find(tmp_path / "a.npz"), None, settings(size=(3, 5), channels=1, bits=8))
    assert np.array_equal(pack.images, np.rint(images * (255 / 4095))[..., None])


def test_one_file_of_16_bits_makes_a_set_of_16(tmp_path) -> None:
    for i in range(8):
        in_class(tmp_path, i, Image.fromarray(np.full((4, 4), 100, np.uint16 if i == 5 else np.uint8)))
    pack = load(find(tmp_path), None, settings(size=4, channels=1))
    assert sorted(pack.images[:, 0, 0, 0].tolist()) == [100] + 7 * [25700]


@pytest.mark.parametrize(
    ("shapes", "size", "resize"),
    [
        ([(60, 100)] * 10, (60, 100), "squash"),
        ([(600, 1000)] * 9 + [(500, 500)], (96, 160), "squash"),
        ([(640, 480)] * 10, (128, 96), "squash"),
        ([(200, 210)] * 10, 128, "squash"),
        ([(200, 300), (300, 200)] * 5, 128, "squash"),
        ([(200, 300), (500, 200)] * 5, 128, "crop"),
    ],
)
def test_generated_recipes_choose_the_shape(tmp_path, shapes, size, resize) -> None:
    for i, (height, width) in enumerate(shapes):
        in_class(tmp_path, i, Image.new("RGB", (width, height)))
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
def test_wrong_sizes_and_channels_are_one_message(tmp_path, data, command, arguments, message) -> None:
    assert message in command("pack", data, "--out", tmp_path / "pack", *arguments, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_commands_on_any_shape(tmp_path, data, command) -> None:
    command("pack", data, "--out", tmp_path / "pack", "--size", "8x12")
    assert open_pack(tmp_path / "pack").images.shape == (12, 8, 12, 5)
    printed = command("check", data)
    assert "shapes: 12x20 12" in printed
    assert "modes: 5 x uint16 12" in printed
    tiff(BANDS[..., :4], data / "c0" / "other.tif")
    message = command("train", data, "--out", tmp_path / "run", code=2)
    assert "some images have 4 and 5 channels; convert all of them to the same number" in message
