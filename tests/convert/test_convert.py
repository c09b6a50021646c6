"""`flatout convert`: files of every framework (`fixtures/make_fixtures.py`) give their logits; what is refused."""

import argparse
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flatout.cli.main import main
from flatout.config import Recipe
from flatout.models.build import build_model
from flatout.models.convert.convert import Shape, convert
from flatout.models.convert.readers import find_file
from flatout.models.pretrained import load_pretrained
from flatout.models.weights import read_weights
from tests.convert.networks import FIXTURES, MODELS, small

SMALL, FASHION = MODELS["small"], "fashion-cnn"
CHECK = str(FIXTURES / "keras-small.npz")
NAME = re.compile(r"(?P<net>\w+?-(?P<model>small|fashion-cnn|keras-resnet)).*")
NOT_FILES = (".npz", ".py")
FILES = sorted(path.name for path in FIXTURES.iterdir() if path.suffix not in NOT_FILES and path.name[0].isalpha())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command in an empty folder: exit code, standard output, last line of errors."""
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        code = main(["convert", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().rpartition("\n")[2]

    return command


def write_net(layers: str) -> None:
    """Write a user's own network, `net.py:net`."""
    Path("net.py").write_text(f"from torch import nn\ndef net(**_):\n    return nn.Sequential({layers})\n")


# --- formats ---


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_gives_the_frameworks_logits(name: str, tmp_path: Path):
    match, out = NAME.fullmatch(name), tmp_path / "weights.safetensors"
    assert match
    check = FIXTURES / f"{match['net']}.npz"
    expected = np.load(check)
    _, channels, size, _ = expected["images"].shape
    result = convert(
        FIXTURES / name, MODELS[match["model"]], out, shape=Shape(size=size), check=check, report=lambda sentence: None
    )
    assert (result["image_size"], result["channels"], result["classes"]) == (size, channels, 3)
    recipe = Recipe(model=MODELS[match["model"]], epochs=1, batch_size=1, image_size=size, channels=channels)
    model = build_model(recipe, 3, allow_code=True)
    model.load_state_dict(read_weights(out)[0])
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(expected["images"])).numpy()
    assert np.abs(logits - expected["logits"]).max() < 1e-5 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("name", ["keras2-fashion-cnn.h5", "paddle-fashion-cnn.pdparams", "tf-fashion-cnn-saved"])
def test_training_starts_from_such_files(name: str):
    """Four classes instead of three: the head starts fresh, the rest is that of the file."""
    weights = str(FIXTURES / name)
    recipe = Recipe(model=FASHION, epochs=1, batch_size=1, image_size=20, channels=1, weights=weights)
    equal, other = (build_model(recipe, classes) for classes in (3, 4))
    sentences: list[str] = []
    for model in (equal, other):
        load_pretrained(model, recipe, sentences.append)
    assert "the head included" in sentences[0] and "starts fresh" in sentences[1]
    own, theirs = equal.state_dict(), other.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own if not key.startswith("classifier.2"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("tf-small-estimator", "tf-small-estimator/model.ckpt-100.index"),
        ("tf-small-estimator/model.ckpt-100.data-00000-of-00001", "tf-small-estimator/model.ckpt-100.index"),
        ("tf-small-saved", "tf-small-saved/variables/variables.index"),
    ],
)
def test_a_checkpoint_is_named_by_its_folder_its_prefix_or_a_file(given: str, found: str):
    assert find_file(FIXTURES / given) == FIXTURES / found


