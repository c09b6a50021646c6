"""Calibration, prediction sets, unknown images and the comparison of runs, against planted truths."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import wilcoxon
from sklearn.metrics import roc_auc_score, top_k_accuracy_score

import flatout
from flatout.cli.main import main
from flatout.engine.base import Evaluation
from flatout.inference import calibration
from flatout.inference.calibration import Calibration, FeatureStats, OODDetector
from flatout.inference.evaluate import mcnemar
from flatout.tasks import task_named, wilson
from tests.conftest import Command
from tests.system.conftest import draw_small_pictures
from tests.unit.runs import write_run

ONE, SEVERAL = task_named("single-label"), task_named("multi-label")


def answers_of(seed: int, count: int, classes: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are `scale` times too large, and labels drawn from the true probabilities."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (count, classes))
    below = np.exp(calibration.log_softmax(logits)).cumsum(axis=1) < rng.random((count, 1))
    return (scale * logits).astype(np.float32), np.minimum(below.sum(axis=1), classes - 1)


def test_the_temperature_is_that_by_which_logits_are_too_large() -> None:
    logits, labels = answers_of(0, 4000, 5, scale=2.5)
    assert calibration.fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.1)
    # Of 20 images that are all classified correctly, a classifier is not certain.
    certain = 30 * np.eye(2)[np.arange(20) % 2]
    probabilities = np.exp(calibration.log_softmax(certain / calibration.fit_temperature(certain, np.arange(20) % 2)))
    assert probabilities.max() == pytest.approx(21 / 22, abs=0.001)
    one = logits[:, 1:2] - logits[:, :1]
    both = np.concatenate([np.zeros_like(one), one], axis=1)
    two = (np.random.default_rng(1).random(4000) < 1 / (1 + np.exp(-one[:, 0] / 2.5))).astype(np.int64)
    assert calibration.fit_temperature(one, two) == pytest.approx(calibration.fit_temperature(both, two))


def test_the_calibration_error_is_that_of_a_plain_loop() -> None:
    confidence, chance = np.random.default_rng(0).random((2, 500))
    is_right = chance < 0.5
    expected = 0.0
    for low in np.arange(calibration.BINS) / calibration.BINS:
        inside = (confidence >= low) & (confidence < low + 1 / calibration.BINS)
        expected += inside.mean() * abs(is_right[inside].mean() - confidence[inside].mean())
    assert calibration.calibration_error(calibration.reliability(confidence, is_right)) == pytest.approx(expected)


@pytest.mark.parametrize("classes", [1, 2, 20])
def test_sets_have_the_wanted_coverage_over_20_seeds(classes: int) -> None:
    """Of a run whose logits are three times too large."""
    covered: dict[float, list[float]] = {0.9: [], 0.95: [], 0.99: []}
    for seed in range(20):
        logits, labels = answers_of(seed, 1500, max(2, classes), scale=3.0)
        logits = logits[:, 1:] - logits[:, :1] if classes == 1 else logits
        found = Calibration.fit(None, evaluation(logits[:1000], labels[:1000]))
        assert found is not None
        assert found.temperature == pytest.approx(3, rel=0.5)
        for coverage, shares in covered.items():
            inside = found.in_set(logits[1000:], coverage)
            shares.append(inside[np.arange(500), labels[1000:]].mean())
    assert {c: np.mean(shares) for c, shares in covered.items()} == pytest.approx({c: c for c in covered}, abs=0.02)


def evaluation(logits: np.ndarray, labels: np.ndarray) -> Evaluation:
    return Evaluation(task=ONE, loss_sum=0.0, predicted=labels, labels=labels, probabilities=None, logits=logits)


def test_images_far_from_all_classes_are_unknown() -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(0, 3, (4, 8))

    def images(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels = rng.integers(0, 4, count)
        features = (means[labels] + rng.normal(0, 1, (count, 8))).astype(np.float32)
        return (features @ means.T).astype(np.float32), features, labels

    _, features, labels = images(2000)
    valid, test = images(1000), images(2000)
    stats = FeatureStats.of(features, labels)
    assert stats is not None
    found = OODDetector.fit(stats, valid[0], stats.distances(valid[1]))
    strange = rng.normal(0, 1, (2000, 8)).astype(np.float32)
    scores = [found.score(*test[:2]), found.score((strange @ means.T).astype(np.float32), strange)]
    assert np.mean(scores[0] > found.threshold) == pytest.approx(0.05, abs=0.02)
    assert roc_auc_score(np.repeat([0, 1], 2000), np.concatenate(scores)) > 0.95
    assert found.score(np.full((1, 4), np.nan), strange[:1])[0] == np.inf
    assert FeatureStats.of(np.full_like(features, np.nan), labels) is None
    energy = OODDetector.fit(None, valid[0], None)
    assert np.mean(energy.score(test[0], None) > energy.threshold) == pytest.approx(0.05, abs=0.02)


def test_intervals_and_tests_of_differences() -> None:
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    a, b = np.array([1] * 80 + [0] * 20, bool), np.array([1] * 75 + [0] * 5 + [1] * 12 + [0] * 8, bool)
    assert mcnemar(a, b) == (5, 12, pytest.approx(0.1435, abs=1e-4))
    assert mcnemar(a, a) == (0, 0, 1.0)


def test_scores_are_those_of_scikit_learn() -> None:
    logits, labels = answers_of(0, 300, 8)
    probabilities = np.exp(calibration.log_softmax(logits))
    predicted = probabilities.argmax(axis=1)
    found = ONE.scores(predicted, labels, probabilities)
    assert found["top5_accuracy"] == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5))
    assert "roc_auc" not in found
    pairs = ONE.confused_pairs(predicted, labels, list("abcdefgh"))
    counts = [((labels == ord(p["actual"]) - 97) & (predicted == ord(p["predicted"]) - 97)).sum() for p in pairs]
    assert counts == [p["count"] for p in pairs] == sorted(counts, reverse=True)
    two = np.stack([1 - probabilities[:, 0], probabilities[:, 0]], axis=1)
    is_first = (labels == 0).astype(np.int64)
    assert ONE.scores(two.argmax(axis=1), is_first, two)["roc_auc"] == pytest.approx(roc_auc_score(is_first, two[:, 1]))
    assert ONE.scores(np.full(300, -1), labels, np.full_like(probabilities, np.nan))["top5_accuracy"] == 0
    present = (probabilities > 0.1).astype(np.uint8)
    present[:, 3] = 0
    areas = [roc_auc_score(present[:, k], probabilities[:, k] ** 2) for k in range(8) if k != 3]
    assert SEVERAL.scores(probabilities, present, probabilities**2)["roc_auc"] == pytest.approx(np.mean(areas))


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    with pytest.MonkeyPatch.context() as patch:
        draw_small_pictures(patch)
        for name, epochs in (("first", "2"), ("second", "4")):
            assert main(["train", "digits", "--epochs", epochs, "--devices", "cpu", "--out", str(folder / name)]) == 0
    return folder


def test_figures_and_report_rest_on_the_answers_that_are_kept(digits: Path) -> None:
    run = flatout.load(digits / "second")
    with np.load(run.path / "predictions.npz") as saved:
        probabilities, labels, unknown = (saved[name] for name in ("probabilities", "labels", "unknown"))
    right, found = probabilities.argmax(axis=1) == labels, run.summary["trust"]
    assert run.summary["test_accuracy_interval"] == list(wilson(int(right.sum()), len(labels)))
    bins = calibration.reliability(probabilities.max(axis=1), right)
    assert found["ece_after"] == pytest.approx(calibration.calibration_error(bins), abs=1e-5)
    assert found["temperature"] != 1
    assert found["unknown"]["flagged"] == pytest.approx((unknown > run.unknown_threshold).mean())
    for row in found["prediction_sets"]:
        assert row["covered"] == pytest.approx(row["coverage"], abs=0.06)
    result = run.evaluate(devices="cpu")
    assert result["per_class"] == run.summary["per_class"]
    assert result["trust"]["prediction_sets"] == found["prediction_sets"]
    text = (digits / "second" / "report.html").read_text(encoding="utf-8")
    for wanted in ("95 % confidence interval", "calibration error", "sets with the right class", "reliability diagram"):
        assert wanted in text


def test_predict_answers_with_sets_and_unknown(
    digits: Path, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    run = flatout.load(digits / "second")
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (8, 8), dtype=np.uint8) for _ in range(20)]
    found = run.predict(noise, coverage=0.9)
    assert all(set(one.classes_in_set) <= set(run.classes) and one.coverage == 0.9 for one in found)
    assert sum(bool(one.unknown) for one in found) > 10
    assert any("unknown; most like" in str(one) for one in found)
    assert found[0].to_dict().keys() == {"file", "predictions", "unknown", "coverage", "set"}
    without = shutil.copytree(run.path, tmp_path / "run", ignore=shutil.ignore_patterns("known.safetensors"))
    with pytest.warns(UserWarning, match="known.safetensors is missing: unknown images are not recognised"):
        assert flatout.load(without).predict(noise[:1])[0].unknown is None
    assert main(["evaluate", str(without), "--devices", "cpu"]) == 0
    assert sum(text.count("known.safetensors is missing") for text in capsys.readouterr()) == 1
    for coverage, reason in (("1.5", "must be from 0.5 to 0.994"), ("0.999", "the 180 validation images")):
        assert reason in command("predict", run.path, "x.png", "--coverage", coverage, code=2)


def test_two_runs_are_compared(digits: Path, command: Command, tmp_path: Path) -> None:
    first, second = (str(digits / name) for name in ("first", "second"))
    found: dict[str, Any] = json.loads(command("compare", first, second, "--json"))
    right = []
    for run in (first, second):
        with np.load(Path(run) / "predictions.npz") as saved:
            right.append(saved["predicted"] == saved["labels"])
    assert found["only_right"] == [int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())]
    assert found["values"] == pytest.approx([one.mean() for one in right])
    assert found["differ"] == (found["p_value"] < 0.05)
    other = shutil.copytree(first, tmp_path / "other", ignore=shutil.ignore_patterns("predictions.npz"))
    with np.load(Path(first) / "predictions.npz") as saved:
        content: dict[str, Any] = dict(saved)
    assert "has no predictions to compare" in command("compare", first, other, code=2)
    np.savez(other / "predictions.npz", **(content | {"brightness": content["brightness"][::-1]}))
    for wrong, reason in ((other, "not the same test images"), (f"{first}/../first", "are the same run")):
        assert reason in command("compare", first, wrong, code=2)


def test_two_runs_of_numbers_are_compared(tmp_path: Path, command: Command) -> None:
    rng = np.random.default_rng(0)
    labels = rng.normal(50, 9, 200).astype(np.float32)
    folders, errors = [tmp_path / "first", tmp_path / "second"], []
    for folder, spread in zip(folders, (1, 3), strict=True):
        write_run(folder, ["number"], task="regression")
        numbers = labels + rng.normal(0, spread, 200).astype(np.float32)
        with np.load(folder / "predictions.npz") as saved:
            content: dict[str, Any] = dict(saved)
        content |= {"labels": labels, "predicted": numbers, "probabilities": numbers[:, None]}
        np.savez(folder / "predictions.npz", **content)
        errors.append(np.abs(numbers.astype(np.float64) - labels))
    found: dict[str, Any] = json.loads(command("compare", *folders, "--json"))
    assert found["p_value"] == pytest.approx(wilcoxon(*errors).pvalue)  # type: ignore[attr-defined]
    assert found["values"] == pytest.approx([one.mean() for one in errors])
    assert found["smaller_errors"] == [(errors[0] < errors[1]).sum(), (errors[1] < errors[0]).sum()]
    assert "Wilcoxon test: p = " in command("compare", *folders)


def test_without_validation_images_a_note_says_what_is_missing(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_small_pictures(monkeypatch)
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2
    settings = {"data.valid_fraction": 0.0, "epochs": 1, "batch_size": 20, "devices": "cpu", "out": tmp_path / "run"}
    run = flatout.fit("parallel-cnn", (images, labels), **settings)
    assert run.calibration is None
    assert run.summary["trust"] is None
    notes = "\n".join(run.summary["notes"])
    assert "no validation images: probabilities are not calibrated" in notes
    # Of the 36 that are not for the test.
    assert "at least 20 are needed: --set data.valid_fraction=0.56 takes" in notes
    assert "has no prediction sets" in command("predict", run.path, "x.png", "--coverage", "0.9", code=2)
