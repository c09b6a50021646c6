"""Files written by TensorFlow, webdataset and datasets (`fixtures/make_fixtures.py`) give the pack of class folders."""

from pathlib import Path

import pytest

from flatout.data.build import load_pack
from flatout.data.detect import recognise
from flatout.data.pack import Pack, PackSettings
from tests.data.packs import Silent

FIXTURES = Path(__file__).resolve().parent / "fixtures"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir() and folder.name[0].isalpha())


def pack_of(name: str) -> Pack:
    settings = PackSettings(size=8, channels=3, resize="stretch", on_bad_image="stop", max_bad_share=0.0)
    return load_pack(recognise(FIXTURES / name), settings, cache=None, report=Silent())


def test_every_framework_has_fixtures():
    assert {"parquet", "saved-dataset", "tfrecord", "webdataset-cls", "webdataset-json"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_gives_the_pack_of_class_folders(name: str):
    pack, expected = pack_of(name), pack_of("class-folders")
    assert (pack.classes, pack.splits) == (("cat", "dog"), {"train": (0, 6), "test": (6, 10)})
    assert pack.fingerprint == expected.fingerprint
