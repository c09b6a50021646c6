"""What labels mean: metrics against scikit-learn, thresholds, splits, recipes, and answers in words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    mean_absolute_error,
    precision_recall_fscore_support,
    r2_score,
)

from flatout.config import Recipe
from flatout.data.splits import split_by_labels
from flatout.report import pictures
from flatout.tasks import TASKS, task_named, with_task
from flatout.utils.errors import InputError

RECIPE = Recipe(model="any", image_size=8, epochs=1, batch_size=8)
SEVERAL, NUMBERS, ONE = (task_named(name) for name in ("multi-label", "regression", "single-label"))


def random_labels(seed: int, count: int = 200, classes: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities with many equal ones, and labels."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((count, classes)) < rng.random(classes)).astype(np.uint8)
    probabilities = np.clip(np.round(labels * 0.3 + rng.random((count, classes)) * 0.7, 1), 0, 1)
    return probabilities.astype(np.float32), labels


@pytest.mark.filterwarnings("ignore:No positive class", "ignore:.*ill-defined")
@pytest.mark.parametrize("task", ["multi-label", "multi-label, a class without images", "single-label", "regression"])
def test_metrics_are_those_of_scikit_learn(task: str) -> None:
    rng = np.random.default_rng(0)
    if task == "regression":
        labels = rng.normal(50, 9, 300).astype(np.float32)
        predicted = (labels + rng.normal(0, 3, 300)).astype(np.float32)
        expected = {"mae": mean_absolute_error(labels, predicted), "r2": r2_score(labels, predicted)}
        assert NUMBERS.metrics(predicted, labels) == pytest.approx(expected)
        return
    if task == "single-label":
        labels = rng.integers(0, 6, 200)
        predicted = np.where(rng.random(200) < 0.7, labels, rng.integers(0, 6, 200))
        of, answers, correct = ONE, predicted, int((predicted == labels).sum())
        expected = {"accuracy": correct / 200, "correct": correct}
        expected["balanced_accuracy"] = balanced_accuracy_score(labels, predicted)
    else:
        predicted, labels = random_labels(0)
        if task != "multi-label":
            labels[:, 2] = 0
        of = SEVERAL.tuned(predicted, labels)
        answers = of.decided(predicted)
        expected = {"map": average_precision_score(labels, predicted, average="macro")}
        expected |= {f"f1_{how}": f1_score(labels, answers, average=how) for how in ("macro", "micro")}
    assert of.metrics(predicted, labels) == pytest.approx(expected)
    table: Any = precision_recall_fscore_support(labels, answers)
    for key, column in zip(("precision", "recall", "f1", "support"), table, strict=True):
        assert [row[key] for row in of.per_class(answers, labels, list("abcdef"))] == pytest.approx(list(column))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=30))
def test_no_threshold_has_a_higher_f1_than_the_tuned_one(rows: list[tuple[int, bool]]) -> None:
    probabilities = np.array([[value / 10] for value, _ in rows], np.float32)
    labels = np.array([[present] for _, present in rows], np.uint8)
    task = SEVERAL.tuned(probabilities, labels)

    def f1(answers: np.ndarray) -> float:
        return 2 * (answers & labels).sum() / max(1, answers.sum() + labels.sum())

    best = max(f1(probabilities >= threshold) for threshold in np.arange(-0.05, 1.1, 0.05))
    assert f1(task.decided(probabilities)) == pytest.approx(best)
    assert labels.any() or task.thresholds == (0.5,)


def test_views_are_averaged_as_probabilities_or_numbers() -> None:
    """Averaged probabilities alone would have no energy, and unknown images would be found by rounding."""
    views = 3 * torch.randn(3, 5, 4)
    averaged = ONE.averaged(views)
    torch.testing.assert_close(averaged.logsumexp(1), views.logsumexp(2).mean(0))
    torch.testing.assert_close(averaged.softmax(1), views.softmax(2).mean(0))
    torch.testing.assert_close(SEVERAL.averaged(views).sigmoid(), views.sigmoid().mean(0))
    torch.testing.assert_close(NUMBERS.averaged(views[..., :1]), views[..., :1].mean(0))


def test_a_split_has_the_same_share_of_every_label_and_of_small_and_large_numbers() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random((1000, 8)) < [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.9]).astype(np.uint8)
    kept, taken = split_by_labels(labels, 0.25, 1, stream="valid")
    assert sorted([*kept, *taken]) == list(range(1000))
    assert len(taken) == pytest.approx(250, abs=8)
    assert np.abs(labels[taken].sum(0) - labels.sum(0) / 4).max() <= 2
    # A rare label stays in training.
    labels = np.zeros((50, 3), np.uint8)
    labels[:, 0], labels[7, 1], labels[3, 2] = 1, 1, 1
    kept, taken = split_by_labels(labels, 0.7, 1, stream="test")
    assert labels[kept].any(0).all()
    assert len(taken) > 20
    numbers = np.random.default_rng(0).lognormal(3, 2, 500).astype(np.float32)
    taken = split_by_labels(numbers, 0.2, 1, stream="valid")[1]
    assert len(taken) == 100
    ranks = np.searchsorted(np.sort(numbers), numbers[taken])
    assert np.bincount(ranks * 10 // 500).tolist() == [10] * 10


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        ({"label_smoothing": 0.1}, "regression", "label_smoothing = 0.1: smooths classes"),
        ({"class_weights": "balanced"}, "regression", "class_weights = 'balanced': weighs classes"),
        ({"augment.cutmix": 1.0}, "regression", "augment.cutmix = 1.0: the number of a patchwork"),
        ({"loss": "mse"}, "single-label", "loss = 'mse': the losses of a single-label task are cross-entropy"),
        ({"loss": "huber"}, "multi-label", "loss = 'huber': the losses of a multi-label task are binary"),
        ({"loss": "binary-cross-entropy"}, "regression", "the losses of a regression task are mse, huber"),
        ({"task": "regression"}, "multi-label", "task = 'regression': the labels of the data are multi-label"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes: dict, task: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_task(RECIPE.override(changes), task)


@pytest.mark.parametrize(("name", "task"), TASKS.items())
def test_the_default_loss_stands_for_that_of_the_task(name: str, task: Any) -> None:
    recipe = with_task(RECIPE, name)
    assert (recipe.task, recipe.loss) == (name, task.losses[0])
    assert with_task(recipe, name) == recipe


def test_answers_in_words() -> None:
    classes, row = ["cat", "dog", "emu"], np.array([0.2, 0.9, 0.6], np.float32)
    assert ONE.answer(row, classes, 2)["classes"] == ("dog", "emu")
    tuned = replace(SEVERAL, thresholds=(0.1, 0.95, 0.6))
    assert SEVERAL.answer(row, classes, 1)["classes"] == ("dog", "emu")
    assert tuned.answer(row, classes, 1)["classes"] == ("emu", "cat")
    assert NUMBERS.answer(np.array([3.5], np.float32), (), 5) == {"value": 3.5}
    assert SEVERAL.text(np.array([1, 0, 1]), classes) == "cat, emu"
    assert SEVERAL.text(np.array([0, 0, 0]), classes) == "none"
    assert (ONE.text(-1, classes), NUMBERS.text(3.14159, ())) == ("none", "3.142")


@pytest.mark.parametrize("count", [3, 100])
def test_pictures_are_drawn_of_any_answers(tmp_path: Path, count: int) -> None:
    names = [f"class {i} with a name of many words" for i in range(count)]
    probabilities, labels = random_labels(0, 30, count)
    probabilities[3] = np.nan
    rows = SEVERAL.per_class(SEVERAL.decided(probabilities), labels, names)
    pictures.draw_class_scores(tmp_path / "several.png", rows)
    numbers = np.linspace(-5, 5, count).astype(np.float32)
    pictures.draw_numbers(tmp_path / "numbers.png", np.where(numbers > 4, np.nan, numbers), numbers, "numbers")
    assert all((tmp_path / f"{name}.png").stat().st_size > 2000 for name in ("several", "numbers"))


def test_the_worst_mistakes_come_first() -> None:
    probabilities = np.array([[0.9, 0.1], [0.6, 0.1], [0.9, 0.6], [0.1, 0.2]], np.float32)
    labels = np.array([[0, 0], [0, 0], [1, 0], [0, 0]], np.uint8)
    assert SEVERAL.mistakes(probabilities, labels, probabilities).tolist() == [0, 1, 2]
    numbers = np.array([1.0, 5.0, 2.0])
    assert NUMBERS.mistakes(numbers, np.array([1.0, 1.0, 1.5]), probabilities).tolist() == [1, 2, 0]
