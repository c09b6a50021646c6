"""Wrong labels, found by confident learning, and the files with suggestions and corrections."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.analysis.label_errors import (
    LabelError,
    LabelErrors,
    find_errors,
    recipe_of_folds,
    write_corrected,
    write_errors,
)
from flatout.cli.main import main
from flatout.config import Data, Recipe
from flatout.config.jobs import load_job
from flatout.data.detect import recognise
from flatout.data.formats.arrays import from_arrays

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


def test_several_labels() -> None:
    true = (RNG.random((1000, 3)) < 0.4).astype(np.uint8)
    probabilities = np.stack([predictions(column.astype(np.int64), 2)[:, 1] for column in true.T], axis=1)
    wrong = RNG.random(true.shape) < 0.05
    index, given, suggested, _ = columns(find_errors(probabilities, true ^ wrong))
    hits = wrong[index, given]
    assert hits.sum() >= 0.8 * wrong.sum()
    assert hits.mean() >= 0.8
    assert (suggested == true[index, given])[hits].all()


@pytest.mark.parametrize("epochs", [1, 2, 3, 60])
def test_the_folds_cost_little_more_than_one_training(epochs: int) -> None:
    recipe = recipe_of_folds(load_job("fashion-mnist").override({"epochs": epochs}))
    assert (recipe.data.folds - 1) * recipe.epochs / epochs <= 1.2


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
    """A class may be called "none", the word for an image without any class."""
    result, lines = write_errors(found, tmp_path, tmp_path / "fixed.csv")
    names = {"train/dogs/dogs03.png": ("dogs", "none"), "test/none/none02.png": ("none", "dogs")}
    rows = read(tmp_path / "label-errors.csv")
    assert {row["file"]: (row["given"], row["suggested"]) for row in rows} == names
    assert lines[0].startswith("2 of 48 labels are likely wrong")
    assert json.loads(json.dumps(result))["applied"] == 2
    assert "dogs03" in (tmp_path / "label-errors.html").read_text()
    # The corrected file is data to train on, with the same images and splits.
    fixed = recognise(tmp_path / "fixed.csv", Data(images=str(photos))).read()
    assert fixed.splits == found.source.splits
    before, after = (dict(zip(map(str, s.files or ()), s.labels, strict=True)) for s in (found.source, fixed))
    assert {Path(name).name for name in before if before[name] != after[name]} == {"dogs03.png", "none02.png"}
    assert sorted(p.name for p in photos.rglob("*.csv")) == []


def test_only_labels_that_are_more_likely_wrong_than_right_are_changed(found: LabelErrors, tmp_path: Path) -> None:
    errors = [
        error._replace(confidence=confidence) for error, confidence in zip(found.errors, (0.9, 0.252), strict=True)
    ]
    result, lines = write_errors(dataclasses.replace(found, errors=errors), tmp_path, tmp_path / "fixed.csv")
    assert (len(result["errors"]), result["applied"]) == (2, 1)
    assert "corrected 1 label" in lines[-1]
    changed = [row["file"] for row in read(tmp_path / "fixed.csv") if f"/{row['label']}/" not in row["file"]]
    assert changed == [result["errors"][0]["file"]]


def test_an_image_without_any_of_several_classes_has_an_empty_label(tmp_path: Path) -> None:
    labels = np.array([[1, 0], [0, 1], [0, 0], [1, 1]] * 5, np.uint8)
    source = from_arrays((np.zeros((20, 4, 4), np.uint8), labels))
    write_corrected(source, {0: ""}, tmp_path / "fixed.csv")
    first, *names = source.classes
    assert [row["label"] for row in read(tmp_path / "fixed.csv")][:4] == ["", names[0], "", f"{first}|{names[0]}"]


def test_chosen_suggestions_are_applied_without_training(found: LabelErrors, photos: Path, tmp_path: Path) -> None:
    write_errors(found, tmp_path, None)
    lines = (tmp_path / "label-errors.csv").read_text().splitlines()
    chosen, fixed = tmp_path / "kept.csv", tmp_path / "fixed.csv"
    chosen.write_text("\n".join([lines[0], *(line for line in lines if ",test," in line)]))
    words = ["check", str(photos), "--suggestions", str(chosen), "--apply", str(fixed), "--json"]
    assert main(words) == 0
    changed = [row["file"] for row in read(fixed) if f"/{row['label']}/" not in row["file"]]
    assert changed == ["test/none/none02.png"]
    assert main(words) == 2, "nothing is overwritten"


def test_corrected_arrays_are_data_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    labels = RNG.permutation(np.arange(40) % 11)
    data, fixed = tmp_path / "data.npz", tmp_path / "fixed.npz"
    np.savez(data, x_train=images[:30], y_train=labels[:30], x_test=images[30:], y_test=labels[30:])
    new = str((labels[2] + 1) % 11)
    (tmp_path / "kept.csv").write_text(f"split,row,given,suggested\ntrain,2,{labels[2]},{new}\n")
    words = ["check", str(data), "--suggestions", str(tmp_path / "kept.csv"), "--apply"]
    assert main([*words, str(fixed)]) == 0
    assert f"flatout train {fixed}" in capsys.readouterr().out
    before, after = recognise(data).read(), recognise(fixed).read()
    np.testing.assert_array_equal(after.images, before.images)  # pyright: ignore
    assert (after.splits, after.classes) == (before.splits, before.classes)
    assert np.flatnonzero(after.labels != before.labels).tolist() == [2]
    assert after.classes[after.labels[2]] == new
    assert main([*words, str(tmp_path / "fixed.csv")]) == 0
    assert "arrays are trained from --apply OUT.npz" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--apply", "{here}/out.txt"], "must be a new file that ends in .csv"),
        (["--suggestions", "{here}/kept.csv"], "--suggestions needs --apply"),
        (["--suggestions", "{here}/other.csv", "--apply", "{here}/out.npz"], "these images are files; end the name in"),
        (["--suggestions", "{here}/absent.csv", "--apply", "{here}/out.csv"], "absent.csv: cannot be read"),
        (["--suggestions", "{here}/other.csv", "--apply", "{here}/out.csv"], "line 2: is not of this data"),
        (["--epochs", "0"], "--epochs requires --labels"),
        (["--labels", "--minutes", "0"], "--minutes 0: must be greater than 0"),
        (["--labels", "--minutes", "1", "--job", "digits"], "needs a generated recipe: remove --job"),
    ],
)
def test_bad_input(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "other.csv").write_text("split,row,given,suggested\ntrain,999,none,dogs\n")
    assert main(["check", str(photos), *(word.format(here=tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_numbers_have_no_wrong_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "data.npz", x_train=np.zeros((30, 4, 4), np.uint8), y_train=np.linspace(0, 1, 30))
    assert main(["check", str(tmp_path / "data.npz"), "--labels", "--epochs", "1", "--devices", "cpu"]) == 2
    assert "labels that are numbers have no classes" in capsys.readouterr().err


@pytest.mark.slow
def test_planted_errors_in_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    labels, wrong = digits.target.copy(), RNG.choice(1797, 90, replace=False)
    labels[wrong] = (labels[wrong] + RNG.integers(1, 10, 90)) % 10
    np.savez(tmp_path / "digits.npz", x_train=(digits.images * 15.9).astype(np.uint8), y_train=labels)
    out = tmp_path / "out"
    words = ["check", str(tmp_path / "digits.npz"), "--labels", "--model", "fashion-cnn", "--set", "image_size=16"]
    assert main([*words, "--epochs", "20", "--devices", "cpu", "--out", str(out), "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    hits = {row["row"] for row in errors} & set(wrong.tolist())
    assert len(hits) >= 0.8 * 90
    assert len(hits) >= 0.7 * len(errors)
