"""A server of a test in place of the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants


def set_endpoint(patch: pytest.MonkeyPatch, url: str) -> None:
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def using_hub(url: str, home: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process a hub, an empty cache and no token: huggingface_hub has read the environment already."""
    set_endpoint(patch, url)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    close_session()
    yield
    close_session()
