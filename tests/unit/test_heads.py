"""Heads of timm's families: found, cut off, and set to any linear function of the features."""

import pytest
import torch
from torch import nn

from flatout.config import Recipe
from flatout.models.build import create_timm, seeded
from flatout.models.heads import FeatureNetwork, Head, HeadNetwork, find_head, set_head

CLASSES = 5
# Each with the size that it takes, the layers of its head, and why it is here.
FAMILIES = [
    ("resnet18", 32, ("fc",), "pooling, linear"),
    ("test_vit", 160, ("head",), "tokens"),
    ("vit_tiny_patch16_224", 32, ("head",), "zeros as fresh weights"),
    ("mobilenetv3_small_050", 32, ("classifier",), "a convolution behind the pooling"),
    ("mobilenetv4_conv_small", 32, ("classifier",), "a norm behind the pooling"),
    ("convnext_atto", 32, ("head.fc",), "a norm in the head"),
    ("caformer_s18", 32, ("head.fc.fc2",), "hidden layers in the head"),
    ("levit_128s", 224, ("head.linear", "head_dist.linear"), "two norms, two heads"),
    ("deit_tiny_distilled_patch16_224", 32, ("head", "head_dist"), "two tokens, two heads"),
    ("crossvit_9_240", 240, ("head.0", "head.1"), "two heads of different widths"),
    ("dla46_c", 32, ("fc",), "the head is a convolution"),
    ("hgnetv2_b0", 32, ("head.fc",), "a hidden convolution"),
    ("swin_tiny_patch4_window7_224", 64, ("head.fc",), "channels last"),
    ("volo_d1_224", 64, ("head",), "an auxiliary head"),  # half its largest value over all places is added
]


def make(name: str, size: int) -> nn.Module:
    recipe = Recipe(model=f"timm:{name}", image_size=size, channels=3, epochs=1, batch_size=1)
    with seeded(1):
        return create_timm(recipe, CLASSES)


def found(model: nn.Module, size: int) -> Head:
    head = find_head(model, (size, size), 3)
    assert head is not None
    return head


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize(("name", "size", "layers", "why"), FAMILIES)
@torch.no_grad()
def test_a_model_is_its_features_and_its_head(name: str, size: int, layers: tuple[str, ...], why: str) -> None:
    model = make(name, size)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    head = found(model, size)
    silent = ("aux_head",) if why == "an auxiliary head" else ()
    assert (head.layers, head.silent, head.outputs) == (layers, silent, CLASSES)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    weight, bias = torch.randn(CLASSES, head.width), torch.randn(CLASSES)
    set_head(model, head, weight, bias)
    body, last = FeatureNetwork(model, head), HeadNetwork(model, head)
    images = torch.rand(3, 3, size, size)
    features, logits = body(images), model.eval()(images)
    assert features.shape == (3, head.width)
    assert set(last.state_dict()) == {f"{layer}.{kind}" for layer in (*layers, *silent) for kind in ("weight", "bias")}
    assert_close(last(features), logits)
    assert_close(features @ weight.T + bias, logits)


def test_a_head_that_is_not_linear_is_not_one() -> None:
    assert find_head(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4), nn.Softmax(1)), (8, 8), 3) is None
    assert find_head(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4)), (9, 9), 3) is None  # fails
    assert find_head(nn.Flatten(), (8, 8), 3) is None


def test_a_head_without_a_bias_takes_none() -> None:
    layer = nn.Linear(3 * 64, 4, bias=False)
    model = nn.Sequential(nn.Flatten(), layer)
    head = found(model, 8)
    assert not head.has_bias
    set_head(model, head, weight := torch.randn(4, head.width), torch.zeros(4))
    assert torch.equal(layer.weight, weight)
    with pytest.raises(AssertionError, match="the head has no bias"):
        set_head(model, head, weight, torch.ones(4))
