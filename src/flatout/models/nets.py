"""Built-in networks: plain sequences `features -> flatten -> classifier`, and `FastCNN`.

Each takes normalised float images `x_NCHW` of `image_size` pixels and returns logits `[N, num_outputs]`, one for
two classes under binary cross-entropy. Biases start at 0 unless stated otherwise.
"""

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flatout.config.settings import Size, shown, sides
from flatout.utils.errors import InputError

_Initialiser = Callable[[torch.Tensor], object]
_glorot_uniform = nn.init.xavier_uniform_
_he_uniform = functools.partial(nn.init.kaiming_uniform_, nonlinearity="relu")


def _map_side(layers: tuple[nn.Module, ...], side: int) -> int:
    """Compute the side of the feature maps from the side of the images."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            assert isinstance(layer.padding, tuple)
            side += 2 * layer.padding[0] + 1 - layer.kernel_size[0]
        elif isinstance(layer, nn.MaxPool2d):
            side //= 2
    return side


def _check_size(name: str, image_size: Size, smallest: int) -> None:
    if min(sides(image_size)) < smallest:
        raise InputError(
            f"image_size = {shown(image_size)}: {name} needs images of at least {smallest}x{smallest} pixels; "
            f"try image_size = {smallest} or another model"
        )


def _blocks(channels: int, *filters: int, kernel: int, padding: int = 0) -> Iterator[nn.Module]:
    """Yield a convolution, a pooling and a ReLU for each number of filters.

    The published order, ReLU before pooling, gives the same values and takes four times as many ReLUs.
    """
    for count in filters:
        yield from (nn.Conv2d(channels, count, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU())
        channels = count


class Net(nn.Sequential):
    """A net whose linear layers have the given widths, with ReLU, and dropout if any, between them."""

    def __init__(self, name: str, image_size: Size, *layers: nn.Module, widths: tuple[int, ...], dropout: float = 0.0):
        features, classifier = nn.Sequential(*layers), []
        _check_size(name, image_size, next(side for side in itertools.count(1) if _map_side(layers, side) >= 1))
        channels = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)][-1]
        inputs = channels * math.prod(_map_side(layers, side) for side in sides(image_size))
        for width in widths:
            classifier += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            inputs = width
        last = classifier[: -2 if dropout else -1]
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=nn.Sequential(*last)))

    def _initialise(self, *, conv: _Initialiser, linear: _Initialiser) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                initialiser = conv if isinstance(layer, nn.Conv2d) else linear
                initialiser(layer.weight)
                nn.init.zeros_(layer.get_parameter("bias"))


class FashionCNN(Net):
    """Two 5x5 convolutions, each pooled, rectified and normalised, and two linear layers; PyTorch's initialisation."""

    def __init__(self, num_outputs: int = 10, image_size: Size = 28, channels: int = 1) -> None:
        first = (nn.Conv2d(channels, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(10))
        second = (nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(20))
        super().__init__("fashion-cnn", image_size, *first, *second, widths=(50, num_outputs))


class CatsDogsCNN(Net):
    """Three blocks of a 3x3 convolution, ReLU and pooling, and three linear layers with dropout between them."""

    def __init__(self, num_outputs: int = 1, image_size: Size = 128, channels: int = 3) -> None:
        blocks = _blocks(channels, 32, 64, 128, kernel=3, padding=1)
        super().__init__("cats-dogs-cnn", image_size, *blocks, widths=(256, 128, num_outputs), dropout=0.2)
        self._initialise(conv=_he_uniform, linear=_glorot_uniform)


class ParallelCNN(Net):
    """Two padded 5x5 convolutions with ReLU and pooling, and one linear layer; PaddlePaddle's initialisation.

    Sources: `_get_default_param_initializer` in PaddlePaddle's `python/paddle/nn/layer/conv.py`;
    https://www.paddlepaddle.org.cn/documentation/docs/zh/3.3/api/paddle/nn/Linear_cn.html (uniform Xavier, bias 0).
    """

    def __init__(self, num_outputs: int = 10, image_size: Size = 28, channels: int = 1) -> None:
        blocks = _blocks(channels, 20, 20, kernel=5, padding=2)
        super().__init__("parallel-cnn", image_size, *blocks, widths=(num_outputs,))
        self._initialise(conv=lambda w: nn.init.normal_(w, std=math.sqrt(2 / w[0].numel())), linear=_glorot_uniform)


class KerasCNN(Net):
    """Three 3x3 convolutions with ReLU, the first two pooled, and two linear layers."""

    def __init__(self, num_outputs: int = 10, image_size: Size = 28, channels: int = 1) -> None:
        layers = (*_blocks(channels, 32, 64, kernel=3), nn.Conv2d(64, 64, kernel_size=3), nn.ReLU())
        super().__init__("keras-cnn", image_size, *layers, widths=(64, num_outputs))
        self._initialise(conv=_he_uniform, linear=_he_uniform)


class CaltechCNN(Net):
    """Two 3x3 convolutions with ReLU and pooling, and three linear layers."""

    def __init__(self, num_outputs: int = 101, image_size: Size = 32, channels: int = 3) -> None:
        blocks = _blocks(channels, 32, 64, kernel=3)
        super().__init__("caltech-cnn", image_size, *blocks, widths=(256, 128, num_outputs))
        self._initialise(conv=nn.init.xavier_normal_, linear=functools.partial(nn.init.normal_, std=0.01))


class VGG16(Net):
    """The thirteen 3x3 convolutions of VGG16 in five pooled blocks, then one linear layer instead of three.

    Configuration D of Simonyan and Zisserman (arXiv 1409.1556), with torchvision's names. Convolutions start He-normal:
    from a Glorot start, so deep a net without batch normalisation rarely trains.
    """

    def __init__(self, num_outputs: int = 4, image_size: Size = 224, channels: int = 3) -> None:
        layers: list[nn.Module] = []
        for convolutions, filters in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(convolutions):
                # Not in place: the output of a frozen convolution may be cached and read again in the next epoch.
                layers += [nn.Conv2d(channels, filters, kernel_size=3, padding=1), nn.ReLU()]
                channels = filters
            layers.append(nn.MaxPool2d(2))
        super().__init__("vgg16", image_size, *layers, widths=(num_outputs,))
        self.classifier = self.get_submodule("classifier.0")
        he_normal = functools.partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
        self._initialise(conv=he_normal, linear=_glorot_uniform)


class FastCNN(nn.Module):
    """A convolutional network that learns fast with little computation, for small images or small data sets.

    Layout, initialisation and scales are those of airbench (K. Jordan, arXiv 2404.00498): patches of whitened pixels,
    up to three blocks of two convolutions that start near the identity, large steps for biases, small logits; but these
    are three times as large, to learn many classes faster. Larger images are first cut into patches of 2, 4, ...
    pixels, so that the blocks see at most 48 on a side of a square.
    """

    def __init__(self, num_outputs: int = 10, image_size: Size = 32, channels: int = 3, *, width: int = 32) -> None:
        super().__init__()
        _check_size(f"fast-cnn-{width}", image_size, 4)
        shorter, longer = sorted(sides(image_size))
        self.stem = _Patches(channels, stride=2 ** max(0, math.ceil(math.log2(math.sqrt(shorter * longer) / 48))))
        inputs, blocks = self.stem.outputs, []
        size = (shorter - self.stem.size) // self.stem.stride + 1
        for outputs in (width, 2 * width, 2 * width):
            if size > 1:
                blocks.append(_FastBlock(inputs, outputs))
                inputs, size = outputs, size // 2
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, num_outputs, bias=False)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """Return logits [N, num_outputs]."""
        return self.classifier(self.features(self.stem(x_NCHW)).amax((2, 3))) / 3


