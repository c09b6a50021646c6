"""Runs on the Hugging Face hub: their address, and their files in its cache on this host."""

import re
from pathlib import Path

from flatout.errors import InputError, causes, first_line
from flatout.report.run_files import FOLD, KNOWN, RECIPE, SUMMARY, WEIGHTS

SCHEME = "hf://"
_URL = re.compile(r"hf://(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?/?")
_TO_READ = (RECIPE, SUMMARY, WEIGHTS, KNOWN)
# What a refusal means, by its HTTP status.
_REFUSALS = {
    401: "access is denied (HTTP 401): check the name; for a private run, run hf auth login or set HF_TOKEN",
    403: "access is denied (HTTP 403): accept the terms on the model's page, or use a token with access",
    404: "there is no such repository or revision; check the name",
}


def is_published(path: str | Path) -> bool:
    """Return whether a run is named by its address on the hub."""
    return str(path).startswith(SCHEME)


def parse_address(url: str) -> tuple[str, str | None]:
    """Return the repository and the revision, if any, of `hf://USER/NAME[@REVISION]`.

    Raises:
        InputError: the address has another form.
    """
    match = _URL.fullmatch(url)
    if match is None or match["repository"].startswith(("datasets/", "spaces/")):
        raise InputError(f"{url}: is not the address of a run; give hf://USER/NAME")
    return match["repository"], match["revision"]


def download_run(url: str) -> Path:
    """Return a folder with the files of a published run that `load` reads, as far as it has them.

    They are downloaded into the Hugging Face cache, by the settings of huggingface_hub (HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE, proxies). Offline, or where the hub does not answer, those in the cache are used.

    Raises:
        InputError: the address is wrong, or the run is neither in the cache nor to be downloaded.
    """
    from huggingface_hub import snapshot_download

    from flatout.models.hub import bars_on_terminals, without_xet

    repository, revision = parse_address(url)
    wanted = [pattern for name in _TO_READ for pattern in (name, f"{FOLD.format('*')}/{name}")]
    try:
        with without_xet(), bars_on_terminals():
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except Exception as error:  # huggingface_hub passes on what its HTTP library raises, which differs by version
        raise InputError(f"{url}: {reason_of(error)}") from error
    if not (folder / RECIPE).is_file():
        raise InputError(f"{url}: holds no run of flatout: {RECIPE} is missing; publish one with flatout upload")
    return folder


def reason_of(error: BaseException) -> str:
    """Return why a run cannot be downloaded, with the fix where it is known."""
    status = status_of(error)
    if status is not None:
        return _REFUSALS.get(status) or f"the hub answered with HTTP {status}; try again later"
    if any(type(each).__name__ == "OfflineModeIsEnabled" for each in causes(error)):
        return "is not in the Hugging Face cache, and HF_HUB_OFFLINE is set; unset it to download the run"
    return f"could not be downloaded ({first_line(causes(error)[-1])}); check the network and HF_ENDPOINT"


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that led to an error, if there was one."""
    responses = (getattr(each, "response", None) for each in causes(error))
    return next((response.status_code for response in responses if response is not None), None)
