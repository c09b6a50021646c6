"""`flatout convert`: what it prints and writes, and what it refuses in one message."""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flatout.cli import main
from tests.convert.networks import FIXTURES, MODELS, small, whole_map

pytestmark = pytest.mark.usefixtures("keras_in_this_process")
SMALL, FASHION = MODELS["small"], "fashion-cnn"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command in an empty folder: exit code, standard output, last line of errors."""
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        code = main(["convert", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().rpartition("\n")[2]

    return command


def test_it_prints_the_pairs_of_layers_and_the_difference(run):
    check = FIXTURES / "keras-small.npz"
    words = (FIXTURES / "keras-small.keras", "--model", SMALL, "--check", check)
    code, said, _ = run(*words, "--out", "w.safetensors")
    assert code == 0
    assert "w.safetensors: 13 tensors, all matched (--verbose lists the layers), of" in said
    assert "conv2d_" not in said
    assert len(said) < 500
    code, said, _ = run(*words, "--out", "v.safetensors", "--verbose")
    assert code == 0
    assert "0 = conv2d_" in said
    assert "v.safetensors: 13 tensors, all matched, of" in said
    assert "the largest difference of logits is" in said
    code, said, _ = run(FIXTURES / "keras-small.keras", "--model", SMALL, "--out", "j.safetensors", "--json")
    result = json.loads(said)
    assert (result["image_size"], result["channels"], result["classes"]) == (12, 3, 3)
    assert result["difference"] is None
    assert load_file("w.safetensors").keys() == load_file("j.safetensors").keys()


def test_an_existing_file_is_kept(run, tmp_path: Path):
    (tmp_path / "w.safetensors").write_text("mine")
    code, _, message = run(FIXTURES / "keras-small.keras", "--model", SMALL, "--out", "w.safetensors")
    assert code == 2
    assert "--out w.safetensors: exists already" in message
    assert (tmp_path / "w.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("gone.h5", "--model", SMALL), "gone.h5: there is no such file or folder"),
        (("EMPTY", "--model", SMALL), "the folder holds none of"),
        (("keras-small.keras", "--model", "fashion-cmn"), "fashion-cnn"),
        (("keras-small.keras", "--model", SMALL, "--epsilon", "2"), "--epsilon 2: must be"),
        (("keras-small.keras", "--model", SMALL, "--channels", "0"), "--channels 0"),
        (("keras-small.keras", "--model", SMALL, "--size", "0"), "--size 0"),
        (("keras-small.keras", "--model", SMALL, "--check", "gone.npz"), "--check gone.npz: cannot be read"),
        (("keras-small.keras", "--model", SMALL, "--mapping", "gone.toml"), "--mapping gone.toml: cannot be read"),
        (("paddle-small.pdparams", "--model", FASHION), "do not fit the model"),
        (("keras2-fashion-cnn.h5", "--model", MODELS["torch-resnet"]), "do not fit the model"),
        (("keras-keras-resnet.weights.h5", "--model", MODELS["shallow-resnet"]), "18 unexpected (conv2_block2_"),
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing(run, tmp_path: Path, words: tuple[str, ...], reason: str):
    (tmp_path / "EMPTY").mkdir()
    file = FIXTURES / words[0] if (FIXTURES / words[0]).exists() else Path(words[0])
    code, said, message = run(file, *words[1:], "--out", "w.safetensors")
    assert (code, said) == (2, "")
    assert reason in message
    assert len(message) < 2500
    assert [path.name for path in tmp_path.iterdir()] == ["EMPTY"]


def test_tensors_that_do_not_fit_are_counted_in_the_message_and_listed_by_json(run):
    state = small(3).state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    missing = ("0.bias", "1.weight", "1.bias", "1.running_mean", "4.bias")
    other = {
        "0.weight": [4, 3, 5, 5],
        "1.running_var": [9],
        "4.weight": [7, 4, 3, 3],
        "8.weight": [5, 25],
        "8.bias": [6],
    }
    extra = {f"extra{i}.offset": [i] for i in range(1, 8)}
    kept = {name: tensor for name, tensor in state.items() if name not in missing}
    torch.save(kept | {name: torch.zeros(shape) for name, shape in (other | extra).items()}, "f.pt")
    words = ("f.pt", "--model", SMALL, "--size", "12", "--out", "w.safetensors")
    code, said, message = run(*words)
    assert (code, said) == (2, "")
    assert "5 misshapen (0.weight is [4, 3, 5, 5] in the file but [4, 3, 3, 3] in the model, " in message
    assert "5 missing (0.bias [4], 1.weight [4], 1.bias [4], 1.running_mean [4], and 1 more)" in message
    assert "7 unexpected (" in message
    assert "--json lists all" in message
    code, said, again = run(*words, "--json")
    found = json.loads(said)
    assert (code, again) == (2, message)
    assert message == f"flatout: {found['error']}"
    assert found["misshapen"] == {name: {"file": shape, "model": shapes[name]} for name, shape in other.items()}
    assert found["missing"] == {name: shapes[name] for name in missing}
    assert found["unexpected"] == extra
    assert not Path("w.safetensors").exists()


def test_a_wrong_match_is_found_by_the_check(run, tmp_path: Path):
    arrays = dict(np.load(FIXTURES / "keras-small.npz"))
    arrays["logits"] = arrays["logits"][:, [1, 0, 2]]
    np.savez(tmp_path / "a.npz", **arrays)
    code, _, message = run(
        FIXTURES / "keras-small.keras", "--model", SMALL, "--out", "w.safetensors", "--check", "a.npz"
    )
    assert code == 2
    assert "the logits differ by" in message
    assert not (tmp_path / "w.safetensors").exists()


def test_the_check_finds_another_epsilon(run, tmp_path: Path):
    words = (FIXTURES / "keras-small.keras", "--model", SMALL, "--check", FIXTURES / "keras-small.npz")
    assert run(*words, "--out", "a.safetensors", "--epsilon", "0.1")[0] == 2
    assert run(*words, "--out", "b.safetensors", "--epsilon", "0.001")[0] == 0


def test_images_of_the_check_may_have_their_channels_last(run, tmp_path: Path):
    arrays = dict(np.load(FIXTURES / "keras-small.npz"))
    np.savez(tmp_path / "a.npz", images=arrays["images"].transpose(0, 2, 3, 1), logits=arrays["logits"])
    words = (FIXTURES / "keras-small.weights.h5", "--model", SMALL, "--check", "a.npz")
    assert run(*words, "--out", "w.safetensors")[0] == 0


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": np.zeros((2, 3, 12, 12))},
        {"images": np.zeros((2, 3, 12, 12)), "logits": np.zeros((3, 3))},
        {"images": np.zeros((2, 3, 12, 12)), "logits": np.full((2, 3), np.nan)},
        {"images": np.zeros((2, 3, 12, 12)), "logits": np.zeros((2, 4))},
        {"images": np.array([None]), "logits": np.zeros((2, 3))},
    ],
)
def test_arrays_that_cannot_be_compared(run, tmp_path: Path, arrays: dict[str, np.ndarray]):
    np.savez(tmp_path / "a.npz", **arrays)  # pyright: ignore[reportArgumentType]
    words = (FIXTURES / "keras-small.keras", "--model", SMALL, "--check", "a.npz")
    code, _, message = run(*words, "--out", "w.safetensors")
    assert code == 2
    assert "a.npz" in message


def test_layers_named_by_a_mapping_file(run, tmp_path: Path):
    """Two convolutions of equal shape, which the file has in another order."""
    first, second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
    torch.save(
        {"b.weight": second.weight, "b.bias": second.bias, "a.kernel": first.weight, "a.bias": first.bias}, "f.pt"
    )
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, **_):\n"
        "    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1),\n"
        "                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))\n"
    )
    (tmp_path / "m.toml").write_text('0.weight = "a/kernel"\n"0.bias" = "a.bias"\n"1" = "b"\n')
    code, _, message = run("f.pt", "--model", "net.py:net", "--out", "w.safetensors", "--mapping", "m.toml")
    assert code == 0, message
    found = load_file("w.safetensors")
    assert torch.equal(found["0.weight"], first.weight)
    assert torch.equal(found["1.weight"], second.weight)
    assert "4.weight" not in found  # the file has no head
    for text, reason in (
        ('"0" = "c"', "the file has no such layer"),
        ('"7" = "a"', "the model has no layer or tensor '7'"),
        ('"0.weight" = "a.scale"', "the file has no such tensor"),
        ("0 = 1", "must be text"),
        ("0", "is no TOML"),
    ):
        (tmp_path / "m.toml").write_text(text)
        code, _, message = run("f.pt", "--model", "net.py:net", "--out", "x.safetensors", "--mapping", "m.toml")
        assert code == 2
        assert reason in message
    assert not (tmp_path / "x.safetensors").exists()


def test_keras_resnets_are_not_those_of_timm(run):
    file = FIXTURES / "keras-keras-resnet.weights.h5"
    code, _, message = run(file, "--model", MODELS["torch-resnet"], "--out", "w.safetensors")
    assert code == 2
    assert "use the model keras-resnet50" in message


def test_a_truncated_file_leaves_nothing(run, tmp_path: Path):
    shutil.copy(FIXTURES / "paddle-small.pdparams", tmp_path / "a.pdparams")
    content = (tmp_path / "a.pdparams").read_bytes()
    (tmp_path / "a.pdparams").write_bytes(content[:-100])
    code, _, message = run("a.pdparams", "--model", SMALL, "--out", "w.safetensors")
    assert code == 2
    assert "a.pdparams: cannot be read" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a.pdparams"]


def test_other_tensors_beside_a_model_under_a_prefix_are_left_out(run):
    """As Lightning writes the weights of a loss, and settings; `net` is a usual key."""
    state = {f"backbone.{name}": tensor for name, tensor in small(3).state_dict().items()}
    settings = {"root": Path("data"), "flags": argparse.Namespace(lr=0.1)}
    torch.save({"net": {**state, "loss.weight": torch.ones(3)}, "hyper_parameters": settings}, "f.ckpt")
    code, _, message = run("f.ckpt", "--model", SMALL, "--size", "12", "--out", "w.safetensors")
    assert code == 0, message
    assert torch.equal(load_file("w.safetensors")["8.weight"], state["backbone.8.weight"])
    torch.save({**state, "backbone.9.weight": torch.ones(3), "loss.weight": torch.ones(3)}, "g.ckpt")
    code, _, message = run("g.ckpt", "--model", SMALL, "--size", "12", "--out", "x.safetensors")
    assert code == 2
    assert "9.weight [3]" in message


@pytest.mark.parametrize("is_mapped", [True, False])
def test_layers_are_found_by_shape_and_as_convolutions(run, tmp_path: Path, is_mapped: bool):
    """Keras's layouts: a depthwise kernel, a linear layer over a flattened map, in an order that is not the model's."""
    h5py = pytest.importorskip("h5py")
    net = whole_map(5).eval()
    depthwise, whole, head = (net.state_dict()[f"{name}.weight"].numpy() for name in ("0", "2", "5"))
    kernels = {"b": depthwise.transpose(2, 3, 0, 1), "c": whole.transpose(2, 3, 1, 0).reshape(-1, 4), "a": head.T}
    with h5py.File("f.weights.h5", "w") as file:
        for name, own in (("b", "0"), ("c", "2"), ("a", "5")):
            file[f"{name}/vars/0"], file[f"{name}/vars/1"] = kernels[name], net.state_dict()[f"{own}.bias"].numpy()
    images = torch.randn(4, 3, 4, 5)
    np.savez("a.npz", images=images, logits=net(images).detach())
    (tmp_path / "m.toml").write_text('"0" = "b"\n"2" = "c"\n5.weight = "a/kernel"\n5.bias = "a/bias"\n')
    words = ("f.weights.h5", "--model", MODELS["whole-map"], "--check", "a.npz", "--out", "w.safetensors")
    code, said, message = run(*words, "--verbose", *(("--mapping", "m.toml") if is_mapped else ()))
    assert code == 0, message
    assert "0 = b, 2 = c, 5 = a" in said


def test_variables_of_no_layer_are_mapped_one_by_one(run, tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    net = small(3).eval()
    with h5py.File("f.weights.h5", "w") as file:
        pairs = []
        for number, (name, tensor) in enumerate(net.state_dict().items()):
            if "num_batches" not in name:
                axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(tensor.ndim, (0,))
                file[f"mine/vars/{number}"] = tensor.numpy().transpose(axes)
                pairs.append((name, f"mine/variable_{len(pairs)}"))
    (tmp_path / "m.toml").write_text("".join(f'"{own}" = "{theirs}"\n' for own, theirs in pairs))
    words = ("f.weights.h5", "--model", SMALL, "--size", "12", "--mapping", "m.toml", "--epsilon", "1e-5")
    code, _, message = run(*words, "--out", "w.safetensors")
    assert code == 0, message
    found = load_file("w.safetensors")
    assert torch.equal(found["0.weight"], net.state_dict()["0.weight"])
    assert torch.equal(found["4.weight"], net.state_dict()["4.weight"])


def test_a_program_of_paddle_is_named(run, tmp_path: Path):
    (tmp_path / "inference.pdiparams").write_bytes(b"\0" * 64)
    code, _, message = run("inference.pdiparams", "--model", SMALL, "--out", "w.safetensors")
    assert code == 2
    assert "save paddle's model.state_dict() as .pdparams" in message


def test_a_model_for_one_size_alone_asks_for_its_flags(run, tmp_path: Path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(**_):\n    return nn.Sequential(nn.Flatten(), nn.Linear(300, 3))\n"
    )
    torch.save({"1.weight": torch.ones(3, 300), "1.bias": torch.ones(3)}, "f.pt")
    words = ("f.pt", "--model", "net.py:net", "--out", "w.safetensors")
    code, _, message = run(*words)
    assert code == 2
    assert "224x224 pixels" in message
    assert "--size N or HxW, --channels C and --classes K" in message
    assert run(*words, "--size", "10", "--classes", "3")[0] == 0
