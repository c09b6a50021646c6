"""What a run did and how well, in words: its stages, and the verdict.

The verdict's findings are plain sentences, each with advice; each rule yields at most one.
"""

import math
import re
from collections.abc import Iterator, Sequence

from flatout.config import Recipe
from flatout.engine.schedule import scaled_rate
from flatout.utils.console import counted, duration
from flatout.utils.run_files import JsonObject
from flatout.utils.style import finite, shorten

# The accuracy of guessing scatters around its expectation; two standard errors include 19 of 20 guessing runs.
STANDARD_ERRORS = 2.0
# Fewer held-out images than this cannot tell luck from skill.
MIN_HELD_OUT_IMAGES = 20
# A model that has learnt its training images is far above guessing on them: by half, and by more than a typical gap.
LEARNT_FACTOR = 1.5
# Learning rates with which most models train; SGD's as lr / (1 - momentum). Rates beyond a factor of two are called
# too high or too low, and ten times as much is advised: a smaller change seldom leaves a plateau.
USUAL_LEARNING_RATE = {"sgd": 0.1, "momentum": 0.1, "adagrad": 0.01, "adam": 0.001, "adamw": 0.001}
UNSUSPECTED_FACTOR, LEARNING_RATE_STEP = 2.0, 10.0
# Augmentation and dropout make training images harder, so that even a small gap shows overfitting.
OVERFITTING_GAP = 0.1
# The lowest validation loss of several epochs is low by chance: a rise below a tenth, or of one epoch, means little.
RISING_LOSS_FACTOR, RISING_LOSS_EPOCHS = 1.1, 2
# Minimum gain of accuracy from the third to the last quarter of the epochs: below it, more epochs gain little.
STILL_IMPROVING = 0.01
# Two epochs show no trend. Above this accuracy no advice is needed.
FEW_EPOCHS, GOOD_ACCURACY = 3, 0.9
# The narrowest network of generated recipes.
SMALLEST_MODEL = "fast-cnn-16"
# A loss above twice ln K is worse than uniform predictions. It may also occur in the first steps of a sound run.
DIVERGED_FACTOR, RECOVERED_FACTOR = 2.0, 0.95
# From a fifth of the time on, removing the wait for images gains more than most other tuning.
INPUT_WAIT = 0.2
# Up to a ratio of about ten, training without class weights still learns the rare classes.
UNBALANCED_RATIO = 10.0
# What the rules look at, by task: accuracies exist only in single-label tasks.
CHECKED = {
    "single-label": "learning, overfitting, a rising loss, number of epochs, class balance, waiting for images",
    "multi-label": "divergence, a rising loss, class balance, waiting for images",
    "regression": "divergence, results no better than the mean, a rising loss, waiting for images",
    # Fitted to features, no epochs.
    "single-label head": "overfitting, results no better than guessing, class balance",
    "multi-label head": "class balance",
    "regression head": "results no better than the mean",
}


def verdict(summary: JsonObject, metrics: Sequence[JsonObject], recipe: Recipe) -> list[str]:
    """Return the findings on a run, a sentence or two each, the most serious first; empty if there are none.

    `summary` is the content of `summary.json`, `metrics` the lines of `metrics.jsonl`; figures may be missing or NaN.
    """
    run = _Run(summary, metrics, recipe)
    learning = [*_diverged(run)] or [*_at_chance(run), *_no_better_than_the_mean(run)]
    learning = learning or [*_overfitting(run), *_rising_loss(run), *_more_epochs(run)]
    return [*learning, *_unbalanced(run), *_input_wait(run)]


