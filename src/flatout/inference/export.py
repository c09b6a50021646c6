"""A run as an ONNX file from raw images to probabilities, kept only if it answers as the run does.

Shape letters: N images, H height, W width, C channels, V views, K classes.
"""

import contextlib
import copy
import importlib.util
import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import nn

from flatout import __version__
from flatout.data.batches import Split
from flatout.engine.augment import tta_views
from flatout.engine.pixels import view
from flatout.inference.evaluate import held_out, labelled
from flatout.inference.predict import normalised
from flatout.models.build import quiet
from flatout.models.keras import KerasModule
from flatout.utils.console import Console
from flatout.utils.errors import InputError, causes, first_line
from flatout.utils.files import make_folder, write_atomically
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from flatout.inference.run import Run

# Images uint8 or uint16 [N, H, W, C] to probabilities float32 [N, K], or numbers [N, 1].
Predict = Callable[[np.ndarray], np.ndarray]

FORMAT = "onnx"
# Limit of a protocol buffer, and so of a single ONNX file; graph and metadata fit in the rest of 2 GiB.
MAX_BYTES = 2**31 - 2**24
# The minimum share of equal labels of a valid export.
MIN_EQUAL = 0.9999
# Maximum number of compared test images, spread evenly.
MAX_IMAGES = 10_000
# Numbers of a regression are equal up to this share of the standard deviation of the labels.
NUMBER_TOLERANCE = 1e-3
_AT_ONCE = 64


# --- from images to probabilities -------------------------------------------------------------------------------------


