"""Weights in and out of models and files: what loads, what is reported, what is refused, and that damage is noticed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flatout.config import Recipe
from flatout.models.pretrained import load_pretrained
from flatout.models.weights import read_weights, save_tensors
from flatout.utils.errors import DiskFull, InputError
from tests.data.packs import files_limited_to
from tests.nets import build

METADATA = {"model": "fashion-cnn", "classes": '["cat", "dog"]', "image_size": "28", "channels": "1"}


def make(
    name: str = "fashion-cnn", *, classes: int = 10, size: int = 28, channels: int = 1, seed: int = 1
) -> nn.Module:
    return build(name, num_classes=classes, image_size=size, channels=channels, seed=seed)


def load(model: nn.Module, weights: Path | str, *, name: str = "fashion-cnn", size: int = 28, channels: int = 1) -> str:
    sentences: list[str] = []
    recipe = Recipe(model=name, image_size=size, channels=channels, epochs=1, batch_size=1, weights=str(weights))
    load_pretrained(model, recipe, sentences.append)
    (loaded,) = sentences
    return loaded


def assert_equal_state(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def assert_small(model: nn.Module, layer: str) -> None:
    """Assert that a layer starts near zero: networks differ in the size of their features, and in their fresh heads."""
    weight = model.get_parameter(f"{layer}.weight")
    assert 0.008 < weight.std() < 0.012
    assert abs(weight.mean()) < 0.004
    assert not model.get_parameter(f"{layer}.bias").any()


# --- files ---


def test_every_kind_of_tensor_survives_with_the_metadata(tmp_path: Path):
    shared, path = torch.rand(4, 4), tmp_path / "t.safetensors"
    tensors = {
        "a": shared,
        "b": shared,
        "part": shared[:, 1],
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        **{str(kind): torch.ones(5).to(kind) for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64)},
        **{str(kind): torch.arange(5).to(kind) for kind in (torch.uint8, torch.int16, torch.float64)},
        "flags": torch.tensor([True, False]),
        "last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    save_tensors(path, tensors, METADATA)
    read, metadata = read_weights(path)
    assert metadata == METADATA
    assert read.keys() == tensors.keys() == load_file(path).keys()  # plain safetensors for everyone else
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())


def test_equal_weights_are_equal_files(tmp_path: Path):
    metadata = {f"key {i}": str(i) for i in range(20)}
    for name in ("a", "b"):
        save_tensors(tmp_path / name, {"w": torch.arange(3.0)}, metadata)
    first = (tmp_path / "a").read_bytes()
    assert first == (tmp_path / "b").read_bytes()
    keys = [part.split('"')[0] for part in first.decode(errors="replace").split('"key ')[1:]]
    assert keys == sorted(keys)


def test_any_flipped_bit_is_noticed(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_tensors(path, {"x": torch.arange(6.0), "y": torch.ones(2)}, {"classes": "cat,dog"})
    whole = path.read_bytes()
    read_weights(path)
    label = whole.index(b"blake2b")  # a flip here only makes the file one without a digest
    for position in {*range(len(whole))} - {*range(label, label + 7)}:
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"w\.safetensors"):
            read_weights(path)


def test_a_file_that_cannot_be_written_is_named_and_leaves_the_old_one_alone(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_tensors(path, make(seed=1).state_dict(), {})
    before = path.read_bytes()
    with files_limited_to(20_000), pytest.raises(DiskFull, match=r"w\.safetensors: cannot be written"):
        save_tensors(path, make(seed=2).state_dict(), {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    with pytest.raises(InputError, match="gone"):
        save_tensors(tmp_path / "gone" / "w.safetensors", {}, {})


# --- into models ---


PREFIXES = ["module.", "_orig_mod.", "_orig_mod.module.", "model._orig_mod."]
COUNT = "num_batches_tracked"


@pytest.mark.parametrize(
    ("file", "prefix", "left_out"),
    [
        ("weights.safetensors", "", ()),  # of a run
        ("pytorch_model.bin", "", ()),
        ("model.safetensors", "", COUNT),  # until torch 0.4.1
        *(("pytorch_model.bin", prefix, ()) for prefix in PREFIXES),
    ],
)
def test_local_weights_load_whole_without_the_prefixes_of_wrappers(
    tmp_path: Path, file: str, prefix: str, left_out: tuple[str, ...]
):
    trained, model = make(seed=8), make(seed=9)
    state = {prefix + name: t for name, t in trained.state_dict().items() if not name.endswith(left_out)}
    save_file(state, tmp_path / file) if file.endswith("tensors") else torch.save(state, tmp_path / file)
    assert "the head included" in load(model, tmp_path)
    assert_equal_state(model, trained)


def test_model_with_a_submodule_called_module_keeps_its_names(tmp_path: Path):
    trained, model = (nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    load(model, tmp_path / "w.pt", name="mine:wrapped")
    assert_equal_state(model, trained)


def test_a_head_of_another_size_starts_fresh_and_small(tmp_path: Path):
    trained, model, again = make(classes=10, seed=8), make(classes=3, seed=9), make(classes=3, seed=10)
    save_tensors(tmp_path / "w.safetensors", trained.state_dict(), {})
    assert "the head (classifier.2) starts fresh" in load(model, tmp_path / "w.safetensors")
    body = {name for name in model.state_dict() if not name.startswith("classifier.2.")}
    assert all(torch.equal(model.state_dict()[name], trained.state_dict()[name]) for name in body)
    assert_small(model, "classifier.2")
    load(again, tmp_path / "w.safetensors")
    assert_equal_state(model, again)  # the head is a function of the seed
    # Some of timm's heads start large.
    name = "timm:tf_efficientnet_lite0"
    model = make(name, classes=5, size=32, channels=3)
    assert model.get_parameter("classifier.weight").std() > 0.1
    save_tensors(tmp_path / "w.safetensors", make(name, classes=10, size=32, channels=3).state_dict(), {})
    load(model, tmp_path / "w.safetensors", name=name, size=32, channels=3)
    assert_small(model, "classifier")


class Layers(nn.Module):
    """A network whose head has a hidden layer, as some of timm's have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 28)
        hidden = (nn.Flatten(), nn.Linear(4, 50), nn.BatchNorm1d(50), nn.ReLU())
        self.head = nn.Sequential(*hidden, nn.Linear(50, classes))

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_hidden_layers_of_a_head_are_loaded(tmp_path: Path):
    trained, model = Layers(10), Layers(3)
    state = trained.state_dict()
    del state["head.2.num_batches_tracked"]  # as in old files
    save_tensors(tmp_path / "w.safetensors", state, {})
    assert "the head (head.4) starts fresh" in load(model, tmp_path / "w.safetensors", name="mine:net")
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items() if not name.startswith("head.4."))
    assert_small(model, "head.4")