@pytest.mark.parametrize("left_out", ["scale", "center"])
def test_the_scale_or_the_shift_of_a_norm_may_be_left_out(run, left_out: str):
    """Of three variables, the description alone tells which one the first is."""
    norm = nn.BatchNorm2d(4)
    nn.init.normal_(norm.weight if left_out == "center" else norm.bias)
    values = [norm.weight if left_out == "center" else norm.bias, torch.randn(4), torch.rand(4)]
    layer = {"name": "norm", "epsilon": 1e-5, "scale": left_out != "scale", "center": left_out != "center"}
    conv = small(3).get_parameter("0.weight")
    with h5py.File("f.weights.h5", "w") as file:
        file["layers/conv/vars/0"] = conv.detach().permute(2, 3, 1, 0).numpy()
        for number, value in enumerate(values):
            file[f"layers/norm/vars/{number}"] = value.detach().numpy()
        file.attrs["model_config"] = json.dumps({"layers": [{"config": {"name": "conv"}}, {"config": layer}]})
    write_net(
        "nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)"
    )
    words = ("f.weights.h5", "--model", "net.py:net", "--out", "w.safetensors", "--classes", "3")
    code, _, message = run(*words)
    assert code == 0, message
    found, expected = load_file("w.safetensors"), {"weight": norm.weight, "bias": norm.bias, "running_mean": values[1]}
    assert all(torch.equal(found[f"1.{name}"], value) for name, value in expected.items())


# --- the command ---


def test_it_prints_the_pairs_of_layers_and_the_difference(run):
    words = (FIXTURES / "keras-small.keras", "--model", SMALL)
    code, printed, _ = run(*words, "--check", CHECK, "--out", "w.safetensors")
    assert code == 0 and len(printed) < 500 and "conv2d_" not in printed
    assert "w.safetensors: 13 tensors, all matched (--verbose lists the layers), of" in printed
    assert "the largest difference of logits is" in printed
    code, printed, _ = run(*words, "--out", "v.safetensors", "--verbose")
    assert "0 = conv2d_" in printed
    code, printed, _ = run(*words, "--out", "j.safetensors", "--json")
    result = json.loads(printed)
    assert (result["image_size"], result["channels"], result["classes"]) == (12, 3, 3)
    assert result["difference"] is None
    assert load_file("w.safetensors").keys() == load_file("j.safetensors").keys()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("gone.h5", "--model", SMALL), "gone.h5: there is no such file or folder"),
        (("EMPTY", "--model", SMALL), "the folder holds none of"),
        (("keras-small.keras", "--model", "fashion-cmn"), "fashion-cnn"),
        (("keras-small.keras", "--model", SMALL, "--size", "0"), "--size 0"),
        (("paddle-small.pdparams", "--model", FASHION), "do not fit the model"),
        (("paddle-fashion-cnn.pdparams", "--model", FASHION), "built for 28 pixels, unless --size N or HxW"),
        (("keras-keras-resnet.weights.h5", "--model", MODELS["shallow-resnet"]), "18 unexpected (conv2_block2_"),
        (("keras-keras-resnet.weights.h5", "--model", MODELS["torch-resnet"]), "use the model keras-resnet50"),
        (("program.pdiparams", "--model", SMALL), "save paddle's model.state_dict() as .pdparams"),
        (("keras-small.keras", "--model", SMALL, "--out", "w.bin"), "must end in .safetensors"),
        (("keras-small.keras", "--model", SMALL, "--out", "kept.safetensors"), "kept.safetensors: exists already"),
        (("headless.pt", "--model", SMALL, "--size", "12", "--classes", "3", "--check", CHECK), "has no head"),
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing(run, tmp_path: Path, words: tuple[str, ...], reason: str):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "program.pdiparams").write_bytes(b"\0" * 64)
    (tmp_path / "kept.safetensors").write_text("mine")
    state = small(3).state_dict()
    torch.save({name: state[name] for name in list(state)[:-2]}, "headless.pt")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    file = FIXTURES / words[0] if (FIXTURES / words[0]).exists() else Path(words[0])
    code, printed, message = run(file, "--out", "w.safetensors", *words[1:])
    assert (code, printed) == (2, "")
    assert reason in message and len(message) < 2500
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tensors_that_do_not_fit_are_counted_in_the_message_and_listed_by_json(run):
    state = small(3).state_dict()
    missing = ("0.bias", "1.weight", "1.bias", "1.running_mean", "4.bias")
    other = {"0.weight": [4, 3, 5, 5], "8.weight": [5, 25]}
    extra = {f"extra{i}.offset": [i] for i in range(1, 8)}
    kept = {name: tensor for name, tensor in state.items() if name not in missing}
    torch.save(kept | {name: torch.zeros(shape) for name, shape in (other | extra).items()}, "f.pt")
    words = ("f.pt", "--model", SMALL, "--size", "12", "--out", "w.safetensors")
    code, printed, message = run(*words)
    assert (code, printed) == (2, "")
    assert "2 misshapen (0.weight is [4, 3, 5, 5] in the file but [4, 3, 3, 3] in the model, " in message
    assert "5 missing (0.bias [4], 1.weight [4], 1.bias [4], 1.running_mean [4], and 1 more)" in message
    assert "7 unexpected (" in message
    assert "--json lists all" in message
    code, printed, again = run(*words, "--json")
    found = json.loads(printed)
    assert (code, again) == (2, message)
    assert message == f"flatout: {found['error']}"
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    assert found["misshapen"] == {name: {"file": shape, "model": shapes[name]} for name, shape in other.items()}
    assert found["missing"] == {name: shapes[name] for name in missing}
    assert found["unexpected"] == extra
    assert not Path("w.safetensors").exists()


