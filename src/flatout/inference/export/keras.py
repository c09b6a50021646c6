"""Keras export: a layer-by-layer equivalent of a built-in network, or the Keras model that a run trained.

Shape letters: N images, H height, W width, C channels, K classes.
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from flatout.engine.pixels import FROM_16_BITS, centre
from flatout.inference.export.classifier import bits_of
from flatout.inference.export.formats import Predict, quietly
from flatout.models.build import list_names, net_named
from flatout.models.convert.match import resnet_namer
from flatout.models.keras import KerasModule
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from flatout.inference.run import Run


def write_keras(run: "Run", path: Path) -> Predict:
    """Write a run as a `.keras` file, or its weights alone as `.weights.h5`; see `docs/export.md`.

    Returns a function that runs the file on images of the run's size.

    Raises:
        InputError: the network has no Keras equivalent, or Keras is not installed.
    """
    model, given = _made(run), run.model
    with quietly():
        if path.name.endswith(".weights.h5"):
            model.save_weights(path)
            for variable in model.variables:
                variable.assign(np.zeros(variable.shape))
            model.load_weights(path)
        else:
            model.save(path)
            model = _keras().models.load_model(path, compile=False)

    def predict(images: np.ndarray) -> np.ndarray:
        pixels = centre(images, *run.recipe.eval_sides).astype(np.float32)
        if not isinstance(given, KerasModule):
            return _numpy(model(pixels, training=False))
        scale, bias = (np.asarray(values, np.float32) for values in _normalisation(run))
        found = torch.from_numpy(_numpy(model(pixels * scale + bias, training=False)))
        return run.task.probabilities(given.logits_of(found)).numpy()

    return predict


def _numpy(tensor: Any) -> np.ndarray:
    return np.array(_keras().ops.convert_to_numpy(tensor))


def _keras() -> Any:
    """Import Keras on the backend that the user has chosen, else on torch; files are the same for all backends."""
    if importlib.util.find_spec("keras") is None:
        raise InputError("--format keras needs keras: pip install keras")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    return keras


def _normalisation(run: "Run") -> tuple[list[float], list[float]]:
    """Return scale and offset of pixels for each channel."""
    recipe = run.recipe
    mean, std = (np.broadcast_to(np.array(values), recipe.channels) for values in (recipe.data.mean, recipe.data.std))
    range_of_pixels = FROM_16_BITS if bits_of(run) == 16 else 1.0
    return (range_of_pixels / (255 * std)).tolist(), (-mean / std).tolist()


def _made(run: "Run") -> Any:
    """Return the Keras model of a run, with its weights."""
    if len(run.members) > 1 or run.recipe.tta:
        why = "a cross-validation has several networks" if len(run.members) > 1 else "tta = true averages over views"
        raise InputError(f"{run.path}: {why}, and --format keras writes one; use --format onnx")
    net = run.model
    if isinstance(net, KerasModule):
        return net.to_keras()
    name = run.recipe.model
    is_resnet = name.startswith("keras-resnet")
    if net_named(name) is None or not (is_resnet or isinstance(net, nn.Sequential)):
        twins = [name for name in list_names() if not name.startswith("fast-")]
        raise InputError(f"{run.path}: {name} has no twin in Keras; these have: {', '.join(twins)}; use --format onnx")
    keras = _keras()
    scale, bias = _normalisation(run)
    images = keras.Input((*run.recipe.eval_sides, run.recipe.channels), name="images")
    x = keras.layers.Rescaling(scale, bias, name="normalisation")(images)
    made = _resnet(keras, x, net, run) if is_resnet else _layers(keras, x, net, run)
    for layer in _answers(keras, run):
        made = made._replace(output=layer(made.output))
    model = keras.Model(images, made.output)
    for twin, layer in made.pairs:
        twin.set_weights([tensor.detach().numpy() for tensor in _weights(twin, layer)])
    return model


class _Made(NamedTuple):
    """The output of a Keras equivalent, and its layers with weights, each with its torch layer."""

    output: Any
    pairs: list[tuple[Any, nn.Module]]


def _resnet(keras: Any, x: Any, net: nn.Module, run: "Run") -> _Made:
    """Return Keras's own ResNet: its layers have the names that `flatout convert` knows."""
    network = getattr(keras.applications, run.recipe.model.removeprefix("keras-").replace("resnet", "ResNet"))
    body = network(include_top=False, weights=None, input_tensor=x, pooling="avg")
    name_of = resnet_namer(net)
    pairs = [(twin, net.get_submodule(name_of(twin.name) or "")) for twin in body.layers if twin.weights]
    head = net.get_submodule("fc")
    twin = _twin(keras, "predictions", head, run)
    return _Made(twin(body.output), [*pairs, (twin, head)])


