"""The names that others give to the layers of networks that timm has, too: ResNets and EfficientNets."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn

# conv2_block1_1_conv, conv2_block1_0_bn: Keras
_KERAS = re.compile(r"conv(?P<stage>[2-5])_block(?P<block>\d+)_(?P<part>[0-3])_(?P<kind>conv|bn)")
# res2a_branch2a, bn2a_branch1: Keras until 2.2, Caffe
_OLD_KERAS = re.compile(r"(?P<kind>res|bn)(?P<stage>[2-5])(?P<block>[a-z])_branch(?P<part>1|2[abc])")
# blocks.3.conv0.bn, blocks.3.short.conv: PaddleClas
_PADDLE = re.compile(r"blocks\.(?P<block>\d+)\.(?P<part>conv[0-2]|short)\.(?P<kind>conv|bn)")
_STEM = {
    **dict.fromkeys(("conv1_conv", "conv1", "stem.0.conv", "stem.conv"), "conv1"),
    **dict.fromkeys(("conv1_bn", "bn_conv1", "bn1", "stem.0.bn", "stem.bn"), "bn1"),
    **dict.fromkeys(("predictions", "probs", "fc1000", "fc"), "fc"),
}
# _blocks.3._bn0: EfficientNet-PyTorch and EfficientNet-Lite, which is made from it. Blocks are counted over all stages.
_EFFICIENTNET = re.compile(r"_blocks\.(?P<block>\d+)\.(?P<part>_\w+)")
_AROUND_BLOCKS = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_PLAIN_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}

_Value = TypeVar("_Value")


def is_resnet(model: nn.Module) -> bool:
    """Return whether a model has the layers of timm's ResNet, with a plain stem."""
    names = {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    return names <= dict(model.named_children()).keys() and isinstance(model.get_submodule("conv1"), nn.Conv2d)


def is_keras_resnet(names: Collection[str]) -> bool:
    """Return whether layers are named as those of Keras's ResNet50, ResNet101 or ResNet152."""
    return any(_KERAS.fullmatch(_last(name)) or _OLD_KERAS.fullmatch(_last(name)) for name in names)


def has_other_strides(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether a model halves images in other layers than the network of Keras's that the names are of."""
    if not is_resnet(model) or not is_keras_resnet(names):
        return False
    first = model.get_submodule("layer2.0.conv1")
    return isinstance(first, nn.Conv2d) and first.stride == (1, 1)


def in_kerass_order(names: Iterable[str]) -> list[str]:
    """Return layers of a ResNet in the order in which Keras makes them: the shortcut before the last convolution."""
    ordered: list[str] = []
    for name in names:
        block, _, part = name.partition(".downsample.")
        last = f"{block}.{'bn' if part == '1' else 'conv'}3"
        ordered.insert(ordered.index(last) if part and last in ordered else len(ordered), name)
    return ordered


def resnet_namer(model: nn.Module) -> Callable[[str], str | None]:
    """Return a function from the name of a layer to that of timm's ResNet, or None."""
    depths = [len(list(model.get_submodule(f"layer{stage}").children())) for stage in range(1, 5)]
    places = [f"layer{stage}.{block}" for stage, depth in enumerate(depths, 1) for block in range(depth)]

    def name_of(name: str) -> str | None:
        last = _last(name)
        if match := _KERAS.fullmatch(last):
            block = f"layer{int(match['stage']) - 1}.{int(match['block']) - 1}"
            return _part(block, int(match["part"]), match["kind"] == "bn")
        if match := _OLD_KERAS.fullmatch(last):
            block = f"layer{int(match['stage']) - 1}.{ord(match['block']) - ord('a')}"
            part = 0 if match["part"] == "1" else ord(match["part"][1]) - ord("a") + 1
            return _part(block, part, match["kind"] == "bn")
        if (match := _PADDLE.search(name)) and int(match["block"]) < len(places):
            part = 0 if match["part"] == "short" else int(match["part"][-1]) + 1
            return _part(places[int(match["block"])], part, match["kind"] == "bn")
        return next((own for theirs, own in _STEM.items() if name == theirs or name.endswith(f".{theirs}")), None)

    return name_of


def is_efficientnet(model: nn.Module) -> bool:
    """Return whether a model has the layers of timm's EfficientNet."""
    names = {"conv_stem", "bn1", "blocks", "conv_head", "bn2", "classifier"}
    return names <= dict(model.named_children()).keys()


def efficientnet_namer(model: nn.Module) -> Callable[[str], str | None]:
    """Return a function from the name of a layer of EfficientNet-PyTorch to that of timm's EfficientNet, or None."""
    stages = model.get_submodule("blocks").named_children()
    blocks = [(f"blocks.{stage}.{name}", block) for stage, inner in stages for name, block in inner.named_children()]

    def name_of(name: str) -> str | None:
        match = _EFFICIENTNET.fullmatch(name)
        if match is None:
            return _AROUND_BLOCKS.get(name)
        if int(match["block"]) >= len(blocks):
            return None
        place, block = blocks[int(match["block"])]
        part = (_EXPANDING_BLOCK if hasattr(block, "conv_pwl") else _PLAIN_BLOCK).get(match["part"])
        return part and f"{place}.{part}"

    return name_of


def in_timms_names(model: nn.Module, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return tensors with the names that they have in a model of timm's; names of no known family are kept."""
    namer = efficientnet_namer(model) if is_efficientnet(model) else lambda name: None
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, role = name.rpartition(".")
        own = namer(layer)
        renamed[f"{own}.{role}" if own else name] = tensor
    return renamed


def _part(block: str, part: int, is_norm: bool) -> str:
    if part == 0:
        return f"{block}.downsample.{int(is_norm)}"
    return f"{block}.{'bn' if is_norm else 'conv'}{part}"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
