"""Setting what the dropout layers drop: in our nets and in timm's, and what is refused."""

import pytest
import torch
from torch import nn

from flatout.errors import InputError
from flatout.models.layers import set_dropout
from tests.nets import build


def make(name: str, size: int) -> nn.Module:
    return build(name, num_classes=3, image_size=size, channels=3, seed=1).train()


def outputs_differ(model: nn.Module, size: int) -> bool:
    """Whether the model in training computes another result from the same images every time."""
    x = torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    return not torch.equal(model(x), model(x))


def test_the_share_is_what_the_layers_then_drop() -> None:
    model = make("cats-dogs-cnn", 128)
    set_dropout(model, 0.7)
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(layers) == 2
    torch.manual_seed(0)
    for layer in layers:
        dropped = float((layer(torch.ones(100_000)) == 0).float().mean())
        assert dropped == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize(("name", "size"), [("cats-dogs-cnn", 128), ("timm:vit_tiny_patch16_224", 32)])
def test_zero_turns_dropout_off_and_more_turns_it_on(name: str, size: int) -> None:
    model = make(name, size)
    set_dropout(model, 0.0)
    assert not outputs_differ(model, size)
    set_dropout(model, 0.5)
    assert outputs_differ(model, size)


def test_minus_one_leaves_the_model_as_it_is() -> None:
    model = make("cats-dogs-cnn", 128)
    set_dropout(model, -1.0)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.2, 0.2]


def test_layers_of_all_kinds_are_found_and_no_others() -> None:
    kinds = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    others = (nn.RReLU(), nn.PairwiseDistance(p=2.0))
    model = nn.Sequential(*(kind(0.1) for kind in kinds), *others)
    set_dropout(model, 0.4)
    assert [getattr(module, "p", None) for module in model] == [0.4] * len(kinds) + [None, None]


def test_a_share_for_a_model_without_dropout_is_refused() -> None:
    model = make("caltech-cnn", 32)
    with pytest.raises(InputError, match=r"dropout = 0\.5: CaltechCNN has no dropout layer"):
        set_dropout(model, 0.5)
    set_dropout(model, 0.0)
