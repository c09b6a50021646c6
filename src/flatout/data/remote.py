"""Data named by a URL: downloaded once into the cache, then read like any local file or folder."""

import json
import os
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flatout.data.cache import DOWNLOAD, cache_folder, combined_digest, make_room, making
from flatout.data.object_stores import STORES, stored_files
from flatout.data.shards import expand_braces
from flatout.data.transfer import RemoteFile, SourceChanged, TransferError, transfer
from flatout.data.web import web_file
from flatout.errors import DiskFull, InputError
from flatout.files import NO_SPACE, lock, printable, write_atomically

if TYPE_CHECKING:
    from flatout.data.cache import Progress

_CONNECTIONS = 16
_INTERVAL_SECONDS = 0.1
_WEB = ("http", "https")


def is_remote(data: Any) -> bool:
    """Whether data is named by a URL."""
    return isinstance(data, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", data) is not None


def download(url: str, report: "Progress") -> tuple[Path, int]:
    """Return the local copy of a file or folder, downloaded now or before, and a descriptor to close after its use.

    The copy lies in the cache, below a key of the URL and of all names, sizes and versions there. A download that was
    interrupted continues. Of several processes, one downloads.

    Raises:
        InputError: the source cannot be read, has changed meanwhile, or the cache cannot be written.
        DiskFull: the disk is full.
    """
    if not url.partition("://")[2].strip("/"):
        raise InputError(f"{url}: names no host, bucket or repository; give the whole URL")
    url = url if url.startswith(_WEB) else url.rstrip("/")
    shown = url.partition("?")[0]
    try:
        name, files = _list(url)
    except TransferError as error:
        if copies := _copies(shown):
            raise InputError(f"{error}; or give the path of the last copy: {copies[-1]}") from None
        raise
    key = combined_digest([url.encode(), *(f"{file.name}\0{file.size}\0{file.version}".encode() for file in files)])
    target = cache_folder() / "remote" / key
    with making(target, "downloading this data", report):
        if target.exists():
            report.note(f"{shown}: unchanged since it was downloaded into the cache")
        else:
            _download(shown, name, files, target, report)
        with suppress(OSError):  # only a note of the last use
            os.utime(target)
        descriptor = lock(target / DOWNLOAD, shared=True)
        assert descriptor is not None
    for removed in make_room(cache_folder()):
        report.note(f"removed the least recently used entry from the cache, which is full: {removed.what}")
    return target / name, descriptor


def _copies(shown: str) -> list[Path]:
    """Return the complete copies in the cache of what is at a URL, least recently used first."""
    abouts = sorted(cache_folder().glob(f"remote/*/{DOWNLOAD}"), key=lambda path: path.parent.stat().st_mtime)
    found = [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in abouts]
    return [folder / about["name"] for folder, about in found if about["url"] == shown]


def _list(url: str) -> tuple[str, list[RemoteFile]]:
    """Return what is to be read in the folder of the download, and the files at a URL; their names are paths in it."""
    scheme = url.partition("://")[0]
    if scheme not in _WEB and scheme not in STORES:
        known = ", ".join(f"{name}://" for name in (*_WEB, *STORES))
        raise InputError(f"{url}: {scheme}:// is not read; flatout downloads from {known}; or give a local path")
    list_one = (lambda one: [web_file(one)]) if scheme in _WEB else stored_files
    if "{" in url:
        # Shards, from the first folder with braces on.
        base, _, _ = url.partition("{")
        base = base[: base.rindex("/") + 1]
        name = url[len(base) :].partition("?")[0]
        parts = [str(path) for path in expand_braces(Path(name))]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            listed = list(pool.map(list_one, (url.replace(name, part) for part in parts)))
        files = [replace(file, name=part) for part, found in zip(parts, listed, strict=True) for file in found]
    else:
        files = list_one(url)
        name = PurePosixPath(files[0].name).parts[0]
    paths = [PurePosixPath(file.name) for file in files]
    for file, path in zip(files, paths, strict=True):
        if path.is_absolute() or ".." in path.parts or printable(file.name) != file.name:
            raise InputError(f"{file.url}: {file.name!r} is no name for a local file; rename it there")
    if len(set(paths)) < len(paths):
        raise InputError(
            f"{url}: several files there would get the same local name; rename them there, or give their folder"
        )
    return name, files


def _download(shown: str, name: str, files: Sequence[RemoteFile], target: Path, report: "Progress") -> None:
    """Download files beside their place, then rename the folder. What has arrived stays, but not on a full disk."""
    unfinished = target.with_name(target.name + ".partial")
    total = sum(file.size or 0 for file in files)
    there = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    free = shutil.disk_usage(target.parent).free
    full = DiskFull(
        f"{target.parent}: the disk is full, or a limit reached: {shown} needs {total - there:,} bytes and {free:,} "
        "are free; make room, or set FLATOUT_CACHE to a folder on a larger disk"
    )
    if total - there > free:
        raise full
    what = f"{shown} ({total / 1e6:,.1f} MB)" if total else shown
    report.note(f"continuing at {there / 1e6:,.1f} MB: {what}" if there else f"downloading {what}")
    try:
        unfinished.mkdir(exist_ok=True)
        _transfer_all(files, unfinished, total, report)
        about = {"url": shown, "name": name}
        write_atomically(unfinished / DOWNLOAD, json.dumps(about).encode())
        unfinished.rename(target)
    except SourceChanged:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    except OSError as error:
        if error.errno in NO_SPACE:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise full from None
        raise InputError(f"{shown}: cannot be written to the cache {unfinished}: {error.strerror or error}") from None


def _transfer_all(files: Sequence[RemoteFile], folder: Path, total: int, report: "Progress") -> None:
    """Download files, several at once, while this thread shows the progress."""
    pending, received, guard, ended = iter(files), 0, threading.Lock(), threading.Event()
    failures: list[Exception] = []

    def advance(count: int) -> None:
        nonlocal received
        if ended.is_set():
            raise InterruptedError
        with guard:
            received += count

    def work() -> None:
        try:
            for file in pending:
                path = folder / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                transfer(file, path, advance)
        except Exception as error:  # raised again by this function
            failures.append(error)

    # Daemons, so that an interrupted command need not wait for a server that is silent.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_CONNECTIONS, len(files)))]
    try:
        for thread in threads:
            thread.start()
        while not failures and (running := [thread for thread in threads if thread.is_alive()]):
            running[0].join(_INTERVAL_SECONDS)
            report.update(received // 10**6, max(1, total // 10**6), "MB")
    finally:
        ended.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
