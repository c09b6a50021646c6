"""A run in another format, verified on its test images before it is kept."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.console import Console
from flatout.errors import DiskFull, InputError
from flatout.files import NO_SPACE
from flatout.settings import nearest

if TYPE_CHECKING:
    from flatout.data.batches import Samples
    from flatout.export.verify import Agreement, Answers
    from flatout.run.folder import Run

# The formats, and how the name of a file ends; a folder has any name.
FORMATS: dict[str, tuple[str, ...]] = {
    "onnx": (".onnx",),
    "torch": (),
    "exported": (".pt2",),
    "keras": (".keras", ".weights.h5"),
}
PRECISIONS = ("fp32", "fp16", "int8")
# Training images by which the ranges of numbers are chosen for int8, and how many share a range before the mean.
CALIBRATION_IMAGES, CALIBRATION_BATCH = 256, 16


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file, or a folder, that was written and verified.

    Attributes:
        path: where it is.
        format, precision: as they were asked for.
        bytes: its size.
        agreement: how its answers compare with those of the run.
        export_seconds, verify_seconds: what writing and verifying took.
    """

    path: Path
    format: str
    precision: str
    bytes: int
    agreement: "Agreement"
    export_seconds: float
    verify_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = self.agreement
        return {
            "out": str(self.path),
            "format": self.format,
            "precision": self.precision,
            "bytes": self.bytes,
            "split": found.split,
            "images": found.images,
            "equal_labels": found.equal,
            "largest_difference": found.difference,
            "resized_images": found.resized,
            "resized_equal_labels": found.resized_equal,
            "metrics": found.metrics,
            "run_metrics": found.run_metrics,
            "export_seconds": self.export_seconds,
            "verify_seconds": self.verify_seconds,
        }

    def lines(self) -> list[str]:
        """Return the figures in words."""
        found = self.agreement
        what = "numbers" if "r2" in found.metrics else "labels"
        lines = [
            f"{self.path}: {self.format}, {self.precision}, {self.bytes / 1e6:,.2f} MB, "
            f"written in {self.export_seconds:.1f} s, verified in {self.verify_seconds:.1f} s",
            f"{100 * found.equal:.2f} % equal {what} on {found.images:,} {found.split} images, "
            f"largest difference {found.difference:.2g}",
        ]
        if found.resized:
            lines.append(f"{100 * found.resized_equal:.0f} % on {found.resized} images of another size")
        name = next(iter(found.metrics))
        lines.append(f"{name} {found.metrics[name]:.4f}; of the run {found.run_metrics[name]:.4f}")
        return lines


def export(
    run: "Run",
    out: str | Path,
    *,
    format: str | None = None,
    precision: str = "fp32",
    data: Any = None,
    console: Console | None = None,
) -> Exported:
    """Write a run in another format; it is kept if it answers as the run does.

    Args:
        run: one run, or a cross-validation, whose folds are averaged.
        out: a file, or for "torch" a folder, that does not exist yet.
        format: "onnx", "torch", "exported" (a `torch.export` program) or "keras"; by default, as the name ends.
        precision: of an ONNX file: "fp32", "fp16" or "int8".
        data: other images to verify on, and to calibrate int8 on; by default the run's own.

    Raises:
        InputError: the file exists, the run cannot be written in this format, its data is missing, or fewer than
            99.99 % of the labels are equal (fp32).
    """
    out, console = Path(out), console or Console()
    chosen = _format_of(out, format)
    if precision not in PRECISIONS:
        raise InputError(f"--precision {precision}: {nearest(precision, PRECISIONS)}")
    if precision != "fp32" and chosen != "onnx":
        raise InputError(f"--precision {precision}: is for --format onnx; {chosen} is written in fp32")
    if out.exists():
        raise InputError(f"{out}: exists; choose another --out, or remove it")
    from flatout.export.verify import agreement

    split, samples, calibration = _images(run, data, console, wants_calibration=precision == "int8")
    with _kept(out) as temporary:
        started = time.monotonic()
        answers = _write(run, temporary, chosen, precision, calibration)
        written = time.monotonic()
        found = agreement(run, samples, split, answers, resizes=chosen != "keras", console=console)
        if precision == "fp32":
            found.require(out)
        size = sum(file.stat().st_size for file in [temporary, *temporary.rglob("*")] if file.is_file())
    return Exported(
        path=out,
        format=chosen,
        precision=precision,
        bytes=size,
        agreement=found,
        export_seconds=written - started,
        verify_seconds=time.monotonic() - written,
    )


def _format_of(out: Path, wanted: str | None) -> str:
    """Return the format that is wanted, or that the name of the file asks for."""
    if wanted is not None and wanted not in FORMATS:
        raise InputError(f"--format {wanted}: {nearest(wanted, FORMATS)}")
    named = next((name for name, ends in FORMATS.items() if ends and out.name.endswith(ends)), None)
    if wanted is None and named is None:
        raise InputError(f"--format is missing: one of {', '.join(FORMATS)}")
    chosen = wanted or named or ""
    ends = FORMATS[chosen]
    if ends and not out.name.endswith(ends):
        raise InputError(f"--out {out}: the name of a file of --format {chosen} must end in {' or '.join(ends)}")
    return chosen


def _images(
    run: "Run", data: Any, console: Console, *, wants_calibration: bool
) -> "tuple[str, Samples, list[np.ndarray]]":
    """Return the split to verify on, its images, and batches of training images to calibrate on."""
    from flatout.data.splits import splits_of
    from flatout.run.evaluate import held_out, labelled

    first, other = run.members[0], data is not None
    try:
        pack, labels = labelled(run, data, console)
    except InputError as error:
        hint = "" if other or "--data" in str(error) else "; verify the export on other images with --data PATH"
        raise InputError(f"{error}{hint}") from None
    split, samples = held_out(first, pack, labels, other=other)
    if not wants_calibration:
        return split, samples, []
    training = samples
    if not other or len(pack.splits) > 1:
        training = splits_of(pack, first.recipe.data, first.recipe.seed)["train"]
    count = min(len(training), CALIBRATION_IMAGES)
    positions = np.linspace(0, len(training) - 1, count).astype(np.int64)
    parts = [positions[start : start + CALIBRATION_BATCH] for start in range(0, count, CALIBRATION_BATCH)]
    return split, samples, [training.images_at(part) for part in parts]


def _write(run: "Run", path: Path, chosen: str, precision: str, calibration: list[np.ndarray]) -> "Answers":
    """Write the file, and return a function that runs it."""
    # What a format needs is imported with it alone.
    if chosen == "onnx":
        from flatout.export import onnx

        onnx.write(run, path, precision, calibration)
        return onnx.answers_of(path)
    if chosen == "keras":
        from flatout.export import keras

        keras.write(run, path)
        return keras.answers_of(path, run)
    if chosen == "torch":
        from flatout.export import plain as module
    else:
        from flatout.export import program as module
    module.write(run, path)
    return module.answers_of(path)


@contextlib.contextmanager
def _kept(out: Path) -> Iterator[Path]:
    """Yield a path to write to, in a folder beside `out`; it becomes `out` where nothing is raised."""
    folder = out.absolute().parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True)
        yield folder / out.name
        if out.exists():
            raise InputError(f"{out}: was made by something else meanwhile; choose another --out")
        (folder / out.name).rename(out)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(f"{out}: cannot be written: {error.strerror}; free disk space") from None
        reason = error.strerror or str(error)
        raise InputError(f"{out}: cannot be written: {reason}; fix that, or choose another --out") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
