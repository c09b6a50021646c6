"""Wrong labels, found by confident learning, and the files with suggestions and corrections."""

import csv
import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.analysis.label_errors import (
    LabelError,
    LabelErrors,
    find_errors,
    find_label_errors,
    recipe_of_folds,
    write_errors,
)
from flatout.config import Data, Recipe
from flatout.config.jobs import load_job
from flatout.data.build import load
from flatout.data.detect import recognise
from flatout.data.source import ImageDataset
from flatout.train.request import Options
from flatout.utils.console import Console
from tests.conftest import Command
from tests.data.small_sets import png, shard

RNG = np.random.default_rng(0)


def predictions(true: np.ndarray, classes: int, noise: float = 0.6) -> np.ndarray:
    """Return probabilities of a model that is right about most images."""
    logits = RNG.normal(size=(len(true), classes)) * noise
    logits[np.arange(len(true)), true] += 3
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def columns(errors: list[LabelError]) -> tuple[np.ndarray, ...]:
    return tuple(map(np.array, zip(*errors, strict=True)))


def test_planted_errors_are_found() -> None:
    true = RNG.integers(0, 5, 2000)
    given, wrong = true.copy(), RNG.choice(2000, 100, replace=False)
    given[wrong] = (true[wrong] + RNG.integers(1, 5, 100)) % 5
    index, _, suggested, confidence = columns(find_errors(predictions(true, 5), given))
    assert len(np.intersect1d(index, wrong)) >= 95
    assert len(index) <= 130
    assert (suggested == true[index]).mean() > 0.95
    assert (np.diff(confidence) <= 0).all()
    assert len(find_errors(np.eye(4)[np.repeat(np.arange(3), 50)] * 0.9 + 0.025, np.repeat(np.arange(3), 50))) == 0


def test_a_network_that_knows_little_is_sure_of_little() -> None:
    true = RNG.integers(0, 2, 1600)
    evidence = RNG.normal(size=1600) + np.where(true == 1, 0.4, -0.4)
    # It prefers class 1, and is surer than it should be.
    present = 1 / (1 + np.exp(-(2 * evidence + 0.5)))
    given = np.where(RNG.random(1600) < 0.05, 1 - true, true)
    index, _, _, confidence = columns(find_errors(np.stack([1 - present, present], axis=1), given))
    assert confidence.mean() < (given != true)[index].mean() + 0.2


