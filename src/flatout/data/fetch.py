"""Data at a URL, and public data sets: downloaded once into the cache by fsspec, then read like local files."""

import contextlib
import copy
import hashlib
import json
import logging
import os
import re
import shutil
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from flatout import __version__
from flatout.data.cache import DOWNLOAD, Progress, cache_folder, combined_digest, making, use, writing
from flatout.data.formats.shards import expand_braces
from flatout.utils.errors import InputError, Stopped, causes, first_line
from flatout.utils.files import NO_SPACE, printable, write_atomically

_TIMEOUT_SECONDS = 20.0  # of silence
_CONNECTIONS = 16
_WEB = ("http", "https")
_VERSIONS = ("generation", "blob_id", "xet_hash", "ETag", "Last-Modified")  # keys of a file's version in file systems
_SILENT = logging.NullHandler()


class _Store(NamedTuple):
    package: str  # and how to install it
    access: str  # what to do about missing permission
    options: Mapping[str, object] = {}


_STORES = {
    "s3": _Store(
        package="s3fs: pip install 'flatout[s3]'",
        access="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=1",
        options={"config_kwargs": {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 2}}},
    ),
    "gs": _Store(
        package="gcsfs: pip install 'flatout[gcs]'",
        access="run gcloud auth application-default login; for a public bucket set FSSPEC_GS_TOKEN=anon",
    ),
    "hf": _Store(
        package="huggingface_hub: pip install huggingface_hub",
        access="accept the terms of the data set, if it has any, and run hf auth login or set HF_TOKEN",
    ),
}


class _RemoteFile(NamedTuple):
    path: str  # for fsspec
    name: str  # its path in the folder of the download
    size: int | None
    version: str  # an ETag or the like; empty if the server has none

    def is_complete(self, folder: Path) -> bool:
        path = folder / self.name
        return path.is_file() and self.size in (None, path.stat().st_size)


