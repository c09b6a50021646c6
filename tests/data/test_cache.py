"""Room in the cache."""

import os
import shutil

import numpy as np
import pytest

from flatout.data.build import load_pack
from flatout.data.cache import clear, entries, limit_bytes
from flatout.errors import InputError
from tests.data.packs import Recorder, class_folders, expected_images, load, settings


def test_the_least_recently_used_packs_make_room_but_none_in_use(tmp_path, monkeypatch):
    cache, source = tmp_path / "cache", class_folders(tmp_path / "data")
    packs = {size: load(source, cache, settings(size=size)) for size in (16, 17, 18)}
    folders = {size: pack.folder for size, pack in packs.items() if pack.folder}
    for age, size in enumerate((17, 16, 18)):
        os.utime(folders[size], (age, age))
    assert [entry.path for entry in entries(cache) if entry.is_limited] == [folders[size] for size in (17, 16, 18)]
    assert all("45 images" in entry.what and entry.size_bytes > 30_000 for entry in entries(cache) if entry.is_limited)
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", "80kB")
    del packs[16], packs[18]
    report = Recorder()
    new = load_pack(source, settings(size=9), cache=cache, report=report)
    # 17 is the oldest, but in use.
    assert {entry.path for entry in entries(cache) if entry.is_limited} == {folders[17], new.folder}
    assert len(report.notes) == 2
    assert "removed the least recently used entry" in report.notes[0]
    assert np.array_equal(packs[17].images, expected_images(source, settings(size=17)))


def test_use_counts_not_age(tmp_path):
    cache, source = tmp_path / "cache", class_folders(tmp_path / "data")
    folders = [load(source, cache, settings(size=size)).folder for size in (16, 17)]
    for age, folder in enumerate(folders):
        assert folder is not None
        os.utime(folder, (age, age))
    load(source, cache, settings(size=16))
    assert [entry.path for entry in entries(cache) if entry.is_limited] == folders[::-1]


def test_the_cache_can_be_cleared(tmp_path):
    cache, source = tmp_path / "cache", class_folders(tmp_path / "data")
    used = load(source, cache)
    load(source, cache, settings(size=17))
    (cache / "downloads" / "mnist").mkdir(parents=True)
    removed, kept = clear(entries(cache))
    assert [entry.path for entry in kept] == [used.folder]
    assert {entry.what for entry in removed} >= {"downloads", "45 images, 17 x 17, " + str(tmp_path / "data")}
    assert np.array_equal(load(source, cache).images, used.images)


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5e9), ("50GB", 5e10), ("500 MB", 5e8), ("1.5t", 1.5e12), ("20k", 2e4), ("0", 0)]
)
def test_limits_of_the_cache(tmp_path, monkeypatch, text, size):
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", text)
    assert limit_bytes(tmp_path) == size


def test_a_limit_that_is_no_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", "much")
    with pytest.raises(InputError, match="FLATOUT_CACHE_LIMIT = 'much': must be a size such as 50GB"):
        limit_bytes(tmp_path)
    monkeypatch.delenv("FLATOUT_CACHE_LIMIT")
    assert limit_bytes(tmp_path) == int(0.2 * shutil.disk_usage(tmp_path).total)
