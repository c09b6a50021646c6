"""Exports of the networks of all built-in jobs and of timm, of every task, number format and kind of image."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import flatout
from flatout.cli import main
from flatout.export import export
from flatout.export.write import FORMATS
from flatout.models.build import list_names
from tests.system.test_export import IMAGES

onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX: pip install 'flatout[onnx]'")

# As the other tests of Keras, which share its process: it reads this once.
os.environ["KERAS_BACKEND"] = "jax"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures_in_module")]
USUAL: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 32, "epochs": 1, "seed": 3}
LONGER: dict[str, Any] = {**USUAL, "epochs": 4}
# What networks are trained on: shapes that they take, small enough for 1,000 images on a CPU. Deeper ResNets of Keras
# and wider fast networks are made as the first ones.
PHOTOS = {"vgg16": 32, "cats-dogs-cnn": 48, "caltech-cnn": 32, "keras-resnet50": 32}
LIKEWISE = {"keras-resnet101", "keras-resnet152", "fast-cnn-32", "fast-cnn-64", "fast-cnn-128"}
NETS = {name: (PHOTOS.get(name, 28), 3 if name in PHOTOS else 1) for name in list_names() if name not in LIKEWISE}
NETS |= {"timm:resnet18": (32, 3), "timm:vit_tiny_patch16_224": (64, 3), "timm:mobilenetv3_small_050": (48, 3)}


def patterns(count: int, size: tuple[int, int], channels: int, bits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return images of stripes, whose class is their width, uint8 or uint16 [N, H, W, C], and the classes."""
    rng, labels = np.random.default_rng(count), np.arange(count) % 4
    across = np.arange(size[1])[None, None, :, None] + rng.integers(0, 20, (count, 1, 1, channels))
    stripes = 60 + 120 * (across // (2 + 2 * labels[:, None, None, None]) % 2)
    images = stripes + rng.integers(0, 60, (count, *size, channels))
    return (images * (257 if bits == 16 else 1)).astype(np.uint16 if bits == 16 else np.uint8), labels


def saved(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    np.savez(path, images=images, labels=labels)
    return path


def onnx_classes(path: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    parts = [session.run(["probabilities"], {"images": images[i : i + 50]})[0] for i in range(0, len(images), 50)]
    return np.concatenate(parts).argmax(axis=1)


@pytest.mark.parametrize("name", NETS)
def test_classes_of_a_thousand_images_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    size, channels = NETS[name]
    data = saved(tmp_path / "data.npz", *patterns(160, (size, size), channels))
    run = flatout.fit(name, data, out=tmp_path / "run", image_size=size, channels=channels, **USUAL)
    done = export(run, tmp_path / "model.onnx")
    assert done.agreement.equal == 1.0
    images, _ = patterns(1000, (size, size), channels)
    expected = run.probabilities(images).argmax(axis=1)
    assert np.array_equal(onnx_classes(done.path, images), expected)
    # The other twins have the layers of these; those of parallel-cnn are below.
    if name in ("fashion-cnn", "cats-dogs-cnn"):
        assert export(run, tmp_path / "model.keras").agreement.equal == 1.0
    if name == "keras-resnet50":
        check_that_convert_reads_back_what_is_written(run, tmp_path / "model.weights.h5")
    assert export(run, tmp_path / "plain", format="torch").agreement.equal == 1.0


def check_that_convert_reads_back_what_is_written(run: flatout.Run, path: Path) -> None:
    """Keras runs on torch here: JAX would compile 50 layers one by one."""
    words = [sys.executable, "-m", "flatout", "export", str(run.path), "--out", str(path)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "KERAS_BACKEND": "torch"})
    out = path.with_name("back.safetensors")
    assert main(["convert", str(path), "--model", "keras-resnet50", "--size", "32", "--out", str(out)]) == 0
    found = load_file(out)
    for name, tensor in run.model.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.allclose(found[name], tensor, atol=1e-7)


# Each run differs from others in all that its name says; no two of these have anything to do with each other.
KINDS: dict[str, dict[str, Any]] = {
    "several labels, 16 bits, padded": {
        "labels": lambda y: np.eye(5, dtype=np.uint8)[:, :4][y] | np.eye(4, dtype=np.uint8)[(y + 1) % 4],
        "bits": 16,
        "shape": (20, 34),
        "resize": "pad",
    },
    "numbers, six channels": {"labels": lambda y: y * 1.5 + 20, "channels": 6},
    "one logit, cropped": {
        "labels": lambda y: y // 2,
        "loss": "binary-cross-entropy",
        "shape": (34, 20),
        "image_size": (16, 20),
        "resize": "crop",
        "stored_size": (24, 30),
    },
    "views": {"tta": True, "augment": {"flip": True}},
    "folds": {"folds": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_exported_to_every_format(kind: str, tmp_path: Path) -> None:
    options = {"image_size": 20, **KINDS[kind]}
    shape, channels, bits = (options.pop(n, d) for n, d in (("shape", (20, 20)), ("channels", 1), ("bits", 8)))
    images, classes = patterns(300, shape, channels, bits)
    data = saved(tmp_path / "data.npz", images, options.pop("labels", lambda y: y)(classes))
    run = flatout.fit("parallel-cnn", data, out=tmp_path / "run", channels=channels, **USUAL | options)
    for name, ends in FORMATS.items():
        out = tmp_path / f"model{ends[0] if ends else ''}"
        if name == "keras" and kind in ("views", "folds"):
            with pytest.raises(flatout.InputError, match="writes one"):
                export(run, out)
            continue
        if name == "exported" and kind != "views":
            continue  # the ONNX file is made from this program
        done = export(run, out, format=name)
        assert done.agreement.equal == 1.0
        assert done.agreement.difference < 1e-3
    if channels < 4:
        files(tmp_path / "files", images[:8, ..., 0])
        answers = [printed_predictions(path, tmp_path) for path in (tmp_path / "run", tmp_path / "model.onnx")]
        assert answers[0] == answers[1]


def files(folder: Path, images: np.ndarray) -> None:
    """Write images as files, three times as large."""
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.repeat(3, axis=0).repeat(3, axis=1)).save(folder / f"{i}.png")


def printed_predictions(path: Path, folder: Path) -> Any:
    out = folder / f"{path.name}.json"
    with out.open("w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert main(["predict", str(path), str(folder / "files"), "--json"]) == 0

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(one) for key, one in value.items()}
        return [rounded(one) for one in value] if isinstance(value, list) else near(value)

    def near(value: Any) -> Any:
        return float(f"{value:.3f}") if isinstance(value, float) else value

    return rounded(json.loads(out.read_text())["predictions"])


@pytest.fixture(scope="module")
def striped(tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    """Return a run that is right about nearly all images."""
    folder = tmp_path_factory.mktemp("striped")
    data = saved(folder / "data.npz", *patterns(1200, (24, 24), 3))
    return flatout.fit("fast-cnn-16", data, out=folder / "run", image_size=24, tta=False, **LONGER)


def test_smaller_numbers_cost_little_accuracy(striped: flatout.Run, tmp_path: Path) -> None:
    full, half, quarter = (export(striped, tmp_path / f"{p}.onnx", precision=p) for p in ("fp32", "fp16", "int8"))
    assert half.bytes < 0.65 * full.bytes
    assert quarter.bytes < 0.5 * full.bytes
    for small in (half, quarter):
        assert small.agreement.run_metrics["accuracy"] > 0.9
        assert small.agreement.equal >= 0.98
        assert small.agreement.difference > full.agreement.difference
        text = "\n".join(small.lines())
        assert f"{100 * small.agreement.equal:.2f} % equal labels" in text
        assert f"accuracy {small.agreement.metrics['accuracy']:.4f}" in text


def test_plain_pytorch_needs_no_flatout(striped: flatout.Run, tmp_path: Path) -> None:
    export(striped, tmp_path / "plain", format="torch")
    image = patterns(7, (50, 40), 4)[0][6]
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(image).save(tmp_path / "image.png", exif=turned)  # and transparent in part
    code = "import sys, runpy; sys.modules['flatout'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", code, tmp_path / "plain" / "model.py", tmp_path / "image.png"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    name, _, text = done.stdout.partition(": ")
    best, probability = text.split(",")[0].split()
    (expected,) = striped.predict(tmp_path / "image.png", top=1)
    assert name == str(tmp_path / "image.png")
    assert (best, float(probability)) == (expected.classes[0], pytest.approx(expected.probabilities[0], abs=0.02))


def test_a_keras_model_is_written_as_it_was_given(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", reason="needs Keras 3")
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(6, 3), layers.ReLU(), layers.Flatten(), layers.Dense(10, "softmax")]
    )
    data = saved(tmp_path / "data.npz", IMAGES[:300], np.arange(300) % 10)
    flatout.fit(net, data, out=tmp_path / "run", engine="xla", image_size=8, channels=1, **USUAL)
    run = flatout.load(tmp_path / "run", model=net)
    for name in ("model.keras", "model.weights.h5"):
        assert export(run, tmp_path / name).agreement.equal == 1.0
    again = keras.models.load_model(tmp_path / "model.keras")
    assert [type(layer).__name__ for layer in again.layers] == [type(layer).__name__ for layer in net.layers]
    with pytest.raises(flatout.InputError, match="Keras model"):
        export(run, tmp_path / "model.onnx")


def test_a_model_too_large_for_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.export.onnx.MOST_BYTES", 10_000)
    data = saved(tmp_path / "data.npz", IMAGES[:100], np.arange(100) % 10)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, 10))
    flatout.fit(net, data, out=tmp_path / "run", **USUAL)
    with pytest.raises(flatout.InputError, match="single ONNX file holds at most 2 GB"):
        export(flatout.load(tmp_path / "run", model=net), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
