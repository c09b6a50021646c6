"""The networks of the fixtures, small ones, as a user's own factories."""

from pathlib import Path
from typing import Any

from torch import nn

FIXTURES = Path(__file__).resolve().parent / "fixtures"
# The networks of the fixtures, by their names, as --model takes them.
FACTORIES = ("small", "keras-resnet", "torch-resnet", "shallow-resnet")
MODELS = {name: f"{Path(__file__).resolve()}:{name.replace('-', '_')}" for name in FACTORIES}
MODELS["fashion-cnn"] = "fashion-cnn"


def small(num_classes: int, channels: int = 3, **_: Any) -> nn.Module:
    """Two convolutions and two linear layers behind a flattened map of 6 x 2 x 2."""
    first = (nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, num_classes))


def keras_resnet(num_classes: int, channels: int = 1, depths: tuple[int, ...] = (2, 1, 1, 1), **_: Any) -> nn.Module:
    """A ResNet with few filters and Keras's strides."""
    net: Any = torch_resnet(num_classes, channels, depths)
    for stage in (net.layer2, net.layer3, net.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return net


def shallow_resnet(num_classes: int, channels: int = 1, **_: Any) -> nn.Module:
    """The same with a block less."""
    return keras_resnet(num_classes, channels, (1, 1, 1, 1))


def torch_resnet(num_classes: int, channels: int = 1, depths: tuple[int, ...] = (2, 1, 1, 1), **_: Any) -> nn.Module:
    """A ResNet with few filters and torch's strides."""
    from timm.models.resnet import Bottleneck, ResNet

    block: Any = Bottleneck
    return ResNet(block, depths, num_classes=num_classes, in_chans=channels, channels=(4, 8, 8, 8))
