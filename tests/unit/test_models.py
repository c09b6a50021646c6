"""The models by name: layers, sizes, first weights, logits, and what is refused."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.models import heads
from flatout.models.build import NETS, build_model, create_timm, usable_size
from flatout.utils.errors import InputError
from tests.nets import build

BLOCK, CONV = "Conv2d MaxPool2d ReLU ", "Conv2d ReLU "
PUBLISHED = [  # name, classes, loss, size, channels, parameters, the smallest size, layers
    (
        *("fashion-cnn", 10, "cross-entropy", 28, 1, 21_900, 16),
        "Conv2d MaxPool2d ReLU BatchNorm2d " * 2 + "Flatten Linear ReLU Linear",
    ),
    (
        *("cats-dogs-cnn", 2, "binary-cross-entropy", 128, 3, 8_515_137, 8),
        BLOCK * 3 + "Flatten Linear ReLU Dropout Linear ReLU Dropout Linear",
    ),
    ("parallel-cnn", 10, "cross-entropy", 28, 1, 20_350, 4, BLOCK * 2 + "Flatten Linear"),
    ("keras-cnn", 10, "cross-entropy", 28, 1, 93_322, 18, BLOCK * 2 + CONV + "Flatten Linear ReLU Linear"),
    ("caltech-cnn", 101, "cross-entropy", 32, 3, 655_397, 10, BLOCK * 2 + "Flatten Linear ReLU Linear ReLU Linear"),
    (
        *("vgg16", 4, "cross-entropy", 224, 3, 14_815_044, 32),
        (CONV * 2 + "MaxPool2d ") * 2 + (CONV * 3 + "MaxPool2d ") * 3 + "Flatten Linear",
    ),
]


@pytest.mark.parametrize("net", PUBLISHED, ids=lambda net: net[0])
def test_published_settings_give_the_published_net(net: tuple[Any, ...]):
    name, classes, loss, size, channels, parameters, _, layers = net
    model = build(name, num_classes=classes, image_size=size, channels=channels, loss=loss, seed=1)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.training
    assert " ".join(type(m).__name__ for m in model.modules() if not list(m.children())) == layers


@pytest.mark.parametrize(("name", "size"), [(net[0], net[6]) for net in PUBLISHED])
def test_smallest_image_runs_and_one_pixel_less_is_refused(name: str, size: int):
    """Also exported, and with channels last."""
    model, images = other_shape(name, (size, size), 1), torch.rand(2, 1, size, size)
    with pytest.raises(InputError, match=f"{name} needs images of at least {size}x{size} pixels"):
        other_shape(name, (size - 1, 64), 1)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), expected)
        last = model.to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(images.contiguous(memory_format=torch.channels_last)), expected)


def other_shape(name: str, size: tuple[int, int], channels: int) -> nn.Module:
    recipe = Recipe(model=name, image_size=1, channels=channels, epochs=1, batch_size=1)
    return build_model(recipe.override({"image_size": size}), 3).eval()


SHAPES = [((32, 64), 5), ((64, 32), 2)]
NAMES = [*NETS, "timm:resnet10t", "timm:vit_tiny_patch16_224"]
# The largest are built of the blocks of keras-resnet50.
LARGEST = ("keras-resnet101", "keras-resnet152")


SIDES = [(4, 1), (8, 5), (28, 1), (48, 3), (224, 3)]  # of fast-cnn, whose depth depends on them
EVERY = [(name, *shape) for name in NAMES for shape in SHAPES[: 1 if name in LARGEST else 2]]
EVERY += [("fast-cnn-16", (side, side), channels) for side, channels in SIDES]


@pytest.mark.parametrize(("name", "size", "channels"), EVERY)
def test_images_may_have_any_shape_and_number_of_channels(name: str, size: tuple[int, int], channels: int):
    with torch.no_grad():
        assert other_shape(name, size, channels)(torch.rand(2, channels, *size)).shape == (2, 3)


def uniform(fan: float) -> tuple[float, float]:
    """Return deviation and largest value of a uniform distribution, as He's and Glorot's are."""
    return (2 / fan) ** 0.5, (6 / fan) ** 0.5


@pytest.mark.parametrize(
    ("name", "size", "channels", "parameter", "deviation", "largest"),
    [
        ("cats-dogs-cnn", 64, 3, "features.3.weight", *uniform(32 * 9)),
        ("cats-dogs-cnn", 64, 3, "classifier.0.weight", *uniform(8192 + 256)),
        ("parallel-cnn", 28, 1, "features.3.weight", (2 / 500) ** 0.5, None),
        ("parallel-cnn", 28, 1, "classifier.0.weight", *uniform(980 + 10)),
        ("keras-cnn", 28, 1, "features.6.weight", *uniform(9 * 64)),
        ("caltech-cnn", 32, 3, "features.3.weight", (2 / (9 * (32 + 64))) ** 0.5, None),
        ("caltech-cnn", 32, 3, "classifier.0.weight", 0.01, None),
    ],
)
def test_first_weights_follow_the_described_distributions(
    name: str, size: int, channels: int, parameter: str, deviation: float, largest: float | None
):
    model = build(name, num_classes=2 if "dogs" in name else 10, image_size=size, channels=channels, seed=3)
    weight = model.get_parameter(parameter)
    assert weight.std().item() == pytest.approx(deviation, rel=0.03)
    if largest:
        assert weight.abs().max().item() == pytest.approx(largest, rel=0.02)
    else:
        assert weight.abs().max() > 3 * weight.std()  # normal
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", ["fashion-cnn", "cats-dogs-cnn", "fast-cnn-16", "timm:test_resnet"])
def test_seed_alone_decides_the_weights_and_the_callers_generator_stays(name: str):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, num_classes=3, image_size=32, channels=3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    same, other = (build(name, num_classes=3, image_size=32, channels=3, seed=seed) for seed in (5, 6))
    pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_binary_loss_means_two_classes():
    with pytest.raises(InputError, match="needs 2 classes, the data has 3"):
        build("cats-dogs-cnn", num_classes=3, image_size=16, channels=3, loss="binary-cross-entropy", seed=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashon-cnn", "no model called 'fashon-cnn'; did you mean 'fashion-cnn'"),
        ("resnet18", "did you mean 'timm:resnet18'"),
        ("timm:resnet81", "timm has no model called 'resnet81'; nearest: timm:resnet"),
        ("timm:resnet18.a1_in2k", "timm has no weights 'a1_in2k' for resnet18; did you mean 'a1_in1k'"),
        ("timm:inception_v3", "'timm:inception_v3' fails on 3-channel images of 32x32 pixels"),
        ("timm:mobilenetv5_300m_enc", "has no classifier; take 'timm:mobilenetv5_300m', which has one"),
        ("own.py", "write own.py:NAME"),
        ("no_such_package.nets:make", "No module named 'no_such_package'"),
    ],
)
def test_a_wrong_name_gets_the_nearest_or_a_reason(name: str, message: str):
    with pytest.raises(InputError, match=message):
        build(name, num_classes=2, image_size=32, channels=3, seed=1, allow_code=True)


# --- factories ---


def factory(name: str) -> nn.Module:
    return build(name, num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)


FACTORIES = """
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(3 * 4, num_classes))

