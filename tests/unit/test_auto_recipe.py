"""Recipes generated from data: the form that suits it, the width that suits the time, and starting weights."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import flatout
from flatout.config import Recipe
from flatout.config.settings import Size
from flatout.data.build import build_pack, load
from flatout.data.detect import find
from flatout.data.pack import PackSettings
from flatout.data.source import DataSource, ImageDataset
from flatout.engine.factory import Speeds
from flatout.models import hub
from flatout.train.auto_recipe import generate_recipe, measure_dataset
from flatout.utils.console import Console
from flatout.utils.errors import InputError, WeightsUnavailable
from tests.system.conftest import draw_small_pictures, leave_out_pictures
from tests.unit.runs import blank_images

SYMBOLS, PHOTOS = blank_images(600, size=28, channels=1), blank_images(600, size=96, channels=3)


def advice(
    source: DataSource | ImageDataset, changes: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Recipe, dict[str, str]]:
    facts = measure_dataset(source, accelerated=False, seconds=options.pop("seconds", None))
    return generate_recipe(facts, "", changes or {}, **options)


def speeds(training: Any, features: float = 100.0) -> Speeds:
    """Return measurements of a machine that does not exist."""
    return Speeds(training=training, features=lambda recipe: features)


def by_width(rate: float, *, per_pixel: bool = False) -> Callable[[Recipe, int], float]:
    """Return a speed of training that depends on the width of fast-cnn, and perhaps on the size of the images."""

    def training(recipe: Recipe, classes: int) -> float:
        pixels = math.prod(recipe.image_sides) if per_pixel else 1
        return rate / int(recipe.model.rpartition("-")[2]) / pixels

    return training


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that all published weights are at hand; return the names that were looked for."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    monkeypatch.setattr(hub, "find_weights", lambda name, report: asked.append(name))
    return asked


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, report: Any) -> None:
        raise WeightsUnavailable(f"could not download {name}")

    monkeypatch.setattr(hub, "unreachable", lambda: "the hub cannot be reached")
    monkeypatch.setattr(hub, "is_cached", lambda name: False)
    monkeypatch.setattr(hub, "find_weights", fail)
    monkeypatch.setattr(hub, "installed_backbones", list)


@pytest.mark.parametrize(("channels", "changes"), [(1, {}), (3, {}), (3, {"model": "timm:resnet18"})])
def test_large_pictures_start_from_published_weights(
    channels: int, changes: dict[str, str], published: list[str]
) -> None:
    recipe, reasons = advice(blank_images(600, size=96, channels=channels), changes)
    assert (published, recipe.channels) == ([recipe.model], 3)
    assert recipe.model.startswith(changes.get("model", "timm:"))
    assert recipe.pretrained and recipe.linear_probe and recipe.epochs == recipe.label_smoothing == 0
    # The normalisation of the weights, not that of the data.
    assert recipe.data.mean == (0.485, 0.456, 0.406)
    assert ("% on ImageNet" in reasons["model"]) == (not changes)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("size", "channels"), [(64, 3), ((96, 128), 1)])
def test_the_recipe_of_a_pack_fits_it(size: Size, channels: int, tmp_path: Path) -> None:
    settings, console = PackSettings(size=size, channels=channels), Console()
    build_pack(blank_images(20, size=128, channels=channels), settings, tmp_path / "pack", console)
    found = find(tmp_path / "pack")
    recipe, _ = advice(found)
    assert recipe.pretrained
    assert len(load(found, recipe, cache=False, report=console).labels) == 20


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (96, 4)])
def test_other_images_train_from_random_weights(size: int, channels: int, published: list[str]) -> None:
    recipe, _ = advice(blank_images(600, size=size, channels=channels))
    assert (published, recipe.pretrained, recipe.model[:8]) == ([], False, "fast-cnn")
    # Grey images may be symbols, which have no mirror images.
    assert recipe.augment.flip == (channels == 3)
    assert size > 64 or recipe.augment.shift == pytest.approx((2 if channels == 3 else 1) / size)
    # Views cost little for small images.
    assert recipe.tta == (size < 64)


def test_without_the_weights_photos_train_from_scratch_and_the_user_is_told(offline: None) -> None:
    said: list[str] = []
    recipe, _ = advice(PHOTOS, report=said.append)
    assert recipe.model.startswith("fast-cnn") and not recipe.pretrained and not recipe.tta
    assert "cannot be reached" in said[0] and "--weights FILE" in said[0] and "flatout[weights]" in said[0]
    recipe, _ = advice(PHOTOS, {"model": "timm:resnet18"}, report=said.append)
    assert not recipe.pretrained and len(said) == 2
    assert said[1].startswith("could not download timm:resnet18: training starts from random weights; give --weights")
    for required in ({"model": "timm:resnet18", "pretrained": True}, {"pretrained": True}):
        with pytest.raises(WeightsUnavailable):
            advice(PHOTOS, required, report=said.append)


@pytest.mark.parametrize(("name", "job"), [("plants.v2/", "plants.v2"), ("plants.tar", "plants")])
def test_the_job_has_the_whole_name_of_a_folder(name: str, job: str, tmp_path: Path) -> None:
    (tmp_path / "plants.v2").mkdir()
    facts = measure_dataset(SYMBOLS, accelerated=False, seconds=None)
    assert generate_recipe(facts, str(tmp_path / name), {})[0].job == job


def test_a_model_of_the_users_gets_settings_that_suit_most(published: list[str]) -> None:
    recipe, _ = advice(PHOTOS, {"model": "cats-dogs-cnn"})
    assert (recipe.model, recipe.optimizer.name, published) == ("cats-dogs-cnn", "adamw", [])


@pytest.mark.parametrize(("seconds", "width"), [(6, 16), (60, 16), (120, 32), (1e6, 128)])
def test_the_widest_network_that_sees_enough_is_chosen(seconds: float, width: int) -> None:
    """30 epochs of 600 images are 18,000. Half of a short time is for training, and nearly all of a long one."""
    recipe, reasons = advice(SYMBOLS, seconds=seconds, speeds=speeds(by_width(8000)))
    assert recipe.model == f"fast-cnn-{width}"
    assert f"{8000 / width:,.0f} images per second here" in reasons["model"]
    fitting = max(0.95 * seconds - 15, seconds / 2) * 8000 / width / 600
    assert recipe.epochs == pytest.approx(np.clip(fitting, 6, 120), abs=1)


@pytest.mark.parametrize(
    ("seconds", "classes", "size", "chosen", "epochs"),
    [
        *((20, 101, 28, (28, 16), 10), (325, 101, 28, (28, 128), 30), (160, 50, 28, (28, 32), 10)),
        *((175, 50, 28, (28, 64), 30), (70, 101, 128, (64, 64), 10), (325, 101, 128, (128, 128), 30)),
    ],
)
def test_many_classes_need_width_more_than_epochs(
    seconds: float, classes: int, size: int, chosen: tuple[int, int], epochs: int
) -> None:
    """Up to width 64, or 32, it is enough to see 600 images 10 times; in wider networks and larger photos, 30 times."""
    source, given = blank_images(600, size=size, channels=3, classes=classes), {"pretrained": False}
    recipe, reasons = advice(source, given, seconds=seconds, speeds=speeds(by_width(8000)))
    assert (recipe.image_size, recipe.model) == (chosen[0], f"fast-cnn-{chosen[1]}")
    assert f"as wide as {epochs} epochs" in reasons["model"]


SIZES: list[tuple[float, dict[str, Any], tuple[int, int]]] = [
    *((30, {}, (64, 32)), (75, {}, (128, 32)), (1e6, {}, (128, 128))),
    *((30, {"image_size": 96}, (96, 16)), (30, {"model": "fast-cnn-32"}, (64, 32))),
]


@pytest.mark.parametrize(("seconds", "changes", "chosen"), SIZES)
def test_photos_are_as_large_as_the_time_permits(seconds: float, changes: dict, chosen: tuple[int, int]) -> None:
    rate = speeds(by_width(2e8, per_pixel=True))
    changes = {"pretrained": False, **changes}
    recipe, reasons = advice(blank_images(600, size=128, channels=3), changes, seconds=seconds, speeds=rate)
    assert (recipe.image_size, recipe.model) == (chosen[0], f"fast-cnn-{chosen[1]}")
    assert ("take too long" in reasons["image_size"]) == (chosen[0] == 64)


@pytest.mark.parametrize(("seconds", "epochs"), [(1e5, 40), (40, 0)])
def test_the_last_layers_are_fine_tuned_if_the_time_permits(seconds: float, epochs: int, published: list[str]) -> None:
    recipe, reasons = advice(PHOTOS, seconds=seconds, speeds=speeds(lambda recipe, classes: 30.0, 30.0))
    assert (recipe.epochs, recipe.freeze[:12]) == (epochs, "all-but-last" if epochs else "")
    assert f"epochs = {epochs}" in reasons["epochs"]


def test_weights_of_a_run_name_their_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on ten classes of digits is the start of one on two; only the head is fresh."""
    found: Any = load_digits()
    images, labels = (found.images * 15).astype(np.uint8)[..., None], found.target
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        flatout.fit("fast-cnn-16", (images, labels), epochs=2, devices="cpu", out=tmp_path / "first", quiet=True)
    draw_small_pictures(monkeypatch)
    other = {"weights": str(tmp_path / "first"), "devices": "cpu", "quiet": True, "epochs": 1}
    run = flatout.fit(data=(images, labels % 2), out=tmp_path / "second", **other)
    recipe = run.recipe
    assert (recipe.model, recipe.optimizer.name, recipe.image_size) == ("fast-cnn-16", "momentum", 8)
    assert recipe.data.mean == flatout.load(tmp_path / "first").recipe.data.mean
    assert len(run.classes) == 2
    assert run.summary["test_accuracy"] > 0.7
    assert any("starts fresh" in note for note in run.summary["notes"])
    # The reasons are in the report.
    assert "model = fast-cnn-16: the network of the weights" in (run.path / "report.html").read_text()


def test_weights_without_a_network_need_its_name(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=r"does not say which network it is of; name it with --model NAME"):
        advice(SYMBOLS, {"weights": str(tmp_path / "weights.safetensors")})
