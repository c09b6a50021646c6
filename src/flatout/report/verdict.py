"""What a run's figures say, in plain sentences: what went wrong, what would help; nothing when all is well.

Each rule is one function of the figures, and its threshold is a named constant with the reason beside it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.recipe import Recipe
from flatout.report.pictures import finite, shorten

# Guessing scatters around its expected accuracy; two standard errors cover 19 of 20 guessing runs.
CHANCE_STANDARD_ERRORS = 2.0
# A training loss above this share of that of a net that knows nothing, ln K, has hardly begun to fall.
IGNORANT_SHARE = 0.97
# So little above guessing is next to it, even where it cannot be luck.
NEXT_TO_CHANCE = 0.05
# Fewer test images than this cannot tell luck from skill.
JUDGED_FROM_IMAGES = 20
# A net that has learnt its training images is well above guessing there; half as good again is the least that shows it.
LEARNT_FACTOR = 1.5
# Learning rates with which most nets train, SGD's as lr / (1 - momentum), the step it takes in the long run. Rates
# within a factor of two of these are not suspected of being on a particular side.
USUAL_LEARNING_RATE = {"sgd": 0.1, "momentum": 0.1, "adagrad": 0.01, "adam": 0.001, "adamw": 0.001}
NOT_SUSPECT_FACTOR = 2.0
# Learning rates are searched for in powers of ten: a smaller step seldom leaves a plateau.
LEARNING_RATE_STEP = 10.0
# Between training and unseen images a gap of up to 0.1 is the rule even for good recipes on small data.
OVERFITTING_GAP = 0.15
# Accuracy that the last quarter of the epochs must add to the quarter before: below this, more epochs buy little.
STILL_IMPROVING = 0.01
# Knowing nothing costs ln K; a first epoch above twice that is worse than knowing nothing.
BLOWN_UP_FACTOR = 2.0
# From a fifth of the time on, removing the wait is worth more than most other tuning.
INPUT_WAIT = 0.2
# A class with fewer images than this may well go without a prediction by bad luck.
NEVER_PREDICTED_FROM_IMAGES = 5
# Up to a ratio of about ten, training without weights still learns the rare classes.
UNBALANCED_RATIO = 10.0
CLASSES_NAMED = 5


def verdict(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    """Return what the figures of a run say, a sentence or two for each finding, the gravest first.

    Args:
        summary: the content of `summary.json`; figures may be missing, None or not a number. Judged where present:
            `train_class_counts`, `test_class_counts` (images of each class) and `test_predicted_counts` (how often each
            class was the answer), lists in the order of `classes`.
        metrics: the lines of `metrics.jsonl`.
        recipe: the recipe of the run.
    """
    blown_up = _blown_up(summary, metrics, recipe)
    chance = [] if blown_up else _at_chance(summary, metrics, recipe)
    if blown_up or chance:
        learning = blown_up + chance
    else:
        learning = _overfitting(summary, metrics, recipe) + _still_improving(summary, metrics, recipe)
        learning += _never_predicted(summary)
    return learning + _unbalanced(summary, recipe) + _input_wait(summary, recipe)


def _blown_up(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    lower = (
        f"a lower learning rate than {recipe.optimizer.lr:g}, such as --lr {recipe.optimizer.lr / LEARNING_RATE_STEP:g}"
    )
    if not recipe.schedule.warmup_epochs:
        lower += ", or warm-up (schedule.warmup_epochs)"
    for line in metrics:
        loss = line.get("train_loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            return [f"The training loss stopped being a number in epoch {line['epoch']}: try {lower}."]
    first = finite(metrics[0].get("train_loss")) if metrics else None
    classes = len(summary.get("classes") or ())
    if first is None or classes < 2 or first <= BLOWN_UP_FACTOR * math.log(classes):
        return []
    return [
        f"The training loss of epoch 1, {first:.3g}, is far above the {math.log(classes):.2f} of a net that knows"
        f" nothing: the start was too violent. Try {lower}."
    ]


def _at_chance(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    classes = len(summary.get("classes") or ())
    accuracy, split = _held_out(summary)
    if accuracy is None or classes < 2:
        return []
    guess, how = 1 / classes, f"is chance for {classes} classes"
    counts = summary.get("test_class_counts") if split == "test" else None
    if counts and max(counts) / sum(counts) > 1.5 * guess:
        guess = max(counts) / sum(counts)
        how = f"is no better than always answering the largest class ({guess:.3f})"
    count = summary.get("test_count") if split == "test" else None
    if count and count < JUDGED_FROM_IMAGES:
        return []
    spread = CHANCE_STANDARD_ERRORS * math.sqrt(guess * (1 - guess) / count) if count else 0.0
    if accuracy > guess + max(spread, NEXT_TO_CHANCE):
        return []
    if accuracy > guess + spread:
        return _knows_nothing(metrics, recipe, f"{split.capitalize()} accuracy {accuracy:.3f}", classes)
    if accuracy > guess + 0.01:
        how += f", give or take {spread:.3f} on {count:,} images"
    finding = f"{split.capitalize()} accuracy {accuracy:.3f} {how}"
    train = finite(metrics[-1].get("train_accuracy")) if metrics else None
    if train is not None and train > LEARNT_FACTOR * guess and train > guess + OVERFITTING_GAP:
        return [
            f"{finding}, although training reached {train:.3f}: what was learnt does not carry over."
            f" Check that the labels of the {split} images mean the same as those of the training images."
        ]
    return [f"{finding}: {_learning_rate_advice(recipe)}."]


def _knows_nothing(metrics: Sequence[Mapping[str, Any]], recipe: Recipe, accuracy: str, classes: int) -> list[str]:
    """Judge by the training loss, which shows that nothing was learnt more surely than a few lucky answers do."""
    loss = finite(metrics[-1].get("train_loss")) if metrics else None
    ignorant = math.log(classes)
    if loss is None or not IGNORANT_SHARE * ignorant < loss <= BLOWN_UP_FACTOR * ignorant:
        return []
    return [
        f"{accuracy} is next to chance for {classes} classes: the training loss, {loss:.3f}, is still about that of a"
        f" net that knows nothing, {ignorant:.3f}. So {_learning_rate_advice(recipe)}."
    ]


def _learning_rate_advice(recipe: Recipe) -> str:
    optimizer = recipe.optimizer
    lr = optimizer.lr
    in_the_long_run = lr / (1 - (optimizer.momentum or 0.0))
    usual = USUAL_LEARNING_RATE[optimizer.name]
    higher, lower = f"--lr {lr * LEARNING_RATE_STEP:g}", f"--lr {lr / LEARNING_RATE_STEP:g}"
    if in_the_long_run < usual / NOT_SUSPECT_FACTOR:
        return f"the learning rate {lr:g} is probably too low; try {higher}"
    if in_the_long_run > usual * NOT_SUSPECT_FACTOR:
        return f"the learning rate {lr:g} is probably too high; try {lower}"
    return f"nothing was learnt with the learning rate {lr:g}; try {higher} and {lower}, and more epochs"


def _overfitting(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    train = finite(metrics[-1].get("train_accuracy")) if metrics else None
    held_out, split = finite(metrics[-1].get("valid_accuracy")) if metrics else None, "validation"
    if held_out is None:
        held_out, split = _held_out(summary)
    if train is None or held_out is None or train - held_out <= OVERFITTING_GAP:
        return []
    mends = []
    if not recipe.augment.is_affine:
        mends.append("augmentation (such as augment.shift, augment.zoom)")
    if not recipe.optimizer.weight_decay:
        mends.append("optimizer.weight_decay")
    mends += ["pre-trained weights"] if not (recipe.pretrained or recipe.weights) else []
    mends.append("a smaller model" if mends else "more images or a smaller model")
    helpers = ", ".join(mends[:-1]) + (" or " if mends[:-1] else "") + mends[-1]
    return [
        f"Overfitting: accuracy {train:.3f} in training, {held_out:.3f} on {split} images. What may help: {helpers}."
    ]


def _still_improving(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    if summary.get("stopped") or recipe.schedule.name in ("cosine", "one-cycle"):
        return []  # these schedules end in their steepest gain by design; that says nothing about more epochs
    for key in ("valid_accuracy", "test_accuracy", "train_accuracy"):
        scores = [score for line in metrics if (score := finite(line.get(key))) is not None]
        if len(scores) < 2:
            continue
        quarter = max(1, len(scores) // 4)
        gain = sum(scores[-quarter:]) / quarter - sum(scores[-2 * quarter : -quarter]) / quarter
        if gain < STILL_IMPROVING:
            return []
        span = "epoch" if quarter == 1 else f"{quarter} epochs"
        name = {"valid_accuracy": "Validation", "test_accuracy": "Test", "train_accuracy": "Training"}[key]
        return [
            f"{name} accuracy was still rising at the end, by {gain:.3f} over the last {span}:"
            f" more than {recipe.epochs} epochs would help, such as --epochs {2 * recipe.epochs}."
        ]
    return []


def _never_predicted(summary: Mapping[str, Any]) -> list[str]:
    classes, actual = summary.get("classes") or (), summary.get("test_class_counts") or ()
    predicted = summary.get("test_predicted_counts") or ()
    missing = [
        shorten(name, 40)
        for name, images, answers in zip(classes, actual, predicted, strict=False)
        if answers == 0 and images >= NEVER_PREDICTED_FROM_IMAGES
    ]
    if not missing:
        return []
    named = ", ".join(missing[:CLASSES_NAMED])
    if len(missing) > CLASSES_NAMED:
        named += f" and {len(missing) - CLASSES_NAMED} more"
    return [f"Never predicted, although the test images hold them: {named}."]


def _unbalanced(summary: Mapping[str, Any], recipe: Recipe) -> list[str]:
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


def _input_wait(summary: Mapping[str, Any], recipe: Recipe) -> list[str]:
    share = finite(summary.get("input_wait_fraction"))
    if share is None or share < INPUT_WAIT:
        return []
    mend = (
        "--set data.placement=memory keeps the images out of the disk's way"
        if recipe.data.placement == "disk"
        else "a faster disk or enough memory for all images would help"
    )
    return [f"{share:.0%} of the training time went into waiting for images: {mend}."]


def _held_out(summary: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the accuracy on test images, or else on validation images, and which it is."""
    test = finite(summary.get("test_accuracy"))
    return (test, "test") if test is not None else (finite(summary.get("valid_accuracy")), "validation")