@pytest.mark.parametrize(("size", "classes"), [(64, 3), (96, 10)])
def test_position_embeddings_are_resized(size: int, classes: int, tmp_path: Path):
    """timm resizes them only for a new network, here one with the classes of the file."""
    trained = make("timm:test_vit", classes=10, size=160, channels=3)
    nn.init.normal_(trained.get_parameter("head.bias"))
    save_file({f"model.{name}": tensor for name, tensor in trained.state_dict().items()}, tmp_path / "w.safetensors")
    model, fresh = (make("timm:test_vit", classes=classes, size=size, channels=3, seed=2) for _ in range(2))
    load(model, tmp_path / "w.safetensors", name="timm:test_vit", size=size, channels=3)
    assert model.get_parameter("pos_embed").shape == (1, (size // 16) ** 2 + 1, 64)
    assert not torch.equal(model.get_parameter("pos_embed"), fresh.get_parameter("pos_embed"))
    others = {name for name, tensor in trained.state_dict().items() if tensor.shape == model.state_dict()[name].shape}
    assert all(torch.equal(trained.state_dict()[name], model.state_dict()[name]) for name in others)
    assert ("head.bias" in others) == (classes == 10)


def test_torchvisions_vgg16_gives_equal_features(tmp_path: Path):
    from torchvision.models import vgg16

    theirs, ours = vgg16(weights=None, init_weights=False).eval(), make("vgg16", classes=4, size=64, channels=3).eval()
    theirs.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1000))  # the real top is 500 MB
    torch.save(theirs.state_dict(), tmp_path / "vgg16.pth")
    assert "26 tensors" in load(ours, tmp_path / "vgg16.pth", name="vgg16", size=64, channels=3)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours.get_submodule("features")(images), theirs.features(images))


# --- refusals ---


def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path: Path):
    save_tensors(tmp_path / "w.safetensors", make(size=32, channels=3).state_dict(), {})
    model, before = make(seed=9), make(seed=9)
    with pytest.raises(InputError) as raised:
        load(model, tmp_path / "w.safetensors")
    assert "classifier.0.weight is [50, 500] in the file but [50, 320] in the model" in str(raised.value)
    assert "features.0.weight is [10, 3, 5, 5] in the file but [10, 1, 5, 5] in the model" in str(raised.value)
    assert_equal_state(model, before)
    save_tensors(tmp_path / "w.safetensors", make("timm:test_vit2", size=160, channels=3).state_dict(), {})
    with pytest.raises(InputError, match=r"do not fit the model: .* missing"):
        load(make("timm:test_vit", size=64, channels=3), tmp_path / "w.safetensors", name="timm:test_vit", size=64)