class _Run:
    """The figures of a run: accuracies of the chosen weights, and the training accuracy of the last epoch."""

    def __init__(self, summary: JsonObject, metrics: Sequence[JsonObject], recipe: Recipe) -> None:
        self.summary, self.metrics, self.recipe = summary, metrics, recipe
        self.classes = summary.get("classes") or ()
        self.last = metrics[-1] if metrics else {}
        self.train = finite(self.last.get("train_accuracy"))
        self.held_out, self.split = self.result("accuracy")

    def result(self, key: str) -> tuple[float | None, str]:
        """Return a figure of test images, else of validation images, and the name of the split."""
        test, valid = (finite(self.summary.get(f"{split}_{key}")) for split in ("test", "valid"))
        return (valid, "validation") if test is None else (test, "test")

    def history(self, key: str) -> list[tuple[float, int]]:
        """Return the finite values of a figure, each with its epoch."""
        return [(value, line["epoch"]) for line in self.metrics if (value := finite(line.get(key))) is not None]


def _diverged(run: _Run) -> Iterator[str]:
    lr = run.recipe.optimizer.lr
    advice = f"Try a lower learning rate than {lr:g}, such as --lr {lr / LEARNING_RATE_STEP:g}"
    advice += "." if run.recipe.schedule.warmup_epochs else ", or warm-up (schedule.warmup_epochs)."
    reason = re.search(r"training diverged in [^;]*", run.summary.get("stopped") or "")
    if reason:
        yield f"{reason[0].capitalize()}. {advice}"
    # The recipe may smooth labels, which a fitted head was not fitted to.
    if reason or not run.metrics or len(run.classes) < 2 or not run.recipe.epochs:
        return
    uniform = math.log(len(run.classes))
    if run.recipe.task == "multi-label":  # balanced weights at most double the loss
        uniform = math.log(2) * (1 + (run.recipe.class_weights == "balanced"))
    first = finite(run.metrics[0].get("train_loss")) or 0.0
    found = (finite(run.last.get(f"{split}_loss")) for split in ("train", "valid", "test"))
    last = min((loss for loss in found if loss is not None), default=0.0)
    # A rate that is much too high can also leave a network at chance.
    never_recovered = len(run.metrics) > 1 and first > DIVERGED_FACTOR * uniform and last > RECOVERED_FACTOR * uniform
    if last > DIVERGED_FACTOR * uniform or never_recovered:
        finding = f"its loss, {max(first, last):.3g}, is far above that of guessing, {uniform:.2f}"
        yield f"Training diverged: {finding}. {advice}"


def _at_chance(run: _Run) -> Iterator[str]:
    classes, accuracy = len(run.classes), run.held_out
    key = "test" if run.split == "test" else "valid"
    count, counts = run.summary.get(f"{key}_count"), run.summary.get(f"{key}_class_counts")
    if accuracy is None or classes < 2 or (count and count < MIN_HELD_OUT_IMAGES):
        return
    guess, how = 1 / classes, f"is chance for {classes} classes"
    is_balanced = run.recipe.class_weights == "balanced"
    if is_balanced:
        # Such a run does not maximise accuracy.
        accuracy = finite(run.summary.get(f"{key}_balanced_accuracy")) or accuracy
    elif counts and max(counts) / sum(counts) > 1.5 * guess:
        guess = max(counts) / sum(counts)
        how = f"is no better than always answering the largest class ({guess:.3f})"
    spread = STANDARD_ERRORS * math.sqrt(guess * (1 - guess) / count) if count else 0.0
    if accuracy > guess + spread:
        return
    advice = f". {_learning_rate_advice(run.recipe)}"
    if run.train is not None and run.train > max(LEARNT_FACTOR * guess, guess + OVERFITTING_GAP):
        advice = (
            f", although training accuracy is {run.train:.3f}."
            f" Check that the labels of the {run.split} images mean the same as those of the training images."
        )
    yield f"{run.split.capitalize()} {'balanced ' * is_balanced}accuracy {accuracy:.3f} {how}{advice}"


def _no_better_than_the_mean(run: _Run) -> Iterator[str]:
    explained, split = run.result("r2")
    if explained is not None and explained <= 0:
        finding = f"R² is {explained:.3f} on the {split} images: no better than always answering the mean"
        yield f"{finding}. {_learning_rate_advice(run.recipe)}"


