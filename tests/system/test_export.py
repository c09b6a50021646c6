"""Runs in other formats: the files answer as the run does, and nothing else is kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import flatout
from flatout.cli import main
from flatout.export import export

onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX: pip install 'flatout[onnx]'")

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")
USUAL: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 32, "epochs": 2, "seed": 3}


DIGITS: Any = load_digits()
IMAGES = (DIGITS.images * 15.9).astype(np.uint8)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with 300 digits of 8x8 pixels."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, images=IMAGES[:300], labels=DIGITS.target[:300])
    return path


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    flatout.fit("parallel-cnn", digits, out=out, optimizer=flatout.Adam(lr=0.01), image_size=8, **USUAL)
    return out


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ONNX file of the run."""
    out = tmp_path_factory.mktemp("exports") / "model.onnx"
    done = export(flatout.load(trained), out)
    assert done.agreement.equal == done.agreement.resized_equal == 1.0
    assert done.bytes == out.stat().st_size
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    return out


def pictures(folder: Path) -> Path:
    """Write digits of several sizes and shapes, and noise, as files."""
    folder.mkdir()
    for i, image in enumerate(IMAGES[300:306]):
        Image.fromarray(image).resize((8 + 3 * i, 8 + 2 * i)).save(folder / f"{i}.png")
    noise = np.random.default_rng(0).integers(0, 256, (30, 20), np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    return folder


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_answers_alike_with_a_run_and_with_its_onnx_file(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pictures(tmp_path / "pictures")
    flags = (folder, "--coverage", "0.9", "--top", "2", "--json")
    ours, theirs = (printed(capsys, "predict", path, *flags)["predictions"] for path in (trained, exported))
    assert len(ours) == len(theirs) == 7
    for one, other in zip(ours, theirs, strict=True):
        assert [p["class"] for p in one["predictions"]] == [p["class"] for p in other["predictions"]]
        for p, q in zip(one.pop("predictions"), other.pop("predictions"), strict=True):
            assert p["probability"] == pytest.approx(q["probability"], abs=1e-5)
        assert one == other  # file, unknown, set
    assert main(["predict", str(exported), str(folder / "0.png")]) == 0
    assert f"{folder / '0.png'}: " in capsys.readouterr().out


def test_an_onnx_file_takes_images_of_any_size_and_describes_itself(trained: Path, exported: Path) -> None:
    session = onnxruntime.InferenceSession(exported)
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["N", "height", "width", 1])
    assert session.get_outputs()[0].shape == ["N", 10]
    run, metadata = flatout.load(trained), session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(i) for i in range(10)]
    assert run.trust is not None
    assert run.trust.novelty is not None
    assert float(metadata["temperature"]) == run.trust.temperature
    assert float(metadata["unknown_threshold"]) == run.trust.novelty.threshold
    assert (metadata["model"], metadata["task"], metadata["image_size"]) == ("parallel-cnn", "single-label", "[8, 8]")
    for shape in ((1, 1, 1, 1), (2, 40, 9, 1), (5, 8, 8, 1)):
        probabilities = session.run(["probabilities"], {"images": np.zeros(shape, np.uint8)})[0]
        assert probabilities.shape == (shape[0], 10)
        assert probabilities.sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert b"/graph.py" not in exported.read_bytes()  # paths of this machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "taken.onnx"], "taken.onnx: exists"),
        (["--out", "model.bin"], "--format is missing"),
        (["--out", "model.bin", "--format", "onnx"], "must end in .onnx"),
        (["--out", "model.pt2", "--precision", "fp16"], "--precision fp16: is for --format onnx"),
        (["--out", "model.onnx", "--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_explained(
    words: list[str],
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.onnx").write_text("mine")
    assert main(["export", str(trained), *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.onnx"]
    assert Path("taken.onnx").read_text() == "mine"


def test_a_file_that_is_no_export_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = exported.read_bytes()
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    for number, (before, after) in enumerate([(b"[8, 8]", b"[8, 8}"), (b"parallel-cnn", b"parallel-\xffnn")]):
        (tmp_path / f"damaged{number}.onnx").write_bytes(whole.replace(before, after))
    for name, message in (
        ("broken.onnx", "cannot be read as an ONNX model"),
        ("cut.onnx", "cannot be read as an ONNX model"),
        ("damaged0.onnx", "is damaged: its metadata cannot be read (JSONDecodeError"),
        ("damaged1.onnx", "is damaged: its metadata cannot be read (UnicodeDecodeError"),
        ("absent.onnx", "no such file"),
    ):
        assert main(["predict", str(tmp_path / name), str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


def test_runs_whose_data_has_moved_are_verified_on_other_data(
    trained: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = digits.rename(digits.with_name("moved.npz"))
    try:
        words = ["export", str(trained), "--format", "torch", "--out", str(tmp_path / "plain")]
        assert main(words) == 2
        assert "--data PATH" in capsys.readouterr().err
        found = printed(capsys, *words, "--data", moved, "--json")
        assert (found["split"], found["images"], found["equal_labels"]) == ("all", 300, 1.0)
        assert {path.name for path in (tmp_path / "plain").iterdir()} == {"model.py", "weights.safetensors"}
    finally:
        moved.rename(digits)


class Net(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.body, self.odd = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.body(x))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 9 * torch.rand_like(x)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else 2 * x


class Kth(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.kthvalue(2, dim=1, keepdim=True)[0]


@pytest.mark.parametrize(
    ("odd", "out", "message"),
    [
        (
            Noise(),
            "model.pt2",
            r"\d+ of 30 test images.*% equal.*image \d+ is '\d'.*no file was kept",
        ),
        (Branch(), "model.pt2", r"layer 'odd' \(Branch\) cannot be exported"),
        pytest.param(Kth(), "model.onnx", r"kthvalue.* of layer 'odd' \(Kth\).*ONNX", marks=pytest.mark.slow),
        (Kth(), "folder", "is your own code"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(
    odd: nn.Module, out: str, message: str, digits: Path, tmp_path: Path
) -> None:
    net = Net(odd)
    flatout.fit(net, digits, out=tmp_path / "run", **USUAL)
    (tmp_path / "exports").mkdir()
    run = flatout.load(tmp_path / "run", model=net)
    with pytest.raises(flatout.InputError, match=message):
        export(run, tmp_path / "exports" / out, format=None if "." in out else "torch")
    assert not list((tmp_path / "exports").iterdir())
