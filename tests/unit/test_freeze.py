"""Freezing: which parameters stop, which modules then run in evaluation mode, and what is refused."""

import pytest
import torch
from torch import nn

from flatout.errors import InputError
from flatout.models.layers import freeze, frozen_modules, learning_rate_scales, set_train_mode
from tests.nets import build


def make(name: str, size: int = 32) -> nn.Module:
    return build(name, num_classes=3, image_size=size, channels=3, seed=1)


def training(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_empty_spec_freezes_nothing():
    model = make("caltech-cnn")
    assert freeze(model, "") == []
    assert len(training(model)) == len(list(model.parameters()))


def test_last_four_of_vgg16_are_block_five_and_its_pool():
    model = make("vgg16")
    frozen = freeze(model, "all-but-last-4")
    block5 = [f"features.{n}.{kind}" for n in (24, 26, 28) for kind in ("weight", "bias")]
    assert training(model) == [*block5, "classifier.weight", "classifier.bias"]
    assert frozen == [f"features.{n}.{k}" for n in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21) for k in ("weight", "bias")]


def test_last_none_leaves_the_head():
    model = make("vgg16")
    freeze(model, "all-but-last-0")
    assert training(model) == ["classifier.weight", "classifier.bias"]


def test_layers_inside_the_classifier_count_but_dropout_does_not():
    model = make("cats-dogs-cnn")
    freeze(model, "all-but-last-3")  # linear 128, linear 256, the last pool
    assert training(model) == [f"classifier.{n}.{kind}" for n in (0, 3, 6) for kind in ("weight", "bias")]


def test_norms_count_in_timm_models_and_so_do_parameters_outside_layers():
    resnet = make("timm:resnet18")
    freeze(resnet, "all-but-last-3")  # the global pool, the last norm and the last convolution
    last = ["layer4.1.conv2.weight", "layer4.1.bn2.weight", "layer4.1.bn2.bias"]
    assert training(resnet) == [*last, "fc.weight", "fc.bias"]
    vit = make("timm:vit_tiny_patch16_224")
    assert {"cls_token", "pos_embed"} <= set(freeze(vit, "all-but-last-1"))
    assert training(vit) == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_patterns_name_parameters():
    model = make("caltech-cnn")
    assert freeze(model, "features.*, classifier.0.weight") == [
        "features.0.weight",
        "features.0.bias",
        "features.3.weight",
        "features.3.bias",
        "classifier.0.weight",
    ]
    assert training(model) == [
        "classifier.0.bias",
        *(f"classifier.{n}.{k}" for n in (2, 4) for k in ("weight", "bias")),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("all-but-last-x", "must be all-but-last-N"),
        ("all-but-last--1", "must be all-but-last-N"),
        ("all-but-last-99", "freezes nothing; the model has 6 layers before its head"),
        ("features.*,encoder.*", "the pattern 'encoder.*' matches no parameter; names look like 'features.0.weight'"),
        ("features", r"the pattern 'features' matches no parameter; did you mean 'features\.\*'"),
        ("features.*,", "the pattern '' matches no parameter"),
        ("*", "leaves no parameter to train"),
    ],
)
def test_bad_spec_is_refused_and_changes_nothing(spec: str, message: str):
    model = make("caltech-cnn")
    with pytest.raises(InputError, match=message):
        freeze(model, spec)
    assert len(training(model)) == len(list(model.parameters()))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(InputError, match="no parameter"):
        freeze(nn.Sequential(nn.Flatten()), "")
    with pytest.raises(InputError, match="has no parameters"):
        freeze(nn.Sequential(nn.Flatten()), "all-but-last-0")


def test_frozen_modules_have_parameters_and_none_that_trains():
    model = make("fashion-cnn", 28)
    freeze(model, "features.*")
    features = model.get_submodule("features")
    expected = [features, *(features.get_submodule(str(n)) for n in (0, 3, 4, 7))]
    assert frozen_modules(model) == expected
    assert frozen_modules(make("fashion-cnn", 28)) == []


def test_frozen_batch_norm_keeps_its_statistics_and_the_others_move():
    model = make("fashion-cnn", 28)
    freeze(model, "features.0.*,features.3.*")
    set_train_mode(model)
    for _ in range(2):
        model(torch.rand(4, 3, 28, 28))
    assert model.get_buffer("features.3.num_batches_tracked") == 0
    assert torch.equal(model.get_buffer("features.3.running_mean"), torch.zeros(10))
    assert model.get_buffer("features.7.num_batches_tracked") == 2
    assert model.training


def test_a_frozen_block_computes_the_same_every_time_in_training():
    block = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5))
    model = nn.Sequential(block, nn.Linear(50, 2))
    freeze(model, "0.*")
    model.eval()
    set_train_mode(model)
    x = torch.rand(3, 50)
    assert torch.equal(block(x), block(x))
    assert model[1].training


# --- layer-wise learning-rate decay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
def test_timm_models_have_the_rates_of_timm(name: str):
    from timm.optim._param_groups import param_groups_layer_decay

    model = make(f"timm:{name}")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.7)
    expected = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert learning_rate_scales(model, 0.7) == pytest.approx(expected)


def test_a_norm_and_its_convolution_have_one_rate():
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)
    )
    scales = learning_rate_scales(model, 0.5)
    by_layer = {0: 0.125, 1: 0.25, 2: 0.25, 3: 0.5, 5: 1.0}
    assert scales == {f"{layer}.{kind}": scale for layer, scale in by_layer.items() for kind in ("weight", "bias")}


def test_frozen_layers_count_for_the_rates():
    model = make("vgg16")
    scales = learning_rate_scales(model, 0.5)
    freeze(model, "all-but-last-4")
    assert learning_rate_scales(model, 0.5) == scales
    assert [scales[f"features.{n}.weight"] for n in (24, 26, 28)] == [0.125, 0.25, 0.5]
    assert scales["classifier.bias"] == 1.0
