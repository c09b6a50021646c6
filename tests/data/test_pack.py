import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.data import pack_files
from flatout.data.build import build_pack, load_pack
from flatout.data.cache import cache_folder, temporary_folder
from flatout.data.detect import recognise
from flatout.data.feed import Samples
from flatout.data.pack import open_pack
from flatout.data.resize import resize_images
from flatout.data.shared_pack import share
from flatout.data.source import DataRef, Source
from flatout.errors import InputError
from tests.data.packs import (
    SMALL_BLOCK,
    Recorder,
    arrays,
    class_folders,
    expected_images,
    flip,
    leftovers,
    load,
    settings,
)

# What a pack is


@pytest.mark.parametrize("changes", [{}, {"channels": 1}, {"resize": "crop", "size": 9}])
def test_a_pack_is_plain_files_of_the_decoded_images(tmp_path, changes):
    source, wanted = class_folders(tmp_path / "data"), settings(**changes)
    pack = build_pack(source, wanted, tmp_path / "out", Recorder())
    assert leftovers(tmp_path / "out") == ["images.npy", "labels.npy", "pack.json"]
    assert leftovers(tmp_path) == ["data", "out"]
    images = np.load(tmp_path / "out" / "images.npy", mmap_mode="r")
    assert images.dtype == np.uint8
    assert np.array_equal(images, expected_images(source, wanted))
    assert np.array_equal(np.load(tmp_path / "out" / "labels.npy"), source.labels)
    description = json.loads((tmp_path / "out" / "pack.json").read_text())
    assert description["classes"] == ["a", "b", "c"]
    assert description["splits"] == {"train": [0, 36], "test": [36, 45]}
    assert "bilinear" in description["resize_method"]
    assert (pack.classes, pack.splits, pack.notes) == (source.classes, source.splits, source.notes)
    assert pack.describe() == source.describe()
    assert not pack.was_cached
    again = open_pack(tmp_path / "out")
    assert np.array_equal(again.images, images)
    assert again.build_seconds == pack.build_seconds > 0


def test_arrays_are_resized_by_the_same_method(tmp_path):
    source = arrays(side=20, channels=3)
    assert source.images is not None
    pack = load(source, tmp_path, settings(channels=1))
    assert np.array_equal(pack.images, resize_images(source.images, size=16, channels=1, resize="squash"))


@pytest.mark.parametrize("cache", [True, False])
def test_arrays_given_as_wanted_stay_in_memory(tmp_path, cache):
    source = arrays()
    pack = load(source, tmp_path / "cache" if cache else None)
    assert pack.images is source.images
    assert pack.folder is None
    assert not (tmp_path / "cache").exists()


def test_torch_has_its_threads_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        build_pack(class_folders(tmp_path / "data"), settings(), tmp_path / "out", Recorder())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_ends_with_all_images(tmp_path):
    report = Recorder()
    build_pack(class_folders(tmp_path / "data"), settings(), tmp_path / "out", report)
    assert report.updates[-1] == (45, 45, "images")


def test_an_existing_folder_is_refused(tmp_path):
    source = class_folders(tmp_path / "data")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"out: exists; choose another --out"):
        build_pack(source, settings(), tmp_path / "out", Recorder())


