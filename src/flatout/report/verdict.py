"""The verdict on a run: findings in plain sentences, each with advice.

Each rule is a function of the figures; each threshold is a named constant with its reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.recipe import Recipe
from flatout.report.style import finite, shorten

# The accuracy of guessing scatters around its expectation; two standard errors include 19 of 20 guessing runs.
STANDARD_ERRORS = 2.0
# A training loss above this share of ln K, the loss of uniform predictions, has hardly begun to fall.
UNTRAINED_SHARE = 0.97
# An accuracy this close to guessing is of no use, even where it cannot be luck.
NEAR_CHANCE = 0.05
# Fewer test images than this cannot tell luck from skill.
LEAST_TEST_IMAGES = 20
# A model that has learnt its training images is well above guessing on them: by half, and by more than a usual gap.
LEARNT_FACTOR = 1.5
# Learning rates with which most models train; SGD's as lr / (1 - momentum). Rates within a factor of two are not
# called too high or too low.
USUAL_LEARNING_RATE = {"sgd": 0.1, "momentum": 0.1, "adagrad": 0.01, "adam": 0.001, "adamw": 0.001}
UNSUSPECTED_FACTOR = 2.0
# Learning rates are searched in powers of ten: a smaller change seldom leaves a plateau.
LEARNING_RATE_STEP = 10.0
# Augmentation and dropout make training images harder, so that even a small gap shows overfitting.
OVERFITTING_GAP = 0.1
# Validation and test accuracy of comparable splits differ by chance alone, and by the choice of the best epoch.
SPLIT_GAP = 0.03
# The lowest validation loss of several epochs is low by chance: a rise below a tenth means little.
RISING_LOSS_FACTOR = 1.1
# Accuracy that the last quarter of the epochs must add to the quarter before: below this, more epochs gain little.
STILL_IMPROVING = 0.01
# Two epochs show no trend. Above this accuracy no advice is needed.
FEW_EPOCHS, GOOD_ACCURACY = 3, 0.9
# Images from this size on, in colour, are usually photos, for which published weights exist.
PHOTO_PIXELS = 64
# A first epoch above twice ln K is worse than uniform predictions.
DIVERGED_FACTOR = 2.0
# From a fifth of the time on, removing the wait for images gains more than most other tuning.
INPUT_WAIT = 0.2
# A class with fewer test images may go without a prediction by chance.
LEAST_CLASS_IMAGES = 5
# Up to a ratio of about ten, training without class weights still learns the rare classes.
UNBALANCED_RATIO = 10.0
CLASSES_NAMED = 5

Summary = Mapping[str, Any]
Line = Mapping[str, Any]


def verdict(summary: Summary, metrics: Sequence[Line], recipe: Recipe) -> list[str]:
    """Return the findings on a run, a sentence or two each, the gravest first; empty if there are none.

    Args:
        summary: the content of `summary.json`; figures may be missing, None or NaN. The lists `train_class_counts`,
            `test_class_counts` and `test_predicted_counts` are in the order of `classes`.
        metrics: the lines of `metrics.jsonl`.
        recipe: the recipe of the run.
    """
    failed = _diverged(summary, metrics, recipe) or _at_chance(summary, metrics, recipe)
    if failed:
        learning = failed
    else:
        learning = _overfitting(summary, metrics, recipe) + _rising_loss(metrics) + _split_gap(summary)
        learning += _more_epochs(summary, metrics, recipe) + _no_pretraining(summary, recipe) + _unpredicted(summary)
    return learning + _unbalanced(summary, recipe) + _input_wait(summary, recipe)


def _diverged(summary: Summary, metrics: Sequence[Line], recipe: Recipe) -> list[str]:
    lr = recipe.optimizer.lr
    advice = f"Try a lower learning rate than {lr:g}, such as --lr {lr / LEARNING_RATE_STEP:g}"
    advice += "." if recipe.schedule.warmup_epochs else ", or warm-up (schedule.warmup_epochs)."
    for line in metrics:
        loss = line.get("train_loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            return [f"Training diverged in epoch {line['epoch']}: the loss is not a number. {advice}"]
    first = finite(metrics[0].get("train_loss")) if metrics else None
    uniform = math.log(max(1, len(summary.get("classes") or ())))
    if first is None or not uniform or first <= DIVERGED_FACTOR * uniform:
        return []
    return [
        f"Training diverged in epoch 1: its loss, {first:.3g}, is far above that of guessing, {uniform:.2f}. {advice}"
    ]


def _at_chance(summary: Summary, metrics: Sequence[Line], recipe: Recipe) -> list[str]:
    classes = len(summary.get("classes") or ())
    accuracy, split = _held_out(summary)
    count = summary.get("test_count") if split == "test" else None
    if accuracy is None or classes < 2 or (count and count < LEAST_TEST_IMAGES):
        return []
    guess, how = 1 / classes, f"is chance for {classes} classes"
    counts = summary.get("test_class_counts") if split == "test" else None
    if counts and max(counts) / sum(counts) > 1.5 * guess:
        guess = max(counts) / sum(counts)
        how = f"is no better than always answering the largest class ({guess:.3f})"
    spread = STANDARD_ERRORS * math.sqrt(guess * (1 - guess) / count) if count else 0.0
    if accuracy > guess + max(spread, NEAR_CHANCE):
        return []
    finding = f"{split.capitalize()} accuracy {accuracy:.3f}"
    last = metrics[-1] if metrics else {}
    if accuracy > guess + spread:
        # Above chance, but hardly: the training loss shows more reliably whether anything was learnt.
        loss, uniform = finite(last.get("train_loss")), math.log(classes)
        if loss is None or not UNTRAINED_SHARE * uniform < loss <= DIVERGED_FACTOR * uniform:
            return []
        return [
            f"{finding} is close to chance for {classes} classes: the training loss, {loss:.3f}, is still about that of"
            f" guessing, {uniform:.3f}. {_learning_rate_advice(recipe)}"
        ]
    if accuracy > guess + 0.01:
        how += f", within ± {spread:.3f} on {count:,} images"
    train = finite(last.get("train_accuracy"))
    if train is not None and train > max(LEARNT_FACTOR * guess, guess + OVERFITTING_GAP):
        return [
            f"{finding} {how}, although training accuracy is {train:.3f}."
            f" Check that the labels of the {split} images mean the same as those of the training images."
        ]
    return [f"{finding} {how}. {_learning_rate_advice(recipe)}"]


def _learning_rate_advice(recipe: Recipe) -> str:
    lr, usual = recipe.optimizer.lr, USUAL_LEARNING_RATE[recipe.optimizer.name]
    effective = lr / (1 - (recipe.optimizer.momentum or 0.0))
    higher, lower = f"--lr {lr * LEARNING_RATE_STEP:g}", f"--lr {lr / LEARNING_RATE_STEP:g}"
    if effective < usual / UNSUSPECTED_FACTOR:
        return f"The learning rate {lr:g} is probably too low; try {higher}."
    if effective > usual * UNSUSPECTED_FACTOR:
        return f"The learning rate {lr:g} is probably too high; try {lower}."
    return f"Nothing was learnt with the learning rate {lr:g}; try {higher} and {lower}, and more epochs."


def _overfitting(summary: Summary, metrics: Sequence[Line], recipe: Recipe) -> list[str]:
    train = finite(metrics[-1].get("train_accuracy")) if metrics else None
    held_out = [_held_out(summary), (finite(metrics[-1].get("valid_accuracy")) if metrics else None, "validation")]
    known = [(accuracy, split) for accuracy, split in held_out if accuracy is not None]
    if train is None or not known or train - min(known)[0] <= OVERFITTING_GAP:
        return []
    accuracy, split = min(known)
    advice = []
    if not recipe.augment.is_affine:
        advice.append("augmentation (such as augment.shift, augment.zoom)")
    if not recipe.optimizer.weight_decay:
        advice.append("optimizer.weight_decay")
    if not (recipe.pretrained or recipe.weights):
        advice.append("pre-trained weights")
    advice.append("a smaller model" if advice else "more images, a smaller model")
    return [
        f"Overfitting: accuracy {train:.3f} in training, {accuracy:.3f} on {split} images."
        f" What may help: {', '.join(advice)}."
    ]


def _rising_loss(metrics: Sequence[Line]) -> list[str]:
    """Report a held-out loss that has risen since its lowest epoch: the model grows too sure of wrong answers."""
    for split, name in (("valid", "validation"), ("test", "test")):
        losses = [(loss, line["epoch"]) for line in metrics if (loss := finite(line.get(f"{split}_loss"))) is not None]
        if not losses:
            continue
        (least, epoch), (last, end) = min(losses), losses[-1]
        if last <= RISING_LOSS_FACTOR * least:
            return []
        return [
            f"The {name} loss rose from {least:.3f} in epoch {epoch} to {last:.3f} in epoch {end}: the model became"
            " surer of its wrong answers. What may help: fewer epochs, augmentation, label_smoothing."
        ]
    return []


def _split_gap(summary: Summary) -> list[str]:
    test, valid = finite(summary.get("test_accuracy")), finite(summary.get("valid_accuracy"))
    counts = [summary.get(f"{split}_count") for split in ("test", "valid")]
    if test is None or valid is None:
        return []
    noise = STANDARD_ERRORS * math.sqrt(sum(test * (1 - test) / count for count in counts if count))
    if valid - test <= max(SPLIT_GAP, noise):
        return []
    return [
        f"Test accuracy {test:.3f} is well below validation accuracy {valid:.3f}: the splits differ. `flatout check`"
        " finds images that are in two splits; other causes are other cameras, times or sources."
    ]


def _more_epochs(summary: Summary, metrics: Sequence[Line], recipe: Recipe) -> list[str]:
    accuracy, _ = _held_out(summary)
    if summary.get("stopped"):
        return []
    if metrics and len(metrics) < FEW_EPOCHS and accuracy is not None and accuracy < GOOD_ACCURACY:
        trained = "1 epoch is" if len(metrics) == 1 else f"{len(metrics)} epochs are"
        return [f"Accuracy {accuracy:.3f} after few epochs: {trained} rarely enough. Try --epochs 10."]
    if recipe.schedule.name in ("cosine", "one-cycle"):
        return []  # these schedules gain most at their end by design; that does not mean that more epochs would help
    for split, name in (("valid", "Validation"), ("test", "Test"), ("train", "Training")):
        scores = [score for line in metrics if (score := finite(line.get(f"{split}_accuracy"))) is not None]
        if len(scores) < 2:
            continue
        quarter = max(1, len(scores) // 4)
        gain = sum(scores[-quarter:]) / quarter - sum(scores[-2 * quarter : -quarter]) / quarter
        if gain < STILL_IMPROVING:
            return []
        span = "epoch" if quarter == 1 else f"{quarter} epochs"
        return [
            f"{name} accuracy was still rising at the end, by {gain:.3f} over the last {span}:"
            f" more than {recipe.epochs} epochs would help, such as --epochs {2 * recipe.epochs}."
        ]
    return []


def _no_pretraining(summary: Summary, recipe: Recipe) -> list[str]:
    accuracy, split = _held_out(summary)
    is_photo = recipe.channels == 3 and recipe.image_size >= PHOTO_PIXELS
    if accuracy is None or accuracy >= GOOD_ACCURACY or not is_photo or recipe.pretrained or recipe.weights:
        return []
    return [
        f"The model was trained from random weights. On photos, published weights usually raise the {split} accuracy"
        " considerably: --model timm:resnet18 --set pretrained=true."
    ]


def _unpredicted(summary: Summary) -> list[str]:
    classes, actual = summary.get("classes") or (), summary.get("test_class_counts") or ()
    predicted = summary.get("test_predicted_counts") or ()
    missing = [
        shorten(name, 40)
        for name, images, answers in zip(classes, actual, predicted, strict=False)
        if answers == 0 and images >= LEAST_CLASS_IMAGES
    ]
    if not missing:
        return []
    named = ", ".join(missing[:CLASSES_NAMED])
    if len(missing) > CLASSES_NAMED:
        named += f" and {len(missing) - CLASSES_NAMED} more"
    return [f"Never predicted, although present in the test images: {named}."]


def _unbalanced(summary: Summary, recipe: Recipe) -> list[str]:
    classes, counts = summary.get("classes") or (), summary.get("train_class_counts") or ()
    pairs = [(count, name) for name, count in zip(classes, counts, strict=False) if count > 0]
    if len(pairs) < 2 or recipe.class_weights != "none":
        return []
    (most, largest), (fewest, smallest) = max(pairs), min(pairs)
    if most < UNBALANCED_RATIO * fewest:
        return []
    return [
        f"The classes are very unbalanced: {most:,} training images of {shorten(largest, 40)}, {fewest:,} of"
        f" {shorten(smallest, 40)}. --set class_weights=balanced gives every class the same weight."
    ]


def _input_wait(summary: Summary, recipe: Recipe) -> list[str]:
    share = finite(summary.get("input_wait_fraction"))
    if share is None or share < INPUT_WAIT:
        return []
    advice = "a faster disk or enough memory for all images would help"
    if recipe.data.placement == "disk":
        advice = "--set data.placement=memory avoids reading from the disk"
    return [f"{share:.0%} of the training time was spent waiting for images: {advice}."]


def _held_out(summary: Summary) -> tuple[float | None, str]:
    """Return the accuracy on test images, else on validation images, and the name of the split."""
    test = finite(summary.get("test_accuracy"))
    return (test, "test") if test is not None else (finite(summary.get("valid_accuracy")), "validation")
