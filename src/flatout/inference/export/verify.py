"""Export a run, and keep the file only if it agrees with the run on the run's test images.

Shape letters: N images, H height, W width, C channels, K classes.
"""

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config.settings import nearest
from flatout.data.batches import Split
from flatout.inference.evaluate import held_out, labelled
from flatout.inference.export.formats import Predict, write_onnx, write_program
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from flatout.utils.files import write_atomically

if TYPE_CHECKING:
    from flatout.inference.run import Run

# The formats and their file suffixes.
FORMATS = {"onnx": ".onnx", "exported": ".pt2"}
PRECISIONS = ("fp32", "fp16")
# The minimum share of equal labels of a valid export.
MIN_EQUAL = 0.9999
# Maximum number of compared test images, spread evenly.
MAX_IMAGES = 10_000
# Numbers of a regression are equal up to this share of the standard deviation of the labels.
NUMBER_TOLERANCE = 1e-3
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written and verified; the fields are those of `export --json`.

    Attributes:
        out: the file.
        format, precision: those requested.
        bytes: its size.
        split: the images that were compared: test, valid or all.
        images: the number of images.
        equal_labels: the share with equal labels, or with numbers within `NUMBER_TOLERANCE`.
        largest_difference: of a probability, or of a number.
        metrics, run_metrics: the task's metrics of the file and of the run on these images.
        export_seconds, verify_seconds: the time of writing and verifying.
    """

    out: Path
    format: str
    precision: str
    bytes: int
    split: str
    images: int
    equal_labels: float
    largest_difference: float
    metrics: dict[str, float]
    run_metrics: dict[str, float]
    export_seconds: float
    verify_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"out": str(self.out)}

    def lines(self) -> list[str]:
        """Return the figures in words."""
        what, name = "numbers" if "r2" in self.metrics else "labels", next(iter(self.metrics))
        return [
            f"{self.out}: {self.format}, {self.precision}, {self.bytes / 1e6:,.2f} MB, "
            f"written in {self.export_seconds:.1f} s, verified in {self.verify_seconds:.1f} s",
            f"{100 * self.equal_labels:.2f} % equal {what} on {self.images:,} {self.split} images, "
            f"largest difference {self.largest_difference:.2g}",
            f"{name} {self.metrics[name]:.4f}; of the run {self.run_metrics[name]:.4f}",
        ]


def export(
    run: "Run",
    out: str | Path,
    *,
    format: str | None = None,
    precision: str = "fp32",
    data: Any = None,
    console: Console,
) -> Exported:
    """See `Run.export`; `console` shows progress."""
    out = Path(out)
    chosen = _format_of(out, format)
    if precision not in PRECISIONS:
        raise InputError(f"--precision {precision}: {nearest(precision, PRECISIONS)}")
    if precision != "fp32" and chosen != "onnx":
        raise InputError(f"--precision {precision}: is for --format onnx; {chosen} is written in fp32")
    if out.exists():
        raise InputError(f"{out}: exists; choose another --out, or remove it")
    split, samples = _images(run, data, console)
    results: list[Exported] = []

    def write(temporary: Path) -> None:
        started = time.monotonic()
        predict = write_onnx(run, temporary, precision) if chosen == "onnx" else write_program(run, temporary)
        written = time.monotonic()
        figures, worst = _compare(run, samples, split, predict, console)
        found = Exported(
            out=out,
            format=chosen,
            precision=precision,
            bytes=temporary.stat().st_size,
            **figures,
            export_seconds=written - started,
            verify_seconds=time.monotonic() - written,
        )
        if precision == "fp32" and found.equal_labels < MIN_EQUAL:
            differ = round((1 - found.equal_labels) * found.images)
            raise InputError(
                f"{out}: {differ:,} of {found.images:,} {split} images get another label from the export than from the "
                f"run ({100 * found.equal_labels:.2f} % equal, {100 * MIN_EQUAL:g} % are required); {worst}; the "
                f"largest difference is {found.largest_difference:.3g}; no file was kept"
            )
        if out.exists():
            raise InputError(f"{out}: was made by something else in the meantime; choose another --out")
        results.append(found)

    with contextlib.suppress(OSError):  # the next call reports it
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, write)
    return results[0]


def _format_of(out: Path, wanted: str | None) -> str:
    """Return the format of the file name, which must be the wanted one."""
    chosen = next((name for name, suffix in FORMATS.items() if out.suffix == suffix), None)
    if chosen is None or wanted not in (None, chosen):
        names = " or ".join(f"{suffix} (--format {name})" for name, suffix in FORMATS.items())
        raise InputError(f"--out {out}: must end in {names}{'' if wanted is None else f', not --format {wanted}'}")
    return chosen


def _images(run: "Run", data: Any, console: Console) -> tuple[str, Split]:
    """Return the split to verify on, and its images."""
    other = data is not None
    try:
        pack, labels = labelled(run, data, console)
    except InputError as error:
        hint = "" if other or "--data" in str(error) else "; verify the export on other images with --data PATH"
        raise InputError(f"{error}{hint}") from None
    split, samples = held_out(run.members[0], pack, labels, other=other)
    if not len(samples):
        raise InputError("there are no images to verify the export on; name some with --data PATH")
    return split, samples


# --- comparison -------------------------------------------------------------------------------------------------------


def _compare(run: "Run", samples: Split, split: str, predict: Predict, console: Console) -> tuple[dict[str, Any], str]:
    """Compare a file's outputs with the run's: return fields of `Exported`, and the worst image in words.

    Args:
        run: computes in 32 bits on the CPU; see `flatout predict`.
        samples, split: labelled images of the run's size.
        predict: runs the file.
        console: shows progress.
    """
    positions = np.linspace(0, len(samples) - 1, min(len(samples), MAX_IMAGES)).astype(np.int64)
    theirs, ours = [], []
    at_once = min(_AT_ONCE, run.recipe.batch_size)
    for start in range(0, len(positions), at_once):
        images = samples.images_at(positions[start : start + at_once])
        ours.append(run.probabilities(images))
        theirs.append(predict(images))
        console.update(start + len(images), len(positions), "images verified")
    console.finish()
    expected, found = np.concatenate(ours), np.concatenate(theirs)
    if found.shape != expected.shape:
        raise InputError(f"the export answers {list(found.shape)} where the run answers {list(expected.shape)}")
    same = _are_equal(run, expected, found)
    labels = samples.labels[positions]
    metrics = [run.task.metrics(run.task.predicted_from(one), labels) for one in (found, expected)]
    figures = {
        "split": split,
        "images": len(positions),
        "equal_labels": float(same.mean()),
        "largest_difference": float(np.abs(found - expected).max()),
        "metrics": metrics[0],
        "run_metrics": metrics[1],
    }
    return figures, _worst(run, positions, expected, found, same)


def check_on_noise(run: "Run", predict: Predict) -> None:
    """Raise InputError if a file and its run disagree on random images of the run's size."""
    recipe = run.recipe
    kind, shape = np.uint16 if recipe.data.bits == 16 else np.uint8, (16, *recipe.stored_sides, recipe.channels)
    images = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    difference = np.abs(predict(images) - run.probabilities(images)).max() / run.task.label_std
    if not difference <= NUMBER_TOLERANCE:
        raise InputError(f"the export answers otherwise than the run, by up to {difference:.3g}")


def _are_equal(run: "Run", expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Whether the labels of two sets of outputs [N, K] are equal, bool [N]."""
    if run.task.name == "regression":
        return np.abs(found - expected)[:, 0] <= NUMBER_TOLERANCE * run.task.label_std
    one, other = (run.task.decided(run.task.predicted_from(answers)) for answers in (expected, found))
    return (one == other).reshape(len(one), -1).all(axis=1)


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
