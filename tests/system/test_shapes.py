"""Whole runs on images of 24x40 pixels with four channels of 16 bits, on both engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

import flatout
from flatout.cli.main import main
from flatout.models.weights import read_weights
from flatout.utils.errors import InputError
from tests.system.run_files import summary

ENGINES = {"cpu": ("cpu", "torch"), "xla": ("8xcpu", "xla")}
KEYS: dict[str, Any] = {"model": "keras-cnn", "image_size": (24, 40), "channels": 4, "batch_size": 16, "lr": 0.01}
KEYS |= {"augment": {"rotate": 15.0, "flip": True, "crop": 0.5, "color_jitter": 0.2}, "epochs": 1}
FIGURES = ("train_accuracy", "valid_correct", "test_correct", "test_count")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of TIFF files; the class is the brighter of two bands."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for i in range(96):
        image = rng.integers(0, 30000, (24, 40, 4)).astype(np.uint16)
        image[..., i % 2] += 20000
        (folder / f"c{i % 2}").mkdir(exist_ok=True)
        tifffile.imwrite(folder / f"c{i % 2}" / f"{i}.tif", image, photometric="minisblack", planarconfig="contig")
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory, no_pictures_in_module: None) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, (devices, engine) in ENGINES.items():
        flatout.fit(data=data, out=folder / name, devices=devices, engine=engine, quiet=True, **KEYS)
    return {name: folder / name for name in ENGINES}


def test_results_are_those_of_one_device(runs: dict[str, Path]) -> None:
    found, expected = summary(runs["xla"]), summary(runs["cpu"])
    assert {key: found[key] for key in FIGURES} == {key: expected[key] for key in FIGURES}
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)


def test_the_run_names_shape_channels_and_bits(runs: dict[str, Path]) -> None:
    run = flatout.load(runs["cpu"])
    assert (run.recipe.image_size, run.recipe.channels, run.recipe.data.bits) == ((24, 40), 4, 16)
    about = read_weights(runs["cpu"] / "weights.safetensors")[1]
    assert (about["image_size"], about["channels"], about["bits"]) == ("[24, 40]", "4", "16")


def test_evaluation_and_prediction(runs: dict[str, Path], data: Path) -> None:
    run = flatout.load(runs["cpu"])
    for devices, engine in (ENGINES["cpu"], ENGINES["xla"]):
        assert run.evaluate(devices=devices, engine=engine)["test_correct"] == run.summary["test_correct"]
    files = sorted(data.rglob("*.tif"))[:6]
    images = np.stack([tifffile.imread(file) for file in files])
    expected = [p.probabilities for p in run.predict(files)]
    for given in (images, images.transpose(0, 3, 1, 2), list(images)):
        assert [p.probabilities for p in run.predict(given)] == expected
    with pytest.raises(InputError, match="has 3 channels, but channels = 4"):
        run.predict([np.zeros((24, 40, 3), np.uint16)])
    # The report shows them, too.
    assert main(["report", str(runs["cpu"])]) == 0
    assert "data:image/png" in (runs["cpu"] / "report.html").read_text()


def test_an_old_run_is_read(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its recipe names neither bits, which are 8, nor the new name of "stretch"."""
    text = (runs["cpu"] / "recipe.toml").read_text()
    assert "\nbits = 16\n" in text
    (tmp_path / "recipe.toml").write_text(text.replace("\nbits = 16\n", "\n").replace('"squash"', '"stretch"'))
    (tmp_path / "weights.safetensors").write_bytes((runs["cpu"] / "weights.safetensors").read_bytes())
    recipe = flatout.load(tmp_path).recipe
    assert (recipe.data.bits, recipe.data.resize) == (8, "squash")
