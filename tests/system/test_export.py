"""Runs as ONNX files, which answer as the run does; nothing else is kept."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import flatout
from flatout.cli.main import main
from flatout.data.pixels import resize_images
from flatout.inference import export

onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX: pip install 'flatout[onnx]'")

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")
USUAL: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 32, "epochs": 2, "seed": 3}
DIGITS: Any = load_digits()
IMAGES = (DIGITS.images * 15.9).astype(np.uint8)


def saved(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    np.savez(path, images=images, labels=labels)
    return path


def patterns(count: int, size: tuple[int, int], channels: int, bits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return images of stripes, whose class is their width, uint8 or uint16 [N, H, W, C], and the classes."""
    rng, labels = np.random.default_rng(count), np.arange(count) % 4
    across = np.arange(size[1])[None, None, :, None] + rng.integers(0, 20, (count, 1, 1, channels))
    stripes = 60 + 120 * (across // (2 + 2 * labels[:, None, None, None]) % 2)
    images = stripes + rng.integers(0, 60, (count, *size, channels))
    return (images * (257 if bits == 16 else 1)).astype(np.uint16 if bits == 16 else np.uint8), labels


def assert_same_answers(run: flatout.Run, file: Path, images: np.ndarray) -> None:
    """Compare the answers of a run and of its ONNX file for images uint8 or uint16 [N, H, W, C] of another size."""
    recipe = run.recipe
    shape: dict[str, Any] = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize}
    expected = run.probabilities(resize_images(images, **shape, bits=8 * images.itemsize))
    (found,) = onnxruntime.InferenceSession(file).run(["probabilities"], {"images": images})
    # Some pixels are rounded to the neighbouring level.
    assert np.abs(found - expected).max() < 0.02 * run.task.label_std


# --- one run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with 300 digits of 8x8 pixels."""
    return saved(tmp_path_factory.mktemp("digits") / "digits.npz", IMAGES[:300], DIGITS.target[:300])


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    return flatout.fit("parallel-cnn", digits, out=out, optimizer=flatout.Adam(lr=0.01), image_size=8, **USUAL)