def resize_matrix(size: int, whole: torch.Tensor, used: torch.Tensor, filled: torch.Tensor, x: torch.Tensor) -> Any:
    """Return the weights float32 [size, len(x)] of a bilinear, antialiased resize along one axis.

    Of the `whole` axis with positions `x`, the `used` ones in the middle are resized to the `filled` ones in the middle
    of the result; zeros are around it.
    """
    offset, scale = torch.floor((whole - used) / 2), used / filled
    rows = torch.arange(size, dtype=torch.float32)[:, None] - torch.floor((size - filled) / 2)
    centre = (rows + 0.5) * scale - 0.5
    weights = (1 - (x - offset - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((x >= offset) & (x < offset + used))
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
    return weights * ((rows >= 0) & (rows < filled))


class Resize(nn.Module):
    """Resizes images uint8 or uint16 [N, H, W, C] to [N, *size, C]; `mode` is `data.resize`."""

    def __init__(self, size: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.size, self.mode = size, mode

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the resized images."""
        (rows, columns), (height, width) = self.size, images.shape[1:3]
        y, x = (torch.arange(length, dtype=torch.float32) for length in (height, width))
        all_y, all_x = (torch.full((), length, dtype=torch.float32) for length in (height, width))
        used_y, used_x, filled_y, filled_x = all_y, all_x, all_y * 0 + rows, all_x * 0 + columns
        is_wide = all_y * columns <= all_x * rows
        if self.mode == "crop":
            used_y = torch.where(is_wide, all_y, (all_x * rows / columns).round().clamp(min=1))
            used_x = torch.where(is_wide, (all_y * columns / rows).round().clamp(min=1), all_x)
        elif self.mode == "pad":
            filled_y = torch.where(is_wide, (columns * all_y / all_x).round().clamp(min=1), filled_y)
            filled_x = torch.where(is_wide, filled_x, (rows * all_x / all_y).round().clamp(min=1))
        across = resize_matrix(columns, all_x, used_x, filled_x, x)
        down = resize_matrix(rows, all_y, used_y, filled_y, y)
        narrow = images.permute(0, 3, 1, 2).float() @ across.T
        if images.dtype == torch.uint8:  # each pass is rounded, as in 8-bit arithmetic
            narrow = torch.floor(narrow + 0.5)
        return torch.floor(down @ narrow + 0.5).permute(0, 2, 3, 1).to(images.dtype)


class ExportedModel(nn.Module):
    """A copy of a run's network with normalisation, the average over views, and the conversion of logits."""

    def __init__(self, run: "Run") -> None:
        super().__init__()
        if isinstance(run.model, KerasModule):
            raise InputError(f"{run.path}: trained a Keras model, which Keras saves: run.model.to_keras().save(FILE)")
        self.network, self.recipe, self.task = copy.deepcopy(run.model).eval(), run.recipe, run.task
        self.views = tta_views(run.recipe) if run.recipe.tta else []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, K] or numbers [N, 1] of images in the stored size and bits, [N, H, W, C]."""
        x = normalised(self.recipe, images)
        # All views are one batch, so the file contains the network once.
        views = [view(torch, x, *each) for each in self.views]
        logits = self.network(torch.cat(views) if views else x).float()
        if views:
            logits = self.task.averaged(logits.reshape(len(views), x.shape[0], *logits.shape[1:]))
        return self.task.probabilities(logits)


class Classifier(nn.Module):
    """Images [N, H, W, C] of any height and width to probabilities float32 [N, K], the mean of a run's members."""

    def __init__(self, run: "Run") -> None:
        super().__init__()
        self.resize = Resize(run.recipe.stored_sides, run.recipe.data.resize)
        self.members = nn.ModuleList(ExportedModel(member) for member in run.members)
        self.eval().requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the probabilities; in regression the numbers."""
        resized = self.resize(images)
        found = [member(resized) for member in self.members]
        return torch.stack(found).mean(dim=0) if len(found) > 1 else found[0]


def metadata_of(run: "Run") -> dict[str, str]:
    """Return the metadata of an exported file, all as text; docs/export.md has the keys."""
    recipe, calibration = run.recipe, run.calibration
    found = {
        "producer": f"flatout {__version__}",
        "model": recipe.model,
        "task": run.task.name,
        "classes": json.dumps(run.classes, ensure_ascii=False),
        "image_size": json.dumps(recipe.stored_sides),
        "channels": str(recipe.channels),
        "bits": str(recipe.data.bits or 8),
        "resize": recipe.data.resize,
        "precision": "fp32",
        "temperature": repr(run.task.temperature),
    }
    if run.task.thresholds:
        found["thresholds"] = json.dumps(run.task.thresholds)
    if calibration:
        found["calibration_images"] = str(calibration.images)
        found["set_thresholds"] = json.dumps(calibration.set_thresholds)
    return found


# --- the file ---------------------------------------------------------------------------------------------------------


def write_onnx(run: "Run", path: Path) -> Predict:
    """Write a run as an ONNX file, for images of any number, height and width; return a function that runs the file."""
    if any(importlib.util.find_spec(name) is None for name in ("onnxscript", "onnxruntime")):
        raise InputError("ONNX files need onnxscript and onnxruntime: pip install 'flatout[onnx]'")
    import onnxruntime

    classifier = Classifier(run)
    size = sum(tensor.nbytes for tensor in classifier.state_dict().values())
    if size > MAX_BYTES:
        raise InputError(f"{run.path}: has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB")
    dtype = torch.uint16 if run.recipe.data.bits == 16 else torch.uint8
    # The lengths of the axes are distinct, and none would specialise the program.
    rows, columns = run.recipe.stored_sides
    images = torch.zeros(2, rows + 5, columns + 11, run.recipe.channels, dtype=dtype)
    names = ("N", "height", "width")
    axes = {axis: torch.export.Dim(name) for axis, name in enumerate(names)}
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(classifier, (images,), dynamic_shapes=(axes,))
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=["probabilities"]
            )
    except Exception as error:  # tracer and exporter raise errors of their own, and those of the network's code
        raise InputError(
            f"{run.path}: {run.recipe.model} cannot be exported ({first_line(causes(error)[-1])}); its forward pass "
            "must not depend on values or on the batch size"
        ) from error
    assert made is not None
    model = made.model_proto
    for value in (*model.graph.input, *model.graph.output):
        for name, axis in zip(names, value.type.tensor_type.shape.dim, strict=False):
            if axis.dim_param:
                axis.dim_param = name
    _strip(model)
    for key, value in metadata_of(run).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["probabilities"], {"images": np.ascontiguousarray(images)})[0]


def _strip(model: onnx.ModelProto) -> None:
    """Remove the exporter's metadata: names, and paths of source files."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.ClearField("doc_string")
    graph.ClearField("value_info")


# --- writing and verifying --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written and verified; the fields are those of `export --json`.

    `equal_labels` is the share of the `images` of a `split` (test, valid or all) with equal labels, or with numbers
    within `NUMBER_TOLERANCE`; `largest_difference` that of a probability or number. `metrics` and `run_metrics` are the
    task's metrics of the file and of the run on these images.
    """

    out: Path
    format: str
    bytes: int
    split: str
    images: int
    equal_labels: float
    largest_difference: float
    metrics: dict[str, float]
    run_metrics: dict[str, float]
    export_seconds: float
    verify_seconds: float

    def to_dict(self) -> JsonObject:
        """Return plain values for JSON."""
        return asdict(self) | {"out": str(self.out)}

    def lines(self) -> list[str]:
        """Return the figures in words."""
        what, name = "numbers" if "r2" in self.metrics else "labels", next(iter(self.metrics))
        return [
            f"{self.out}: {self.format}, {self.bytes / 1e6:,.2f} MB, written in {self.export_seconds:.1f} s, "
            f"verified in {self.verify_seconds:.1f} s",
            f"{100 * self.equal_labels:.2f} % equal {what} on {self.images:,} {self.split} images, "
            f"largest difference {self.largest_difference:.2g}",
            f"{name} {self.metrics[name]:.4f}; of the run {self.run_metrics[name]:.4f}",
        ]


def export(run: "Run", out: str | Path, *, data: object = None, console: Console) -> Exported:
    """See `Run.export`; `console` shows progress."""
    out = Path(out)
    if out.suffix != ".onnx":
        raise InputError(f"--out {out}: must end in .onnx")
    if out.exists():
        raise InputError(f"{out}: exists; choose another --out, or remove it")
    try:
        pack, labels = labelled(run, data, console)
    except InputError as error:
        hint = "" if data is not None or "--data" in str(error) else "; verify on other images with --data PATH"
        raise InputError(f"{error}{hint}") from None
    split, samples = held_out(run.members[0], pack, labels, other=data is not None)
    results: list[Exported] = []

    def write(temporary: Path) -> None:
        started = time.monotonic()
        predict = write_onnx(run, temporary)
        written = time.monotonic()
        figures = _compare(run, samples, predict, console)
        equal, images = figures["equal_labels"], figures["images"]
        if equal < MIN_EQUAL:
            raise InputError(
                f"{out}: {round((1 - equal) * images):,} of {images:,} {split} images get another label from the "
                f"export than from the run ({100 * equal:.2f} % equal, {100 * MIN_EQUAL:g} % are required); "
                f"the largest difference is {figures['largest_difference']:.3g}; no file was kept"
            )
        if out.exists():
            raise InputError(f"{out}: was made by something else in the meantime; choose another --out")
        seconds: JsonObject = {"export_seconds": written - started, "verify_seconds": time.monotonic() - written}
        size = temporary.stat().st_size
        results.append(Exported(out=out, format=FORMAT, bytes=size, split=split, **figures, **seconds))

    make_folder(out.parent)
    write_atomically(out, write)
    return results[0]


def _compare(run: "Run", samples: Split, predict: Predict, console: Console) -> JsonObject:
    """Compare a file's outputs with the run's on labelled images, and return fields of `Exported`."""
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
    task, labels = run.task, samples.labels[positions]
    predicted = [task.predicted_from(one) for one in (expected, found)]
    same = task.is_right(*(task.decided(one) for one in predicted))
    if same is None:
        same = np.abs(predicted[0] - predicted[1]) <= NUMBER_TOLERANCE * task.label_std
    return {
        "images": len(positions),
        "equal_labels": float(same.mean()),
        "largest_difference": float(np.abs(found - expected).max()),
        "metrics": task.metrics(predicted[1], labels),
        "run_metrics": task.metrics(predicted[0], labels),
    }


def check_on_noise(run: "Run", predict: Predict) -> None:
    """Raise InputError if a file and its run disagree on random images of the run's size."""
    recipe = run.recipe
    kind, shape = np.uint16 if recipe.data.bits == 16 else np.uint8, (16, *recipe.stored_sides, recipe.channels)
    images = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    difference = np.abs(predict(images) - run.probabilities(images)).max() / run.task.label_std
    if not difference <= NUMBER_TOLERANCE:
        raise InputError(f"the exported file's results differ from the run's by up to {difference:.3g}")
