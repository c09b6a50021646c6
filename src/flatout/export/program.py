"""A `torch.export` program, `.pt2`: it runs in PyTorch without the source of the network.

The ONNX file is made from the same program.
"""

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.errors import InputError, causes, first_line
from flatout.export.build import bits_of, classifier_of, metadata_of
from flatout.export.graph import Classifier
from flatout.export.verify import Answers, answers_by

if TYPE_CHECKING:
    from flatout.run.folder import Run

_METADATA = "metadata.json"


def write(run: "Run", path: Path) -> None:
    """Write a run as a program with the inputs and outputs of the ONNX file; see `docs/export.md`.

    Raises:
        InputError: the network cannot be exported.
    """
    program = exported(classifier_of(run), run)
    with quietly():
        torch.export.save(program, path, extra_files={_METADATA: json.dumps(metadata_of(run, "fp32"))})


def answers_of(path: Path) -> Answers:
    """Return a function that runs a program."""
    return answers_by(torch.export.load(path).module())


def outputs_of(classifier: Classifier) -> list[str]:
    """Return the names of the outputs."""
    knows = len(classifier.members) == 1 and classifier.members[0].novelty is not None
    return ["probabilities", "unknown_score"] if knows else ["probabilities"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep torch from printing warnings, logs and whole programs; errors say what matters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def exported(classifier: Classifier, run: "Run") -> torch.export.ExportedProgram:
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
    # No axis has a length that stands for another, or that a program would be specialised for.
    rows, columns = run.recipe.stored_sides
    images = torch.zeros(2, rows + 5, columns + 11, run.recipe.channels, dtype=dtype)
    axes = {axis: torch.export.Dim(name) for axis, name in enumerate(("N", "height", "width"))}
    try:
        with quietly():
            program = torch.export.export(classifier, (images,), dynamic_shapes=(axes,))
    except Exception as error:  # the network's own code, run by torch's tracer, may raise anything
        raise InputError(
            f"{run.path}: {_described(classifier, entered[-1])} cannot be exported ({first_line(error)}); its forward "
            "pass must not depend on values or on the batch size"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return program


def _described(classifier: nn.Module, name: str) -> str:
    short = re.sub(r"^members\.\d+\.network\.?", "", name)
    return f"layer {short!r} ({type(classifier.get_submodule(name)).__name__})" if short else "the network"


def layer_of(program: torch.export.ExportedProgram, error: BaseException) -> str:
    """Return the layer, and its operation, whose translation failed."""
    node: Any = None
    nodes = {node.name: node for node in program.graph.nodes}
    for each in causes(error):
        if found := re.search(r"node %(\w+)", str(each)):
            node = nodes.get(found[1]) or node
    if node is None:
        return f"the network ({first_line(error)})"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name, kind = stack[-1] if stack else ("", "")
    short = re.sub(r"^members\.\d+\.network\.?", "", name)
    kind = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return f"{node.target} of layer {short!r} ({kind})"
