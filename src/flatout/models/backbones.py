"""Networks with published weights to start training on photos from, and a choice among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from flatout.host import physical_cores

# Top-1 accuracy at 224 pixels in timm's table of results on ImageNet.
_RESULTS = (
    "https://github.com/huggingface/pytorch-image-models/blob/7479d451a6dfd8af27f941b8e82a7402461fae80/"
    "results/results-imagenet.csv"
)
# What the choice assumes: passes over the images, seconds for them, and multiply-adds per second in training. The speed
# on a core is what small convolutional networks reach with torch; that of an accelerator is a modest GPU's.
_PASSES = 5
_SECONDS = 600.0
_SPEED_OF_A_CORE, _SPEED_OF_AN_ACCELERATOR = 4e9, 5e12


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A network of timm's with published ImageNet weights.

    Attributes:
        model: the recipe's `model`.
        parameters: those of the network with its 1000 classes.
        operations: multiply-adds of the forward pass of one image of `image_size`.
        image_size: pixels on a side; convolutional networks take others too.
        top1: ImageNet accuracy at `image_size`, in percent.
        source: where `top1` is published.
        mean, std: of the RGB channels, in 0..1: the normalisation that the weights expect.
    """

    model: str
    parameters: int
    operations: int
    top1: float
    image_size: int = 224
    source: str = _RESULTS
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


# From small to large; each is more accurate than those before it. All are convolutional, so that smaller images need no
# other weights, and licensed under Apache 2.0 (many weights of similar accuracy are for research only).
BACKBONES = (
    Backbone(
        model="timm:mobilenetv4_conv_small.e2400_r224_in1k",
        parameters=3_774_024,
        operations=186_005_568,
        top1=73.730,
    ),
    Backbone(
        model="timm:mobilenetv4_conv_medium.e500_r224_in1k",
        parameters=9_715_512,
        operations=827_649_984,
        top1=79.092,
    ),
    Backbone(
        model="timm:convnext_nano.in12k_ft_in1k",
        parameters=15_593_560,
        operations=2_445_528_320,
        top1=82.306,
    ),
    Backbone(
        model="timm:convnext_tiny.in12k_ft_in1k",
        parameters=28_589_128,
        operations=4_455_531_264,
        top1=84.192,
    ),
    Backbone(
        model="timm:convnext_small.in12k_ft_in1k",
        parameters=50_223_688,
        operations=8_683_712_256,
        top1=85.164,
    ),
    Backbone(
        model="timm:convnext_base.fb_in22k_ft_in1k",
        parameters=88_591_464,
        operations=15_354_729_472,
        top1=85.816,
    ),
)


_Choice = TypeVar("_Choice", bound=Backbone)


def choose(*, accelerated: bool, images: int, seconds: float | None) -> Backbone:
    """Return the most accurate backbone that can be trained in the time, or the smallest if none can.

    The estimate: 5 passes over the images at the published size, a training step at 3 times the forward pass, and
    4e9 multiply-adds per second on each core or 5e12 on an accelerator. Without a time budget, 10 minutes are assumed.
    A CPU thus gets the smallest, except for a few hundred images or a long budget. More images mean a smaller one,
    since each takes time; few images do not call for a small one, since the weights are trained already.

    Args:
        seconds: the time budget; None for none.
    """
    return most_accurate(BACKBONES, accelerated=accelerated, images=images, seconds=seconds)


def most_accurate(backbones: Sequence[_Choice], *, accelerated: bool, images: int, seconds: float | None) -> _Choice:
    """Return the choice of `choose` among others, at least one, from small to large."""
    speed = _SPEED_OF_AN_ACCELERATOR if accelerated else _SPEED_OF_A_CORE * physical_cores()
    most = (_SECONDS if seconds is None else seconds) * speed / (3 * _PASSES * max(images, 1))
    return next((backbone for backbone in reversed(backbones) if backbone.operations <= most), backbones[0])