def _learning_rate_advice(recipe: Recipe) -> str:
    if not recipe.epochs:
        return "Only the head was fitted: try another network, or --epochs 5, and check the labels."
    lr, at_batch = recipe.optimizer.lr, scaled_rate(recipe)
    effective = at_batch / (1 - (recipe.optimizer.momentum or 0.0))
    usual = USUAL_LEARNING_RATE.get(recipe.optimizer.name, effective)
    higher, lower = f"--lr {lr * LEARNING_RATE_STEP:g}", f"--lr {lr / LEARNING_RATE_STEP:g}"
    shown = f"{lr:g}" if math.isclose(lr, at_batch) else f"{lr:g} ({at_batch:g} for the batch size)"
    if effective < usual / UNSUSPECTED_FACTOR:
        return f"The learning rate {shown} is probably too low; try {higher}."
    if effective > usual * UNSUSPECTED_FACTOR:
        return f"The learning rate {shown} is probably too high; try {lower}."
    return f"Nothing was learnt with the learning rate {shown}; try {higher} and {lower}, and more epochs."


def _overfitting(run: _Run) -> Iterator[str]:
    held_out = [(run.held_out, run.split), (finite(run.last.get("valid_accuracy")), "validation")]
    known = [(accuracy, split) for accuracy, split in held_out if accuracy is not None]
    if run.train is None or not known:
        return
    accuracy, split = min(known)
    # Three standard errors, since the worse of two splits is taken. Two right and two wrong predictions are added
    # (Agresti and Coull, 1998), so that the error of few images is never 0.
    count = run.summary.get(f"{'valid' if split == 'validation' else split}_count")
    likely = (accuracy * count + 2) / (count + 4) if count else 0.0
    if run.train - accuracy <= max(OVERFITTING_GAP, 3 * math.sqrt(likely * (1 - likely) / ((count or 0) + 4))):
        return
    advice = {
        "augmentation (such as augment.shift, augment.zoom)": not run.recipe.augment.is_affine,
        "optimizer.weight_decay": not run.recipe.optimizer.weight_decay,
        "pre-trained weights": not (run.recipe.pretrained or run.recipe.weights),
    }
    what = [name for name, is_new in advice.items() if is_new] or ["more images"]
    what += ["a smaller model"] * (run.recipe.model != SMALLEST_MODEL)
    found = f"accuracy {run.train:.3f} in training, {accuracy:.3f} on {split} images"
    yield f"Overfitting: {found}. What may help: {', '.join(what)}."


def _rising_loss(run: _Run) -> Iterator[str]:
    name, losses = "validation", run.history("valid_loss")
    if not losses:
        name, losses = "test", run.history("test_loss")
    if losses and min(losses[-RISING_LOSS_EPOCHS:])[0] > RISING_LOSS_FACTOR * min(losses)[0]:
        (least, epoch), (last, end) = min(losses), losses[-1]
        finding, advice = "became more confident in its wrong answers", ", label_smoothing"
        if run.recipe.task == "regression":
            finding, advice = "began to memorise its training images", ""
        rise = f"The {name} loss rose from {least:.3f} in epoch {epoch} to {last:.3f} in epoch {end}"
        yield f"{rise}: the model {finding}. What may help: fewer epochs, augmentation{advice}."


