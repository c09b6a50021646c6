"""Packs: their files, finding them again, bad images, damage, and what other processes do to them."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.data import pack as packs
from flatout.data.batches import Split
from flatout.data.build import build_pack, load_pack
from flatout.data.cache import entries, remove, temporary_folder
from flatout.data.detect import recognise
from flatout.data.pack import open_pack, share
from flatout.data.pixels import resize_images
from flatout.data.source import DataSource, ImageDataset
from flatout.utils.errors import DiskFull, InputError
from tests.data.packs import (
    SMALL_BLOCK,
    Recorder,
    arrays,
    class_folders,
    expected_images,
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


def test_a_pack_of_the_users_is_opened_if_it_fits(tmp_path, source):
    build_pack(source, settings(), tmp_path / "out", Recorder())
    found = DataSource(kind="pack", path=tmp_path / "out", inputs=(), read=pytest.fail)
    assert load(found, tmp_path / "cache").folder == tmp_path / "out"
    fix = r"does not fit the recipe; use --set image_size=16 --set channels=3 --set data.resize=squash"
    with pytest.raises(InputError, match=fix):
        load(found, tmp_path / "cache", settings(size=32, resize="crop"))
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
    folders = {load(source, tmp_path / "cache").folder}
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    # Other treatment of bad images, and bits that the data has, change no pixel.
    lenient = settings(on_bad_image="skip", max_bad_share=0.5, bits=8)
    for same, wanted in ((source, lenient), (class_folders(tmp_path / "moved"), settings())):
        again = load(same, tmp_path / "cache", wanted)
        assert (again.was_cached, {again.folder}) == (True, folders)
    for changes in ({"size": 17}, {"channels": 1}, {"resize": "crop"}):
        folders.add(load(source, tmp_path / "cache", settings(**changes)).folder)
    first, second, *_ = list(source.files or [])
    Path(str(first)).write_bytes(second.read_bytes())
    folders.add(load(source, tmp_path / "cache").folder)
    source.labels[0] += 1
    folders.add(load(source, tmp_path / "cache").folder)
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


@pytest.mark.parametrize("place", ["data/0/0.jpg/cache", "x" * 300 + "/cache"])
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
    (name, damage), folder, report = DAMAGE[what], load(source, tmp_path / "cache").folder, Recorder()
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


# Other processes

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from flatout.data.build import load_pack
from flatout.utils.host import peak_rss_bytes
from tests.data.packs import Recorder, repeated, settings

folder, count, size, act = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

class Report(Recorder):
    def update(self, done, total, unit="images"):
        if act == "die" and unit == "images" and done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while act == "hold" and unit == "images" and not (folder / "go").exists():
            time.sleep(0.01)

before = 0
for times in (1, 5) if act == "grow" else (1,):
    load_pack(repeated(folder, times * count), settings(size=size), cache=folder / "cache", report=Report())
    before, grown = peak_rss_bytes(), peak_rss_bytes() - before
print(grown)
"""


@pytest.fixture
def start(tmp_path: Path, source: ImageDataset) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that loads a pack; ends those that a failed test leaves."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), *arguments]
        root = Path(__file__).parents[2]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def test_after_a_kill_the_next_process_makes_it_anew(tmp_path, start):
    assert start("400", "256", "die").wait(60) == -9
    (partial,) = tmp_path.glob("cache/packs/*.partial")
    flip(partial / "images.npy", 1000)
    many, wanted = repeated(tmp_path, 400), settings(size=256)
    pack = load(many, tmp_path / "cache", wanted)
    assert np.array_equal(pack.images, expected_images(many, wanted))
    assert not list(tmp_path.glob("cache/packs/*.partial"))


def test_while_one_process_makes_it_another_waits_and_it_is_not_cleared(tmp_path, start):
    first, cache, report = start("60", "128", "hold"), tmp_path / "cache", Recorder()
    while not list(cache.glob("packs/*.partial")):
        assert first.poll() is None
        time.sleep(0.01)
    for entry in entries(cache):
        if entry.is_limited:
            assert (entry.what, remove(entry.path)) == (f"incomplete: {entry.path.name}", False)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(load_pack, repeated(tmp_path, 60), settings(size=128), cache=cache, report=report)
        while not report.notes:
            assert not second.done()
            time.sleep(0.01)
        assert report.notes == ["another process is making this pack; waiting for it"]
        (tmp_path / "go").touch()
        assert second.result(60).was_cached
    assert first.wait(60) == 0


def test_without_room_nothing_is_left_behind(tmp_path, source):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"limit reached: 500 images need 6,144,000 bytes and .* free; make room"):
            load(repeated(tmp_path, 500), tmp_path / "cache", settings(size=64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert leftovers(tmp_path / "cache" / "packs") == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(start):
    text, _ = start("200", "256", "grow").communicate(timeout=60)
    assert int(text) < 4 * 200 * 256 * 256 * 3 / 10
