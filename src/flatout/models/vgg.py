"""VGG16 without its top: the convolutions of the published network, flattened into one linear layer."""

from collections import OrderedDict

from torch import nn

from flatout.models.nets import feature_size

# torchvision's ImageNet weights; the eight hexadecimal digits are the start of the file's SHA-256.
IMAGENET_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"

_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # (convolutions, filters) of each block


class VGG16(nn.Sequential):
    """The thirteen 3x3 convolutions of VGG16 in five pooled blocks, then one linear layer to logits `[N, num_outputs]`.

    Configuration D of Simonyan and Zisserman (https://arxiv.org/abs/1409.1556). Convolutions have torchvision's names,
    so that published weights load; those expect RGB images with ImageNet's normalisation. Otherwise convolutions start
    He-normal (fan-out), since so deep a net rarely trains from a Glorot start without batch normalisation; the linear
    layer starts Glorot-uniform, all biases at 0.
    """

    def __init__(self, num_outputs: int = 4, image_size: int = 224, channels: int = 3) -> None:
        layers: list[nn.Module] = []
        in_channels = channels
        for convolutions, filters in _BLOCKS:
            for _ in range(convolutions):
                # Not in place: the output of a frozen convolution may be cached and read again in the next epoch.
                layers += [nn.Conv2d(in_channels, filters, kernel_size=3, padding=1), nn.ReLU()]
                in_channels = filters
            layers.append(nn.MaxPool2d(2))
        features = nn.Sequential(*layers)
        size = feature_size("vgg16", features, image_size)
        classifier = nn.Linear(in_channels * size * size, num_outputs)
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
        for layer in features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        nn.init.xavier_uniform_(classifier.weight)
        nn.init.zeros_(classifier.bias)
