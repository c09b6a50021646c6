"""`flatout convert`: the weights of another framework as a safetensors file with the names of a model.

Shape letters: N images, C channels, H height, W width, K outputs.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flatout.convert.find import find_file
from flatout.convert.foreign import Foreign, layers_of
from flatout.convert.match import candidates
from flatout.convert.trace import trace
from flatout.errors import InputError
from flatout.models.layers import head_modules
from flatout.models.load import build_model, default_shape
from flatout.models.pretrained import fit, read_file
from flatout.models.weights import save_tensors
from flatout.recipe import Recipe
from flatout.settings import Size, one_or_both, shown, sides

if TYPE_CHECKING:
    from torch import nn

# Of logits, the largest difference over the largest absolute value.
TOLERANCE = 1e-4
_MAX_SIDE = 1024
_MAX_MAPPING_BYTES = 16 << 20


class Shape(NamedTuple):
    """What a model is built for; None for what the file decides."""

    classes: int | None = None
    size: Size | None = None
    channels: int | None = None


def convert(
    file: Path,
    model_name: str,
    out: Path,
    *,
    shape: Shape,
    mapping: Path | None,
    check: Path | None,
    epsilon: float | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Write the weights of a file as those of a model, and return what was done, in plain values.

    Args:
        file: of any format that `flatout.convert` reads; a folder or prefix of a checkpoint.
        model_name: as in a recipe.
        out: a new `.safetensors` file.
        mapping: a TOML or JSON file, `"layer of the model" = "layer of the file"`.
        check: an `.npz` file with `images`, [N, C, H, W] or [N, H, W, C] as the model receives them, and `logits`
            [N, K] of the source framework.
        epsilon: of the file's batch normalisation, if its framework's default is not right.

    Raises:
        InputError: the file cannot be read or does not fit, or logits differ by more than TOLERANCE. Nothing is
            written.
    """
    if out.exists():
        raise InputError(f"--out {out}: exists already; choose another name, or remove it")
    if out.suffix != ".safetensors":
        raise InputError(f"--out {out}: must end in .safetensors")
    answers = _Answers.read(check) if check else None
    pairs = _read_mapping(mapping) if mapping else None
    path = find_file(file)
    foreign = read_file(path)
    known = _known(foreign, answers, shape)
    model, recipe = _model(foreign, model_name, known, pairs)
    fitted = fit(model, foreign, path, recipe.image_sides, report, mapping=pairs, epsilon=epsilon)
    difference, absolute = answers.compare(model, fitted.head_fits) if answers else (None, None)
    state = model.state_dict()
    if not fitted.head_fits:
        heads = tuple(f"{head}." for head in head_modules(model))
        state = {name: t for name, t in state.items() if name in fitted.names or not name.startswith(heads)}
    about = {"model": model_name, "image_size": json.dumps(recipe.image_size), "channels": str(recipe.channels)}
    save_tensors(out, state, {**about, "converted_from": foreign.framework})
    return {
        "file": str(path),
        "out": str(out),
        "model": model_name,
        "image_size": recipe.image_size,
        "channels": recipe.channels,
        "classes": _outputs(model) if fitted.head_fits else None,
        "tensors": len(state),
        "matched": fitted.how,
        "layers": fitted.pairs,
        "difference": difference,
        "absolute_difference": absolute,
    }


def lines_of(result: Mapping[str, Any], *, verbose: bool) -> list[str]:
    """Return what is printed of the result of `convert`; `verbose` adds the pairs of layers whose names differ."""
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


def _known(foreign: Foreign, answers: "_Answers | None", shape: Shape) -> Shape:
    """Return what the user, the arrays to check and the file say of the model."""
    size, channels = shape.size, shape.channels
    if foreign.image:
        height, width, count = foreign.image
        size, channels = size or one_or_both((height, width)), channels or count
    if answers and not (size and channels):
        guessed = answers.shape(channels)
        size, channels = size or guessed[0], channels or guessed[1]
    return Shape(shape.classes or (answers and answers.logits.shape[1]) or None, size, channels)


def _model(foreign: Foreign, name: str, known: Shape, mapping: Mapping[str, str] | None) -> "tuple[nn.Module, Recipe]":
    """Build a model; what is not known is what the file's first and last layers have in a model of the usual shape."""
    usual = default_shape(name)
    classes, size, channels = known.classes or usual[0], known.size or usual[1], known.channels or usual[2]
    tried = classes, size, channels
    try:
        model, recipe = _build(name, *tried)
    except InputError as error:
        if known.size and known.channels and known.classes:
            raise
        raise InputError(f"{error}; --size N or HxW, --channels C and --classes K say what it is for") from None
    found = trace(model, channels, *sides(size))
    layers = {layer.name: layer for layer in layers_of(foreign)}
    *_, (_, _, pairs) = candidates(foreign, model, found, head_modules(model), mapping=mapping)
    own = [(own, kind) for own, kind in found.layers.items() if own in pairs and kind in ("conv", "linear")]
    weights = {
        name: (model.get_submodule(name).weight.shape, theirs.shape)
        for name, _ in own
        if (theirs := layers[pairs[name]].tensors.get("weight") if pairs[name] in layers else None) is not None
    }
    if not known.channels and own and own[0][1] == "conv" and own[0][0] in weights:
        channels = weights[own[0][0]][1][1]
    if not known.classes and (last := next(iter(head_modules(model)))) in weights:
        classes = weights[last][1][0]
    if not known.size and (first := next(iter(found.flattened), None)) in weights:
        size = _size(model, size, found.flattened[first][0], weights[first][1][1])
    if (classes, size, channels) == tried:
        return model, recipe
    return _build(name, classes, size, channels)


