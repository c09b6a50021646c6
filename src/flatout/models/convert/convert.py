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
    file: Path,
    model_name: str,
    out: Path,
    *,
    shape: Shape,
    check: Path | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Write the weights of a file as those of a model; return what `--json` prints.

    Args:
        file: in any format that `readers` knows; a folder or prefix of a checkpoint.
        model_name: as in a recipe.
        out: a new `.safetensors` file.
        check: an `.npz` file with `images`, [N, C, H, W] or [N, H, W, C] as the model receives them, and `logits`
            [N, K] of the source framework.

    Raises:
        InputError: the file cannot be read or does not fit, or logits differ by more than TOLERANCE. Nothing is
            written.
    """
    if out.exists():
        raise InputError(f"--out {out}: exists already; choose another name, or remove it")
    if out.suffix != ".safetensors":
        raise InputError(f"--out {out}: must end in .safetensors")
    expected = _ExpectedLogits.read(check) if check else None
    path = find_file(file)
    source = read_file(path)
    known = _known_shape(source, expected, shape)
    model, recipe = _build_for(source, model_name, known)
    try:
        fitted = fit(model, source, path, recipe.image_sides, report)
    except InputError as error:
        if known.size:
            raise
        hint = f"the model is built for {shown(recipe.image_size)} pixels, unless --size N or HxW says otherwise"
        raise InputError(f"{error}; {hint}", error.details) from None
    difference, absolute = expected.compare(model, recipe.channels, fitted.head_fits) if expected else (None, None)
    state = model.state_dict()
    if not fitted.head_fits:
        heads = tuple(f"{head}." for head in head_modules(model))
        state = {name: t for name, t in state.items() if name in fitted.names or not name.startswith(heads)}
    about = {"model": model_name, "image_size": json.dumps(recipe.image_size), "channels": str(recipe.channels)}
    save_tensors(out, state, {**about, "converted_from": source.framework})
    *_, head = head_modules(model).values()
    return {
        "file": str(path),
        "out": str(out),
        "model": model_name,
        "image_size": recipe.image_size,
        "channels": recipe.channels,
        "classes": len(next(head.parameters())) if fitted.head_fits else None,
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
        note = "not compared with the source framework: --check arrays.npz does that"
    else:
        note = f"the largest difference of logits is {result['difference']:.1e} of the largest logit"
    return [*lines, note]


# ---- the model -------------------------------------------------------------------------------------------------------


def _known_shape(source: SourceCheckpoint, expected: "_ExpectedLogits | None", shape: Shape) -> Shape:
    """Complete the user's shape from the file's description and the arrays to check."""
    classes, size, channels = shape
    if source.image:
        height, width, count = source.image
        size, channels = size or collapse_size((height, width)), channels or count
    if expected:
        seen = expected.shape(channels)
        classes, size, channels = classes or seen.classes, size or seen.size, channels or seen.channels
    return Shape(classes, size, channels)


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
    is_binary = outputs == 1
    loss: Any = "binary-cross-entropy" if is_binary else "cross-entropy"
    recipe = Recipe(model=name, image_size=size, channels=channels, epochs=1, batch_size=1, loss=loss)
    return build_model(recipe, 2 if is_binary else outputs, allow_code=True), recipe


# ---- --check ---------------------------------------------------------------------------------------------------------


class _ExpectedLogits(NamedTuple):
    """The source framework's logits, float64 [N, K], of images [N, C, H, W] or [N, H, W, C]."""

    where: str
    images: np.ndarray
    logits: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "_ExpectedLogits":
        where = f"--check {path}"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                images, logits = arrays["images"].astype(np.float32), arrays["logits"].astype(np.float64)
        except Exception as error:  # numpy and zipfile raise errors of many types on damaged files
            reason = first_line(error) or type(error).__name__
            raise InputError(f"{where}: must be an .npz file with numbers images and logits ({reason})") from None
        if images.ndim != 4 or logits.ndim != 2 or len(images) != len(logits) or not len(images):
            found = f"images {list(images.shape)} and logits {list(logits.shape)}"
            raise InputError(f"{where}: needs images [N, C, H, W] and logits [N, K], not {found}")
        if not np.isfinite(logits).all():
            raise InputError(f"{where}: the logits must be finite")
        return cls(where, images, logits)

    def shape(self, channels: int | None) -> Shape:
        """Infer the shape of the model; channels are last only if there is no other possibility."""
        first, *_, last = self.images.shape[1:]
        is_last = last == channels if channels and first != channels else first > 4 >= last
        height, width, count = self.images.shape[1:] if is_last else (*self.images.shape[2:], first)
        return Shape(self.logits.shape[1], collapse_size((height, width)), count)

    def compare(self, model: nn.Module, channels: int, head_fits: bool) -> tuple[float, float]:
        """Compute the largest difference of logits, over the largest of them and absolute; refuse a large one."""
        if not head_fits:
            raise InputError(f"{self.where}: the file has no head of the model, so it has no logits to compare")
        images = torch.from_numpy(self.images)
        if images.shape[1] != channels and images.shape[3] == channels:
            images = images.permute(0, 3, 1, 2).contiguous()
        try:
            with torch.no_grad():
                logits = torch.cat([model.eval()(part) for part in images.split(16)]).double().numpy()
        except (RuntimeError, ValueError, AssertionError) as error:
            shape = list(images.shape[1:])
            raise InputError(f"{self.where}: the model does not take images {shape}: {first_line(error)}") from None
        if logits.shape != self.logits.shape:
            own, theirs = list(logits.shape), list(self.logits.shape)
            raise InputError(f"{self.where}: the logits have the shape {theirs}, those of the model {own}")
        absolute = float(np.abs(logits - self.logits).max())
        difference = absolute / max(float(np.abs(self.logits).max()), 1e-30)
        if not difference <= TOLERANCE:
            agree = float((logits.argmax(1) == self.logits.argmax(1)).mean())
            raise InputError(
                f"{self.where}: the logits differ by {difference:.1e} of the largest logit (limit "
                f"{TOLERANCE:g}; {agree:.0%} of the classes agree), so nothing was written; layers may be matched "
                "wrongly, activations or padding differ, logits be probabilities, or the epsilon of batch "
                "normalisation be unusual, which only .keras and .h5 files of whole models have"
            )
        return difference, absolute