def _layers(keras: Any, x: Any, net: nn.Module, run: "Run") -> _Made:
    """Convert the layers of a sequence in order."""
    pairs: list[tuple[Any, nn.Module]] = []
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Sequential):
            continue
        if isinstance(layer, nn.Flatten):
            # The order of torch's weights.
            x = keras.layers.Permute((3, 1, 2), name=f"{name.replace('.', '_')}_channels_first")(x)
        twin = _twin(keras, name.replace(".", "_"), layer, run)
        x = twin(x)
        pairs += [(twin, layer)] if twin.weights else []
    return _Made(x, pairs)


def _twin(keras: Any, name: str, layer: nn.Module, run: "Run") -> Any:
    """Return the Keras equivalent of a torch layer."""
    layers = keras.layers
    if isinstance(layer, nn.Conv2d):
        assert isinstance(layer.padding, tuple) and layer.stride == (1, 1)
        padding = "same" if layer.padding[0] else "valid"
        return layers.Conv2D(layer.out_channels, layer.kernel_size, padding=padding, name=name)
    if isinstance(layer, nn.BatchNorm2d):
        return layers.BatchNormalization(epsilon=layer.eps, name=name)
    if isinstance(layer, nn.MaxPool2d):
        return layers.MaxPooling2D(layer.kernel_size, name=name)
    if isinstance(layer, nn.Linear):
        has_one_logit = layer.out_features == 1 and run.task.name == "single-label"
        return layers.Dense(2 if has_one_logit else layer.out_features, name=name)
    if isinstance(layer, nn.Dropout):
        return layers.Dropout(layer.p, name=name)
    plain = {nn.ReLU: layers.ReLU, nn.Flatten: layers.Flatten}
    assert type(layer) in plain, f"{name}: no twin for {type(layer).__name__}"
    return plain[type(layer)](name=name)


def _weights(twin: Any, layer: nn.Module) -> list[torch.Tensor]:
    """Return the weights of a torch layer in Keras's layout."""
    if isinstance(layer, nn.Conv2d):
        bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias
        return [layer.weight.permute(2, 3, 1, 0), bias]
    if isinstance(layer, nn.BatchNorm2d):
        assert layer.running_mean is not None and layer.running_var is not None
        # Only the sum of variance and epsilon matters.
        return [layer.weight, layer.bias, layer.running_mean, layer.running_var + (layer.eps - twin.epsilon)]
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.T, layer.bias
    if twin.units > layer.out_features:
        # A single logit is that of class 1, against 0.
        weight, bias = (torch.cat([torch.zeros_like(one), one], dim=-1) for one in (weight, bias))
    return [weight, bias]


def _answers(keras: Any, run: "Run") -> list[Any]:
    """Return the layers from logits to probabilities, or to the number of a regression."""
    layers, task = keras.layers, run.task
    if task.name == "regression":
        return [layers.Rescaling(task.label_std, task.label_mean, name="number")]
    if task.name == "multi-label":
        return [layers.Activation("sigmoid", name="probabilities")]
    return [layers.Rescaling(1 / task.temperature, name="temperature"), layers.Softmax(name="probabilities")]
