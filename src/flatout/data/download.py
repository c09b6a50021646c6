"""Download the public data sets that may be downloaded; name the source of the others."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flatout.data.transfer import RemoteFile, TransferError, digest_of, transfer
from flatout.data.web import read
from flatout.errors import DiskFull, InputError
from flatout.files import NO_SPACE, lock


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
        DiskFull: the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = lock(folder / ".download.lock")
        assert descriptor is not None
        try:
            for name, md5 in data.files.items():
                if not (folder / name).is_file() or digest_of(folder / name, "md5") != md5:
                    _download(data, name, folder, report)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = f"{folder}: cannot write the downloaded data: {error.strerror or error}"
        raise (DiskFull if error.errno in NO_SPACE else InputError)(reason) from None
    return folder


def _download(data: PublicData, name: str, folder: Path, report: Callable[[str], None]) -> None:
    failures: list[str] = []
    part = folder / f".{name}.part"
    with contextlib.ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        for base_url in data.base_urls:
            url = base_url + name
            report(f"downloading {url}")
            file = RemoteFile(url=url, name=name, digest=("md5", data.files[name]), read=partial(read, url))
            try:
                transfer(file, part, lambda count: None)
            except TransferError as error:
                failures.append(f"{url} ({error.reason})")
            else:
                part.replace(folder / name)
                return
    raise InputError(
        f"{name} could not be downloaded: {'; '.join(failures)}. Check the network, or get {', '.join(data.files)} "
        f"by other means, put them into {folder} and run again"
    )
