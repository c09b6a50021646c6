"""The verdict on a run: what went wrong, and what to try."""

from typing import Any

import pytest

from flatout.report.verdict import verdict
from tests.unit.runs import RECIPE, epoch_line, summary_of

MANY = [f"c{i}" for i in range(101)]
TWO = ["a", "b"]


def lines(count: int, **values: Any) -> list[dict[str, Any]]:
    return [epoch_line(epoch, **values) for epoch in range(1, count + 1)]


STEADY = lines(8)
CHANCE = {"test_accuracy": 0.01, "test_count": 930}
UNLEARNT = lines(2, train_accuracy=0.012, train_loss=4.6)
WEIGHTED = {"test_accuracy": 0.8, "test_balanced_accuracy": 0.7, "test_count": 1000, "test_class_counts": [900, 100]}
CONSTANT = {"test_accuracy": None, "valid_accuracy": 0.9, "valid_count": 1000, "valid_class_counts": [900, 100]}
OVERFITTED = lines(8, train_accuracy=0.99, valid_accuracy=0.8)
RISING = [epoch_line(e, valid_accuracy=0.6 + 0.02 * e, train_accuracy=0.6) for e in range(1, 9)]
NUMBERS = {"task": "regression", "loss": "mse"}
FITTED = {"epochs": 0, "linear_probe": True}
COUNTS = {"train_class_counts": [1200, 900, 30], "test_class_counts": [50, 40, 10]}


def loss_rose(split: str, losses: tuple[float, ...] = (0.40, 0.31, 0.28, 0.29, 0.31, 0.33)) -> list[dict[str, Any]]:
    none = {"valid_loss": None, "valid_accuracy": None}
    return [epoch_line(e, **none | {f"{split}_loss": loss}) for e, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("classes", "summary", "metrics", "recipe", "words"),
    [
        (MANY, CHANCE, UNLEARNT, {"optimizer.name": "sgd", "optimizer.lr": 0.001},
         "is chance for 101 classes. The learning rate 0.001 is probably too low; try --lr 0.01"),
        (MANY, CHANCE, UNLEARNT, {"optimizer.name": "adam", "optimizer.lr": 0.01}, "too high; try --lr 0.001"),
        (MANY, CHANCE, UNLEARNT, {"optimizer.name": "adam", "optimizer.lr": 0.001}, "try --lr 0.01 and --lr 0.0001"),
        (MANY, CHANCE, lines(1, train_accuracy=0.9), {}, "although training accuracy is 0.900"),
        (TWO, WEIGHTED | {"test_accuracy": 0.9}, lines(1), {}, "always answering the largest class (0.900)"),
        (TWO, CONSTANT, lines(1), {}, "Validation accuracy 0.900 is no better than always answering the largest class"),
        (TWO, WEIGHTED | {"test_balanced_accuracy": 0.5}, STEADY, {"class_weights": "balanced"},
         "Test balanced accuracy 0.500 is chance for 2 classes"),
        (TWO, {"test_accuracy": 0.6, "test_count": 40}, lines(1, train_accuracy=0.6), {}, "chance"),
        (TWO, {}, OVERFITTED, {}, "Overfitting: accuracy 0.990 in training, 0.800 on test images."
         " What may help: augmentation (such as augment.shift"),
        (TWO, {}, RISING, {}, "still rising at the end, by 0.040 over the last 2 epochs: more than 4 epochs"),
        (TWO, {"stopped": "failed: training diverged in epoch 2: the loss is not finite in step 3; try"}, lines(1), {},
         "Training diverged in epoch 2: the loss is not finite in step 3. Try a lower learning rate than"),
        (MANY, CHANCE, UNLEARNT, FITTED, "Only the head was fitted"),
        (TWO, {}, [epoch_line(1, train_loss=1.5), epoch_line(2, train_loss=0.69, valid_loss=0.69)], {},
         "its loss, 1.5, is far above that of guessing, 0.69"),
        (["a", "b", "c"], COUNTS, STEADY, {}, "1,200 training images of a, 30 of c"),
        (TWO, {"input_wait_fraction": 0.43}, STEADY, {}, "43% of the training time"),
        (TWO, {}, loss_rose("valid"), {}, "The validation loss rose from 0.280 in epoch 3 to 0.330 in epoch 6"),
        (TWO, {}, loss_rose("test"), {}, "The test loss rose from 0.280 in epoch 3 to 0.330 in epoch 6"),
        (TWO, {"test_accuracy": 0.831}, lines(1, train_accuracy=0.8), {}, "0.831 after few epochs: 1 epoch is"),
        ([], {"test_r2": -0.1}, [], NUMBERS,
         "R² is -0.100 on the test images: no better than always answering the mean."),
        ([], {"test_r2": 0.4}, loss_rose("valid"), NUMBERS,
         "memorise its training images. What may help: fewer epochs, augmentation."),
    ],
)  # fmt: skip
def test_a_finding_and_its_advice(
    classes: list[str], summary: dict[str, Any], metrics: list[dict[str, Any]], recipe: dict[str, Any], words: str
):
    assert words in "\n".join(verdict(summary_of(classes, **summary), metrics, RECIPE.override(recipe)))


@pytest.mark.parametrize(
    ("classes", "summary", "metrics", "recipe", "absent"),
    [
        (TWO, {"train_class_counts": [100, 90]}, STEADY, {}, ""),
        (TWO, {}, RISING, {"schedule.name": "cosine"}, ""),
        (TWO, {"stopped": "interrupted in epoch 8"}, RISING, {}, ""),
        (TWO, {}, loss_rose("valid")[:4], {}, ""),
        (TWO, {"test_accuracy": 0.7, "valid_accuracy": 1.0, "test_count": 10, "valid_count": 6}, OVERFITTED, {},
         "Overfitting"),
        (TWO, {"test_accuracy": 0.6, "test_count": 4000}, lines(1, train_accuracy=0.6), {}, "chance"),
        (TWO, WEIGHTED, STEADY, {"class_weights": "balanced"}, "chance"),
        (TWO, {}, OVERFITTED, {"augment.shift": 0.1}, "augment."),
        (TWO, {}, OVERFITTED, {"model": "fast-cnn-16"}, "a smaller model"),
        # The first steps had losses above those of guessing.
        (TWO, {}, [epoch_line(1, train_loss=1.5), epoch_line(2, train_loss=0.4)], {}, "diverged"),
        (TWO, {}, [epoch_line(1, train_loss=1.7, valid_loss=0.8)], {}, "diverged"),
        (["a", "b", "c"], COUNTS, STEADY, {"class_weights": "balanced"}, "unbalanced"),
        # A head that was fitted, without fine-tuning.
        (TWO, {}, [epoch_line(1) | {"epoch": 0}], {}, ""),
        (TWO, {}, [epoch_line(1, train_loss=6.5, valid_loss=3.9) | {"epoch": 0}], FITTED, ""),
        ([], {"test_r2": 0.4}, loss_rose("valid")[:4], NUMBERS, ""),
    ],
)  # fmt: skip
def test_no_finding(
    classes: list[str], summary: dict[str, Any], metrics: list[dict[str, Any]], recipe: dict[str, Any], absent: str
):
    found = verdict(summary_of(classes, **summary), metrics, RECIPE.override(recipe))
    assert not [sentence for sentence in found if absent in sentence]


def test_nothing_is_said_of_a_run_without_figures():
    assert verdict({}, [], RECIPE) == []
