"""Packs that a run has before all images are decoded."""

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from flatout.data import arrival, build, pack_files
from flatout.data.arrival import Building, Cancelled
from flatout.data.build import load_pack
from flatout.data.decode import decode_image
from flatout.data.feed import Samples
from flatout.data.pack import Pack, open_pack
from flatout.data.shared_pack import share
from flatout.data.source import Source
from flatout.errors import InputError
from tests.data.packs import SMALL_BLOCK, Recorder, class_folders, expected_images, settings

pytestmark = pytest.mark.skipif(not arrival.is_available(), reason="needs /proc")

ORDER = np.random.default_rng(3).permutation(45)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return class_folders(tmp_path / "data")


@contextmanager
def held_from(source: Source, place: int) -> Iterator[tuple[threading.Event, list[str]]]:
    """Hold the decoding from a place in `ORDER` on until the event; the list has the names of what is decoded."""
    assert source.files is not None
    held, event, decoded = {str(source.files[row]) for row in ORDER[place:]}, threading.Event(), []

    def decode(path, **how) -> np.ndarray:
        if str(path) in held:
            event.wait(60)
        decoded.append(path.name)
        return decode_image(path, **how)

    with mock.patch.object(build, "decode_image", decode), mock.patch.object(pack_files, "BLOCK_BYTES", SMALL_BLOCK):
        try:
            yield event, decoded
        finally:
            event.set()


def building_of(source: Source, cache: Path | None, order: np.ndarray = ORDER) -> Building:
    def make(building: Building) -> Pack:
        return load_pack(source, settings(), cache=cache, report=building, building=building)

    return Building(make, lambda pack: order, Recorder())


def started(source: Source, cache: Path | None) -> tuple[Pack, Building]:
    pack = building_of(source, cache).start()
    assert pack.building is not None
    return pack, pack.building


def samples_of(pack: Pack) -> Samples:
    return Samples(images=pack.images, rows=np.arange(45), labels=pack.labels, arrival=pack.arrival)


def read(samples: Samples, rows: np.ndarray) -> np.ndarray:
    return samples.read(rows, np.empty((len(rows), 16, 16, 3), np.uint8))


@pytest.mark.parametrize("is_cached", [True, False])
def test_images_are_there_in_the_order_asked_for(source, tmp_path, is_cached):
    wanted = expected_images(source, settings())
    with held_from(source, 20) as (event, _):
        pack, building = started(source, tmp_path / "cache" if is_cached else None)
        with building.completed(), share(pack) as shared:
            samples, other = samples_of(pack), pickle.loads(pickle.dumps(shared)).open()
            assert np.array_equal(read(samples, ORDER[:20]), wanted[ORDER[:20]])
            assert samples.is_arriving
            assert pack.arrival is not None
            assert pack.arrival.done() == 20 < pack.arrival.needed(ORDER[15:25])
            event.set()
            assert np.array_equal(read(samples_of(other), ORDER), wanted[ORDER])
    assert not samples.is_arriving
    assert np.array_equal(read(samples, np.arange(45)), wanted)


def test_the_pack_is_the_one_that_is_decoded_before(source, tmp_path):
    with mock.patch.object(pack_files, "BLOCK_BYTES", SMALL_BLOCK):
        before = load_pack(source, settings(), cache=tmp_path / "one", report=Recorder())
        _, building = started(source, tmp_path / "two")
        with building.completed():
            pass
    (folder,) = [path for path in (tmp_path / "two" / "packs").iterdir() if path.suffix != ".lock"]
    made = open_pack(folder)
    assert (made.fingerprint, made.classes, made.splits) == (before.fingerprint, before.classes, before.splits)
    assert building_of(source, tmp_path / "two").start().was_cached


def test_parts_that_were_decoded_before_the_end_of_a_process_are_not_decoded_again(source, tmp_path):
    assert source.files is not None
    with held_from(source, 20) as (event, _):
        pack, building = started(source, tmp_path / "cache")
        assert pack.arrival is not None
        pack.arrival.wait(ORDER[:20])
        threading.Timer(0.2, event.set).start()
        building.cancel()
    assert not list((tmp_path / "cache" / "packs").glob("*/pack.json"))
    with held_from(source, 45) as (_, decoded):
        pack, building = started(source, tmp_path / "cache")
        with building.completed():
            again = read(samples_of(pack), np.arange(45))
    assert np.array_equal(again, expected_images(source, settings()))
    first = {source.files[row].name for row in ORDER[:20]}
    assert decoded
    assert not first & set(decoded)


def test_another_order_begins_anew(source, tmp_path):
    with held_from(source, 20) as (event, _):
        _, building = started(source, tmp_path / "cache")
        threading.Timer(0.2, event.set).start()
        building.cancel()
    pack = building_of(source, tmp_path / "cache", ORDER[::-1].copy()).start()
    assert pack.building is not None
    assert np.array_equal(read(samples_of(pack), np.arange(45)), expected_images(source, settings()))
    pack.building.cancel()


def test_unreadable_images_are_all_named_to_whoever_waits(source, tmp_path):
    assert source.files is not None
    bad = [source.files[row] for row in ORDER[[12, 40]]]
    for file in bad:
        file.write_bytes(b"no image")
    with mock.patch.object(pack_files, "BLOCK_BYTES", SMALL_BLOCK):
        pack, building = started(source, tmp_path / "cache")
        samples = samples_of(pack)
        assert read(samples, ORDER[:10]).any()
        with pytest.raises(InputError, match="2 of 45 images") as raised, building.completed():
            read(samples, ORDER[10:20])
    assert all(str(file) in str(raised.value) for file in bad)
    assert not list((tmp_path / "cache" / "packs").glob("*/pack.json"))


def test_what_goes_wrong_before_the_first_image_is_raised_at_once(source, tmp_path):
    with mock.patch.object(build, "bits_of", side_effect=InputError("no")), pytest.raises(InputError, match="no"):
        building_of(source, tmp_path / "cache").start()
    with pytest.raises(Cancelled):
        building = building_of(source, tmp_path / "cache")
        building._is_cancelled = True
        building.update(1, 2)
