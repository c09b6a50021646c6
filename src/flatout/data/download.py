"""Download the public data sets that may be downloaded; name the source of the others."""

import contextlib
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.data.cache import lock
from flatout.errors import InputError

_TIMEOUT_SECONDS = 20.0
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """A data set that anyone may download: mirrors, the best first, and file name -> MD5."""

    base_urls: tuple[str, ...]
    files: Mapping[str, str]


PUBLIC = {
    # Zalando Research, MIT licence
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
    ),
    # Yann LeCun, Corinna Cortes and Christopher Burges, CC BY-SA 3.0
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
    """Return where to get the data of a built-in job that may not be downloaded, and the layout it needs."""
    return f"{_WHERE_TO_GET[job]}; then run flatout train {job} --data FOLDER"


def download(data: PublicData, folder: Path, report: Callable[[str], None]) -> Path:
    """Download the files that are missing or damaged into a folder, and return the folder.

    Every mirror is tried in turn. A file gets its name only when it is complete and its MD5 is right. Of two processes,
    the second waits and finds the files. `report` gets a line for each file.

    Raises:
        InputError: a file could not be downloaded from any mirror, or not written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = lock(folder / ".download.lock")
        assert descriptor is not None
        try:
            for name, md5 in data.files.items():
                if not (folder / name).is_file() or _md5_of(folder / name) != md5:
                    _download(data, name, folder, report)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(f"{folder}: cannot write the downloaded data: {error.strerror or error}") from None
    return folder


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        # Against damage, not attacks; it is what the publishers give.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(data: PublicData, name: str, folder: Path, report: Callable[[str], None]) -> None:
    failures: list[str] = []
    part = folder / f".{name}.part"
    with contextlib.ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        for base_url in data.base_urls:
            url = base_url + name
            report(f"downloading {url}")
            reason = _download_from(url, data.files[name], part)
            if reason is None:
                part.replace(folder / name)
                return
            failures.append(f"{url} ({reason})")
    raise InputError(
        f"{name} could not be downloaded: {'; '.join(failures)}. Check the network, or get {', '.join(data.files)} "
        f"by other means, put them into {folder} and run again"
    )


def _download_from(url: str, md5: str, part: Path) -> str | None:
    """Write the content of a URL to a file and flush it to the disk; return the reason if it is not the right file."""
    with part.open("wb") as file:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
                shutil.copyfileobj(response, file, _CHUNK_BYTES)
                promised = int(response.headers.get("Content-Length") or 0)
        except urllib.error.HTTPError as error:
            return f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__
        file.flush()
        os.fsync(file.fileno())
    received = part.stat().st_size
    if received < promised:
        return f"cut off after {received:,} of {promised:,} bytes"
    found = _md5_of(part)
    return None if found == md5 else f"the file there has MD5 {found} instead of {md5}"
