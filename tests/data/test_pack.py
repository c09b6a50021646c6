"""Packs and their cache: files, finding them again, bad images, damage, several processes, limits, digests."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from flatout.data import cache as caches
from flatout.data import pack as packs
from flatout.data.batches import Split
from flatout.data.build import build_pack, load_pack
from flatout.data.cache import DIGEST_BYTES, combined_digest, entries, limit_bytes, remove, temporary_folder
from flatout.data.detect import recognise
from flatout.data.pack import open_pack, share
from flatout.data.pixels import resize_images
from flatout.data.source import ImageDataset
from flatout.utils.errors import DiskFull, InputError
from tests.data.packs import (
    SMALL_BLOCK,
    Recorder,
    arrays,
    class_folders,
    expected_images,
    files_limited_to,
    flip,
    leftovers,
    load,
    repeated,
    settings,
)


@pytest.fixture
def source(tmp_path: Path) -> ImageDataset:
    return class_folders(tmp_path / "data")


@pytest.mark.parametrize("changes", [{"channels": 1}, {"resize": "crop", "size": 9}])
def test_a_pack_is_plain_files_of_the_decoded_images(tmp_path, source, changes):
    wanted, report, threads = settings(**changes), Recorder(), torch.get_num_threads()
    pack = build_pack(source, wanted, tmp_path / "out", report)
    assert torch.get_num_threads() == threads
    assert report.updates[-1] == (45, 45, "images")
    assert leftovers(tmp_path / "out") == ["images.npy", "labels.npy", "pack.json"]
    assert leftovers(tmp_path) == ["data", "out"]
    assert np.array_equal(np.load(tmp_path / "out" / "images.npy"), expected_images(source, wanted))
    assert np.array_equal(np.load(tmp_path / "out" / "labels.npy"), source.labels)
    description = json.loads((tmp_path / "out" / "pack.json").read_text())
    assert description["splits"] == {"train": [0, 36], "test": [36, 45]}
    again = open_pack(tmp_path / "out")
    assert (again.classes, again.splits, again.notes) == (source.classes, source.splits, source.notes)
    assert again.describe() == source.describe()
    assert again.build_seconds == pack.build_seconds > 0
    with pytest.raises(InputError, match=r"out: exists; choose another --out"):
        build_pack(source, wanted, tmp_path / "out", report)


def test_arrays_are_resized_as_files_are_and_stay_in_memory_where_they_fit(tmp_path):
    other, fitting = arrays(side=20), arrays()
    pack = load(other, tmp_path / "cache", settings(channels=1))
    assert np.array_equal(pack.images, resize_images(np.array(other.images), size=16, channels=1, resize="squash"))
    assert load(fitting, tmp_path / "other").images is load(fitting, None).images is fitting.images
    assert not (tmp_path / "other").exists()
    # Mapped from a file of another layout.
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.arange(6) % 2)
    mapped = load(recognise(tmp_path), None)
    samples = Split(images=mapped.images, rows=np.arange(6), labels=mapped.labels)
    assert np.array_equal(samples.images_at(np.array([5, 1])), pixels[[5, 1]].transpose(0, 2, 3, 1))


def test_a_pack_of_the_users_is_opened(tmp_path, source):
    build_pack(source, settings(), tmp_path / "out", Recorder())
    found = recognise(tmp_path / "out")
    assert load(found, tmp_path / "cache").path == tmp_path / "out"
    with pytest.raises(InputError, match="is a pack already"):
        build_pack(found, settings(), tmp_path / "other", Recorder())


def test_the_fingerprint_is_of_the_content_alone(tmp_path, source):
    fingerprint = load(source, tmp_path / "cache").fingerprint
    assert load(source, None).fingerprint == fingerprint
    assert load(source, None, settings(size=17)).fingerprint != fingerprint
    source.labels[0] = 1 - source.labels[0]
    assert load(source, None).fingerprint != fingerprint
    built = build_pack(arrays(), settings(), tmp_path / "out", Recorder())
    assert load(arrays(), None).fingerprint == built.fingerprint == "43aa7b40d3851dcf601f8f17d34715a7"


# The cache


def test_packs_are_found_by_content_and_settings_wherever_the_data_lies(tmp_path, source):
    folders = {load(source, tmp_path / "cache").path}
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    # Other treatment of bad images, and bits that the data has, change no pixel.
    lenient = settings(on_bad_image="skip", max_bad_share=0.5, bits=8)
    for same, wanted in ((source, lenient), (class_folders(tmp_path / "moved"), settings())):
        again = load(same, tmp_path / "cache", wanted)
        assert (again.was_cached, {again.path}) == (True, folders)
    noted = replace(source, notes=("ignored 3 files",))
    assert load(noted, tmp_path / "cache").notes == ("ignored 3 files",)  # not those of the data packed first
    for changes in ({"size": 17}, {"channels": 1}, {"resize": "crop"}):
        folders.add(load(source, tmp_path / "cache", settings(**changes)).path)
    first, second, *_ = list(source.files or [])
    Path(str(first)).write_bytes(second.read_bytes())
    folders.add(load(source, tmp_path / "cache").path)
    source.labels[0] += 1
    folders.add(load(source, tmp_path / "cache").path)
    assert len(folders) == 6


def test_without_a_cache_nothing_is_left_behind_not_even_by_killed_processes(tmp_path, source, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / "flatout-dead").mkdir(parents=True)
    (tmp_path / "tmp" / "flatout-dead" / ".owner").touch()
    alive, descriptor = temporary_folder()
    assert np.array_equal(load(source, None).images, expected_images(source, settings()))
    assert leftovers(tmp_path / "tmp") == [alive.name]
    os.close(descriptor)


@pytest.mark.parametrize("cache", ["cache", ""])
def test_a_pack_is_read_and_shared_after_its_cache_was_removed(tmp_path, source, cache):
    pack = load(source, tmp_path / cache if cache else None)
    images, rows = np.array(pack.images), np.array([3, 0])
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with share(pack) as shared:
        for one in (pack, shared.open()):
            samples = Split(images=one.images, rows=np.arange(45), labels=pack.labels)
            assert np.array_equal(samples.images_at(rows), images[rows])


@pytest.mark.parametrize("place", ["data/test/a/00.jpg/cache", "x" * 300 + "/cache"])
def test_without_a_cache_that_can_be_written_the_run_continues_with_a_warning(tmp_path, source, place):
    report = Recorder()
    pack = load_pack(source, settings(), cache=tmp_path / place, report=report)
    assert np.array_equal(pack.images, expected_images(source, settings()))
    (note,) = report.notes
    assert "the cache cannot be used, so the decoded images are not kept" in note
    assert f"{place}/packs: cannot be written (" in note


# Bad images


def spoil(source: ImageDataset, indices: list[int]) -> list[str]:
    files = [(source.files or ())[index] for index in indices]
    for file in files:
        Path(str(file)).write_bytes(b"<html>not found</html>")
    return [f"{file}: is not an image of a known format (it begins with b'<html>not found</html>')" for file in files]


def test_stop_names_every_bad_image_at_once(tmp_path, source):
    lines, cache = spoil(source, [0, 20, 44]), tmp_path / "cache"
    for make in (lambda: build_pack(source, settings(), tmp_path / "out", Recorder()), lambda: load(source, cache)):
        with pytest.raises(InputError, match="3 of 45 images cannot be used; repair or remove them, or") as caught:
            make()
        assert str(caught.value).splitlines()[1:] == lines
    assert leftovers(tmp_path) == ["cache", "data"]
    assert leftovers(cache / "packs") == []


def test_skip_leaves_bad_images_out(tmp_path, source, monkeypatch):
    monkeypatch.setattr(packs, "BLOCK_BYTES", SMALL_BLOCK)
    wanted = settings(on_bad_image="skip", max_bad_share=0.4)
    whole, bad = expected_images(source, wanted), [0, *range(10, 20), 40, 44]  # the second block has none left
    lines = spoil(source, bad)
    pack = load(source, tmp_path / "cache", wanted)
    assert np.array_equal(pack.images, np.delete(whole, bad, axis=0))
    assert np.array_equal(pack.labels, np.delete(source.labels, bad))
    assert pack.splits == {"train": (0, 25), "test": (25, 32)}
    assert [f"{file}: {reason}" for file, reason in pack.skipped.items()] == lines
    # A cached pack is judged by the settings of today.
    assert load(source, tmp_path / "cache", wanted).was_cached
    # It names the files of today.
    shutil.copytree(source.path, tmp_path / "copy")
    moved = [tmp_path / "copy" / Path(file).relative_to(source.path) for file in source.files]
    assert [*load(replace(source, files=moved), tmp_path / "cache", wanted).skipped] == [str(moved[row]) for row in bad]
    with pytest.raises(InputError, match="13 of 45 images cannot be used; repair or remove"):
        load(source, tmp_path / "cache")
    with pytest.raises(InputError, match=r"13 of 45 images cannot be used, .*max_bad_share = 0\.25"):
        load(source, tmp_path / "cache", settings(on_bad_image="skip", max_bad_share=0.25))


def test_splits_and_classes_whose_images_are_all_bad(tmp_path, source):
    lenient = settings(on_bad_image="skip", max_bad_share=0.9)
    spoil(source, list(range(36, 45)))
    pack = load(source, tmp_path / "cache", lenient)
    assert pack.splits == {"train": (0, 36)}
    assert pack.notes == ("A note.", "All test images are bad, so there is no test split.")
    spoil(source, [i for i in range(36) if source.labels[i] == 1])
    with pytest.raises(InputError, match=r"all training images of class 'b' are bad.*is not an image"):
        load(source, tmp_path / "cache", lenient)


# Damage

DAMAGE = {
    "a pixel": ("images.npy", lambda path: flip(path, -1000)),
    "images too long": ("images.npy", lambda path: os.truncate(path, path.stat().st_size + 1)),
    "a label": ("labels.npy", lambda path: flip(path, -8)),
    "a letter of the description": ("pack.json", lambda path: flip(path, 25)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen_and_a_cached_pack_made_again(tmp_path, source, what):
    (name, damage), folder, report = DAMAGE[what], load(source, tmp_path / "cache").path, Recorder()
    assert folder
    damage(folder / name)
    with pytest.raises(InputError, match=rf"{name}: is damaged .*; delete .* and pack the data again"):
        open_pack(folder)
    rebuilt = load_pack(source, settings(), cache=tmp_path / "cache", report=report)
    assert "rebuilding the damaged cached pack" in report.notes[0]
    assert not rebuilt.was_cached
    assert np.array_equal(rebuilt.images, expected_images(source, settings()))


def test_of_a_large_pack_blocks_over_the_whole_file_are_checked(tmp_path, source, monkeypatch):
    monkeypatch.setattr(packs, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(packs, "CHECKED_BYTES", 2 * SMALL_BLOCK)
    build_pack(source, settings(), folder := tmp_path / "out", Recorder())
    flip(folder / "images.npy", 128 + 15 * 16 * 16 * 3)  # a block in the middle of five
    open_pack(folder)
    flip(folder / "images.npy", -1)
    with pytest.raises(InputError, match="images 40 to 44 have changed"):
        open_pack(folder)
    open_pack(folder, verify=False)
    description = json.loads((folder / "pack.json").read_text())
    (folder / "pack.json").write_text(json.dumps({**description, "format_version": 99}))
    with pytest.raises(InputError, match=r"has format 99, .* update flatout, or pack"):
        open_pack(folder)


# Several processes


def test_what_a_killed_process_left_is_made_anew(tmp_path, source):
    folder = load(source, tmp_path / "cache").path
    assert folder
    flip(folder / "images.npy", 1000)
    partial = folder.rename(f"{folder}.partial")
    pack = load(source, tmp_path / "cache")
    assert not pack.was_cached
    assert np.array_equal(pack.images, expected_images(source, settings()))
    assert not partial.exists()


def test_while_one_makes_it_another_waits_and_it_is_not_cleared(tmp_path, source):
    begun, go, cache, report = Event(), Event(), tmp_path / "cache", Recorder()

    class Held(Recorder):
        def update(self, done: int, total: int, unit: str = "images") -> None:
            if unit == "images":
                begun.set()
                go.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_pack, source, settings(), cache=cache, report=Held())
        assert begun.wait(60)
        for entry in entries(cache):
            if entry.is_limited:
                assert (entry.what, remove(entry.path)) == (f"incomplete: {entry.path.name}", False)
        second = pool.submit(load_pack, source, settings(), cache=cache, report=report)
        while not report.notes:
            assert not second.done()
            time.sleep(0.01)
        assert report.notes == ["another process is making this pack; waiting for it"]
        go.set()
        assert (first.result(60).was_cached, second.result(60).was_cached) == (False, True)


def test_without_room_nothing_is_left_behind(tmp_path, source):
    words = "limit reached: 500 images need 6,144,000 bytes and .* free; make room"
    with files_limited_to(1_000_000), pytest.raises(DiskFull, match=words):
        load(repeated(tmp_path, 500), tmp_path / "cache", settings(size=64))
    assert leftovers(tmp_path / "cache" / "packs") == []


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from flatout.utils.host import peak_rss_bytes
from tests.data.packs import load, repeated, settings

folder, peaks = Path(sys.argv[1]), []
for count in (200, 1000):
    load(repeated(folder, count), folder / "cache", settings(size=256))
    peaks.append(peak_rss_bytes())
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path, source):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    # With an arena of glibc's for each thread, freed memory that they keep varies by up to 16 MB on busy cores.
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=env)
    assert int(run.stdout) < 4 * 200 * 256 * 256 * 3 / 10


# The limit of the cache


def limited(cache: Path) -> list[Path]:
    return [entry.path for entry in entries(cache) if entry.is_limited]


def test_the_least_recently_used_packs_make_room_but_none_in_use(tmp_path, source, monkeypatch):
    cache = tmp_path / "cache"
    used = {size: load(source, cache, settings(size=size)) for size in (16, 17, 18)}
    folders = {size: pack.path for size, pack in used.items() if pack.path}
    for age, size in enumerate((17, 16, 18)):
        os.utime(folders[size], (age, age))
    assert limited(cache) == [folders[size] for size in (17, 16, 18)]
    assert all("45 images" in entry.what and entry.size_bytes > 30_000 for entry in entries(cache) if entry.is_limited)
    del used[16], used[18]
    load(source, cache, settings(size=16))  # use counts, not age
    assert limited(cache) == [folders[size] for size in (17, 18, 16)]
    monkeypatch.setenv("FLATOUT_CACHE_LIMIT", "80kB")
    report = Recorder()
    new = load_pack(source, settings(size=9), cache=cache, report=report)
    # 17 is the oldest, but in use.
    assert set(limited(cache)) == {folders[17], new.path}
    assert len(report.notes) == 2
    assert "removed the least recently used entry" in report.notes[0]
    assert np.array_equal(used[17].images, expected_images(source, settings(size=17)))
    (cache / "downloads" / "mnist").mkdir(parents=True)
    del used[17], new
    assert {entry.what for entry in entries(cache) if remove(entry.path)} >= {
        "downloads",
        f"45 images, {tmp_path}/data",
    }
    assert not limited(cache)


def test_limits_of_the_cache(tmp_path, monkeypatch):
    assert limit_bytes(tmp_path) == int(0.2 * shutil.disk_usage(tmp_path).total)
    for text, size in (("5", 5e9), ("500 MB", 5e8), ("1.5t", 1.5e12), ("20k", 2e4), ("0", 0)):
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
    paths = [tmp_path / f"{i:03}.bin" for i in range(200)]
    for i, path in enumerate(paths):
        path.write_bytes(f"content {i % 150}".encode())
    time.sleep(0.15)  # a digest is remembered only when the file has rested
    return paths


def test_digests_are_of_the_content_and_remembered(files, tmp_path):
    expected, memo = [blake(path.read_bytes()) for path in files], tmp_path / "cache" / "memo"
    unwritable = files[0] / "memo"
    assert digest_files([files[3], files[1], files[3]], memo=unwritable) == [expected[3], expected[1], expected[3]]
    assert len({combined_digest(parts) for parts in ([b"a", b"bc"], [b"ab", b"c"], [b"bc", b"a"], [b"abc"])}) == 4
    assert digest_files(files, memo=memo) == expected
    (remembered,) = memo.iterdir()
    other = b"from the memo".ljust(DIGEST_BYTES)
    remembered.write_bytes(other + remembered.read_bytes()[DIGEST_BYTES:])
    assert digest_files(files, memo=memo) == [other, *expected[1:]]
    os.truncate(remembered, 100)  # a damaged memo is replaced
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


def test_files_just_written_and_files_that_cannot_be_read_are_not_remembered(files, tmp_path, monkeypatch):
    memo, fresh = tmp_path / "memo", tmp_path / "fresh"
    fresh.write_bytes(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(caches, "_RESTED_NS", 10**12)
        digest_files([fresh], memo=memo)
    files[5].unlink()
    assert digest_files(files, memo=memo)[5] != blake(b"")
    assert not memo.exists()
