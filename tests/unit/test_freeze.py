"""Freezing: which parameters stop, which modules run in evaluation mode, learning rates by layer, and dropout."""

import pytest
import torch
from timm.optim import param_groups_layer_decay  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from flatout.models.layers import freeze, learning_rate_scales, set_dropout, set_train_mode
from flatout.utils.errors import InputError
from tests.nets import build


def make(name: str, size: int = 32) -> nn.Module:
    return build(name, num_classes=3, image_size=size, channels=3, seed=1)


def training(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def both(*layers: str) -> list[str]:
    return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("name", "spec", "trained"),
    [
        # Block five and its pool.
        ("vgg16", "all-but-last-4", both("features.24", "features.26", "features.28", "classifier")),
        ("vgg16", "all-but-last-0", both("classifier")),
        # Linear layers count, dropout does not: linear 128, linear 256, the last pool.
        ("cats-dogs-cnn", "all-but-last-3", both("classifier.0", "classifier.3", "classifier.6")),
        # The global pool, the last norm and the last convolution.
        ("timm:resnet18", "all-but-last-3", ["layer4.1.conv2.weight", *both("layer4.1.bn2", "fc")]),
        # Parameters outside of layers are frozen, too.
        ("timm:vit_tiny_patch16_224", "all-but-last-1", both("norm", "head")),
        (
            *("caltech-cnn", "features.*, classifier.0.weight"),
            ["classifier.0.bias", *both("classifier.2", "classifier.4")],
        ),
        ("caltech-cnn", "", both("features.0", "features.3", "classifier.0", "classifier.2", "classifier.4")),
    ],
)
def test_what_is_not_frozen_trains(name: str, spec: str, trained: list[str]):
    model = make(name)
    freeze(model, spec)
    assert training(model) == trained


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("all-but-last-x", "must be all-but-last-N"),
        ("all-but-last-99", "freezes nothing; the model has 6 layers before its head"),
        ("features.*,encoder.*", "the pattern 'encoder.*' matches no parameter; names look like 'features.0.weight'"),
        ("features", r"the pattern 'features' matches no parameter; did you mean 'features\.\*'"),
        ("*", "leaves no parameter to train"),
    ],
)
def test_bad_spec_is_refused_and_changes_nothing(spec: str, message: str):
    model = make("caltech-cnn")
    with pytest.raises(InputError, match=message):
        freeze(model, spec)
    assert len(training(model)) == len(list(model.parameters()))


def test_frozen_batch_norm_keeps_its_statistics_and_the_others_move():
    model = make("fashion-cnn", 28)
    freeze(model, "features.0.*,features.3.*")
    set_train_mode(model)
    assert [name for name, module in model.named_modules() if not module.training] == ["features.0", "features.3"]
    for _ in range(2):
        model(torch.rand(4, 3, 28, 28))
    assert model.get_buffer("features.3.num_batches_tracked") == 0
    assert torch.equal(model.get_buffer("features.3.running_mean"), torch.zeros(10))
    assert model.get_buffer("features.7.num_batches_tracked") == 2
    assert model.training
    set_train_mode(model, "frozen")
    assert not model.get_submodule("features.7").training


# --- learning rates ---


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
def test_timm_models_have_the_rates_of_timm(name: str):
    model = make(f"timm:{name}")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.7)
    expected = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert learning_rate_scales(model, 0.7) == pytest.approx(expected)


def test_a_norm_and_its_convolution_have_one_rate_frozen_or_not():
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)
    )
    by_layer = {0: 0.125, 1: 0.25, 2: 0.25, 3: 0.5, 5: 1.0}
    expected = {f"{layer}.{kind}": scale for layer, scale in by_layer.items() for kind in ("weight", "bias")}
    assert learning_rate_scales(model, 0.5) == expected
    freeze(model, "0.*,1.*")
    assert learning_rate_scales(model, 0.5) == expected


# --- dropout ---


@pytest.mark.parametrize(("name", "size"), [("cats-dogs-cnn", 64), ("timm:vit_tiny_patch16_224", 32)])
def test_layers_drop_the_given_share(name: str, size: int) -> None:
    model, images = make(name, size).train(), torch.rand(4, 3, size, size)
    set_dropout(model, 0.0)
    assert torch.equal(model(images), model(images))
    set_dropout(model, 0.5)
    assert not torch.equal(model(images), model(images))
    set_dropout(model, -1)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.5}


def test_a_model_without_dropout_is_refused() -> None:
    with pytest.raises(InputError, match=r"dropout = 0\.5: CaltechCNN has no dropout layer"):
        set_dropout(make("caltech-cnn"), 0.5)
    set_dropout(make("caltech-cnn"), 0.0)
