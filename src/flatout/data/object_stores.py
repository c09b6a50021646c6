"""Files in object stores, through fsspec: Amazon S3 and servers of its kind, Google Cloud Storage, Hugging Face."""

import base64
import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from flatout.data.transfer import Chunks, RemoteFile, SourceChanged, TransferError
from flatout.errors import InputError, first_line

_CHUNK_BYTES = 1 << 23
_SILENT = logging.NullHandler()


@dataclass(frozen=True, kw_only=True)
class _Store:
    """How fsspec's file system of one scheme is used.

    Attributes:
        package: what has to be installed, and how.
        version: from what a file's `info` tells to what only this content has.
        digest: the same, to a hash function and a digest, if there is one.
        access: what to do about missing permission.
        options: arguments of the file system.
    """

    package: str
    version: Callable[[Mapping[str, Any]], str]
    digest: Callable[[Mapping[str, Any]], tuple[str, str] | None]
    access: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _md5_of_google(info: Mapping[str, Any]) -> tuple[str, str] | None:
    return ("md5", base64.b64decode(info["md5Hash"]).hex()) if info.get("md5Hash") else None


def _sha256_of_hugging_face(info: Mapping[str, Any]) -> tuple[str, str] | None:
    return ("sha256", info["lfs"]["sha256"]) if info.get("lfs") else None


STORES = {
    "s3": _Store(
        package="s3fs: pip install 'flatout[remote]'",
        version=lambda info: str(info.get("ETag", "")).strip('"'),
        # An ETag is an MD5 digest for some ways of storing only; botocore compares sizes.
        digest=lambda info: None,
        access="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=1",
        options={"config_kwargs": {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 2}}},
    ),
    "gs": _Store(
        package="gcsfs: pip install gcsfs",
        version=lambda info: str(info.get("generation", "")),
        digest=_md5_of_google,
        access="run gcloud auth application-default login; for a public bucket set FSSPEC_GS_TOKEN=anon",
    ),
    "hf": _Store(
        package="huggingface_hub: pip install huggingface_hub",
        version=lambda info: str(info.get("blob_id") or info.get("xet_hash") or ""),
        digest=_sha256_of_hugging_face,
        access="accept the terms of the data set, if it has any, and run hf auth login or set HF_TOKEN",
    ),
}


def stored_files(url: str) -> list[RemoteFile]:
    """List a file, or all files of a folder, whose names then start with that of the folder.

    Raises:
        InputError: a package is missing, nothing is there, or the store is not there or refuses.
    """
    from fsspec.core import url_to_fs

    store = STORES[url.partition("://")[0]]
    try:
        files, path = url_to_fs(url, **copy.deepcopy(store.options))  # s3fs changes them
    except ImportError:
        raise InputError(f"{url}: needs the package {store.package}") from None
    # What the libraries log about errors, with tracebacks, is in the message.
    logging.getLogger(type(files).__module__.partition(".")[0]).addHandler(_SILENT)
    try:
        files.invalidate_cache()  # of an earlier call in this process
        path = files.info(path)["name"].rstrip("/")
        found = files.find(path, detail=True)
    except Exception as error:  # each store's own
        raise _failed(url, store, error) from error
    # Some tools mark a folder by an empty object.
    kept = [info for name, info in sorted(found.items()) if info["type"] == "file" and not name.endswith("/")]
    if not kept:
        raise TransferError(url, "the folder holds no files", "check the URL")
    return [_described(files, store, info, PurePosixPath(path).parent) for info in kept]


def _described(files: Any, store: _Store, info: Mapping[str, Any], folder: PurePosixPath) -> RemoteFile:
    path, version = info["name"], store.version(info)
    url = files.unstrip_protocol(path)

    def chunks(start: int) -> Chunks:
        try:
            with files.open(path, "rb", cache_type="none") as file:
                if store.version(file.details) != version:
                    raise SourceChanged(url)
                file.seek(start)
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except TransferError:
            raise
        except Exception as error:  # each store's own
            # s3fs compares the ETag of every answer.
            is_other = type(error).__name__ == "FileExpired"
            raise SourceChanged(url) if is_other else _failed(url, store, error) from error

    return RemoteFile(
        url=url,
        name=str(PurePosixPath(path).relative_to(folder)).lstrip("."),
        size=info["size"],
        version=version,
        digest=store.digest(info),
        read=lambda start: (start, chunks(start)),
    )


def _failed(url: str, store: _Store, error: Exception) -> TransferError:
    """Return the error of a store's library in our words."""
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return TransferError(url, "there is no such file or folder", "check the URL")
    if isinstance(error, PermissionError) or "Credentials" in name or "GatedRepo" in name:
        return TransferError(url, f"access is denied ({first_line(error)})", store.access)
    return TransferError(url, first_line(error), "check the URL and the network")
