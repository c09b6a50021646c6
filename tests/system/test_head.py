"""The head fitted to features: against scikit-learn and a plain loop, and in whole runs."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import flatout
from flatout.cli.main import main
from flatout.tasks import Regression, SingleLabel
from flatout.train.head import fit_head
from flatout.utils.errors import InputError
from tests.system.interrupted import at_image
from tests.system.run_files import grey_levels, metrics, summary, weights

HEAD_ONLY = ("train", "digits", "--epochs", "0", "--set", "linear_probe=true")
CLASSES = SingleLabel(loss="cross-entropy")
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


def features_of(labels: np.ndarray, *, seed: int = 3) -> np.ndarray:
    """Return features of different scales that say something of the labels."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(len(labels), 7)) * 3 + 2
    return (noise + labels[:, None] * rng.normal(size=7)).astype(np.float32)


@pytest.mark.parametrize("classes", [2, 5])
def test_the_head_is_that_of_scikit_learn(classes: int) -> None:
    labels = np.random.default_rng(3).integers(0, classes, 200)
    features = features_of(labels)
    head = fit_head([features], labels, CLASSES, classes, strength=0.05)
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    # Of two classes, scikit-learn regularises one row of weights, and a softmax two that are half as large.
    C = (2 if classes == 2 else 1) / (0.05 * len(labels))
    expected = LogisticRegression(C=C, max_iter=1000, tol=1e-8).fit(scaled, labels)
    found = torch.from_numpy(features @ head.weight.T + head.bias).softmax(dim=1).numpy()
    np.testing.assert_allclose(found, expected.predict_proba(scaled), atol=2e-3)


@pytest.mark.parametrize("of", ["a head", "a correction"])
def test_numbers_are_fitted_by_ridge_regression(of: str) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, 5)).astype(np.float32)
    labels = (features @ rng.normal(size=5) + 0.1 * rng.normal(size=100)).astype(np.float32)
    task = Regression(loss="mse", label_mean=float(labels.mean()), label_std=float(labels.std()))
    weight, bias = rng.normal(size=(1, 5)).astype(np.float32) * (of == "a correction"), np.zeros(1, np.float32)
    head = fit_head([features], labels, task, 1, strength=0.2, base=(weight, bias) if weight.any() else None)
    scaled = (features - features.mean(0)) / features.std(0)
    targets = (labels - labels.mean()) / labels.std() - features @ weight[0]
    # mean((xw - t)^2) + 0.1 w^2
    expected = np.linalg.solve(scaled.T @ scaled / 100 + 0.1 * np.eye(5), scaled.T @ targets / 100)
    np.testing.assert_allclose((head.weight - weight)[0] * features.std(0), expected, atol=2e-3)


def test_answers_of_the_folds_come_from_heads_that_have_not_seen_the_image() -> None:
    """More features than images fit any labels, but say nothing about unseen ones."""
    rng = np.random.default_rng(7)
    features, labels = rng.normal(size=(80, 200)).astype(np.float32), rng.integers(0, 2, 80)
    head = fit_head([features], labels, CLASSES, 2)
    seen = (features @ head.weight.T + head.bias).argmax(axis=1)
    assert (seen == labels).mean() > 0.9
    assert (head.out_of_fold.argmax(axis=1) == labels).mean() < 0.7


def test_images_of_a_group_share_a_fold() -> None:
    """Copies of an image in several folds would make random labels predictable."""
    rng = np.random.default_rng(8)
    features, labels = rng.normal(size=(40, 60)).astype(np.float32), rng.integers(0, 2, 40)
    of, twice, doubled = np.repeat(np.arange(40), 2), np.repeat(features, 2, axis=0), np.repeat(labels, 2)
    right = [
        (fit_head([twice], doubled, CLASSES, 2, groups=groups, copies=copies).out_of_fold.argmax(axis=1) == doubled)
        for groups, copies in ((of, None), (None, of), (np.arange(80), of), (None, None))
    ]
    assert max(each.mean() for each in right[:3]) < right[3].mean()


