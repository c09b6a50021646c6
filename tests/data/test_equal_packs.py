"""The same images give the same pack, whichever format they are in."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.data.build import build_pack, load_pack
from flatout.data.detect import recognise
from flatout.data.pack import Pack, PackSettings
from flatout.recipe import Data
from tests.data import containers as c
from tests.data.packs import Silent

SETTINGS = PackSettings(size=c.SIZE, channels=3, resize="stretch", on_bad_image="stop", max_bad_share=0.05)
FORMATS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "class folders with ids": (c.class_ids, "class folders"),
    "tar": (c.in_tar("w"), "class folders in an archive"),
    "tar.gz": (c.in_tar("w:gz"), "class folders in an archive"),
    "tar.bz2": (c.in_tar("w:bz2"), "class folders in an archive"),
    "tar.xz": (c.in_tar("w:xz"), "class folders in an archive"),
    "zip, stored": (c.in_zip(zipfile.ZIP_STORED), "class folders in an archive"),
    "zip, deflated": (c.in_zip(zipfile.ZIP_DEFLATED), "class folders in an archive"),
    "CSV": (c.csv_files, "CSV manifest"),
    "CSV in zip": (c.in_zip(zipfile.ZIP_DEFLATED, c.csv_files), "CSV manifest in an archive"),
    "metadata.csv": (c.metadata("metadata.csv"), "CSV manifest"),
    "metadata.jsonl": (c.metadata("metadata.jsonl"), "CSV manifest"),
    "metadata.jsonl in tar": (c.in_tar("w", c.metadata("metadata.jsonl")), "CSV manifest in an archive"),
    "PaddleClas": (c.paddle_lists, "PaddleClas lists"),
    "PaddleClas in tar": (c.in_tar("w", c.paddle_lists), "PaddleClas lists in an archive"),
    "file names": (c.named_files, "images with classes in their names"),
    "file names in zip": (
        c.in_zip(zipfile.ZIP_STORED, c.named_files),
        "images with classes in their names in an archive",
    ),
    "WebDataset, cls": (c.webdataset("cls"), "WebDataset shards"),
    "WebDataset, json": (c.webdataset("json"), "WebDataset shards"),
    "TFRecord, Slim": (c.tf_records(c.tf_encoded), "TFRecord files"),
    "TFRecord, texts": (c.tf_texts, "TFRecord files"),
    "TFRecord, raw": (c.tf_records(c.tf_raw), "TFRecord files"),
    "TFRecord, gzip": (c.tf_records(c.tf_encoded, gzip.compress), "TFRecord files"),
    "Parquet of Hugging Face": (c.parquet, "Parquet files"),
    "Parquet": (c.plain_parquet, "Parquet files"),
    "saved data set": (c.saved_dataset, "saved Hugging Face data set"),
    "npz": (c.npz, "NumPy arrays"),
    "npy in tar": (c.in_tar("w:gz", c.npy), "NumPy arrays in an archive"),
    "IDX": (c.idx, "IDX files"),
    "IDX in tar": (c.in_tar("w", c.idx), "IDX files in an archive"),
    "CIFAR-10": (c.cifar10, "CIFAR binaries"),
    "CIFAR-10 in tar.gz": (c.in_tar("w:gz", c.cifar10), "CIFAR binaries in an archive"),
    "CIFAR-100": (c.cifar100, "CIFAR binaries"),
}


def pack_of(path: Path, cache: Path | None = None) -> Pack:
    options = Data(
        classes=str(path.parent / "names.txt") if (path.parent / "names.txt").is_file() else "",
        label_pattern=r"^(\w+)\.\d" if is_named_by_files(path) else "",
    )
    return load_pack(recognise(path, options), SETTINGS, cache=cache, report=Silent())


def is_named_by_files(path: Path) -> bool:
    return any(folder.is_dir() and list(folder.glob("*/cat.000.*")) for folder in (path, path.parent / "inside"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return pack_of(c.class_folders(tmp_path_factory.mktemp("expected")))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_pack_of_class_folders(name: str, tmp_path: Path, expected: Pack):
    write, kind = FORMATS[name]
    path = write(tmp_path)
    for _ in range(2):
        pack = pack_of(path, tmp_path / "cache")
        assert (pack.kind, pack.classes, pack.splits) == (kind, c.CLASSES, expected.splits)
        assert pack.fingerprint == expected.fingerprint
    assert pack.was_cached
    assert pack_of(path).fingerprint == expected.fingerprint


def test_shards_by_a_pattern_with_braces(tmp_path: Path, expected: Pack):
    pack = pack_of(c.braces(tmp_path))
    assert list(pack.splits) == ["train", "valid"]
    assert (pack.images == expected.images).all()


def test_a_cached_pack_of_a_container_is_found_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = c.in_tar("w:gz")(tmp_path)
    assert not pack_of(path, tmp_path / "cache").was_cached

    def refuse(*_: object) -> None:
        raise AssertionError("the archive was opened")

    monkeypatch.setattr("flatout.data.detect.open_archive", refuse)
    assert pack_of(path, tmp_path / "cache").was_cached


def test_options_are_part_of_the_key(tmp_path: Path):
    path = c.in_zip(zipfile.ZIP_STORED, c.named_files)(tmp_path)
    packs = [
        load_pack(recognise(path, Data(label_pattern=pattern)), SETTINGS, cache=tmp_path / "cache", report=Silent())
        for pattern in (r"^(\w+)\.\d", r"^(\w)")
    ]
    assert [pack.classes for pack in packs] == [c.CLASSES, ("c", "d", "o")]


def test_a_pack_is_built_from_a_container(tmp_path: Path, expected: Pack):
    found = recognise(c.in_zip(zipfile.ZIP_DEFLATED)(tmp_path))
    assert build_pack(found, SETTINGS, tmp_path / "pack", Silent()).fingerprint == expected.fingerprint


def test_check_names_the_format_and_the_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = c.class_folders(tmp_path / "inside")
    (folder / "train" / "cat" / "000.jpg").write_bytes(b"no image")
    path = c.in_zip(zipfile.ZIP_DEFLATED, lambda _: folder)(tmp_path)
    assert main(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "class folders in an archive: train 15 images of 3 classes, test 9" in shown
    assert "set.zip: member photos/train/cat/000.jpg: is not an image" in shown