def _more_epochs(run: _Run) -> Iterator[str]:
    # A fitted head has a line, too, but is not an epoch.
    epochs, accuracy = sum(line["epoch"] > 0 for line in run.metrics), run.held_out
    if run.summary.get("stopped"):
        return
    if 0 < epochs < FEW_EPOCHS and accuracy is not None and accuracy < GOOD_ACCURACY:
        trained = "1 epoch is" if epochs == 1 else f"{epochs} epochs are"
        yield f"Accuracy {accuracy:.3f} after few epochs: {trained} rarely enough. Try --epochs 10."
        return
    if run.recipe.max_steps or run.recipe.schedule.name in ("cosine", "one-cycle"):
        return  # these schedules gain most at their end by design; that does not mean that more epochs would help
    names = {"valid": "Validation", "test": "Test", "train": "Training"}
    series = [(name, run.history(f"{split}_accuracy")) for split, name in names.items()]
    name, values = next((both for both in series if len(both[1]) > 1), ("", []))
    if not values:
        return
    scores = [score for score, _ in values]
    quarter = max(1, len(scores) // 4)
    gain = sum(scores[-quarter:]) / quarter - sum(scores[-2 * quarter : -quarter]) / quarter
    if gain >= STILL_IMPROVING:
        span = "epoch" if quarter == 1 else f"{quarter} epochs"
        yield (
            f"{name} accuracy was still rising at the end, by {gain:.3f} over the last {span}:"
            f" more than {run.recipe.epochs} epochs would help, such as --epochs {2 * run.recipe.epochs}."
        )


def _unbalanced(run: _Run) -> Iterator[str]:
    counts = zip(run.summary.get("train_class_counts") or (), run.classes, strict=False)
    present = [(count, shorten(name, 40)) for count, name in counts if count > 0]
    if len(present) > 1 and run.recipe.class_weights == "none":
        (most, largest), (fewest, smallest) = max(present), min(present)
        if most >= UNBALANCED_RATIO * fewest:
            yield (
                f"The classes are very unbalanced: {most:,} training images of {largest}, {fewest:,} of {smallest}."
                " --set class_weights=balanced gives every class the same weight."
            )


def _input_wait(run: _Run) -> Iterator[str]:
    share = finite(run.summary.get("input_wait_fraction"))
    if share is not None and share >= INPUT_WAIT:
        advice = "a faster disk or enough memory for all images would help"
        if run.recipe.data.placement == "disk":
            advice = "--set data.placement=memory avoids reading from the disk"
        yield f"{share:.0%} of the training time was spent waiting for images: {advice}."


def stages(summary: JsonObject, recipe: JsonObject) -> list[tuple[str, str, str]]:
    """Return name, layers and time of each stage in words, for the nested plain values of a recipe.

    Nothing is returned for a run in which all layers train from random weights, that has not finished, or of folds.
    """
    times = summary.get("time_seconds") or {}
    source = f"the weights {recipe['weights']}" if recipe.get("weights") else ""
    if recipe.get("pretrained") and not source:
        source = f"the published weights of {recipe.get('model')}"
    if "epochs_trained" not in summary or (not source and "head" not in times):
        return []

    spent = {part: duration(seconds) for part, value in times.items() if (seconds := finite(value))}
    rows = [("pre-trained", f"the layers before the head: {source}" if source else "none: random weights", "")]
    if "head" in times:
        is_mirrored = recipe.get("tta") and (recipe.get("augment") or {}).get("flip")
        frozen = "the layers before the head, frozen: their output is computed once for each image"
        rows.append(("features", frozen + " and its mirror image" * bool(is_mirrored), spent.get("features", "")))
        alone = None if summary.get("epochs_trained") else finite(summary.get("trained_parameters"))
        fitted = f"the head is fitted to the features{f': {alone:,.0f} parameters' if alone else ''}"
        rows.append(("head", fitted, spent.get("head", "")))
    rows.append(("fine-tuning", _fine_tuning(summary, has_head="head" in times), spent.get("train", "")))
    kept = summary.get("kept_epoch")
    used = "the fitted head" if kept == 0 else f"the weights of epoch {kept or '—'}"
    return [*rows, ("evaluation", used, spent.get("evaluate", ""))]


def _fine_tuning(summary: JsonObject, *, has_head: bool) -> str:
    epochs, count = summary.get("epochs_trained"), finite(summary.get("trained_parameters"))
    if not epochs:
        return "left out: the layers before the head stay as they were" if has_head else "left out"
    every = finite(summary.get("parameters"))
    if not count or not every:
        return counted(epochs, "epoch")
    if count == every:
        return f"all {every:,.0f} parameters, {counted(epochs, 'epoch')}"
    return f"{count:,.0f} of {every:,.0f} parameters, {counted(epochs, 'epoch')}; the others are frozen"
