"""Looking at data before training."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import flatout
from flatout.analysis.look import augmented
from flatout.cli.main import main
from flatout.engine.augment import epoch_transforms

RNG = np.random.default_rng(0)


def save(path: Path, width: int = 24, height: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return class folders with an image of each kind of outlier, and a class whose name is a script."""
    root = tmp_path_factory.mktemp("look") / "photos"
    for split, count in (("train", 6), ("test", 2)):
        for i in range(count):
            save(root / split / "<script>alert(1)<_script>" / f"{i}.png")
            save(root / split / "dogs" / f"{i}.jpg")
    save(root / "train" / "dogs" / "long.png", 200, 8)
    save(root / "train" / "dogs" / "last.png")
    (root / "test" / "dogs" / "text.jpg").write_text("no image")
    return root


@pytest.fixture(scope="module")
def looked(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("looked") / "out"
    words = ["--set", "image_size=16", "--set", "augment.rotate=20"]
    assert main(["look", str(photos), "--out", str(out), *words, "--json"]) == 0
    return out


def test_outliers_and_counts_are_named(looked: Path):
    figures = json.loads((looked / "look.json").read_text())
    assert figures["images"] == {"train": 14, "test": 5}
    assert figures["counts"]["train"]["dogs"] == 8
    assert figures["extreme"] == ["train/dogs/long.png"]
    assert list(figures["unreadable"]) == ["test/dogs/text.jpg"]
    assert figures["widths"] == {"smallest": 24, "median": 24, "largest": 200}
    assert figures["recipe"]["image_size"] == 16


def test_the_page_is_self_contained_and_escapes_names(looked: Path):
    page = (looked / "look.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert page.count('<div class="first">') == 6, "augmented images"


def test_augmented_images_are_those_of_training():
    images = RNG.integers(0, 256, (20, 6, 6, 3), dtype=np.uint8)
    look = flatout.look(
        (images, np.arange(20) % 2), model="fast-cnn-16", augment={"flip": True, "shift": 0}, quiet=True
    )
    recipe = look.recipe.override({"data.mean": (0.4, 0.5, 0.6), "data.std": (0.2, 0.3, 0.2)})
    chosen = np.array([3, 5, 11, 19])
    views = augmented(look.source, chosen, recipe, range(4))
    for epoch in range(4):
        tables = epoch_transforms(recipe, epoch, 20)
        assert tables is not None
        for row, i in enumerate(chosen):
            expected = images[i][:, ::-1] if tables["flip"][i] else images[i]
            np.testing.assert_array_equal(views[row, epoch], expected)


def test_mixed_images_are_shown_mixed():
    images = np.repeat(np.arange(20, dtype=np.uint8)[:, None, None, None] * 10, 8, axis=1).repeat(8, axis=2)
    changes = {"model": "fast-cnn-16", "augment": {"mixup": 1.0, "shift": 0.0, "flip": False}}
    look = flatout.look((images, np.arange(20) % 2), quiet=True, **changes)
    recipe = look.recipe.override({"data.mean": (0.5,), "data.std": (0.25,)})
    tables = epoch_transforms(recipe, 0, 20)
    assert tables is not None
    views = augmented(look.source, np.arange(20), recipe, [0])[:, 0, 0, 0, 0]
    own, other = np.arange(20) * 10.0, tables["partner"] * 10.0
    np.testing.assert_allclose(views, own + tables["mix"][:, 0] * (other - own), atol=0.51)


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_other_tasks_and_notebooks(task: str):
    images = RNG.integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    labels = np.eye(3, dtype=np.uint8)[np.arange(30) % 3] if task == "multi-label" else RNG.normal(size=30)
    look = flatout.look(images, labels, task=task, quiet=True)
    assert look.source.task == task
    assert [size for _, size, _ in look.groups()] == ([10] * 3 if task == "multi-label" else [6] * 5)
    assert look._repr_html_().startswith("<div><iframe srcdoc=")