class _Patches(nn.Module):
    """Patches of pixels in the basis of the cosine transform and of colour differences, whitened; and their negatives.

    In this basis the pixels of photographs are nearly uncorrelated, so dividing each by its deviation whitens them.
    """

    def __init__(self, channels: int, *, stride: int) -> None:
        super().__init__()
        self.size, self.stride = max(2, stride), stride
        self.outputs = 2 * channels * self.size**2
        differences = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
        colours = differences if channels == 3 else _cosines(channels)
        waves, colours = (functional.normalize(rows) for rows in (_cosines(self.size), colours))
        basis = torch.einsum("iy,jx,kc->ijkcyx", waves, waves, colours).flatten(0, 2)
        self.register_buffer("basis", basis.contiguous())
        self.norm = _Norm(self.outputs)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        x = functional.conv2d(x_NCHW, self.get_buffer("basis"), stride=self.stride)
        return functional.gelu(self.norm(torch.cat([x, -x], dim=1)))


def _cosines(length: int) -> torch.Tensor:
    positions = torch.arange(length)
    return torch.cos(torch.pi / length * (positions + 0.5) * positions[:, None])


# Pure copies would propagate a digit's background through all poolings, until a channel is nearly constant, and the
# gradient of its rounding errors, after normalisation, thousands of times the others'.
COPIES_NOISE = 0.3


class _FastBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        first, second = (nn.Conv2d(i, outputs, 3, padding=1, bias=False) for i in (inputs, outputs))
        for conv in (first, second):
            copies = conv.weight[: min(conv.in_channels, outputs)]
            with torch.no_grad():
                copies.copy_(nn.init.dirac_(torch.empty_like(copies)) + COPIES_NOISE * copies)
        super().__init__(first, nn.MaxPool2d(2), _Norm(outputs), nn.GELU(), second, _Norm(outputs), nn.GELU())


class _Norm(nn.BatchNorm2d):
    """Batch normalisation without a scale, whose shift learns SHIFT**2 times as fast as other weights under SGD."""

    SHIFT = 8.0

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.4, affine=False)
        self.shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean, var, scale = (self.get_buffer(name) for name in ("running_mean", "running_var", "scale"))
        return functional.batch_norm(input, mean, var, scale, self.SHIFT * self.shift, self.training, momentum=0.4)


def _keras_resnet(num_outputs: int = 1000, image_size: Size = 224, channels: int = 3, *, depth: int) -> nn.Module:
    """Build the paper's ResNet, as in Keras: timm's, but with the stride in the first convolution of a stage.

    Torch's and timm's have it in the 3x3 convolution, so their weights are incompatible: He et al. (arXiv 1512.03385)
    against https://catalog.ngc.nvidia.com/orgs/nvidia/resources/resnet_50_v1_5_for_pytorch.
    """
    import timm

    _check_size(f"keras-resnet{depth}", image_size, 32)
    net = timm.create_model(f"resnet{depth}", num_classes=num_outputs, in_chans=channels)
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = net.get_submodule(f"{stage}.0")
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return net


KerasResNet50, KerasResNet101, KerasResNet152 = (functools.partial(_keras_resnet, depth=n) for n in (50, 101, 152))
FastCNN16, FastCNN32, FastCNN64, FastCNN128 = (functools.partial(FastCNN, width=width) for width in (16, 32, 64, 128))
