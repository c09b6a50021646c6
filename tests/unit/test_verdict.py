"""The verdict on a run: what went wrong, and what to try."""

import math

import pytest

from flatout.config import Augment, Optimizer, Recipe, Schedule
from flatout.report.verdict import verdict
from tests.unit.runs import RECIPE, epoch_line, summary_of

NAMES = [f"c{i}" for i in range(101)]


STEADY = [epoch_line(e) for e in range(1, 9)]


def test_verdict_says_nothing_when_all_is_well():
    summary = summary_of(
        ["a", "b"], input_wait_fraction=0.01, train_class_counts=[100, 90], test_class_counts=[50, 50],
        test_predicted_counts=[40, 60],
    )  # fmt: skip
    assert verdict(summary, STEADY, RECIPE) == []
    assert verdict({}, [], RECIPE) == []


@pytest.mark.parametrize(
    ("optimizer", "advice"),
    [
        (Optimizer(lr=0.001), "The learning rate 0.001 is probably too low; try --lr 0.01"),
        (Optimizer(name="momentum", lr=0.001), "too low; try --lr 0.01"),
        (Optimizer(name="adam", lr=0.01), "too high; try --lr 0.001"),
        (Optimizer(name="adam", lr=0.001), "try --lr 0.01 and --lr 0.0001"),
    ],
)
def test_verdict_on_chance_advises_on_the_learning_rate(optimizer: Optimizer, advice: str):
    recipe = RECIPE.override({f"optimizer.{k}": v for k, v in {"name": optimizer.name, "lr": optimizer.lr}.items()})
    metrics = [epoch_line(e, train_accuracy=0.012, train_loss=4.6) for e in (1, 2)]
    found = verdict(summary_of(NAMES, test_accuracy=0.01, test_count=930), metrics, recipe)
    assert len(found) == 1
    assert found[0].startswith("Test accuracy 0.010 is chance for 101 classes")
    assert advice in found[0]


def test_verdict_on_chance_knows_the_largest_class_and_small_numbers():
    summary = summary_of(["a", "b"], test_accuracy=0.9, test_count=100, test_class_counts=[90, 10])
    metrics = [epoch_line(1, train_accuracy=0.9)]
    assert "always answering the largest class (0.900)" in verdict(summary, metrics, RECIPE)[0]
    few = summary_of(["a", "b"], test_accuracy=0.6, test_count=40)
    assert "within ±" in verdict(few, [epoch_line(1, train_accuracy=0.6)], RECIPE)[0]
    many = few | {"test_count": 4000, "valid_accuracy": 0.6}
    assert "chance" not in " ".join(verdict(many, [epoch_line(1, train_accuracy=0.6)], RECIPE))


def test_verdict_on_chance_after_learning_points_at_the_labels():
    summary = summary_of(NAMES, test_accuracy=0.01, test_count=930)
    assert "although training accuracy is 0.900" in verdict(summary, [epoch_line(1, train_accuracy=0.9)], RECIPE)[0]


def test_verdict_on_overfitting():
    metrics = [epoch_line(e, train_accuracy=0.99, valid_accuracy=0.8) for e in range(1, 9)]
    (found,) = verdict(summary_of(["a", "b"]), metrics, RECIPE)
    assert found.startswith("Overfitting: accuracy 0.990 in training, 0.800 on test images")
    assert "augment.shift" in found
    augmented = Recipe(model="cnn", image_size=8, epochs=1, batch_size=1, augment=Augment(shift=0.1))
    assert "augment." not in verdict(summary_of(["a", "b"]), metrics, augmented)[0]


def test_verdict_on_still_improving():
    metrics = [epoch_line(e, valid_accuracy=0.6 + 0.02 * e, train_accuracy=0.6) for e in range(1, 9)]
    (found,) = verdict(summary_of(["a", "b"]), metrics, RECIPE)
    assert found.startswith("Validation accuracy was still rising at the end, by 0.040 over the last 2 epochs")
    assert "--epochs 8" in found
    cosine = Recipe(model="cnn", image_size=8, epochs=4, batch_size=1, schedule=Schedule(name="cosine"))
    assert verdict(summary_of(["a", "b"]), metrics, cosine) == []
    assert verdict(summary_of(["a", "b"], stopped="interrupted in epoch 8"), metrics, RECIPE) == []


def test_verdict_on_a_loss_that_blew_up():
    metrics = [epoch_line(1), epoch_line(2, train_loss=math.nan)]
    (found,) = verdict(summary_of(["a", "b"]), metrics, RECIPE)
    assert "diverged in epoch 2" in found
    assert "--lr 0.005" in found
    at_chance = [epoch_line(1, train_loss=1.5), epoch_line(2, train_loss=0.69, valid_loss=0.69)]
    (violent,) = verdict(summary_of(["a", "b"]), at_chance, RECIPE)
    assert "its loss, 1.5, is far above that of guessing, 0.69" in violent
    recovered = [epoch_line(1, train_loss=1.5), epoch_line(2, train_loss=0.4)]
    one_epoch = [epoch_line(1, train_loss=1.7, valid_loss=0.8)]  # the first steps had losses above those of guessing
    for metrics in (recovered, one_epoch):
        assert not any("diverged" in found for found in verdict(summary_of(["a", "b"]), metrics, RECIPE))