def is_remote(data: object) -> TypeGuard[str]:
    return isinstance(data, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", data) is not None


def download(url: str, report: Progress) -> tuple[Path, int]:
    """Return the local copy of a file or folder, and a descriptor to close after its use.

    The key of the copy in the cache is made of the URL and of all names, sizes and versions there.
    """
    server = _Server(url)
    name, files = server.list_files()
    versions = (f"{file.name}\0{file.size}\0{file.version}".encode() for file in files)
    target = cache_folder() / "remote" / combined_digest([server.url.encode(), *versions])
    if target.exists():
        report.note(f"{server.shown}: unchanged since it was downloaded into the cache")
    descriptor = use(target, "downloading this data", report, lambda: _download(server, name, files, target, report))
    return target / name, descriptor


# --- transfer ---


def _download(server: "_Server", name: str, files: Sequence[_RemoteFile], target: Path, report: Progress) -> None:
    """Download files to a temporary folder, then rename it. After an error, complete files are kept if valid."""
    unfinished = target.with_name(f"{target.name}.partial")
    missing = [file for file in files if file.size is None or not file.is_complete(unfinished)]
    total, needed = (sum(file.size or 0 for file in some) for some in (files, missing))
    done = f"continuing after {len(files) - len(missing):,} files:" if len(missing) < len(files) else "downloading"
    paths = [unfinished / file.name for file in missing]
    with writing(target.parent, f"{server.shown} needs {needed:,} bytes", needed):
        report.note(f"{done} {server.shown}" + (f" ({total / 1e6:,.1f} MB)" if total else ""))
        try:
            server.get([file.path for file in missing], paths, _Shown(total - needed, total, report))
        except OSError:  # a full disk
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if server.list_files() != (name, files) or not all(file.is_complete(unfinished) for file in files):
            shutil.rmtree(unfinished, ignore_errors=True)
            raise InputError(f"{server.shown}: changed during the download; run the same command again")
        os.sync()
        write_atomically(unfinished / DOWNLOAD, json.dumps({"url": server.shown, "name": name}).encode())
        unfinished.rename(target)


class _Shown(Callback):
    """Shows the number of bytes received of all files."""

    def __init__(self, done: int, total: int, report: Progress) -> None:
        super().__init__(value=done)
        self._total, self._report = max(1, total // 10**6), report

    def branched(self, path_1: str, path_2: str, **kwargs: object) -> "_Shown":
        return self

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        self._report.update(self.value // 10**6, self._total, "MB")


# --- fsspec ---


class _Server:
    """A web server or an object store, as a file system of fsspec; `shown` is its URL for messages."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self._store = _STORES.get(scheme)
        self.url, self.shown = url.rstrip("/") if self._store else url, _without_query(url)
        if scheme not in (*_WEB, *_STORES) or not rest.strip("/") or urllib.parse.urlsplit(url).username is not None:
            known = ", ".join(f"{name}://..." for name in (*_WEB, *_STORES))
            fix = f"give a local path or {known}, with user name and password in ~/.netrc, not in the URL"
            raise InputError(f"{self.shown}: is not read; {fix}")
        options = copy.deepcopy(self._store.options) if self._store else self._web_options()
        try:
            # A new instance each time: cached ones remember file listings.
            self._system: Any = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
        except ImportError:
            assert self._store is not None
            raise InputError(f"{url}: needs the package {self._store.package}") from None
        # The libraries log tracebacks of errors that our messages already contain, and downloads that were given up.
        for library in (type(self._system).__module__.partition(".")[0], "aiohttp", "asyncio"):
            logging.getLogger(library).addHandler(_SILENT)

    def _web_options(self) -> dict[str, object]:
        import aiohttp

        async def refuse_downgrade(session: object, context: object, params: Any) -> None:
            """Refuse unencrypted redirects: aiohttp sends credentials again to the same host."""
            location = params.response.headers.get("Location", "")
            if params.url.scheme == "https" and location.lower().startswith("http:"):
                where = _without_query(location)
                raise InputError(f"{self.shown}: redirects to {where}, without encryption; give another URL")

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(refuse_downgrade)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_SECONDS, sock_read=_TIMEOUT_SECONDS)
        # Other encodings would give the sizes of compressed content. The environment has proxies and ~/.netrc.
        headers = {"Accept-Encoding": "identity", "User-Agent": f"flatout/{__version__}"}
        client = {"trust_env": True, "headers": headers, "timeout": timeout, "trace_configs": [trace]}
        return {"client_kwargs": client}

    def list_files(self) -> tuple[str, list[_RemoteFile]]:
        """Return the name of the data in the folder of its download, and its files."""
        if "{" in self.url:
            # Shards: the names begin with the first folder that has braces.
            base = self.url.partition("{")[0]
            base = base[: base.rindex("/") + 1]
            name = self.url[len(base) :].partition("?")[0]
            parts = [str(path) for path in expand_braces(Path(name))]
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                listed = list(pool.map(self._list_one, (self.url.replace(name, part) for part in parts)))
            files = [file._replace(name=part) for part, found in zip(parts, listed, strict=True) for file in found]
        else:
            files = self._list_one(self.url)
            name = PurePosixPath(files[0].name).parts[0]
        seen = set[PurePosixPath]()
        for file in files:
            path = PurePosixPath(file.name)
            is_strange = printable(file.name) != file.name or re.search(r"[\x00-\x1f]", file.name)
            if is_strange or path.is_absolute() or ".." in path.parts or path in seen:
                raise InputError(f"{self.shown}: {file.name!r} cannot be the name of one local file; rename it there")
            seen.add(path)
        return name, files

    def _list_one(self, url: str) -> list[_RemoteFile]:
        """List a file, or all files of a folder in a store, whose names then start with that of the folder."""
        with self._errors(url):
            self._system.invalidate_cache()
            info = self._system.info(url)
            if self._store is None:
                name = re.split(r"[/\\]", urllib.parse.unquote(urllib.parse.urlsplit(url).path))[-1].lstrip(".")
                if info.get("mimetype") == "text/html" or not name:
                    fix = "give the URL of the file itself; folders are read from s3, gs and hf"
                    raise InputError(f"{_without_query(url)}: is a web page or a folder, not a file; {fix}")
                return [_remote_file(info, name)]
            root = info["name"].rstrip("/")
            found = self._system.find(root, detail=True)
        # Some tools mark a folder by an empty object.
        files = [info for name, info in sorted(found.items()) if info["type"] == "file" and not name.endswith("/")]
        if not files:
            raise InputError(f"{url}: the folder holds no files; check the URL")
        names = [PurePosixPath(info["name"]).relative_to(PurePosixPath(root).parent) for info in files]
        return [_remote_file(info, str(name).lstrip(".")) for info, name in zip(files, names, strict=True)]

    def get(self, remote: list[str], local: list[Path], shown: Callback = DEFAULT_CALLBACK) -> None:
        system: Any = self._system if self._system.async_impl else AsyncFileSystemWrapper(self._system)
        with self._errors(self.url):
            system.get(remote, list(map(str, local)), callback=shown, batch_size=_CONNECTIONS)

    @contextlib.contextmanager
    def _errors(self, url: str) -> Iterator[None]:
        """Turn errors of fsspec and its libraries into InputError; a full disk stays OSError."""
        import aiohttp

        try:
            yield
        except (InputError, Stopped):
            raise
        except Exception as error:  # exceptions of each store's library
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            chain = causes(error)
            if own := next((cause for cause in chain if isinstance(cause, InputError)), None):
                raise own from None
            found = next((cause for cause in chain if isinstance(cause, aiohttp.ClientError)), chain[0])
            if isinstance(found, aiohttp.ClientResponseError) and found.status:
                reason = f"the server answers {found.status} {found.message}".rstrip()
            elif isinstance(found, FileNotFoundError):
                reason = "there is no such file or folder"
            else:
                text = re.sub(r"\?\S*", "", first_line(found))  # a query may be a signature
                reason = f"cannot be downloaded ({type(found).__name__}: {text})"
            access = self._store.access if self._store else "put user name and password into ~/.netrc"
            fix = f"check the URL and the network, and run the same command again; where access is denied, {access}"
            raise InputError(f"{_without_query(url)}: {reason}; {fix}") from error


def _remote_file(info: Mapping[str, Any], name: str) -> _RemoteFile:
    # A weak ETag is fine: servers use it only because they may compress the response.
    versions = (str(info[key]).removeprefix("W/").strip('"') for key in _VERSIONS if info.get(key))
    return _RemoteFile(path=info["name"], name=name, size=info["size"], version=next(versions, ""))


def _without_query(url: str) -> str:
    """Return a URL for messages: without password and query, which may be a signature."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


# --- public data ---


class PublicData(NamedTuple):
    """A data set that anyone may download: mirrors, the best first, and file name -> MD5."""

    base_urls: Sequence[str]
    files: Mapping[str, str]


_KNOWN = tomllib.loads(Path(__file__).with_name("public.toml").read_text(encoding="utf-8"))
PUBLIC = {name: PublicData(**about) for name, about in _KNOWN["sets"].items()}
PUBLIC_NAMES: dict[str, str] = _KNOWN["jobs"]  # jobs whose data is a public set


def where_to_get(job: str) -> str:
    """Return the source and layout of the data of a built-in job that cannot be downloaded automatically."""
    return f"{_KNOWN['where'][job]}; then run flatout train {job} --data FOLDER"


def download_public(data: PublicData, folder: Path, report: Progress) -> Path:
    """Download the files that are missing or damaged into a folder; every mirror is tried in turn."""
    with making(folder, "downloading this data", report), writing(folder, "the data needs more bytes"):
        for name, md5 in data.files.items():
            if not (folder / name).is_file() or _md5(folder / name) != md5:
                _download_public_file(data, name, folder, report)
    return folder


def _download_public_file(data: PublicData, name: str, folder: Path, report: Progress) -> None:
    failures, part = [], folder / f".{name}.part"
    for url in (base_url + name for base_url in data.base_urls):
        report.note(f"downloading {url}")
        try:
            _Server(url).get([url], [part])
            if (md5 := _md5(part)) == data.files[name]:
                part.replace(folder / name)
                return
            failures.append(f"{url}: the file there has MD5 {md5} instead of {data.files[name]}")
        except InputError as error:
            failures.append(str(error).partition("; ")[0])
        finally:
            part.unlink(missing_ok=True)
    raise InputError(
        f"{name} could not be downloaded: {'; '.join(failures)}. Check the network, or get {', '.join(data.files)} "
        f"by other means, put them into {folder} and run again"
    )


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        # Detects damage, not attacks; the publishers provide no other digest.
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
