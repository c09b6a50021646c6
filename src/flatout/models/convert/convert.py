"""`flatout convert`: the weights of another framework as a safetensors file with the names of a model.

Shape letters: N images, C channels, H height, W width, K outputs.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.config.settings import Size, collapse_size, shown, sides
from flatout.models.build import build_model, default_shape
from flatout.models.convert.match import candidates, layers_of, trace
from flatout.models.convert.readers import SourceCheckpoint, find_file, read_file
from flatout.models.layers import head_modules
from flatout.models.pretrained import fit
from flatout.models.weights import save_tensors
from flatout.utils.errors import InputError, first_line

# Maximum difference of logits, relative to the largest absolute value.
TOLERANCE = 1e-4


class Shape(NamedTuple):
    """The outputs and images of a model; None for values to be taken from the file."""

    classes: int | None = None
    size: Size | None = None
    channels: int | None = None


def convert(
    file: Path, model_name: str, out: Path, *, shape: Shape, check: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Write the weights of a file as those of a model; return what `--json` prints.

    Nothing is written if they do not fit, or if logits differ from those of `check` by more than TOLERANCE.
    """
    if out.exists():
        raise InputError(f"--out {out}: exists already; choose another name, or remove it")
    if out.suffix != ".safetensors":
        raise InputError(f"--out {out}: must end in .safetensors")
    path = find_file(file)
    source = read_file(path)
    if source.image:
        size, count = collapse_size(source.image[:2]), source.image[2]
        shape = shape._replace(size=shape.size or size, channels=shape.channels or count)
    model, recipe = _build_for(source, model_name, shape)
    try:
        fitted, fresh = fit(model, source, path, recipe.image_sides, report)
    except InputError as error:
        if shape.size:
            raise
        hint = f"the model is built for {shown(recipe.image_size)} pixels, unless --size N or HxW says otherwise"
        raise InputError(f"{error}; {hint}", error.details) from None
    if check and fresh:
        raise InputError(f"--check {check}: the file has no head of the model, so it has no logits to compare")
    difference, absolute = _difference(model, recipe.channels, check) if check else (None, None)
    state = {name: t for name, t in model.state_dict().items() if name.rpartition(".")[0] not in fresh}
    about = {"model": model_name, "image_size": json.dumps(recipe.image_size), "channels": str(recipe.channels)}
    save_tensors(out, state, {**about, "converted_from": source.framework})
    *_, head = head_modules(model).values()
    return {
        "file": str(path),
        "out": str(out),
        "model": model_name,
        "image_size": recipe.image_size,
        "channels": recipe.channels,
        "classes": None if fresh else len(next(head.parameters())),
        "tensors": len(state),
        "matched": fitted.how,
        "layers": fitted.pairs,
        "difference": difference,
        "absolute_difference": absolute,
    }


def format_conversion(result: Mapping[str, Any], *, verbose: bool) -> list[str]:
    """Format the result of `convert` for the terminal; `verbose` adds the pairs of layers whose names differ."""
    pairs = [f"{own} = {theirs}" for own, theirs in result["layers"].items() if theirs not in (own, "")]
    lines = [f"layers, of the model and of the file: {', '.join(pairs)}"] if pairs and verbose else []
    head = f"{result['classes']} outputs" if result["classes"] else "without a head"
    built = f"{result['model']} for {shown(result['image_size'])} pixels, {result['channels']} channels, {head}"
    hint = " (--verbose lists the layers)" if pairs and not verbose else ""
    lines.append(f"{result['out']}: {result['tensors']} tensors, all matched{hint}, of {built}")
    if result["difference"] is None:
        return [*lines, "not compared with the source framework: --check arrays.npz does that"]
    return [*lines, f"the largest difference of logits is {result['difference']:.1e} of the largest logit"]


def _build_for(source: SourceCheckpoint, name: str, known: Shape) -> tuple[nn.Module, Recipe]:
    """Build a model for a file; unknown channels and outputs are those of its first and last layer."""
    usual_classes, usual_size, usual_channels = default_shape(name)
    classes, size, channels = known.classes or usual_classes, known.size or usual_size, known.channels or usual_channels
    try:
        model, recipe = _build(name, classes, size, channels)
    except InputError as error:
        if known.size and known.channels and known.classes:
            raise
        raise InputError(f"{error}; --size N or HxW, --channels C and --classes K say what it is for") from None
    usual = classes, channels
    heads, traced = head_modules(model), trace(model, channels, *sides(size))
    weights = {layer.name: layer.tensors["weight"] for layer in layers_of(source) if "weight" in layer.tensors}
    *_, (_, _, pairs) = candidates(source, model, traced, heads)
    matched = {own: weights[pairs[own]] for own in traced.layers if pairs.get(own) in weights}
    first = next((own for own, kind in traced.layers.items() if kind in ("conv", "linear") and own in pairs), "")
    if not known.channels and traced.layers.get(first) == "conv" and first in matched:
        channels = matched[first].shape[1]
    if not known.classes and (last := next(iter(heads))) in matched:
        classes = len(matched[last])
    return (model, recipe) if (classes, channels) == usual else _build(name, classes, size, channels)


def _build(name: str, outputs: int, size: Size, channels: int) -> tuple[nn.Module, Recipe]:
    loss: Any = "binary-cross-entropy" if outputs == 1 else "cross-entropy"
    recipe = Recipe(model=name, image_size=size, channels=channels, epochs=1, batch_size=1, loss=loss)
    return build_model(recipe, max(2, outputs), allow_code=True), recipe


def _difference(model: nn.Module, channels: int, check: Path) -> tuple[float, float]:
    """Compute the largest difference of logits, over the largest of them and absolute; refuse a large one."""
    try:
        with np.load(check, allow_pickle=False) as arrays:
            images = torch.from_numpy(arrays["images"].astype(np.float32))
            expected = torch.from_numpy(arrays["logits"].astype(np.float64))
        if images.shape[1] != channels:
            images = images.permute(0, 3, 1, 2)
        with torch.no_grad():
            logits = torch.cat([model.eval()(part) for part in images.split(16)]).double()
        if logits.shape != expected.shape or not len(logits):
            raise ValueError(f"the model gives {list(logits.shape)}, the file has {list(expected.shape)}")
    except Exception as error:  # a damaged file, or images that the model does not take, can raise anything
        need = "an .npz file with images [N, C, H, W] or [N, H, W, C], as the model takes them, and its logits [N, K]"
        raise InputError(f"--check {check}: must be {need} ({first_line(error)})") from None
    absolute = float((logits - expected).abs().max())
    difference = absolute / max(float(expected.abs().max()), 1e-30)
    if not difference <= TOLERANCE:
        agree = float((logits.argmax(1) == expected.argmax(1)).double().mean())
        raise InputError(
            f"--check {check}: the logits differ by {difference:.1e} of the largest logit (limit "
            f"{TOLERANCE:g}; {agree:.0%} of the classes agree), so nothing was written; layers may be matched "
            "wrongly, activations or padding differ, logits be probabilities, or the epsilon of batch "
            "normalisation be unusual, which only .keras and .h5 files of whole models have"
        )
    return difference, absolute
