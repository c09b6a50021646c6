"""The models by name: layers, sizes, first weights, logits, and what is refused."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.errors import InputError
from flatout.models.build import build_model, list_names
from flatout.models.layers import freeze, head_modules
from flatout.recipe import Recipe
from tests.nets import build

PUBLISHED = {  # name: classes, loss, image size, channels, parameters layer by layer
    "fashion-cnn": (
        10,
        "cross-entropy",
        28,
        1,
        10 * 25 + 10 + 20 + 20 * 10 * 25 + 20 + 40 + 320 * 50 + 50 + 50 * 10 + 10,
    ),
    "cats-dogs-cnn": (
        2,
        "binary-cross-entropy",
        128,
        3,
        (32 * 3 * 9 + 32)
        + (64 * 32 * 9 + 64)
        + (128 * 64 * 9 + 128)
        + (128 * 16 * 16 * 256 + 256)
        + (256 * 128 + 128)
        + (128 * 1 + 1),
    ),
    "parallel-cnn": (10, "cross-entropy", 28, 1, (20 * 25 + 20) + (20 * 20 * 25 + 20) + (20 * 7 * 7 * 10 + 10)),
    "keras-cnn": (10, "cross-entropy", 28, 1, 320 + 18_496 + 36_928 + (64 * 3 * 3 * 64 + 64) + 650),
    "caltech-cnn": (
        101,
        "cross-entropy",
        32,
        3,
        (32 * 3 * 9 + 32) + (64 * 32 * 9 + 64) + (64 * 6 * 6 * 256 + 256) + (256 * 128 + 128) + (128 * 101 + 101),
    ),
    "vgg16": (4, "cross-entropy", 224, 3, 14_714_688 + 512 * 7 * 7 * 4 + 4),
}
SMALLEST = {"fashion-cnn": 16, "cats-dogs-cnn": 8, "parallel-cnn": 4, "keras-cnn": 18, "caltech-cnn": 10, "vgg16": 32}
OWN_SMALL = [name for name in PUBLISHED if name != "vgg16"]


def small(name: str, *, size: int = 0, classes: int = 2, channels: int = 1, seed: int = 1) -> nn.Module:
    return build(name, num_classes=classes, image_size=size or SMALLEST[name], channels=channels, seed=seed)


def test_the_names_are_those_of_the_jobs_of_nets_for_small_images_and_of_kerass():
    others = [*(f"fast-cnn-{width}" for width in (16, 32, 64, 128)), *(f"keras-resnet{n}" for n in (50, 101, 152))]
    assert sorted(list_names()) == sorted([*PUBLISHED, *others])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_give_the_published_net(name: str):
    classes, loss, size, channels, parameters = PUBLISHED[name]
    model = build(name, num_classes=classes, image_size=size, channels=channels, loss=loss, seed=1)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.training


@pytest.mark.parametrize("name", PUBLISHED)
def test_smallest_image_runs_and_one_pixel_less_is_refused(name: str):
    logits = small(name, classes=7)(torch.rand(3, 1, SMALLEST[name], SMALLEST[name]))
    assert logits.shape == (3, 7)
    with pytest.raises(InputError, match=f"{name} needs images of at least {SMALLEST[name]}x{SMALLEST[name]} pixels"):
        small(name, size=SMALLEST[name] - 1)


def test_layers_come_in_the_published_order():
    def kinds(name: str, **settings: int) -> str:
        model = small(name, **settings)
        return " ".join(type(m).__name__ for m in model.modules() if not list(m.children()))

    assert kinds("fashion-cnn") == (
        "Conv2d MaxPool2d ReLU BatchNorm2d Conv2d MaxPool2d ReLU BatchNorm2d Flatten Linear ReLU Linear"
    )
    assert (
        kinds("cats-dogs-cnn")
        == "Conv2d MaxPool2d ReLU " * 3 + "Flatten Linear ReLU Dropout Linear ReLU Dropout Linear"
    )
    assert kinds("parallel-cnn") == "Conv2d MaxPool2d ReLU " * 2 + "Flatten Linear"
    assert kinds("keras-cnn") == "Conv2d MaxPool2d ReLU " * 2 + "Conv2d ReLU Flatten Linear ReLU Linear"
    assert kinds("caltech-cnn") == "Conv2d MaxPool2d ReLU " * 2 + "Flatten Linear ReLU Linear ReLU Linear"
    assert kinds("vgg16") == "Conv2d ReLU Conv2d ReLU MaxPool2d " * 2 + (
        "Conv2d ReLU Conv2d ReLU Conv2d ReLU MaxPool2d " * 3 + "Flatten Linear"
    )


def test_outputs_are_logits_not_probabilities():
    for name in OWN_SMALL:
        model = small(name, classes=3).eval()
        with torch.no_grad():
            head = next(iter(head_modules(model).values()))
            assert isinstance(head, nn.Linear)
            head.bias.fill_(-5.0)
            logits = model(torch.zeros(2, 1, SMALLEST[name], SMALLEST[name]))
        assert (logits < -2).all()


def spread(weight: torch.Tensor) -> tuple[float, float]:
    return weight.std().item(), weight.abs().max().item()


def test_first_weights_follow_the_described_distributions():
    cats = build("cats-dogs-cnn", num_classes=2, image_size=64, channels=3, seed=3)
    conv, linear = cats.get_parameter("features.3.weight"), cats.get_parameter("classifier.0.weight")
    he, glorot = (6 / (32 * 9)) ** 0.5, (6 / (8192 + 256)) ** 0.5
    assert spread(conv) == pytest.approx((he / 3**0.5, he), rel=0.02)
    assert spread(linear) == pytest.approx((glorot / 3**0.5, glorot), rel=0.02)

    parallel = build("parallel-cnn", num_classes=10, image_size=28, channels=1, seed=3)
    assert parallel.get_parameter("features.3.weight").std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.03)
    glorot = (6 / (980 + 10)) ** 0.5
    assert spread(parallel.get_parameter("classifier.0.weight")) == pytest.approx((glorot / 3**0.5, glorot), rel=0.02)

    keras = build("keras-cnn", num_classes=10, image_size=28, channels=1, seed=3)
    he = (6 / (9 * 64)) ** 0.5
    assert spread(keras.get_parameter("features.6.weight")) == pytest.approx((he / 3**0.5, he), rel=0.02)

    caltech = build("caltech-cnn", num_classes=101, image_size=32, channels=3, seed=3)
    conv = caltech.get_parameter("features.3.weight")
    assert conv.std().item() == pytest.approx((2 / (9 * (32 + 64))) ** 0.5, rel=0.03)
    assert conv.abs().max() > 3 * conv.std()
    assert caltech.get_parameter("classifier.0.weight").std().item() == pytest.approx(0.01, rel=0.02)

    for model in (cats, parallel, keras, caltech):
        assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", [*OWN_SMALL, "timm:test_resnet"])
def test_seed_alone_decides_the_weights_and_the_callers_generator_stays(name: str):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, num_classes=3, image_size=32, channels=3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    same = build(name, num_classes=3, image_size=32, channels=3, seed=5)
    other = build(name, num_classes=3, image_size=32, channels=3, seed=6)
    pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_traces_exports_and_runs_in_channels_last(name: str):
    size = SMALLEST[name]
    model, images = small(name).eval(), torch.rand(2, 1, size, size)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), expected)
        torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), expected)
        last = model.to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(images.contiguous(memory_format=torch.channels_last)), expected)


def test_binary_loss_means_one_output_and_two_classes():
    model = build("cats-dogs-cnn", num_classes=2, image_size=16, channels=3, loss="binary-cross-entropy", seed=1)
    assert model(torch.rand(4, 3, 16, 16)).shape == (4, 1)
    with pytest.raises(InputError, match="needs 2 classes, the data has 3"):
        build("cats-dogs-cnn", num_classes=3, image_size=16, channels=3, loss="binary-cross-entropy", seed=1)


def test_unknown_name_gets_the_nearest():
    with pytest.raises(InputError, match="no model called 'fashon-cnn'; did you mean 'fashion-cnn'"):
        build("fashon-cnn", num_classes=2, image_size=28, channels=1, seed=1)


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:vit_tiny_patch16_224", "timm:resnet18.a1_in1k"])
def test_timm_models_take_size_channels_and_classes(name: str):
    model = build(name, num_classes=5, image_size=64, channels=1, seed=1)
    assert model(torch.rand(2, 1, 64, 64)).shape == (2, 5)
    assert model.training


def test_unknown_timm_names_get_the_nearest():
    with pytest.raises(InputError, match=r"timm has no model called 'resnet81'; nearest: timm:resnet"):
        build("timm:resnet81", num_classes=2, image_size=32, channels=3, seed=1)
    with pytest.raises(InputError, match=r"timm has no weights 'a1_in2k' for resnet18; did you mean 'a1_in1k'"):
        build("timm:resnet18.a1_in2k", num_classes=2, image_size=32, channels=3, seed=1)


def test_timm_model_that_cannot_take_such_images_is_refused():
    with pytest.raises(InputError, match=r"'timm:inception_v3' fails on 3-channel images of 32x32 pixels"):
        build("timm:inception_v3", num_classes=2, image_size=32, channels=3, seed=1)


FACTORIES = """
import torch
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
    raise ZeroDivisionError("by design")

