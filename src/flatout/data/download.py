"""Fetch the public data sets that may be fetched; say where to get the others."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from flatout.errors import InputError

_TIMEOUT_SECONDS = 20.0
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """A data set that anyone may download.

    Attributes:
        base_urls: the places that have the files, the best first; each ends with a slash.
        files: file name -> MD5 in hexadecimal digits.
        size_bytes: of all files together.
        terms: whose it is and under which licence.
    """

    base_urls: tuple[str, ...]
    files: Mapping[str, str]
    size_bytes: int
    terms: str


PUBLIC = {
    "fashion-mnist": PublicData(
        base_urls=(
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        files={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        size_bytes=30_878_645,
        terms="Fashion-MNIST, Zalando Research, MIT licence",
    ),
    "mnist": PublicData(
        base_urls=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        files={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        size_bytes=11_594_722,
        terms="MNIST, Yann LeCun, Corinna Cortes and Christopher Burges, CC BY-SA 3.0",
    ),
}
# Jobs whose data is a public set of another name.
PUBLIC_NAMES = {"fashion-mnist": "fashion-mnist", "fashion-mnist-keras": "fashion-mnist", "mnist-parallel": "mnist"}

_WHERE_TO_GET = {
    "cats-dogs": (
        "Get the pictures of the Dogs vs. Cats competition from https://www.kaggle.com/c/dogs-vs-cats/data and sort "
        "them into training_set/cats, training_set/dogs, test_set/cats and test_set/dogs"
    ),
    "caltech101": (
        "Get Caltech 101 from https://data.caltech.edu/records/mzrjq-6wc02 and unpack 101_ObjectCategories, one folder "
        "for each class; or list the images in desc_train.csv, desc_valid.csv and desc_test.csv, with rows of "
        "file,label and the class names in classes.txt"
    ),
    "oct-vgg16": (
        "Get the OCT scans of Kermany et al. (2018) from https://data.mendeley.com/datasets/rscbjbr9sj and unpack them "
        "into train/ and test/, each with the folders CNV, DME, DRUSEN and NORMAL"
    ),
}


def where_to_get(job: str) -> str:
    """Return where the data of a built-in job that cannot be fetched is, and how to lay it out."""
    return f"{_WHERE_TO_GET[job]}; then run flatout train {job} --data FOLDER"


def download(data: PublicData, folder: Path, report: Callable[[str], None]) -> Path:
    """Fetch the files that are not there yet, or not right, into a folder, and return the folder.

    Every place is tried in turn. A file appears under its name only when it is complete and its MD5 is right. Two
    processes may do this at once: the second waits, and finds the files there.

    Args:
        data: what to fetch.
        folder: where to; created if need be.
        report: called with a line for people about each file fetched.

    Raises:
        InputError: a file could not be fetched from anywhere, or not written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            for name, md5 in data.files.items():
                if not _is_right(folder / name, md5):
                    _fetch(data, name, folder, report)
    except OSError as error:
        raise InputError(f"{folder}: cannot write the downloaded data: {error.strerror or error}") from None
    return folder


def _is_right(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest() == md5


def _md5():
    return hashlib.md5(usedforsecurity=False)  # against damage; it is what the publishers give


def _fetch(data: PublicData, name: str, folder: Path, report: Callable[[str], None]) -> None:
    failures: list[str] = []
    part = folder / f".{name}.part"
    try:
        for base_url in data.base_urls:
            url = base_url + name
            report(f"downloading {url}")
            reason = _fetch_from(url, data.files[name], part)
            if reason is None:
                part.replace(folder / name)
                return
            failures.append(f"{url} ({reason})")
    finally:
        part.unlink(missing_ok=True)
    raise InputError(
        f"{name} could not be downloaded: {'; '.join(failures)}. Check the network, or get {', '.join(data.files)} "
        f"by other means, put them into {folder} and run again"
    )


def _fetch_from(url: str, md5: str, part: Path) -> str | None:
    """Write what a URL gives to a file and onto the disk; return the reason if that is not the right file."""
    digest = _md5()
    received = 0
    with part.open("wb") as file:
        try:
            response = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            return _reason(error)
        with response:
            promised = response.headers.get("Content-Length")
            while True:
                try:
                    chunk = response.read(_CHUNK_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    return _reason(error)
                if not chunk:
                    break
                received += len(chunk)
                digest.update(chunk)
                file.write(chunk)
        if promised is not None and received < int(promised):
            return f"cut off after {received:,} of {int(promised):,} bytes"
        if digest.hexdigest() != md5:
            return f"the file there has MD5 {digest.hexdigest()} instead of {md5}"
        file.flush()
        os.fsync(file.fileno())
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(error.reason if isinstance(error, urllib.error.URLError) else error) or type(error).__name__