def sized(*, num_classes, image_size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2 * channels, num_classes), nn.BatchNorm1d(num_classes))

def keywords(**kwargs):
    assert list(kwargs) == ["num_classes"]
    return plain(**kwargs)

def fixed(num_classes):
    return plain(1000)

def nothing(num_classes):
    return None

def careless():
    return plain(2)

def failing(num_classes):
    raise ValueError("by design")

class Nets:
    make = staticmethod(plain)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = f"factories_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(FACTORIES)
    # A file may have the name of a module, and import from its own folder.
    (tmp_path / "random.py").write_text(f"from {module} import plain as make\n")
    monkeypatch.chdir(tmp_path)
    return module


PLACES = ["{name}:plain", "{name}:sized", "{name}:keywords", "{name}:Nets.make"]
PLACES += ["{name}.py:plain", "{folder}/{name}.py:plain", "random.py:make"]


@pytest.mark.parametrize("place", PLACES)
def test_a_factory_is_called(factories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    if "{folder}" in place:
        monkeypatch.chdir("/")
    path = list(sys.path)
    model = factory(place.format(name=factories, folder=tmp_path))
    assert sys.path == path
    # Its outputs were checked, which leaves statistics and mode alone.
    assert all(module.training for module in model.modules())
    assert all(buffer == 0 for name, buffer in model.named_buffers() if "batches" in name)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 4)


def test_a_factory_is_not_even_imported_unless_code_is_allowed(factories: str):
    with pytest.raises(InputError, match=f"code named in a file is never run.*--model {factories}:plain"):
        build(f"{factories}:plain", num_classes=4, image_size=8, channels=3, seed=1)
    assert factories not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixed", r"must return logits \[N, 4\].*returned \[2, 1000\]"),
        ("nothing", "must return a torch.nn.Module, not NoneType"),
        ("careless", "must take num_classes"),
        ("failing", "raised ValueError: by design"),
        ("missing", "cannot be imported.*no attribute 'missing'"),
    ],
)
def test_a_bad_factory_is_named_with_its_fault(factories: str, name: str, message: str):
    with pytest.raises(InputError, match=message):
        factory(f"{factories}:{name}")


# --- outputs ---


