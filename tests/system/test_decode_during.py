"""Whole runs whose first epoch begins before all images are decoded."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from flatout.cli import main
from flatout.data import arrival, build, load, order, pack_files
from flatout.data.decode import decode_image
from flatout.numerics import random
from flatout.recipe import load_recipe
from flatout.run import monitor
from tests.system.test_stopping import Killed, assert_same, at_image, kill, resume

pytestmark = [
    pytest.mark.usefixtures("no_pictures"),
    pytest.mark.skipif(not arrival.is_available(), reason="needs /proc"),
]
IMAGE_BYTES = 8 * 8 * 3
MEAN = ["--set", "data.mean=[0.5]", "--set", "data.std=[0.3]"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred random images of two classes; 80 are trained on."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(100):
        file = folder / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(file)
    return folder


@contextlib.contextmanager
def small_parts() -> Iterator[None]:
    """Windows of two blocks of eight images, decoded in parts of as many."""
    with (
        mock.patch.multiple(random, WINDOW_BLOCKS=2),
        mock.patch.multiple(order, BLOCK_BYTES=8 * IMAGE_BYTES),
        mock.patch.multiple(pack_files, BLOCK_BYTES=16 * IMAGE_BYTES),
    ):
        yield


def command(photos: Path, out: Path, decode: str = "during", *changes: str) -> list[str]:
    recipe = ["--model", "parallel-cnn", "--batch-size", "8", "--epochs", "2", "--devices", "cpu"]
    recipe += ["--set", "image_size=8", "--set", "precision=fp32", "--set", f"data.decode={decode}", *MEAN]
    return ["train", str(photos), *recipe, "--out", str(out), *changes]


@pytest.fixture(autouse=True)
def parts_of(request: pytest.FixtureRequest) -> Iterator[None]:
    # Processes of ranks have the usual ones.
    with contextlib.nullcontext() if "devices" in request.fixturenames else small_parts():
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packs"


@contextlib.contextmanager
def decoded(images: int, released: threading.Event) -> Iterator[list[str]]:
    """Hold the decoding after so many images until an event; the list has the files decoded since."""
    names: list[str] = []

    def decode(path: Path, **how) -> np.ndarray:
        if len(names) >= images:
            assert released.wait(60)
        names.append(path.name)
        return decode_image(path, **how)

    with mock.patch.object(build, "decode_image", decode):
        yield names


def test_the_first_epoch_begins_before_all_images_are_decoded(photos: Path, tmp_path: Path, cache: Path) -> None:
    first_step = threading.Event()
    with at_image(8, first_step.set), decoded(80, first_step):
        assert main(command(photos, tmp_path / "meanwhile")) == 0
    assert first_step.is_set()
    assert not json.loads((tmp_path / "meanwhile" / "summary.json").read_text())["pack_was_cached"]
    assert main(command(photos, tmp_path / "cached")) == 0
    assert json.loads((tmp_path / "cached" / "summary.json").read_text())["pack_was_cached"]
    assert_same(tmp_path / "meanwhile", tmp_path / "cached")
    assert len(list(cache.glob("*/pack.json"))) == 1


def test_a_run_killed_while_images_are_decoded_resumes(
    photos: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(photos, tmp_path / "whole", "during", "--no-cache")) == 0
    monkeypatch.setattr(monitor, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "CHECKPOINT_SHARE", 1e9)
    out, killed = tmp_path / "run", threading.Event()

    def end() -> None:
        threading.Timer(0.3, killed.set).start()
        kill()

    with at_image(16, end), decoded(80, killed), pytest.raises(Killed):
        main(command(photos, out))
    assert not list(cache.glob("*/pack.json"))
    with decoded(100, killed) as names:
        assert resume(out) == 0
    assert 0 < len(names) <= 100 - 64
    assert_same(tmp_path / "whole", out)


def test_an_unreadable_image_ends_the_run(
    photos: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    for file in photos.glob("*/*.png"):
        (copy / file.parent.name).mkdir(parents=True, exist_ok=True)
        (copy / file.parent.name / file.name).write_bytes(file.read_bytes()[: None if file.name != "50.png" else 70])
    assert main(command(copy, tmp_path / "run")) == 2
    assert "1 of 100 images cannot be used" in (message := capsys.readouterr().err)
    assert "50.png: is truncated or damaged" in message
    assert "Traceback" not in message
    assert main(command(copy, tmp_path / "skipped", "during", "--on-bad-image", "skip")) == 2
    assert "data.decode = 'during': needs data.on_bad_image = \"stop\"" in capsys.readouterr().err
    assert main(command(copy, tmp_path / "skipped", "before", "--on-bad-image", "skip", "--set", "epochs=1")) == 0


def test_it_is_chosen_for_large_data_whether_or_not_it_is_cached(
    photos: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(name: str, *changes: str) -> str:
        assert main(command(photos, tmp_path / name, "auto", "--epochs", "1", *changes)) == 0
        return load_recipe(tmp_path / name / "recipe.toml").data.decode

    assert chosen("small") == "before"
    monkeypatch.setattr(load, "LARGE_BYTES", 100 * IMAGE_BYTES)
    assert chosen("cached") == "during"
    assert chosen("not cached", "--no-cache") == "during"
    assert chosen("skip", "--on-bad-image", "skip") == "before"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["--devices", "2xcpu"], ["--engine", "xla", "--devices", "2xcpu"]])
def test_results_are_those_of_one_device(photos: Path, tmp_path: Path, cache: Path, devices: list[str]) -> None:
    assert main(command(photos, tmp_path / "one", "during", "--no-cache")) == 0
    assert main(command(photos, tmp_path / "two", "during", *devices)) == 0
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert one["test_correct"] == two["test_correct"]
    assert one["valid_loss"] == pytest.approx(two["valid_loss"], rel=1e-3)
    assert not two["pack_was_cached"]
