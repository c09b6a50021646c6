"""The model's answers on test or validation images: the confusion matrix, galleries of images, and the images.

Shape letters: N samples, K classes, H height, W width, C channels.
"""

import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.detect import DIGITS
from flatout.data.pack import open_pack
from flatout.errors import InputError
from flatout.report import html, run_files
from flatout.report.page import SPLIT_NAMES
from flatout.report.run_files import PREDICTIONS, Predictions, visible
from flatout.tasks import task_named
from flatout.tasks.base import Task
from flatout.tasks.single_label import confusion

KEPT_RUNS = 4
MOST_AT_ONCE = 500
FULL_PIXELS = 2048
ORDERS = ("confident", "unsure", "data")


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """The answers of one run.

    Attributes:
        images: those of the pack, [P, H, W, C]; None where there is no pack any more.
        why: the reason, as a sentence; empty if there is one.
        white: the pixel that is shown as white.
        right, confidence: of each answer, bool [N] and float [N]; `right` is None in regression.
    """

    shown: Predictions
    task: Task
    classes: list[str]
    images: np.ndarray | None
    why: str
    white: int
    right: np.ndarray | None
    confidence: np.ndarray

    def summary(self) -> dict[str, Any]:
        """Return classes, counts and, where each image has one class, the cells of the confusion matrix."""
        shown, K = self.shown, len(self.classes)
        found: dict[str, Any] = {
            "split": SPLIT_NAMES.get(shown.split, shown.split),
            "classes": self.classes,
            "count": len(shown.labels),
            "wrong": None if self.right is None else int((~self.right).sum()),
            "images": "" if self.images is not None else self.why,
            "tiny": max(self.shape) < html.SMOOTH_FROM_PIXELS,
            "shape": self.shape,
        }
        if shown.labels.ndim == 1 and self.right is not None:
            matrix_KK = confusion(shown.predicted, shown.labels, K)
            rows, columns = np.nonzero(matrix_KK)
            found["cells"] = np.stack([rows, columns, matrix_KK[rows, columns]], axis=1).tolist()
            found["totals"] = np.bincount(shown.labels, minlength=K).tolist()
        elif shown.labels.ndim == 2:
            found["totals"] = shown.labels.astype(bool).sum(axis=0).tolist()
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        images = self.shown.images if self.images is None else self.images
        return images.shape[1], images.shape[2]

    def samples(
        self, *, actual: int | None, predicted: int | None, show: str, order: str, offset: int, limit: int
    ) -> dict[str, Any]:
        """Return a page of the images of a class, a prediction, or both; `show` is "all", "wrong" or "right"."""
        shown = self.shown
        is_wanted = np.ones(len(shown.labels), bool)
        for wanted, labels in ((actual, shown.labels), (predicted, shown.predicted)):
            if wanted is not None:
                is_wanted &= labels == wanted if labels.ndim == 1 else labels[:, wanted] > 0
        if show != "all" and self.right is not None:
            is_wanted &= self.right == (show == "right")
        found = np.flatnonzero(is_wanted)
        if order != "data":
            keys = self.confidence[found]
            found = found[np.argsort(-keys if order == "confident" else keys, kind="stable")]
        page = found[offset : offset + min(limit, MOST_AT_ONCE)]
        return {"total": len(found), "offset": offset, "samples": [self._sample(int(i)) for i in page]}

    def _sample(self, i: int) -> dict[str, Any]:
        shown, task = self.shown, self.task
        confidence = task.confidence(shown.predicted[i], shown.probabilities[i])
        return {
            "i": i,
            "actual": task.text(shown.labels[i], self.classes),
            "predicted": task.text(shown.predicted[i], self.classes),
            "right": None if self.right is None else bool(self.right[i]),
            "confidence": None if confidence is None else round(confidence, 4),
            "image": self._has_image(i),
        }

    def sample(self, i: int) -> dict[str, Any]:
        """Return an image's answer with its most probable classes. Raises InputError where there is none."""
        self._check(i)
        answer = self.task.answer(self.shown.probabilities[i], self.classes, 5)
        return {**self._sample(i), "answer": run_files.plain(answer)}

    def image(self, i: int, *, full: bool = False) -> tuple[str, bytes]:
        """Return type and content of an image, as PNG or JPEG. Raises InputError where it is not there."""
        self._check(i)
        shown = self.shown
        if self.images is not None and shown.row is not None:
            image_HWC = visible(np.asarray(self.images[shown.row[i]]), self.white)
        else:
            place = np.flatnonzero(shown.sample == i)
            if not len(place):
                raise InputError(self.why)
            image_HWC = shown.images[place[0]]
        return html.encode(image_HWC, pixels=FULL_PIXELS if full else html.THUMBNAIL_PIXELS)

    def _has_image(self, i: int) -> bool:
        return self.images is not None or bool((self.shown.sample == i).any())

    def _check(self, i: int) -> None:
        if not 0 <= i < len(self.shown.labels):
            raise InputError(f"there is no image {i}: there are {len(self.shown.labels):,}")


# A run is read once, however many images of it are asked for at the same time.
_reading = threading.Lock()


def answers_of(run: Path) -> Answers:
    """Return the answers of a run, read again when the file changes. Raises InputError where it has none."""
    path = run / PREDICTIONS
    with _reading:
        return _read(run, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(KEPT_RUNS)
def _read(run: Path, changed: int) -> Answers:
    missing: dict[str, str] = {}
    files = run_files.read_run(run, predictions=False)
    shown = run_files.read_predictions(run, files.summary, missing)
    if shown is None:
        raise InputError(missing[PREDICTIONS])
    task = task_named(files.summary.get("task") or files.recipe.get("task"))
    classes = files.summary.get("classes") or []
    images, why = _images(run, files.summary, files.recipe, shown)
    right = task.is_right(shown.predicted, shown.labels)
    if right is None:
        # The largest errors are what the most confident mistakes are elsewhere.
        confidence = np.abs(shown.predicted - shown.labels)
    elif shown.labels.ndim == 2:
        confidence = np.abs(shown.probabilities - 0.5).mean(axis=1)
    else:
        confidence = np.nan_to_num(shown.probabilities.max(axis=1))
    white = 255
    if images is not None and images.dtype != np.uint8:
        white = int(images[:: max(1, len(images) // 64)].max())
    return Answers(
        shown=shown,
        task=task,
        classes=classes,
        images=images,
        why=why,
        white=white,
        right=right,
        confidence=confidence,
    )


def _images(
    run: Path, summary: dict[str, Any], recipe: dict[str, Any], shown: Predictions
) -> tuple[np.ndarray | None, str]:
    """Return the images of the pack that the run names, and "" or the reason why there are none."""
    kept = f"Only the {len(shown.sample)} images of the report can be shown"
    if shown.row is None:
        return None, f"{kept}: the run is of an earlier version."
    if (recipe.get("data") or {}).get("path") == DIGITS and not summary.get("pack"):
        from flatout.data.formats.arrays import load_digits_source

        images = load_digits_source().images
        assert images is not None
        return np.asarray(images), ""
    if not summary.get("pack"):
        return None, f"{kept}: the data was given as arrays."
    try:
        pack = open_pack(Path(summary["pack"]), verify=False)
    except (InputError, OSError):
        again = f"flatout evaluate {run} decodes the images again"
        return None, f"{kept}: the decoded images are no longer in the cache; {again}."
    if pack.fingerprint != summary.get("pack_fingerprint") or shown.row.max(initial=-1) >= len(pack.images):
        return None, f"{kept}: the decoded images in the cache are not those of this run."
    return pack.images, ""