class Outputs(nn.Module):
    """A linear model that returns its logits in many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear, self.other = form, nn.Linear(48, 3), nn.Linear(48, 5)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> object:
        x = x.flatten(1)
        logits, other = self.norm(self.linear(x)), self.other(x)
        if self.form == "auxiliary":
            return (logits, other) if self.training else logits
        return {
            "dict": {"logits": logits, "hidden": other},
            "torchvision": {"out": logits, "aux": other},
            "object": SimpleNamespace(logits=logits, hidden=other),
            "softmax": logits.softmax(1),
            "tensor": logits,
        }[self.form]


@pytest.mark.parametrize("form", ["dict", "torchvision", "object", "softmax", "auxiliary", "tensor"])
def test_outputs_of_every_form_become_logits(form: str):
    module, sentences = Outputs(form), list[str]()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    recipe = Recipe(model="python:Outputs", image_size=4, epochs=1, batch_size=2)
    model = build_model(recipe, 3, module=module, report=sentences.append)
    x = torch.randn(6, 3, 4, 4)
    expected = Outputs("tensor")
    expected.load_state_dict(before)
    for training in (True, False):
        logits, wanted = model.train(training)(x), expected.train(training)(x)
        torch.testing.assert_close(logits.softmax(1), wanted.softmax(1))
    assert len(sentences) == (form != "tensor")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module(x[:2]).__class__ is Outputs(form)(x[:2]).__class__, "the user's module stays as it is"


def test_modules_that_cannot_be_copied_or_are_complete_after_the_first_batch_are_trained_themselves():
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    vars(net)["lock"] = threading.Lock()
    heads.ensure_logits(net, "net", Recipe(model="net", image_size=4, epochs=1, batch_size=1), 3, lambda sentence: None)
    assert sum(parameter.numel() for parameter in net.parameters()) == 3 * 48 + 3


@pytest.mark.parametrize("is_called", [False, True])
def test_a_final_sigmoid_is_undone_if_it_is_called(is_called: bool):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.last = nn.Linear(48, 1, bias=False), nn.Sigmoid()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.head(x.flatten(1))  # 0 for a black image, as a probability may be
            return self.last(logits) if is_called else logits

    said, module, x = list[str](), Net(), torch.randn(6, 3, 4, 4)
    recipe = Recipe(model="python:Net", image_size=4, epochs=1, batch_size=2, loss="binary-cross-entropy")
    found = build_model(recipe, 2, module=module, report=said.append)(x)
    torch.testing.assert_close(found, module.head(x.flatten(1)))
    assert len(said) == is_called


# --- fast-cnn ---


@pytest.mark.parametrize("background", ["dark", "bright"])
def test_a_plain_background_leaves_the_gradient_to_the_digits(background: str):
    """No gradient is above the others by orders of magnitude, and bfloat16 computes the same one."""
    digits: Any = load_digits()
    images = torch.from_numpy(np.asarray(digits.images[:128], np.float32))[:, None]
    images = functional.pad(functional.interpolate(images, size=20), [4] * 4)
    images = (images - images.mean()) / images.std() * (1 if background == "dark" else -1)
    labels = torch.from_numpy(np.asarray(digits.target[:128]))

    def gradients(is_bf16: bool) -> dict[str, torch.Tensor]:
        net = build("fast-cnn-32", num_classes=10, image_size=28, channels=1, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            logits = net(images)
        functional.cross_entropy(logits.float(), labels).backward()
        return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}

    expected, found = gradients(False), gradients(True)
    for name, gradient in expected.items():
        assert gradient.norm() < 3, name
        assert (found[name] - gradient).norm() < 0.3 * gradient.norm(), name


# --- image sizes that networks of timm's take with their weights ---


@pytest.mark.filterwarnings("ignore::UserWarning:timm")
@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("resnet18", 100, 100),  # any size
        ("vit_tiny_patch16_224", 128, 128),  # position embeddings are resized
        ("vit_tiny_patch16_224", (96, 160), (96, 160)),
        ("vit_tiny_patch16_224", 100, 224),  # not whole patches
        ("levit_128s", 128, 224),  # attention biases are of one size
        ("pvt_v2_b0", 128, 128),  # patches overlap
        ("halonet26t", 128, 256),  # the least size that timm lists
    ],
)
def test_the_size_fits_the_network_and_its_weights(name: str, wanted: Any, expected: Any) -> None:
    state = torch.random.get_rng_state()
    size = usable_size(f"timm:{name}", wanted, channels=1)
    assert size == expected
    assert torch.equal(torch.random.get_rng_state(), state)
    recipe = Recipe(model=f"timm:{name}", image_size=size, channels=1, epochs=1, batch_size=1)
    model = create_timm(recipe, 1000, timm.create_model(name, num_classes=1000).state_dict()).eval()
    images = torch.rand(1, 1, *(size if isinstance(size, tuple) else (size, size)))
    with torch.no_grad():
        assert model(images).shape == (1, 1000)


def test_other_networks_are_taken_to_fit() -> None:
    assert usable_size("fast-cnn-32", (7, 9), channels=3) == (7, 9)
    assert usable_size("file.py:net", 7, channels=3) == 7