@pytest.mark.parametrize("times", [1, 2])
def test_validation_images_are_judged_by_heads_that_have_not_seen_them(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random labels are learnt by heart: images beyond the limit of the cross-validation, and those there twice."""
    monkeypatch.setattr("flatout.train.head.MAX_IMAGES", 50 if times == 1 else 20_000)
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (120, 16, 16, 1), np.uint8), rng.integers(0, 2, 120)
    images, labels = (np.repeat(values, times, axis=0) for values in (images, labels))
    first, last = slice(80 * times), slice(80 * times, None)
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    data = {"train": (images[first], labels[first]), "valid": (images[last], labels[last])}
    given: dict[str, Any] = {"linear_probe": True, "epochs": 0, "devices": "cpu", "quiet": True}
    run = flatout.fit(net, data, out=tmp_path / "run", **given)
    assert run.summary["valid_accuracy"] < 0.75


def test_mirrored_views_are_fitted_together() -> None:
    labels = np.random.default_rng(3).integers(0, 3, 90)
    views = [features_of(labels, seed=seed) for seed in (1, 2)]
    twice = fit_head(views, labels, CLASSES, 3, strength=0.1)
    both = fit_head([np.concatenate(views)], np.tile(labels, 2), CLASSES, 3, strength=0.1)
    np.testing.assert_allclose(twice.weight, both.weight, atol=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_fewer_images_than_folds(count: int) -> None:
    labels = np.arange(count) % 2
    head = fit_head([features_of(labels)], labels, CLASSES, 2)
    assert np.isfinite(head.weight).all()


@pytest.mark.parametrize(
    ("devices", "engine"),
    [("cpu", "torch"), pytest.param("2xcpu", "torch", marks=pytest.mark.slow), ("2xcpu", "xla")],
)
def test_a_run_of_no_epochs_is_its_head(devices: str, engine: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    views = ("--set", "tta=true", "--set", "augment.flip=true")
    assert main([*HEAD_ONLY, *views, "--devices", devices, "--engine", engine, "--out", str(out)]) == 0
    (line,), figures = metrics(out), summary(out)
    assert (line["epoch"], figures["epochs"], figures["epochs_trained"], figures["kept_epoch"]) == (0, 0, 0, 0)
    assert figures["test_accuracy"] > 0.9
    assert figures["valid_accuracy"] == line["valid_accuracy"]
    assert figures["trust"]["calibration_images"] == figures["valid_count"]
    assert figures["trained_parameters"] < figures["parameters"]  # those of the head alone
    # What is written answers as the run did.
    evaluated = flatout.load(out).evaluate(devices="cpu")
    assert evaluated["test_correct"] == figures["test_correct"]
    assert evaluated["test_loss"] == pytest.approx(figures["test_loss"], rel=1e-4)


@pytest.mark.parametrize("of", ["several labels", "numbers", "folds"])
def test_only_classes_are_calibrated_and_not_on_the_images_of_a_fold(of: str, tmp_path: Path) -> None:
    images, classes = grey_levels(300)
    several = np.stack([classes == 0, classes > 0, classes == 2], axis=1).astype(np.uint8)
    labels = {"several labels": several, "numbers": classes + 0.5}.get(of, classes)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1 if of == "numbers" else 3))
    given: dict[str, Any] = {"linear_probe": True, "epochs": 0, "devices": "cpu", "quiet": True}
    run = flatout.fit(net, (images, labels), out=tmp_path / "run", folds=2 * (of == "folds"), **given)
    figures = summary(run.path / "fold-1") if of == "folds" else run.summary
    assert figures["valid_count"] >= 20
    assert figures["trust"] is None


def test_fine_tuning_that_makes_it_worse_is_not_kept(tmp_path: Path) -> None:
    """The fitted head is one of the results to choose from, and the one for all images is kept."""
    bad = ("--epochs", "1", "--lr", "3", "--set", "linear_probe=true", "--devices", "cpu")
    assert main(["train", "digits", *bad, "--out", str(tmp_path / "tuned")]) in (0, 1)
    assert main([*HEAD_ONLY, "--devices", "cpu", "--out", str(tmp_path / "head")]) == 0
    tuned, head = summary(tmp_path / "tuned"), summary(tmp_path / "head")
    assert tuned["kept_epoch"] == 0
    assert [tuned[key] == head[key] for key in ("test_accuracy", "valid_accuracy")] == [True, True]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_without_time_for_an_epoch_the_head_that_is_evaluated_is_written(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has another one by then: that for the training images alone, from which fine-tuning would start."""
    # Else the head would be good enough to end before the time of an epoch is measured.
    monkeypatch.setattr("flatout.train.run.ENOUGH", 2.0)
    short = ("--minutes", "0.01", "--epochs", "1", "--set", "linear_probe=true", "--set", f"keep={keep}")
    assert main(["train", "digits", *short, "--devices", "cpu", "--out", str(tmp_path / "run")]) == 0
    figures, evaluated = summary(tmp_path / "run"), flatout.load(tmp_path / "run").evaluate(devices="cpu")
    assert any("fine-tuning is left out: an epoch takes longer" in note for note in figures["notes"])
    assert evaluated["test_accuracy"] == figures["test_accuracy"]
    assert evaluated["test_loss"] == pytest.approx(figures["test_loss"], rel=1e-4)


def test_a_first_epoch_that_is_interrupted_is_evaluated_with_the_weights_that_are_written(tmp_path: Path) -> None:
    """Fine-tuning has changed them: they are no longer those of the fitted head."""
    changes = ("--set", "linear_probe=true", "--set", "keep=last", "--lr", "0.1", "--batch-size", "64")
    with at_image(128, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert main(["train", "digits", *changes, "--devices", "cpu", "--out", str(tmp_path / "run")]) == 130
    figures, evaluated = summary(tmp_path / "run"), flatout.load(tmp_path / "run").evaluate(devices="cpu")
    assert evaluated["test_loss"] == pytest.approx(figures["test_loss"], rel=1e-4)
    assert figures["kept_epoch"] is figures["train_loss"] is None


@pytest.mark.parametrize("validation", ["0", pytest.param("0.1", marks=pytest.mark.slow)])
def test_a_resumed_run_ends_as_an_undisturbed_one(validation: str, tmp_path: Path) -> None:
    """Without validation images, the last weights are kept, not the fitted head."""
    # On a busy machine, each run could measure another number format as the fastest.
    changes = ("linear_probe=true", "schedule.name=constant", "precision=fp32", f"data.valid_fraction={validation}")
    flags = ("train", "digits", "--lr", "1e-3", "--devices", "cpu", *(w for key in changes for w in ("--set", key)))
    assert main([*flags, "--epochs", "2", "--out", str(tmp_path / "whole")]) == 0
    assert main([*flags, "--epochs", "1", "--out", str(tmp_path / "parts")]) == 0
    resume = ("train", "--resume", "--devices", "cpu", "--out", str(tmp_path / "parts"))
    assert main([*resume, "--epochs", "0"]) == 2  # the fitted head would replace the weights
    assert main([*resume, "--epochs", "2"]) == 0
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)


def test_without_validation_images_fine_tuning_is_not_stopped_early(tmp_path: Path) -> None:
    """Nor given up with a budget, for a head that is good enough, once it has begun."""
    given: dict[str, Any] = {"linear_probe": True, "valid_fraction": 0, "devices": "cpu", "quiet": True}
    given |= {"early_stopping": 1, "data": grey_levels(60), "out": tmp_path / "run"}
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    assert flatout.fit(net, epochs=2, **given).summary["epochs_trained"] == 2
    assert flatout.fit(net, epochs=2, minutes=1, resume=True, **given).summary["epochs_trained"] > 2


FINE_TUNED: dict[str, Any] = {"linear_probe": True, "freeze": "all-but-last-1", "keep": "last", "epochs": 2}
FINE_TUNED |= {"augment": None, "class_weights": "none"}


def small_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def test_validation_images_correct_the_head_of_a_fine_tuned_network(tmp_path: Path) -> None:
    """Many labels of the training images are wrong here."""
    images, labels = grey_levels(600)
    wrong = np.where((labels == 1) & (np.arange(600) % 9 > 2), 0, labels)
    held_out = {"valid": (images[200:400], labels[200:400]), "test": (images[400:], labels[400:])}
    data = {"train": (images[:200], wrong[:200]), **held_out}
    run = flatout.fit(small_net(), data, out=tmp_path / "run", devices="cpu", quiet=True, **FINE_TUNED)
    before = metrics(run.path)[-1]["valid_accuracy"]
    assert min(run.summary["valid_accuracy"], run.summary["test_accuracy"]) > before + 0.1
    evaluated = run.evaluate(data, devices="cpu")
    assert evaluated["test_loss"] == pytest.approx(run.summary["test_loss"], rel=1e-4)


@pytest.mark.parametrize("held_out", ["a fold", "one image"])
def test_without_images_for_it_the_head_is_not_corrected(held_out: str, tmp_path: Path) -> None:
    images, labels = grey_levels(120)
    folds = 2 * (held_out == "a fold")
    parts = {"train": (images[1:], labels[1:]), "valid": (images[:1], labels[:1])}
    data: Any = (images, labels) if folds else parts
    run = flatout.fit(small_net(), data, folds=folds, out=tmp_path / "run", devices="cpu", quiet=True, **FINE_TUNED)
    figures = summary(run.path / "fold-1") if folds else run.summary
    assert not any("corrected" in note for note in figures["notes"])


def test_a_network_without_a_head_is_refused(tmp_path: Path) -> None:
    """Its logits are not linear in what any layer reads."""
    given: dict[str, Any] = {"job": "digits", "linear_probe": True, "devices": "cpu", "quiet": True}
    with pytest.raises(InputError, match="no head can be fitted; set linear_probe = false"):
        flatout.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh()), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_class_weights_shift_the_head() -> None:
    labels = (np.arange(200) % 10 == 0).astype(np.int64)
    features = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    plain = fit_head([features], labels, CLASSES, 2, strength=1.0)
    given, balanced = np.array([1 / 1.8, 5.0], np.float32), replace(CLASSES, is_balanced=True)
    weighted = fit_head([features], labels, balanced, 2, strength=1.0, class_weights=given)
    answers = [(features @ head.weight.T + head.bias).argmax(axis=1).mean() for head in (plain, weighted)]
    assert answers[0] == 0 and answers[1] > 0.2
