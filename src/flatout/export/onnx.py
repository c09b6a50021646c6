"""ONNX: one file with resizing, normalisation, network and probabilities, checked by onnxruntime."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flatout.errors import InputError
from flatout.export.build import classifier_of, metadata_of
from flatout.export.program import exported, layer_of, outputs_of, quietly
from flatout.export.verify import Answers

if TYPE_CHECKING:
    from flatout.run.folder import Run

# A protocol buffer, and so a single file, holds no more; graph and metadata take less than the difference to 2 GiB.
MOST_BYTES = 2**31 - 2**24


def need(*packages: str, what: str) -> None:
    """Raise InputError where a package is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise InputError(f"{what} needs {', '.join(missing)}: pip install 'flatout[onnx]'")


def write(run: "Run", path: Path, precision: str, calibration: Sequence[np.ndarray]) -> None:
    """Write a run as an ONNX file.

    Args:
        run: its task and its images decide inputs and outputs; see `docs/export.md`.
        path: the file.
        precision: "fp32"; "fp16" for networks in 16 bits; or "int8", calibrated.
        calibration: batches of images of the run's size, for int8.

    Raises:
        InputError: the model is too large, or computes what ONNX has no operation for.
    """
    need("onnx", "onnxscript", "onnxruntime", what="--format onnx")
    import onnx

    classifier = classifier_of(run, torch.float16 if precision == "fp16" else torch.float32)
    size = sum(t.numel() * t.element_size() for t in classifier.state_dict().values())
    if size > MOST_BYTES:
        smaller = "; try --precision fp16, or" if precision != "fp16" and size < 2 * MOST_BYTES else ": use"
        raise InputError(
            f"{run.path}: has {size / 1e9:.1f} GB of weights, and a single ONNX file holds at most 2 GB{smaller} "
            "--format exported"
        )
    program = exported(classifier, run)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": outputs_of(classifier)}
    try:
        with quietly():
            made = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    except Exception as error:  # the exporter raises errors of its own, which wrap those of its parts
        raise InputError(
            f"{run.path}: {layer_of(program, error)} cannot be written as ONNX; use --format exported or torch"
        ) from error
    assert made is not None
    model = made.model_proto
    _name_axes(model)
    if precision == "int8":
        from flatout.export.int8 import quantized

        model = quantized(model, calibration, _network_of)
    _strip(model)
    for key, value in metadata_of(run, precision).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)


def _name_axes(model: Any) -> None:
    """Name the axes of inputs and outputs that may have any length."""
    names = ("N", "height", "width")
    for value in (*model.graph.input, *model.graph.output):
        for name, axis in zip(names, value.type.tensor_type.shape.dim, strict=False):
            if axis.dim_param:
                axis.dim_param = name


def _network_of(node: Any) -> str:
    """Return the network that a node computes a part of, by where the exporter found it; empty for none."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"), "")
    found = re.search(r"'(members\.\d+\.network)\b", scopes)
    return found[1] if found else ""


def _strip(model: Any) -> None:
    """Remove what the exporter notes of its own work: names, and paths of source files."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.ClearField("doc_string")
    graph.ClearField("value_info")


def open_session(path: Path) -> Any:
    """Return an `onnxruntime.InferenceSession` of a file on the CPU.

    Raises:
        InputError: onnxruntime is not installed, or the file is missing, damaged or no ONNX model.
    """
    need("onnxruntime", what=str(path))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, of many types
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: cannot be read as an ONNX model ({reason})") from None


def answers_of(path: Path) -> Answers:
    """Return a function that runs an ONNX file."""
    session = open_session(path)
    return lambda images: session.run(["probabilities"], {"images": np.ascontiguousarray(images)})[0]