def test_a_model_for_one_size_alone_asks_for_its_flags(run):
    write_net("nn.Flatten(), nn.Linear(300, 3)")
    torch.save({"1.weight": torch.ones(3, 300), "1.bias": torch.ones(3)}, "f.pt")
    words = ("f.pt", "--model", "net.py:net", "--out", "w.safetensors")
    code, _, message = run(*words)
    assert code == 2 and "224x224 pixels" in message
    assert "--size N or HxW, --channels C and --classes K" in message
    assert run(*words, "--size", "10", "--classes", "3")[0] == 0


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


# --- --check ---


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda images, logits: (images.transpose(0, 2, 3, 1), logits), 0),  # channels last
        (lambda images, logits: (images, logits[:, [1, 0, 2]]), 2),
        (lambda images, logits: (images, np.full_like(logits, np.nan)), 2),
        (lambda images, logits: (images, np.zeros((len(images), 4))), 2),
        (lambda images, logits: (np.array([None]), logits), 2),
        (lambda images, logits: (images[:0], logits[:0]), 2),
    ],
)
def test_the_check_compares_logits(run, change, code: int):
    arrays = np.load(CHECK)
    images, logits = change(arrays["images"], arrays["logits"])
    np.savez("a.npz", images=images, logits=logits)
    words = (FIXTURES / "keras-small.keras", "--model", SMALL, "--check", "a.npz", "--out", "w.safetensors")
    found, _, message = run(*words)
    assert found == code
    assert code == 0 or "a.npz" in message
    assert Path("w.safetensors").exists() == (code == 0)


# --- layouts ---


def test_depthwise_kernels_of_keras_are_converted(run):
    layers = "nn.Conv2d(3, 6, 3, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)"
    write_net(layers)
    net = eval(f"nn.Sequential({layers})").eval()
    state = net.state_dict()
    kernel = state["0.weight"].numpy().reshape(3, 2, 3, 3).transpose(2, 3, 0, 1)
    with h5py.File("f.weights.h5", "w") as file:
        for name, values in (("a", (kernel, state["0.bias"])), ("b", (state["3.weight"].T, state["3.bias"]))):
            file[f"{name}/vars/0"], file[f"{name}/vars/1"] = values
    images = torch.randn(4, 3, 4, 5)
    np.savez("a.npz", images=images, logits=net(images).detach())
    words = ("f.weights.h5", "--model", "net.py:net", "--check", "a.npz", "--out", "w.safetensors", "--verbose")
    code, printed, message = run(*words, "--classes", "5")
    assert code == 0, message
    assert "0 = a, 3 = b" in printed
