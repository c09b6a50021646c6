"""A run as an ONNX file, or as a `torch.export` program, `.pt2`. The ONNX file is made from that program.

Both take `images` uint8 or uint16 [N, H, W, C] of any size and give `probabilities` float32 [N, K]: `docs/export.md`.
"""

import contextlib
import importlib.util
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import torch

from flatout.inference.export.classifier import Classifier, bits_of, metadata_of
from flatout.utils.errors import InputError, causes, first_line

if TYPE_CHECKING:
    from flatout.inference.run import Run

# Images uint8 or uint16 [N, H, W, C] to probabilities float32 [N, K], or numbers [N, 1].
Predict = Callable[[np.ndarray], np.ndarray]

# Limit of a protocol buffer, and so of a single file; graph and metadata fit in the rest of 2 GiB.
MAX_BYTES = 2**31 - 2**24


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep torch from printing warnings, logs and whole programs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# --- torch.export -----------------------------------------------------------------------------------------------------


def write_program(run: "Run", path: Path) -> Predict:
    """Write a run as a `torch.export` program, and return a function that runs the file.

    Raises:
        InputError: the network cannot be exported.
    """
    program = _program(Classifier(run), run)
    # As open files, since torch demands a suffix of paths.
    with quietly(), path.open("wb") as file:
        torch.export.save(program, file, extra_files={"metadata.json": json.dumps(metadata_of(run, "fp32"))})
    with path.open("rb") as file:
        module = torch.export.load(file).module()

    def predict(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(np.ascontiguousarray(images))).numpy()

    return predict


def _program(classifier: Classifier, run: "Run") -> torch.export.ExportedProgram:
    """Return the program of a classifier, for images of any number, height and width.

    Raises:
        InputError: the network cannot be exported; the message names the layer.
    """
    entered: list[str] = [""]
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: entered.append(name))
        for name, module in classifier.named_modules()
    ]
    dtype = torch.uint16 if bits_of(run) == 16 else torch.uint8
    # The lengths of the axes are distinct, and none would specialise the program.
    rows, columns = run.recipe.stored_sides
    images = torch.zeros(2, rows + 5, columns + 11, run.recipe.channels, dtype=dtype)
    axes = {axis: torch.export.Dim(name) for axis, name in enumerate(("N", "height", "width"))}
    try:
        with quietly():
            return torch.export.export(classifier, (images,), dynamic_shapes=(axes,))
    except Exception as error:  # the network's own code, run by torch's tracer, may raise anything
        short = _short(entered[-1])
        kind = type(classifier.get_submodule(entered[-1])).__name__
        raise InputError(
            f"{run.path}: {f'layer {short!r} ({kind})' if short else 'the network'} cannot be exported "
            f"({first_line(error)}); its forward pass must not depend on values or on the batch size"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _short(name: str) -> str:
    """Return the name of a layer within its network."""
    return re.sub(r"^members\.\d+\.network\.?", "", name)


# --- ONNX -------------------------------------------------------------------------------------------------------------


def write_onnx(run: "Run", path: Path, precision: str) -> Predict:
    """Write a run as an ONNX file, and return a function that runs it.

    Args:
        run: one run, or a cross-validation, whose folds are averaged.
        path: the file.
        precision: "fp32", or "fp16" for networks in 16 bits.

    Raises:
        InputError: the model is too large, or uses an operation that ONNX lacks.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise InputError("--format onnx needs onnxscript: pip install 'flatout[onnx]'")
    classifier = Classifier(run, torch.float16 if precision == "fp16" else torch.float32)
    size = sum(t.numel() * t.element_size() for t in classifier.state_dict().values())
    if size > MAX_BYTES:
        raise InputError(
            f"{run.path}: has {size / 1e9:.1f} GB of weights, and a single ONNX file holds at most 2 GB; "
            "try --precision fp16, or --format exported"
        )
    program = _program(classifier, run)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
    try:
        with quietly():
            made = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    except Exception as error:  # the exporter raises errors of its own, which wrap those of its parts
        layer = _failed_layer(program, error)
        raise InputError(f"{run.path}: {layer} cannot be written as ONNX; use --format exported") from error
    assert made is not None
    model = made.model_proto
    for value in (*model.graph.input, *model.graph.output):
        for name, axis in zip(("N", "height", "width"), value.type.tensor_type.shape.dim, strict=False):
            if axis.dim_param:
                axis.dim_param = name
    _strip(model)
    for key, value in metadata_of(run, precision).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["probabilities"], {"images": np.ascontiguousarray(images)})[0]


def _failed_layer(program: torch.export.ExportedProgram, error: BaseException) -> str:
    """Return the layer and operation whose conversion failed."""
    node: Any = None
    nodes = {node.name: node for node in program.graph.nodes}
    for each in causes(error):
        if found := re.search(r"node %(\w+)", str(each)):
            node = nodes.get(found[1]) or node
    if node is None:
        return f"the network ({first_line(error)})"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name, kind = stack[-1] if stack else ("", "")
    kind = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return f"{node.target} of layer {_short(name)!r} ({kind})"


def _strip(model: onnx.ModelProto) -> None:
    """Remove the exporter's metadata: names, and paths of source files."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.ClearField("doc_string")
    graph.ClearField("value_info")
