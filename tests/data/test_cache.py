"""The cache: its limit, and digests of files, which are remembered."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from flatout.data import cache as caches
from flatout.data.build import load_pack
from flatout.data.cache import DIGEST_BYTES, combined_digest, entries, limit_bytes, remove
from flatout.utils.errors import InputError
from tests.data.packs import Recorder, class_folders, expected_images, load, settings


def limited(cache: Path) -> list[Path]:
    return [entry.path for entry in entries(cache) if entry.is_limited]


def test_the_least_recently_used_packs_make_room_but_none_in_use(tmp_path, monkeypatch):
    cache, source = tmp_path / "cache", class_folders(tmp_path / "data")
    packs = {size: load(source, cache, settings(size=size)) for size in (16, 17, 18)}
    folders = {size: pack.folder for size, pack in packs.items() if pack.folder}
    for age, size in enumerate((17, 16, 18)):
        os.utime(folders[size], (age, age))
    assert limited(cache) == [folders[size] for size in (17, 16, 18)]
    assert all("45 images" in entry.what and entry.size_bytes > 30_000 for entry in entries(cache) if entry.is_limited)
    del packs[16], packs[18]
    load(source, cache, settings(size=16))  # use counts, not age
    assert limited(cache) == [folders[size] for size in (17, 18, 16)]
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", "80kB")
    report = Recorder()
    new = load_pack(source, settings(size=9), cache=cache, report=report)
    # 17 is the oldest, but in use.
    assert set(limited(cache)) == {folders[17], new.folder}
    assert len(report.notes) == 2
    assert "removed the least recently used entry" in report.notes[0]
    assert np.array_equal(packs[17].images, expected_images(source, settings(size=17)))


def test_the_cache_can_be_cleared(tmp_path):
    cache, source = tmp_path / "cache", class_folders(tmp_path / "data")
    used = load(source, cache)
    load(source, cache, settings(size=17))
    (cache / "downloads" / "mnist").mkdir(parents=True)
    removed = {entry.what for entry in entries(cache) if remove(entry.path)}
    assert removed >= {"downloads", f"45 images, {tmp_path}/data"}
    assert np.array_equal(load(source, cache).images, used.images)


@pytest.mark.parametrize(("text", "size"), [("5", 5e9), ("500 MB", 5e8), ("1.5t", 1.5e12), ("20k", 2e4), ("0", 0)])
def test_limits_of_the_cache(tmp_path, monkeypatch, text, size):
    assert limit_bytes(tmp_path) == int(0.2 * shutil.disk_usage(tmp_path).total)
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", text)
    assert limit_bytes(tmp_path) == size
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", "much")
    with pytest.raises(InputError, match="FLATOUT_CACHE_LIMIT = 'much': must be a size such as 50GB"):
        limit_bytes(tmp_path)


# Digests


def digest_files(paths: list[Path], memo: Path) -> list[bytes]:
    return list(caches.digest_files(paths, memo=memo, report=Recorder()))


def blake(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(caches, "_RESTED_NS", 10**8)
    folder = tmp_path / "data"
    folder.mkdir()
    paths = [folder / f"{i:03}.bin" for i in range(200)]
    for i, path in enumerate(paths):
        path.write_bytes(f"content {i % 150}".encode())
    time.sleep(0.15)  # a digest is remembered only when the file has rested
    return paths


def change_what_is_remembered(memo: Path) -> bytes:
    """Put another first digest into the memo, so that an answer from the memo can be told from one read anew."""
    (file,) = memo.iterdir()
    other = b"from the memo".ljust(DIGEST_BYTES)
    file.write_bytes(other + file.read_bytes()[DIGEST_BYTES:])
    return other


def test_digests_are_of_the_content_and_remembered(files, tmp_path):
    expected, memo = [blake(path.read_bytes()) for path in files], tmp_path / "cache" / "memo"
    unwritable = files[0] / "memo"
    assert digest_files([files[3], files[1], files[3]], memo=unwritable) == [expected[3], expected[1], expected[3]]
    assert len({combined_digest(parts) for parts in ([b"a", b"bc"], [b"ab", b"c"], [b"bc", b"a"], [b"abc"])}) == 4
    assert digest_files(files, memo=memo) == expected
    other = change_what_is_remembered(memo)
    assert digest_files(files, memo=memo) == [other, *expected[1:]]
    os.truncate(next(memo.iterdir()), 100)  # a damaged memo is replaced
    assert digest_files(files, memo=memo) == expected
    content = np.random.default_rng(0).bytes((1 << 23) + 100)  # a large file is digested by parts
    (tmp_path / "large").write_bytes(content)
    parts = blake(content[: 1 << 23]) + blake(content[1 << 23 :])
    assert digest_files([tmp_path / "large"], memo=unwritable) == [blake(parts)]


def test_changed_content_of_equal_size_and_time_is_seen(files, tmp_path):
    memo = tmp_path / "memo"
    before = digest_files(files, memo=memo)
    status = files[0].stat()
    files[0].write_bytes(files[0].read_bytes()[::-1])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = digest_files(files, memo=memo)
    assert after[0] == blake(files[0].read_bytes()) != before[0]
    assert after[1:] == before[1:]


def test_files_just_written_and_files_that_cannot_be_read_are_not_remembered(files, tmp_path):
    memo, fresh = tmp_path / "memo", tmp_path / "fresh"
    fresh.write_bytes(b"one")
    digest_files([fresh], memo=memo)
    files[5].unlink()
    assert digest_files(files, memo=memo)[5] != blake(b"")
    assert not memo.exists()