@pytest.fixture(scope="module")
def exported(run: flatout.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ONNX file of the run, whose data has moved: it was verified on other data."""
    out, data = tmp_path_factory.mktemp("exports") / "model.onnx", Path(run.recipe.data.path)
    moved = data.rename(data.with_name("moved.npz"))
    try:
        with pytest.raises(flatout.InputError, match="verify on other images with --data PATH"):
            run.export(out)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            words = ["--out", str(out), "--format", "onnx", "--data", str(moved), "--json"]
            assert main(["export", str(run.path), *words]) == 0
    finally:
        moved.rename(data)
    found = json.loads(printed.getvalue())
    assert [found[key] for key in ("split", "images", "equal_labels", "bytes")] == ["all", 300, 1.0, out.stat().st_size]
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    return out


def test_an_onnx_file_takes_images_of_any_size_and_describes_itself(run: flatout.Run, exported: Path) -> None:
    for rows, columns in ((2, 3), (5, 1), (1, 4)):
        larger = IMAGES[300:340, ..., None].repeat(rows, axis=1).repeat(columns, axis=2)
        assert_same_answers(run, exported, larger[:, 1:])
    session = onnxruntime.InferenceSession(exported)
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["N", "height", "width", 1])
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(i) for i in range(10)]
    assert run.calibration is not None
    assert float(metadata["temperature"]) == run.calibration.temperature
    assert (metadata["model"], metadata["task"], metadata["image_size"]) == ("parallel-cnn", "single-label", "[8, 8]")
    assert b"/export.py" not in exported.read_bytes()  # paths of this machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["taken.onnx"], "taken.onnx: exists"),
        (["model.pt2"], "model.pt2: must end in .onnx"),
        (["model.onnx", "--format", "exported"], "--format exported: the only format is onnx"),
        (["model.onnx", "--data", "nowhere"], "nowhere"),
        (["without onnxscript.onnx"], "pip install 'flatout[onnx]'"),
        (["without onnxruntime.onnx"], "pip install 'flatout[onnx]'"),
    ],
)
def test_what_is_wrong_or_missing_is_named(
    words: list[str], message: str, run: flatout.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0].startswith("without "):
        monkeypatch.setitem(sys.modules, Path(words[0]).stem.split()[1], None)
    Path("taken.onnx").write_text("mine")
    assert message in command("export", run.path, "--out", *words, code=2)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("taken.onnx", "mine")]


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("bits", [8, 16])
def test_images_are_resized_as_in_a_pack(resize: str, bits: int) -> None:
    # To a level of 255 at most, or of 65535, where the pack's kernels round otherwise.
    rng, kind = np.random.default_rng(0), {8: np.uint8, 16: np.uint16}[bits]
    for shape in ((28, 28, 1), (50, 71, 3), (13, 9, 5), (301, 224, 3), (1, 1, 1), (3, 400, 1)):
        images = rng.integers(0, 2**bits, (2, *shape), dtype=kind)
        for size in ((28, 28), (20, 45)):
            target: dict[str, Any] = {"size": size, "channels": shape[-1], "resize": resize, "bits": bits}
            expected = resize_images(images, **target).astype(np.int64)
            found = export.Resize(size, resize)(torch.from_numpy(images)).numpy()
            assert np.abs(found - expected).max() <= 1, (shape, size)
            if shape[:2] == size:
                assert np.array_equal(found, images)


# --- what is refused --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A linear layer, with noise, or with a branch by a value."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.body, self.odd = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.odd == "noise":
            return x + 9 * torch.rand_like(x)
        return 2 * x if self.odd == "branch" and x.sum() <= 0 else x


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("noise", r"\d+ of 30 test images.*% equal.*no file was kept"),
        ("branch", "Net cannot be exported .*must not depend on values"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(odd: str, message: str, digits: Path, tmp_path: Path) -> None:
    net = Net(odd)
    flatout.fit(net, digits, out=tmp_path / "run", **USUAL)
    (tmp_path / "exports").mkdir()
    with pytest.raises(flatout.InputError, match=message):
        flatout.load(tmp_path / "run", model=net).export(tmp_path / "exports" / "model.onnx")
    assert not list((tmp_path / "exports").iterdir())


def test_a_large_file_is_refused(run: flatout.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_BYTES", 1_000)
    with pytest.raises(flatout.InputError, match="ONNX file holds at most 2 GB"):
        run.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


# --- every network, every kind of run ---------------------------------------------------------------------------------

# What is in one name has nothing to do with each other.
KINDS: dict[str, dict[str, Any]] = {
    "several labels, 16 bits, padded": {
        "labels": lambda y: np.eye(5, dtype=np.uint8)[:, :4][y] | np.eye(4, dtype=np.uint8)[(y + 1) % 4],
        "bits": 16,
        "shape": (20, 34),
        "resize": "pad",
    },
    "one logit, cropped, folds": {
        "labels": lambda y: y // 2,
        "loss": "binary-cross-entropy",
        "shape": (34, 20),
        "image_size": (16, 20),
        "resize": "crop",
        "stored_size": (24, 30),
        "folds": 2,
    },
    "many layers, views": {"model": "fast-cnn-16", "tta": True},
    "numbers, six channels, a residual network of timm's": {
        "labels": lambda y: y * 1.5 + 20,
        "model": "timm:test_resnet",
        "channels": 6,
    },
    "a transformer": {"model": "timm:test_vit", "channels": 3, "shape": (64, 64), "image_size": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_exported(kind: str, tmp_path: Path) -> None:
    options = {"image_size": 20, "epochs": 1, **KINDS[kind]}
    shape, channels, bits = (options.pop(n, d) for n, d in (("shape", (20, 20)), ("channels", 1), ("bits", 8)))
    images, classes = patterns(100, shape, channels, bits)
    data = saved(tmp_path / "data.npz", images, options.pop("labels", lambda y: y)(classes))
    run = flatout.fit(
        options.pop("model", "parallel-cnn"), data, out=tmp_path / "run", channels=channels, **USUAL | options
    )
    done = run.export(tmp_path / "model.onnx")
    # Folds have no test images.
    assert done.split == ("valid" if "folds" in options else "test")
    assert (done.equal_labels, done.largest_difference < 1e-3) == (1.0, True)
    assert_same_answers(run, tmp_path / "model.onnx", images[:8].repeat(3, axis=1).repeat(3, axis=2))