def test_verdict_on_input_wait_classes_and_balance():
    summary = summary_of(
        ["a", "b", "c"], input_wait_fraction=0.43, train_class_counts=[1200, 900, 30],
        test_class_counts=[50, 40, 10], test_predicted_counts=[60, 40, 0],
    )  # fmt: skip
    never, unbalanced, wait = verdict(summary, STEADY, RECIPE)
    assert never == "Never predicted, although present in the test images: c."
    assert "1,200 training images of a, 30 of c" in unbalanced
    assert wait.startswith("43% of the training time")
    balanced = RECIPE.override({"class_weights": "balanced"})
    assert len(verdict(summary, STEADY, balanced)) == 2


def test_verdict_on_gaps_between_splits():
    metrics = [epoch_line(e, train_accuracy=0.88, valid_accuracy=0.842) for e in range(1, 9)]
    summary = summary_of(["a", "b"], valid_accuracy=0.842, test_accuracy=0.7725, test_count=800, valid_count=800)
    overfitting, splits = verdict(summary, metrics, RECIPE)
    assert overfitting.startswith("Overfitting: accuracy 0.880 in training, 0.772 on test images")
    assert splits.startswith("Test accuracy 0.772 is well below validation accuracy 0.842: the splits differ.")
    few = summary | {"test_count": 40, "valid_count": 40}
    assert "splits" not in " ".join(verdict(few, metrics, RECIPE))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_verdict_on_a_rising_loss(split: str):
    losses = [0.40, 0.31, 0.28, 0.29, 0.31, 0.33]
    values = [{"valid_loss": None, "valid_accuracy": None, f"{split}_loss": loss} for loss in losses]
    metrics = [epoch_line(e, **v) for e, v in enumerate(values, start=1)]
    (found,) = verdict(summary_of(["a", "b"]), metrics, RECIPE)
    name = "validation" if split == "valid" else "test"
    assert found.startswith(f"The {name} loss rose from 0.280 in epoch 3 to 0.330 in epoch 6")
    assert verdict(summary_of(["a", "b"]), metrics[:4], RECIPE) == []


def test_verdict_on_too_few_epochs():
    metrics = [epoch_line(1, train_accuracy=0.3)]
    summary = summary_of([f"c{i}" for i in range(10)], test_accuracy=0.431, valid_accuracy=0.43)
    (found,) = verdict(summary, metrics, RECIPE)
    assert found == "Accuracy 0.431 after few epochs: 1 epoch is rarely enough. Try --epochs 10."
    assert verdict(summary | {"stopped": "interrupted"}, metrics, RECIPE) == []
    # A head that was fitted, without fine-tuning.
    assert verdict(summary, [epoch_line(1, train_accuracy=0.3) | {"epoch": 0}], RECIPE) == []


def test_verdict_does_not_judge_by_a_handful_of_images():
    """A gap that chance explains is none; on many images, the same gap is one."""
    metrics = [epoch_line(e, train_accuracy=1.0, valid_accuracy=0.8) for e in range(1, 9)]
    figures = {"test_accuracy": 0.7, "valid_accuracy": 1.0}
    few = summary_of(["a", "b"], **figures, test_count=10, valid_count=6)
    assert not [sentence for sentence in verdict(few, metrics, RECIPE) if "Overfitting" in sentence]
    assert not [sentence for sentence in verdict(few, metrics, RECIPE) if "cameras" in sentence]
    many = summary_of(["a", "b"], **figures, test_count=1000, valid_count=600)
    found = " ".join(verdict(many, metrics, RECIPE))
    assert "Overfitting" in found and "cameras" in found and "a smaller model" in found
    assert "a smaller model" not in " ".join(verdict(many, metrics, RECIPE.override({"model": "fast-cnn-16"})))


def test_verdict_on_weighted_classes_compares_the_balanced_accuracy():
    summary = summary_of(
        ["a", "b"], test_accuracy=0.8, test_balanced_accuracy=0.7, test_count=1000, test_class_counts=[900, 100]
    )
    metrics = [epoch_line(e, train_accuracy=0.8) for e in range(1, 9)]
    assert "largest class" in verdict(summary, metrics, RECIPE)[0]
    balanced = RECIPE.override({"class_weights": "balanced"})
    assert "chance" not in " ".join(verdict(summary, metrics, balanced))
    useless = summary | {"test_balanced_accuracy": 0.5}
    assert verdict(useless, metrics, balanced)[0].startswith("Test balanced accuracy 0.500 is chance for 2 classes")
