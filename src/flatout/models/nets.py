"""The five small nets.

Each is a plain sequence `features -> flatten -> classifier` from normalised float images `x_NCHW` (H = W = `image_size`
pixels) to logits `[N, num_outputs]`. Softmax and sigmoid belong to the loss. A net for two classes under binary
cross-entropy has one output. Biases start at 0 unless stated otherwise.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch import nn

from flatout.errors import InputError


def feature_size(net: str, features: nn.Sequential, image_size: int) -> int:
    """Return the height (= width) in pixels of the output of `features` for images of `image_size` pixels.

    Raises:
        InputError: the images are too small; the smallest size is named.
    """
    smallest = next(size for size in itertools.count(1) if _reduced(features, size) >= 1)
    if image_size < smallest:
        raise InputError(
            f"image_size = {image_size}: {net} needs images of at least {smallest}x{smallest} pixels; "
            f"try image_size = {smallest} or another model"
        )
    return _reduced(features, image_size)


def _reduced(features: nn.Sequential, size: int) -> int:
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            assert isinstance(layer.padding, tuple)
            size = (size + 2 * layer.padding[0] - layer.kernel_size[0]) // layer.stride[0] + 1
        elif isinstance(layer, nn.MaxPool2d):
            assert layer.kernel_size == layer.stride == 2
            size //= 2
        if size < 1:
            return 0
    return size


def _blocks(channels: int, *filters: int, kernel: int, padding: int = 0) -> Iterator[nn.Module]:
    """Yield a convolution, a ReLU and a pooling for each number of filters."""
    for count in filters:
        yield from (nn.Conv2d(channels, count, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2))
        channels = count


def _layers(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers from width to width, with a ReLU, and dropout if any, between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1])


class _Net(nn.Sequential):
    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))

    def _initialise(self, *, conv: Callable[[nn.Conv2d], object], linear: Callable[[nn.Linear], object]) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                conv(layer)
            elif isinstance(layer, nn.Linear):
                linear(layer)
            else:
                continue
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


def _glorot_uniform(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.xavier_uniform_(layer.weight)


def _he_uniform(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")


class FashionCNN(_Net):
    """Two 5x5 convolutions, each pooled, rectified and normalised, and two linear layers; 22 thousand parameters.

    Initialised as PyTorch does by default, biases included.
    """

    def __init__(self, num_outputs: int = 10, image_size: int = 28, channels: int = 1) -> None:
        features = nn.Sequential(
            *(nn.Conv2d(channels, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(10)),
            *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(20)),
        )
        size = feature_size("fashion-cnn", features, image_size)
        super().__init__(features, _layers(20 * size * size, 50, num_outputs))


class CatsDogsCNN(_Net):
    """Three blocks of a 3x3 convolution, ReLU and pooling, and three linear layers with dropout between them.

    Convolutions start He-uniform, linear layers Glorot-uniform (the default of Keras).
    """

    def __init__(self, num_outputs: int = 1, image_size: int = 128, channels: int = 3) -> None:
        features = nn.Sequential(*_blocks(channels, 32, 64, 128, kernel=3, padding=1))
        size = feature_size("cats-dogs-cnn", features, image_size)
        super().__init__(features, _layers(128 * size * size, 256, 128, num_outputs, dropout=0.2))
        self._initialise(conv=_he_uniform, linear=_glorot_uniform)


class ParallelCNN(_Net):
    """Two padded 5x5 convolutions with ReLU and pooling, and one linear layer.

    Initialised as PaddlePaddle does by default: a convolution's weights normal with mean 0 and standard deviation
    sqrt(2 / (kernel height * kernel width * input channels)), a linear layer's Xavier-uniform.

    Sources: `_get_default_param_initializer` in PaddlePaddle's `python/paddle/nn/layer/conv.py`;
    https://www.paddlepaddle.org.cn/documentation/docs/zh/3.3/api/paddle/nn/Linear_cn.html (Xavier, bias 0);
    https://www.paddlepaddle.org.cn/documentation/docs/en/2.4/api/paddle/fluid/initializer/XavierInitializer_en.html
    (uniform by default).
    """

    def __init__(self, num_outputs: int = 10, image_size: int = 28, channels: int = 1) -> None:
        features = nn.Sequential(*_blocks(channels, 20, 20, kernel=5, padding=2))
        size = feature_size("parallel-cnn", features, image_size)
        super().__init__(features, _layers(20 * size * size, num_outputs))
        self._initialise(
            conv=lambda layer: nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.weight[0].numel())),
            linear=_glorot_uniform,
        )


class KerasCNN(_Net):
    """Three 3x3 convolutions with ReLU, the first two pooled, and two linear layers; He-uniform throughout.

    After five epochs at batch 512 on Fashion-MNIST, He-uniform weights reach 0.88 and Glorot-uniform ones, the default
    of Keras, 0.87.
    """

    def __init__(self, num_outputs: int = 10, image_size: int = 28, channels: int = 1) -> None:
        features = nn.Sequential(*_blocks(channels, 32, 64, kernel=3), nn.Conv2d(64, 64, kernel_size=3), nn.ReLU())
        size = feature_size("keras-cnn", features, image_size)
        super().__init__(features, _layers(64 * size * size, 64, num_outputs))
        self._initialise(conv=_he_uniform, linear=_he_uniform)


class CaltechCNN(_Net):
    """Two 3x3 convolutions with ReLU and pooling, and three linear layers.

    Convolutions start Xavier-normal; weights of linear layers are normal with mean 0 and standard deviation 0.01.
    """

    def __init__(self, num_outputs: int = 101, image_size: int = 32, channels: int = 3) -> None:
        features = nn.Sequential(*_blocks(channels, 32, 64, kernel=3))
        size = feature_size("caltech-cnn", features, image_size)
        super().__init__(features, _layers(64 * size * size, 256, 128, num_outputs))
        self._initialise(
            conv=lambda layer: nn.init.xavier_normal_(layer.weight),
            linear=lambda layer: nn.init.normal_(layer.weight, std=0.01),
        )
