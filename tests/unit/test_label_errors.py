"""Wrong labels, found by confident learning."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.cli import main
from flatout.data.detect import recognise
from flatout.explore import label_files
from flatout.explore.confident import find_errors, find_errors_of_several
from flatout.explore.label_errors import LabelErrors, judge, short
from flatout.jobs import load_job
from flatout.recipe import Data, Recipe

RNG = np.random.default_rng(0)


def answers(true: np.ndarray, classes: int, noise: float = 0.6) -> np.ndarray:
    """Return probabilities of a model that is right about most images."""
    logits = RNG.normal(size=(len(true), classes)) * noise
    logits[np.arange(len(true)), true] += 3
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def test_planted_errors_are_found():
    true = RNG.integers(0, 5, 2000)
    given, wrong = true.copy(), RNG.choice(2000, 100, replace=False)
    given[wrong] = (true[wrong] + RNG.integers(1, 5, 100)) % 5
    found = find_errors(answers(true, 5), given)
    assert len(np.intersect1d(found.index, wrong)) >= 95
    assert len(found) <= 130
    assert (found.suggested == true[found.index]).mean() > 0.95
    assert (np.diff(found.confidence) <= 0).all()


def test_a_network_that_knows_little_is_sure_of_little():
    true = RNG.integers(0, 2, 1600)
    evidence = RNG.normal(size=1600) + np.where(true == 1, 0.4, -0.4)
    # It prefers class 1, and is surer than it should be.
    present = 1 / (1 + np.exp(-(2 * evidence + 0.5)))
    given = np.where(RNG.random(1600) < 0.05, 1 - true, true)
    found = find_errors(np.stack([1 - present, present], axis=1), given)
    share_wrong = (given != true)[found.index].mean()
    assert found.confidence.mean() < share_wrong + 0.2


def test_right_labels_and_absent_classes_are_left_alone():
    true = np.repeat(np.arange(3), 50)
    probabilities = np.eye(4)[true] * 0.9 + 0.025
    assert len(find_errors(probabilities, true)) == 0


def test_several_labels():
    true = (RNG.random((1000, 3)) < 0.4).astype(np.uint8)
    probabilities = np.stack([answers(column.astype(np.int64), 2)[:, 1] for column in true.T], axis=1)
    wrong = RNG.random(true.shape) < 0.05
    found = find_errors_of_several(probabilities, true ^ wrong)
    hits = wrong[found.index, found.given]
    assert hits.sum() >= 0.8 * wrong.sum()
    assert hits.mean() >= 0.8
    assert (found.suggested == true[found.index, found.given])[hits].all()


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 10, 60])
def test_the_folds_cost_little_more_than_one_training(epochs: int):
    recipe = short(load_job("fashion-mnist").override({"epochs": epochs}))
    folds = recipe.data.folds
    assert (folds - 1) * recipe.epochs / epochs <= 1.2


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labels") / "photos"
    for split, count in (("train", 20), ("test", 4)):
        for name in ("cats", "dogs"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{name}{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def found(photos: Path) -> LabelErrors:
    """The errors that a model finds which takes one training cat and one test dog for the other."""
    source = recognise(photos).read()
    true = np.asarray(source.labels).copy()
    true[[3, 46]] ^= 1
    probabilities = (np.eye(2)[true] * 0.9 + 0.05).astype(np.float32)
    recipe = Recipe(model="any", image_size=8, epochs=1, batch_size=1)
    return LabelErrors(source=source, errors=judge(source, probabilities), probabilities=probabilities, recipe=recipe)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_files_of_a_check(found: LabelErrors, photos: Path, tmp_path: Path):
    result, lines = label_files.write(found, tmp_path, tmp_path / "fixed.csv")
    names = {"train/cats/cats03.png": ("cats", "dogs"), "test/dogs/dogs02.png": ("dogs", "cats")}
    rows = read(tmp_path / "label-errors.csv")
    assert {row["file"]: (row["given"], row["suggested"]) for row in rows} == names
    assert lines[0].startswith("2 of 48 labels are likely wrong")
    assert json.dumps(result)
    assert "cats03" in (tmp_path / "label-errors.html").read_text()
    # The corrected file is data to train on, with the same images and splits.
    fixed = recognise(tmp_path / "fixed.csv", Data(images=str(photos))).read()
    assert fixed.splits == found.source.splits
    before, after = (dict(zip(map(str, s.files or ()), s.labels, strict=True)) for s in (found.source, fixed))
    assert {Path(name).name for name in before if before[name] != after[name]} == {"cats03.png", "dogs02.png"}
    assert sorted(p.name for p in photos.rglob("*.csv")) == []


def test_networks_that_know_little_are_named(found: LabelErrors):
    labels = np.array([[1, 0, 1], [0, 1, 0]] * 24, np.uint8)
    source = dataclasses.replace(found.source, labels=labels, task="multi-label", classes=("a", "b", "c"))
    for right, remarks in ((0.9, 0), (0.4, 1)):
        several = dataclasses.replace(found, source=source, probabilities=np.where(labels, right, 1 - right))
        assert len(label_files.remarks(several)) == remarks


def test_chosen_suggestions_are_applied_without_training(found: LabelErrors, photos: Path, tmp_path: Path):
    label_files.write(found, tmp_path, None)
    kept = [row for row in read(tmp_path / "label-errors.csv") if row["split"] == "test"]
    chosen, fixed = tmp_path / "kept.csv", tmp_path / "fixed.csv"
    label_files.write_csv(chosen, list(kept[0]), [list(row.values()) for row in kept])
    words = ["check", str(photos), "--suggestions", str(chosen), "--apply", str(fixed), "--json"]
    assert main(words) == 0
    changed = [row["file"] for row in read(fixed) if f"/{row['label']}/" not in row["file"]]
    assert changed == ["test/dogs/dogs02.png"]
    assert main(words) == 2, "nothing is overwritten"


def test_corrected_arrays_are_data_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    labels = RNG.permutation(np.arange(40) % 11)
    data, fixed = tmp_path / "data.npz", tmp_path / "fixed.npz"
    np.savez(data, x_train=images[:30], y_train=labels[:30], x_test=images[30:], y_test=labels[30:])
    new = str((labels[2] + 1) % 11)
    chosen = [{"split": "train", "row": 2, "given": str(labels[2]), "suggested": new}]
    label_files.write_csv(tmp_path / "kept.csv", list(chosen[0]), [list(chosen[0].values())])
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
        (["--apply", "{here}/none/out.csv"], "there is no folder"),
        (["--suggestions", "{here}/kept.csv"], "--suggestions needs --apply"),
        (["--suggestions", "{here}/other.csv", "--apply", "{here}/out.npz"], "these images are files; end the name in"),
        (["--suggestions", "{here}/absent.csv", "--apply", "{here}/out.csv"], "absent.csv: cannot be read"),
        (["--suggestions", "{here}/other.csv", "--apply", "{here}/out.csv"], "line 2: is not of this data"),
        (["--epochs", "3"], "go with --labels"),
    ],
)
def test_bad_input(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    (tmp_path / "other.csv").write_text("split,row,given,suggested\ntrain,999,cats,dogs\n")
    assert main(["check", str(photos), *(word.format(here=tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_numbers_have_no_wrong_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.savez(tmp_path / "data.npz", x_train=np.zeros((30, 4, 4), np.uint8), y_train=np.linspace(0, 1, 30))
    assert main(["check", str(tmp_path / "data.npz"), "--labels", "--epochs", "1", "--devices", "cpu"]) == 2
    assert "labels that are numbers have no classes" in capsys.readouterr().err


@pytest.mark.slow
def test_planted_errors_in_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