class Nets:
    make = staticmethod(plain)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = f"factories_{next(_serial)}"
    (tmp_path / f"{module}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return module


_serial = itertools.count()


@pytest.mark.parametrize("factory", ["plain", "sized", "keywords", "Nets.make"])
def test_factory_of_the_current_folder_is_called(factories: str, factory: str):
    path = list(sys.path)
    model = build(f"{factories}:{factory}", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 4)
    assert sys.path == path


def test_checking_a_factory_leaves_statistics_and_mode_alone(factories: str):
    model = build(f"{factories}:sized", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)
    assert all(module.training for module in model.modules())
    assert model.get_buffer("2.num_batches_tracked") == 0


def test_factory_is_not_even_imported_unless_code_is_allowed(factories: str):
    with pytest.raises(InputError, match=f"code named in a file is never run.*--model {factories}:plain"):
        build(f"{factories}:plain", num_classes=4, image_size=8, channels=3, seed=1)
    assert factories not in sys.modules


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("fixed", r"must return logits \[N, 4\].*returned \[2, 1000\]"),
        ("nothing", "must return a torch.nn.Module, not NoneType"),
        ("careless", "must take num_classes"),
        ("failing", "raised ZeroDivisionError: by design"),
        ("missing", "cannot be imported.*no attribute 'missing'"),
    ],
)
def test_bad_factory_is_named_with_its_fault(factories: str, factory: str, message: str):
    with pytest.raises(InputError, match=message):
        build(f"{factories}:{factory}", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)


