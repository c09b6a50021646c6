"""Whether an exported file answers as its run does, on the run's own test images.

Shape letters: N images, H height, W width, C channels, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.batches import Samples
from flatout.data.pixels import resize_images
from flatout.errors import InputError

if TYPE_CHECKING:
    from flatout.console import Console
    from flatout.run.folder import Run

# Images uint8 or uint16 [N, H, W, C] to probabilities float32 [N, K], or numbers [N, 1].
Answers = Callable[[np.ndarray], np.ndarray]

# The least share of equal labels of an export that computes as its run does.
LEAST_EQUAL = 0.9999
# Of more test images, so many are compared, spread evenly.
MOST_IMAGES = 10_000
# Images that are compared at another size too. Some pixels are rounded to the neighbouring level there, so answers
# count as equal whose probabilities differ by no more than this.
RESIZED_IMAGES, RESIZED_TOLERANCE = 32, 0.02
# Numbers of a regression are equal up to this share of the standard deviation of the labels; and at another size.
NUMBER_TOLERANCE, RESIZED_NUMBER_TOLERANCE = 1e-3, 0.1
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the answers of a file compare with those of its run.

    Attributes:
        split: the images that were compared: test, valid or all.
        images: how many.
        equal: the share with equal labels; of numbers, those within `NUMBER_TOLERANCE`.
        difference: the largest difference of a probability, or of a number.
        worst: in words, an image whose label differs; empty for none.
        resized, resized_equal: likewise at another size, up to `RESIZED_TOLERANCE`; 0 and 1 where the file takes images
            of one size alone.
        metrics, run_metrics: of the task, of the file's answers and of the run's, on these images.
    """

    split: str
    images: int
    equal: float
    difference: float
    worst: str
    resized: int
    resized_equal: float
    metrics: dict[str, float]
    run_metrics: dict[str, float]

    def require(self, out: Any) -> None:
        """Raise InputError where too few answers are equal."""
        if self.equal < LEAST_EQUAL:
            differ = round((1 - self.equal) * self.images)
            raise InputError(
                f"{out}: {differ:,} of {self.images:,} {self.split} images get another label from the export than from "
                f"the run ({100 * self.equal:.2f} % equal, {100 * LEAST_EQUAL:g} % are required); {self.worst}; the "
                f"largest difference is {self.difference:.3g}; no file was kept"
            )
        if self.resized_equal < 1:
            differ = round((1 - self.resized_equal) * self.resized)
            raise InputError(
                f"{out}: {differ} of {self.resized} {self.split} images of another size get another label from the "
                f"export than from the run: it does not resize as the run does; no file was kept"
            )


def answers_by(module: "Callable[..., Any]") -> Answers:
    """Return a function that runs a module of torch; the first of its outputs are the answers."""
    import torch

    def answers(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found = module(torch.from_numpy(np.ascontiguousarray(images)))
        return (found[0] if isinstance(found, tuple | list) else found).numpy()

    return answers


def agreement(
    run: "Run", samples: Samples, split: str, answers: Answers, *, resizes: bool, console: "Console"
) -> Agreement:
    """Return the `Agreement` of what an exported file answers with what its run does.

    Args:
        run: computes in 32 bits on the CPU, as `flatout predict` does.
        samples: labelled images of the run's size.
        answers: runs the file.
        resizes: whether the file takes images of any size.
    """
    positions = np.linspace(0, len(samples) - 1, min(len(samples), MOST_IMAGES)).astype(np.int64)
    if not len(positions):
        raise InputError("there are no images to verify the export on; name some with --data PATH")
    theirs, ours = [], []
    at_once = min(_AT_ONCE, run.recipe.batch_size)
    for start in range(0, len(positions), at_once):
        images = samples.images_at(positions[start : start + at_once])
        ours.append(run.probabilities(images))
        theirs.append(answers(images))
        console.update(start + len(images), len(positions), "images verified")
    console.finish()
    expected, found = np.concatenate(ours), np.concatenate(theirs)
    if found.shape != expected.shape:
        raise InputError(f"the export answers {list(found.shape)} where the run answers {list(expected.shape)}")
    same = _equal(run, expected, found)
    resized = _resized(run, samples.images_at(positions[:RESIZED_IMAGES]), answers) if resizes else np.ones(0, bool)
    labels = samples.labels[positions]
    metrics = [run.task.metrics(run.task.predicted_from(one), labels) for one in (found, expected)]
    return Agreement(
        split=split,
        images=len(positions),
        equal=float(same.mean()),
        difference=float(np.abs(found - expected).max()),
        worst=_worst(run, positions, expected, found, same),
        resized=len(resized),
        resized_equal=float(resized.mean()) if len(resized) else 1.0,
        metrics=metrics[0],
        run_metrics=metrics[1],
    )


def _equal(
    run: "Run", expected: np.ndarray, found: np.ndarray, number_tolerance: float = NUMBER_TOLERANCE
) -> np.ndarray:
    """Return whether the labels of two sets of answers [N, K] are equal, bool [N]."""
    if run.task.name == "regression":
        return np.abs(found - expected)[:, 0] <= number_tolerance * run.task.label_std
    one, other = (run.task.decided(run.task.predicted_from(answers)) for answers in (expected, found))
    return (one == other).reshape(len(one), -1).all(axis=1)


def _resized(run: "Run", images: np.ndarray, answers: Answers) -> np.ndarray:
    """Return whether labels are equal for larger images of another shape, bool [N], resized by the run or the file."""
    large = images.repeat(3, axis=1).repeat(2, axis=2)[:, 1:]
    recipe = run.recipe
    shape: dict[str, Any] = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize}
    expected = run.probabilities(resize_images(large, **shape, bits=8 * images.itemsize))
    found = answers(large)
    is_near = np.abs(found - expected).max(axis=1) <= RESIZED_TOLERANCE
    return _equal(run, expected, found, RESIZED_NUMBER_TOLERANCE) | (is_near & (run.task.name != "regression"))


def _worst(run: "Run", positions: np.ndarray, expected: np.ndarray, found: np.ndarray, same: np.ndarray) -> str:
    """Return the image whose label differs most, in words; empty for none."""
    if same.all():
        return ""
    difference = np.where(same, -1.0, np.abs(found - expected).max(axis=1))
    row = int(np.nan_to_num(difference, nan=np.inf).argmax())
    words = [
        run.task.text(run.task.decided(run.task.predicted_from(one[row : row + 1]))[0], run.classes)
        for one in (expected, found)
    ]
    return f"image {positions[row]} is {words[0]!r} for the run and {words[1]!r} for the export"