def test_folds_cost_little_more_than_one_training_and_no_schedule_watches_the_other_images() -> None:
    for epochs in (1, 2, 3, 60):
        recipe = recipe_of_folds(load_job("fashion-mnist").override({"epochs": epochs}))
        assert (recipe.data.folds - 1) * recipe.epochs / epochs <= 1.2
    # Heads are fitted to two thirds of the images.
    recipe = load_job("caltech101").override({"linear_probe": True, "pretrained": True})
    folds = recipe_of_folds(recipe)
    assert (recipe.schedule.name, folds.schedule.name, folds.data.folds) == ("plateau", "constant", 3)
    assert (recipe.epochs > 0, folds.epochs) == (True, 0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labels") / "photos"
    for split, count in (("train", 20), ("test", 4)):
        for name in ("none", "dogs"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{name}{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def found(photos: Path) -> LabelErrors:
    """The errors of a model that takes a training dog and a test "none" for the other class."""
    source = recognise(photos).read()
    true = np.asarray(source.labels).copy()
    true[[3, 46]] ^= 1
    probabilities = (np.eye(2)[true] * 0.9 + 0.05).astype(np.float32)
    recipe = Recipe(model="any", image_size=8, epochs=1, batch_size=1)
    errors = find_errors(probabilities.astype(np.float64), source.labels)
    return LabelErrors(source=source, errors=errors, probabilities=probabilities, recipe=recipe)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_files_of_a_check(found: LabelErrors, photos: Path, tmp_path: Path) -> None:
    """Only labels that are more likely wrong than right are corrected; a class may be called "none"."""
    errors = [error._replace(confidence=c) for error, c in zip(found.errors, (0.9, 0.252), strict=True)]
    result, lines = write_errors(dataclasses.replace(found, errors=errors), tmp_path)
    names = {"train/dogs/dogs03.png": ("dogs", "none"), "test/none/none02.png": ("none", "dogs")}
    rows = read(tmp_path / "label-errors.csv")
    assert {row["file"]: (row["given"], row["suggested"]) for row in rows} == names
    assert lines[0].startswith("2 of 48 labels are likely wrong")
    assert json.loads(json.dumps(result))["applied"] == 1
    assert "dogs03" in (tmp_path / "label-errors.html").read_text()
    # The corrected file is data to train on, with the same images and splits.
    fixed = recognise(tmp_path / "corrected.csv", Data(images=str(photos))).read()
    assert fixed.splits == found.source.splits
    before, after = (dict(zip(map(str, s.files or ()), s.labels, strict=True)) for s in (found.source, fixed))
    changed = [str(Path(name).relative_to(photos)) for name in before if before[name] != after[name]]
    assert changed == [rows[0]["file"]]
    given = {row["file"]: row["given"] for row in read(tmp_path / "corrected.csv") if row["given"]}
    assert given == {rows[0]["file"]: rows[0]["given"]}
    assert sorted(p.name for p in photos.rglob("*.csv")) == []


def in_archive(folder: Path, photos: Path) -> ImageDataset:
    return recognise(Path(shutil.make_archive(str(folder / "photos"), "zip", photos.parent, photos.name))).read()


def in_list_elsewhere(folder: Path, photos: Path) -> ImageDataset:
    names = [file.relative_to(photos) for file in sorted(photos.rglob("*.png"))]
    rows = [f"{name},{name.parts[1]},{name.parts[0]}" for name in names]
    (folder / "list.csv").write_text("\n".join(["file,label,split", *rows]))
    return recognise(folder / "list.csv", Data(images=str(photos))).read()


@pytest.mark.parametrize("read_data", [in_archive, in_list_elsewhere])
def test_the_printed_command_finds_the_images(
    read_data: Callable[[Path, Path], ImageDataset], found: LabelErrors, photos: Path, tmp_path: Path
) -> None:
    source = read_data(tmp_path, photos)
    _, lines = write_errors(dataclasses.replace(found, source=source), tmp_path)
    _, _, listed, _, folder, *task = shlex.split(lines[-1].partition(": ")[2])
    assert task == ["--set", "task=single-label"]
    assert [*(recognise(Path(listed), Data(images=folder)).read().files or ())] == [*(source.files or ())]


def test_images_within_shards_get_no_list(found: LabelErrors, tmp_path: Path) -> None:
    labels = {f"{i:02}.cls": b"%d" % (i % 2) for i in range(48)}
    images = {f"{i:02}.png": png() for i in range(48)}
    source = recognise(shard(tmp_path / "train.tar", dict(sorted((labels | images).items())))).read()
    result, lines = write_errors(dataclasses.replace(found, source=source), tmp_path)
    assert lines[-1] == "corrected.csv is not written: the images are not separate files in one folder"
    assert result["corrected"] is None
    assert not (tmp_path / "corrected.csv").exists()


def test_unreadable_images_may_have_been_packed_from_a_copy(tmp_path: Path) -> None:
    for i in range(24):
        path = tmp_path / "photos" / ("bright" if i % 2 else "dark") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG" if i == 3 else png(100 * (i % 2) + i))
    first, copy = (tmp_path / folder / "photos.zip" for folder in ("first", "copy"))
    shutil.make_archive(str(first.with_suffix("")), "zip", tmp_path / "photos")
    copy.parent.mkdir()
    shutil.copy(first, copy)
    recipe = Recipe(model="parallel-cnn", image_size=8, epochs=1, batch_size=8, channels=1)
    recipe = recipe.override({"data.on_bad_image": "skip", "data.max_bad_share": 0.5})
    load(recognise(first), recipe, cache=True, report=Console(None))
    found = find_label_errors(recipe, recognise(copy), Options(devices="cpu"), Console(None))
    assert len(found.source) == len(found.probabilities) == 23


def test_labels_must_be_one_class_for_each_image(tmp_path: Path, command: Command) -> None:
    numbers = tmp_path / "data.npz"
    np.savez(numbers, x_train=np.zeros((30, 4, 4), np.uint8), y_train=np.linspace(0, 1, 30))
    words = ["check", numbers, "--labels", "--epochs", "1", "--devices", "cpu"]
    assert "this data is regression" in command(*words, code=2)


@pytest.mark.slow
def test_planted_errors_in_digits(tmp_path: Path, command: Command) -> None:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    rng = np.random.default_rng(0)
    labels, wrong = digits.target.copy(), rng.choice(1797, 90, replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, 90)) % 10
    np.savez(tmp_path / "digits.npz", x_train=(digits.images * 15.9).astype(np.uint8), y_train=labels)
    words = ["check", tmp_path / "digits.npz", "--labels", "--model", "parallel-cnn", "--epochs", "40"]
    words += ["--set", "optimizer.lr=0.01", "--set", "batch_size=128", "--devices", "cpu"]
    errors = json.loads(command(*words, "--out", tmp_path / "out", "--json"))["errors"]
    hits = {row["row"] for row in errors} & set(wrong.tolist())
    assert len(hits) >= 0.8 * 90
    assert len(hits) >= 0.7 * len(errors)