def _build(name: str, outputs: int, size: Size, channels: int) -> "tuple[nn.Module, Recipe]":
    # One output is that of two classes.
    loss: Any = "binary-cross-entropy" if outputs == 1 else "cross-entropy"
    recipe = Recipe(model=name, image_size=size, channels=channels, epochs=1, batch_size=1, loss=loss)
    return build_model(recipe, 2 if outputs == 1 else outputs, allow_code=True), recipe


def _size(model: "nn.Module", size: Size, maps: int, inputs: int) -> Size:
    """Return the size of the square images whose flattened feature maps have so many values: the usual, or the least.

    `maps` is the number of feature maps. Sizes of equal feature maps have equal weights.
    """
    from flatout.models.nets import side_of_features

    reduce = side_of_features(model)
    if reduce is None or inputs % maps:
        return size
    height, width = sides(size)
    if reduce(height) * reduce(width) * maps == inputs:
        return size
    return next((side for side in range(1, _MAX_SIDE) if maps * max(0, reduce(side)) ** 2 == inputs), size)


def _outputs(model: "nn.Module") -> int:
    *_, head = head_modules(model).values()
    return next(len(parameter) for parameter in head.parameters())


def _read_mapping(path: Path) -> dict[str, str]:
    """Return the pairs of a mapping file; TOML's dotted keys are tables."""
    try:
        if path.stat().st_size > _MAX_MAPPING_BYTES:
            raise ValueError("it is too large")
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"--mapping {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InputError(f"--mapping {path}: is no {kind}: {str(error).splitlines()[0]}") from None
    pairs: dict[str, str] = {}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, str) and prefix:
            pairs[prefix] = value
        else:
            raise InputError(
                f'--mapping {path}: {prefix or "its content"} must be text: "layer of the model" = "layer of the file"'
            )

    collect("", table)
    return pairs


class _Answers(NamedTuple):
    """What the source framework answered to images, [N, C, H, W] or [N, H, W, C]; logits are float64 [N, K]."""

    path: Path
    images: np.ndarray
    logits: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "_Answers":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                images, logits = arrays["images"], arrays["logits"]
        except KeyError as error:
            raise InputError(f"--check {path}: has no array {error}; images and logits are needed") from None
        except OSError as error:
            raise InputError(f"--check {path}: cannot be read: {error.strerror or error}") from None
        except Exception as error:  # numpy and zipfile raise errors of many types on damaged files
            raise InputError(f"--check {path}: is damaged or no .npz file ({type(error).__name__})") from None
        if images.ndim != 4 or logits.ndim != 2 or len(images) != len(logits) or not len(images):
            found = f"images {list(images.shape)} and logits {list(logits.shape)}"
            raise InputError(f"--check {path}: needs images [N, C, H, W] and logits [N, K], not {found}")
        if images.dtype.kind not in "fiu" or logits.dtype.kind not in "fiu" or not np.isfinite(logits).all():
            raise InputError(f"--check {path}: images and logits must be finite numbers")
        return cls(path, images.astype(np.float32), logits.astype(np.float64))

    def shape(self, channels: int | None) -> tuple[Size, int]:
        """Return image size and channels; channels are last where only that is possible."""
        first, *_, last = self.images.shape[1:]
        is_last = last == channels if channels and first != channels else first > 4 >= last
        height, width, count = self.images.shape[1:] if is_last else (*self.images.shape[2:], first)
        return one_or_both((height, width)), count

    def compare(self, model: "nn.Module", head_fits: bool) -> tuple[float, float]:
        """Return the largest difference of logits, over the largest of them and absolute.

        Raises:
            InputError: it is larger than TOLERANCE, or there is nothing to compare.
        """
        import torch

        if not head_fits:
            raise InputError(f"--check {self.path}: the file has no head of the model, so it has no logits to compare")
        channels = next((w.shape[1] for w in model.state_dict().values() if w.ndim == 4), self.images.shape[1])
        images = self.images
        if images.shape[1] != channels and images.shape[3] == channels:
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        try:
            with torch.no_grad():
                found = [model.eval()(torch.from_numpy(images[i : i + 16])) for i in range(0, len(images), 16)]
            logits = torch.cat(found).double().numpy()
        except (RuntimeError, ValueError, AssertionError) as error:
            shape = list(images.shape[1:])
            reason = str(error).strip().partition("\n")[0]
            raise InputError(f"--check {self.path}: the model does not take images {shape}: {reason}") from None
        if logits.shape != self.logits.shape:
            found, need = list(logits.shape), list(self.logits.shape)
            raise InputError(f"--check {self.path}: the logits have the shape {need}, those of the model {found}")
        absolute = float(np.abs(logits - self.logits).max())
        difference = absolute / max(float(np.abs(self.logits).max()), 1e-30)
        if not difference <= TOLERANCE:
            agree = float((logits.argmax(1) == self.logits.argmax(1)).mean())
            raise InputError(
                f"--check {self.path}: the logits differ by {difference:.1e} of the largest logit (limit "
                f"{TOLERANCE:g}; {agree:.0%} of the classes agree), so nothing was written; layers may be matched "
                "wrongly (--mapping), epsilon of batch normalisation (--epsilon), activations or padding differ, or "
                "logits be probabilities"
            )
        return difference, absolute
