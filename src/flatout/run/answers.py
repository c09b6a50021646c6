"""The answers of a run on its test images, for notebooks: the worst ones, and which classes are confused."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import InputError
from flatout.report.html import data_uri, thumbnail
from flatout.report.run_files import PICTURES, PREDICTIONS, Predictions, read_predictions, visible

if TYPE_CHECKING:
    from flatout.run.folder import Run

_SHOWN_PIXELS = 112


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a run says of one of its test images.

    Attributes:
        index: the position of the image among the test images, or those of validation without any.
        actual, predicted: the label and the answer in words.
        loss: of the image.
        probability: of the answer; None where it has none.
        image: uint8 [H, W, 1 or 3]; None where the run does not have it and the cache no longer.
    """

    index: int
    actual: str
    predicted: str
    loss: float
    probability: float | None
    image: np.ndarray | None

    def __repr__(self) -> str:
        sure = "" if self.probability is None else f" {self.probability:.3f}"
        return f"{self.index}: {self.predicted}{sure}, actually {self.actual}, loss {self.loss:.3f}"

    def _repr_html_(self) -> str:
        shown = "" if self.image is None else f'<img src="{thumbnail(self.image)}" style="{_STYLE}">'
        words = escape(f"{self.predicted} / actually {self.actual}")
        return f'<figure style="display:inline-block;margin:4px">{shown}<figcaption>{words}</figcaption></figure>'


_STYLE = f"width:{_SHOWN_PIXELS}px;image-rendering:pixelated"


class Answers(list[Answer]):
    """A list that a notebook shows as pictures."""

    def _repr_html_(self) -> str:
        return "".join(answer._repr_html_() for answer in self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion:
    """How often each class was taken for each.

    Attributes:
        counts: int64 [K, K], a row for each actual class, a column for each predicted one.
        classes: their names.
        picture: of the counts, a PNG file; None where the run has none.
    """

    counts: np.ndarray
    classes: tuple[str, ...]
    picture: Path | None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.counts, dtype=dtype)

    def frame(self) -> Any:
        """Return the counts as a pandas DataFrame.

        Raises:
            InputError: pandas is not installed.
        """
        index, columns = (_pandas("Confusion.frame()").Index(self.classes, name=n) for n in ("actual", "predicted"))
        return _pandas("Confusion.frame()").DataFrame(self.counts, index=index, columns=columns)

    def _repr_html_(self) -> str:
        if self.picture is None:
            return f"<pre>{escape(repr(self))}</pre>"
        return f'<img style="max-width:100%" src="{data_uri("image/png", self.picture.read_bytes())}">'


def top_losses(run: "Run", count: int) -> Answers:
    """See `Run.top_losses`."""
    found = _predictions(run)
    losses = run.task.losses_of(found.probabilities.astype(np.float64), found.labels)
    worst = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable")[: max(0, count)]
    images = _images(run, found, worst)
    return Answers(
        Answer(
            index=int(i),
            actual=run.task.text(found.labels[i], run.classes),
            predicted=run.task.text(found.predicted[i], run.classes),
            loss=float(losses[i]) + 0.0,  # no -0.0
            probability=run.task.confidence(found.predicted[i], found.probabilities[i]),
            image=image,
        )
        for i, image in zip(worst, images, strict=True)
    )


def confusion(run: "Run") -> Confusion:
    """See `Run.confusion`."""
    from flatout.tasks.single_label import SingleLabel
    from flatout.tasks.single_label import confusion as count

    if not isinstance(run.task, SingleLabel):
        raise InputError(f"{run.path}: confusion() needs one class for each image; show() has the tables of this task")
    found, picture = _predictions(run), run.path / PICTURES[2]
    counts = count(found.predicted, found.labels, len(run.classes))
    return Confusion(counts=counts, classes=run.classes, picture=picture if picture.is_file() else None)


def history(epochs: list[dict[str, Any]]) -> Any:
    """Return the lines of metrics.jsonl as a DataFrame."""
    frame = _pandas("run.history", "run.epochs has the same as a list").DataFrame(epochs)
    return frame.set_index("epoch") if epochs else frame


def _pandas(what: str, otherwise: str = "") -> Any:
    try:
        import pandas
    except ImportError:
        fix = f"{what} needs the package pandas: pip install pandas"
        raise InputError(f"{fix}; {otherwise}" if otherwise else fix) from None
    return pandas


def _predictions(run: "Run") -> Predictions:
    missing: dict[str, str] = {}
    found = read_predictions(run.path, run.summary, missing)
    if found is None:
        raise InputError(f"{run.path}: {missing[PREDICTIONS]}")
    return found


def _images(run: "Run", found: Predictions, wanted: Sequence[int] | np.ndarray) -> list[np.ndarray | None]:
    """Return images as they are shown: those that the run keeps, else those of the pack while the cache has it."""
    from flatout.data.pack import open_pack

    kept = {int(number): image for number, image in zip(found.sample, found.images, strict=True)}
    pack, folder = None, run.summary.get("pack")
    if folder and found.row is not None and not set(map(int, wanted)) <= kept.keys() and Path(folder).is_dir():
        try:
            pack = open_pack(Path(folder), verify=False)
        except InputError:
            pack = None  # the cache was cleared meanwhile

    def image_of(number: int) -> np.ndarray | None:
        if number in kept or pack is None or found.row is None:
            return kept.get(number)
        return visible(np.asarray(pack.images[found.row[number]])[None])[0]

    return [image_of(int(number)) for number in wanted]