def test_missing_module_is_named():
    with pytest.raises(InputError, match="No module named 'no_such_package'"):
        build("no_such_package.nets:make", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)


def test_names_are_listed_without_importing_torch():
    code = "import sys; from flatout.models.build import list_names; list_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("place", ["{name}.py", "./{name}.py", "{folder}/{name}.py"])
def test_factory_of_a_file_is_called(factories: str, tmp_path, monkeypatch: pytest.MonkeyPatch, place: str):
    if "{folder}" in place:
        monkeypatch.chdir("/")
    name = place.format(name=factories, folder=tmp_path)
    model = build(f"{name}:plain", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 4)


def test_a_file_may_have_the_name_of_a_module_and_import_what_lies_beside_it(factories: str, tmp_path):
    (tmp_path / "random.py").write_text(f"from {factories} import plain as make\n")
    model = build("random.py:make", num_classes=4, image_size=8, channels=3, seed=1, allow_code=True)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "did you mean 'timm:resnet18'"),
        ("resnet18.a1_in1k", "did you mean 'timm:resnet18.a1_in1k'"),
        ("own.py", "write own.py:NAME"),
        ("gone.py:Net", "cannot be imported.*gone.py"),
    ],
)
def test_a_name_that_lacks_something_gets_the_whole_name(name: str, message: str):
    with pytest.raises(InputError, match=message):
        build(name, num_classes=2, image_size=32, channels=3, seed=1, allow_code=True)


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
    module, said = Outputs(form), []
    before = {name: value.clone() for name, value in module.state_dict().items()}
    recipe = Recipe(model="python:Outputs", image_size=4, epochs=1, batch_size=2)
    model = build_model(recipe, 3, module=module, report=said.append)
    x = torch.randn(6, 3, 4, 4)
    expected = Outputs("tensor")
    expected.load_state_dict(before)
    for training in (True, False):
        logits, wanted = model.train(training)(x), expected.train(training)(x)
        torch.testing.assert_close(logits.softmax(1), wanted.softmax(1))
    assert len(said) == (form != "tensor")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module._forward_hooks, "the user's module stays as it is"


def test_a_final_sigmoid_is_undone():
    module = nn.Sequential(nn.Flatten(), nn.Linear(48, 1), nn.Sigmoid())
    recipe = Recipe(model="python:Net", image_size=4, epochs=1, batch_size=2, loss="binary-cross-entropy")
    x = torch.randn(6, 3, 4, 4)
    torch.testing.assert_close(build_model(recipe, 2, module=module)(x), module[:2](x))


def test_a_factory_may_come_from_an_installed_package():
    model = build("torchvision.models:squeezenet1_1", num_classes=3, image_size=32, channels=3, seed=1, allow_code=True)
    assert list(head_modules(model)) == ["classifier.1"]
    assert freeze(model, "all-but-last-0")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"classifier.1.weight", "classifier.1.bias"}