# The cache


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("FLATOUT_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "flatout"
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FLATOUT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "flatout"


def test_the_same_content_is_found_again_wherever_it_lies(tmp_path):
    source = class_folders(tmp_path / "data")
    first = load(source, tmp_path / "cache")
    again = load(source, tmp_path / "cache")
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    moved = load(class_folders(tmp_path / "moved"), tmp_path / "cache")
    assert (first.was_cached, again.was_cached, moved.was_cached) == (False, True, True)
    assert first.folder == again.folder == moved.folder


def test_other_content_labels_or_settings_make_another_pack(tmp_path):
    source = class_folders(tmp_path / "data")
    folders = {load(source, tmp_path / "cache").folder}
    for changes in ({"size": 17}, {"channels": 1}, {"resize": "crop"}):
        folders.add(load(source, tmp_path / "cache", settings(**changes)).folder)
    assert source.files is not None
    Path(str(source.files[0])).write_bytes(source.files[1].read_bytes())
    folders.add(load(source, tmp_path / "cache").folder)
    source.labels[0] += 1
    folders.add(load(source, tmp_path / "cache").folder)
    assert len(folders) == 6
    lenient = load(source, tmp_path / "cache", settings(on_bad_image="skip", max_bad_share=0.5))
    assert lenient.was_cached  # what is done about bad images decides no pixel


def test_a_cached_pack_of_array_files_is_found_without_reading_them(tmp_path):
    source = arrays()
    (tmp_path / "images.npy").write_bytes(b"content")
    reads = []

    def read() -> Source:
        reads.append(1)
        return source

    found = DataRef(kind="arrays", path=tmp_path, inputs=(tmp_path / "images.npy",), read=read)
    first, again = load(found, tmp_path / "cache"), load(found, tmp_path / "cache")
    assert (first.was_cached, again.was_cached, len(reads)) == (False, True, 1)
    assert np.array_equal(again.images, np.asarray(source.images))
    (tmp_path / "images.npy").write_bytes(b"changed")
    assert not load(found, tmp_path / "cache").was_cached
    assert len(reads) == 2


def test_without_a_cache_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    source = class_folders(tmp_path / "data")
    pack = load(source, None)
    assert np.array_equal(pack.images, expected_images(source, settings()))
    assert leftovers(tmp_path / "tmp") == []  # already without a name, so that a kill leaves nothing
    rows = np.array([3, 0])
    samples = Samples(images=pack.images, rows=np.arange(45), labels=pack.labels)
    assert np.array_equal(samples.read(rows, np.empty((2, 16, 16, 3), np.uint8)), pack.images[rows])
    with share(pack) as shared:
        assert np.array_equal(shared.open().images, pack.images)


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    alive, descriptor = temporary_folder()
    dead = tmp_path / "tmp" / "flatout-dead"
    dead.mkdir()
    (dead / ".owner").touch()
    (dead / "images.npy").touch()
    load(class_folders(tmp_path / "data"), None)
    assert leftovers(tmp_path / "tmp") == [alive.name]
    os.close(descriptor)


def test_a_pack_of_the_users_is_opened_if_it_fits(tmp_path):
    build_pack(class_folders(tmp_path / "data"), settings(), tmp_path / "out", Recorder())
    found = DataRef(kind="pack", path=tmp_path / "out", inputs=(), read=pytest.fail)
    assert load(found, tmp_path / "cache").folder == tmp_path / "out"
    mend = r"16 x 16 pixels.*wants 32 x 32.*use --set image_size=16 --set data.resize=squash, or make another"
    with pytest.raises(InputError, match=mend):
        load(found, tmp_path / "cache", settings(size=32, resize="crop"))
    with pytest.raises(InputError, match="is a pack already"):
        build_pack(found, settings(), tmp_path / "other", Recorder())


# Bad images


def spoil(source: Source, indices: list[int]) -> list[str]:
    assert source.files is not None
    for index in indices:
        Path(str(source.files[index])).write_bytes(b"<html>not found</html>")
    return [f"{source.files[index]}: is HTML, not an image" for index in indices]


def test_stop_names_every_bad_image_at_once(tmp_path):
    source = class_folders(tmp_path / "data")
    lines = spoil(source, [0, 20, 44])
    with pytest.raises(InputError) as caught:
        build_pack(source, settings(), tmp_path / "out", Recorder())
    assert str(caught.value).splitlines()[1:] == lines
    assert str(caught.value).startswith("3 of 45 images cannot be used; repair or remove them, or leave them out with")
    assert leftovers(tmp_path) == ["data"]


def test_skip_leaves_bad_images_out(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_files, "BLOCK_BYTES", SMALL_BLOCK)
    source, wanted = class_folders(tmp_path / "data"), settings(on_bad_image="skip", max_bad_share=0.4)
    whole = expected_images(source, wanted)
    bad = [0, *range(10, 20), 40, 44]  # the second block has none left
    spoil(source, bad)
    pack = load(source, tmp_path / "cache", wanted)
    assert np.array_equal(pack.images, np.delete(whole, bad, axis=0))
    assert np.array_equal(pack.labels, np.delete(source.labels, bad))
    assert pack.splits == {"train": (0, 25), "test": (25, 32)}
    assert source.files is not None
    assert pack.skipped == {str(source.files[index]): "is HTML, not an image" for index in bad}
    # A cached pack is judged by the settings of today.
    assert load(source, tmp_path / "cache", wanted).was_cached
    with pytest.raises(InputError, match="13 of 45 images cannot be used; repair or remove"):
        load(source, tmp_path / "cache")
    with pytest.raises(InputError, match=r"13 of 45 images \(28.89%\).*max_bad_share = 0.25 \(25.00%\)"):
        load(source, tmp_path / "cache", settings(on_bad_image="skip", max_bad_share=0.25))


def test_a_class_that_loses_all_training_images_is_refused(tmp_path):
    source = class_folders(tmp_path / "data")
    spoil(source, [i for i in range(36) if source.labels[i] == 1])
    with pytest.raises(InputError, match=r"all 12 training images of class 'b' are bad.*1\.jpg|all 12.*is HTML"):
        load(source, tmp_path / "cache", settings(on_bad_image="skip", max_bad_share=0.9))


def test_a_split_whose_images_are_all_bad_is_left_out(tmp_path):
    source = class_folders(tmp_path / "data")
    spoil(source, list(range(36, 45)))
    pack = load(source, tmp_path / "cache", settings(on_bad_image="skip", max_bad_share=0.9))
    assert pack.splits == {"train": (0, 36)}
    assert pack.notes == ("A note.", "All test images are bad, so there is no test split.")


# Damage


DAMAGE = {
    "a pixel": ("images.npy", lambda path: flip(path, -1000)),
    "the header of the images": ("images.npy", lambda path: flip(path, 25)),
    "images cut short": ("images.npy", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "images too long": ("images.npy", lambda path: os.truncate(path, path.stat().st_size + 1)),
    "no images": ("images.npy", Path.unlink),
    "a label": ("labels.npy", lambda path: flip(path, -8)),
    "labels cut short": ("labels.npy", lambda path: os.truncate(path, 100)),
    "no labels": ("labels.npy", Path.unlink),
    "a letter of the description": ("pack.json", lambda path: flip(path, 25)),
    "description cut short": ("pack.json", lambda path: os.truncate(path, 100)),
    "no description": ("pack.json", Path.unlink),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen_and_a_cached_pack_made_again(tmp_path, what):
    name, spoil_file = DAMAGE[what]
    source = class_folders(tmp_path / "data")
    pack = load(source, tmp_path / "cache")
    assert pack.folder is not None
    spoil_file(pack.folder / name)
    with pytest.raises(InputError, match=rf"{name}: is damaged .*; delete .* and pack the data again"):
        open_pack(pack.folder)
    report = Recorder()
    mended = load_pack(source, settings(), cache=tmp_path / "cache", report=report)
    assert "rebuilding the damaged cached pack" in report.notes[0]
    assert not mended.was_cached
    assert np.array_equal(mended.images, expected_images(source, settings()))
    assert load(source, tmp_path / "cache").was_cached


def test_of_a_large_pack_blocks_over_the_whole_file_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_files, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(pack_files, "CHECKED_BYTES", 2 * SMALL_BLOCK)
    folder = tmp_path / "out"
    build_pack(class_folders(tmp_path / "data"), settings(), folder, Recorder())
    row = 16 * 16 * 3
    flip(folder / "images.npy", 128 + 15 * row)  # a block in the middle of five
    open_pack(folder)
    flip(folder / "images.npy", -1)
    with pytest.raises(InputError, match="images 40 to 44 have changed"):
        open_pack(folder)
    open_pack(folder, verify=False)


def test_a_pack_of_a_newer_format_says_so(tmp_path):
    folder = tmp_path / "out"
    build_pack(class_folders(tmp_path / "data"), settings(), folder, Recorder())
    description = json.loads((folder / "pack.json").read_text())
    (folder / "pack.json").write_text(json.dumps({**description, "format_version": 99}))
    with pytest.raises(InputError, match=r"has format 99, .* update flatout"):
        open_pack(folder)


# The fingerprint


def test_the_fingerprint_is_of_the_content_alone(tmp_path):
    source = class_folders(tmp_path / "data")
    pack = load(source, tmp_path / "cache")
    assert pack.fingerprint == load(source, tmp_path / "cache").fingerprint == load(source, None).fingerprint
    assert load(source, None, settings(size=17)).fingerprint != pack.fingerprint
    given = arrays()
    built = build_pack(given, settings(), tmp_path / "out", Recorder())
    assert load(given, None).fingerprint == built.fingerprint
    assert given.images is not None
    given.images[7, 3, 3, 0] ^= 1
    assert load(given, None).fingerprint != built.fingerprint
    source.labels[0] = 1 - source.labels[0]
    assert load(source, None).fingerprint != pack.fingerprint


def test_arrays_mapped_from_a_file_of_another_layout_are_read_right(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.arange(6) % 2)
    pack = load(recognise(tmp_path), None)
    samples = Samples(images=pack.images, rows=np.arange(6), labels=pack.labels)
    read = samples.read(np.array([5, 1]), np.empty((2, 16, 16, 3), np.uint8))
    assert np.array_equal(read, pixels[[5, 1]].transpose(0, 2, 3, 1))
