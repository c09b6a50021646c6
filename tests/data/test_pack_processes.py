"""Packs and other processes: killed, at the same time, short of room, short of memory."""

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

from flatout.data.build import build_pack, load_pack
from flatout.data.source import Source
from flatout.errors import DiskFull, InputError
from tests.data.packs import Recorder, class_folders, expected_images, flip, leftovers, load, settings

SCRIPT = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
import numpy as np
from flatout.data.build import load_pack
from flatout.data.pack import PackSettings
from flatout.data.source import Source
from flatout.host import peak_rss_bytes

folder, count, size, cache, act = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
files = sorted(folder.rglob("*.jpg"))

class Report:
    def update(self, done, total, unit="images"):
        if act == "die" and unit == "images" and done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while act == "hold" and unit == "images" and not (cache / "go").exists():
            time.sleep(0.01)
    def note(self, text):
        print(text, flush=True)

source = Source(kind="k", path=folder, classes=("a", "b"), labels=np.arange(count) % 2, splits={"train": (0, count)},
                files=[files[i % len(files)] for i in range(count)])
settings = PackSettings(size=size, channels=3, resize="squash", on_bad_image="stop", max_bad_share=0.0)
pack = load_pack(source, settings, cache=cache, report=Report())
print("cached" if pack.was_cached else "built")
if act == "grow":
    before = peak_rss_bytes()
    source = replace(source, labels=source.labels.repeat(5), splits={"train": (0, 5 * count)}, files=5 * source.files)
    load_pack(source, settings, cache=cache, report=Report())
    print(peak_rss_bytes() - before)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that loads a pack; ends those that a failed test leaves."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(folder: Path, count: int, size: int, cache: Path, act: str = "") -> subprocess.Popen[str]:
        arguments = [sys.executable, "-W", "error", "-c", SCRIPT, str(folder), str(count), str(size), str(cache), act]
        processes.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Return the cache of a process that was killed while it packed 400 images."""
    folder = tmp_path_factory.mktemp("killed")
    class_folders(folder / "data")
    arguments = [str(folder / "data"), "400", "256", str(folder / "cache"), "die"]
    assert subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT, *arguments]).returncode == -9
    return folder / "cache"


def repeated(folder: Path, count: int) -> Source:
    """Return the source that the script makes."""
    files = sorted(folder.rglob("*.jpg"))
    return Source(
        kind="k",
        path=folder,
        classes=("a", "b"),
        labels=np.arange(count) % 2,
        splits={"train": (0, count)},
        files=[files[i % len(files)] for i in range(count)],
    )


def output(process: subprocess.Popen[str], returncode: int = 0) -> str:
    text, _ = process.communicate(timeout=60)
    assert process.returncode == returncode, text
    return text.strip()


def test_after_a_kill_the_next_process_makes_it_anew(tmp_path, killed):
    source, cache = class_folders(tmp_path / "data"), tmp_path / "cache"
    assert source.files is not None
    shutil.copytree(killed, cache)
    (partial,) = cache.glob("packs/*.partial")
    flip(partial / "images.npy", 1000)

    same, wanted = repeated(tmp_path / "data", 400), settings(size=256, max_bad_share=0.0)
    pack = load_pack(same, wanted, cache=cache, report=Recorder())
    assert not pack.was_cached
    images = expected_images(source, wanted)
    row_of = {file: row for row, file in enumerate(source.files)}
    assert np.array_equal(pack.images, images[[row_of[file] for file in same.files or ()]])
    assert not list(cache.glob("packs/*.partial"))
    assert load(same, cache, wanted).was_cached


@pytest.mark.slow
def test_two_processes_at_once_build_it_once(tmp_path, start):
    class_folders(tmp_path / "data")
    cache = tmp_path / "cache"
    first = start(tmp_path / "data", 60, 128, cache, "hold")
    while not list(cache.glob("packs/*.partial")):
        assert first.poll() is None
        time.sleep(0.01)
    report = Recorder()
    with ThreadPoolExecutor(1) as pool:
        wanted = settings(size=128, max_bad_share=0.0)
        second = pool.submit(load_pack, repeated(tmp_path / "data", 60), wanted, cache=cache, report=report)
        while not report.notes:
            assert not second.done()
            time.sleep(0.01)
        assert report.notes == ["another process is making this pack; waiting for it"]
        (cache / "go").touch()
        assert second.result(60).was_cached
    assert output(first) == "built"


def test_without_room_nothing_is_left_behind(tmp_path):
    class_folders(tmp_path / "data")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(DiskFull) as caught:
            load(repeated(tmp_path / "data", 500), tmp_path / "cache", settings(size=64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(caught.value)
    assert (
        f"{tmp_path / 'cache' / 'packs'}: the disk is full, or a limit reached: 500 images need 6,144,000 bytes"
        in message
    )
    assert "are free; make room" in message
    assert leftovers(tmp_path / "cache" / "packs") == []


def test_without_a_cache_that_can_be_written_the_run_continues_with_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    source, report = class_folders(tmp_path / "data"), Recorder()
    pack = load_pack(source, settings(), cache=tmp_path / "file" / "cache", report=report)
    assert np.array_equal(pack.images, expected_images(source, settings()))
    (note,) = report.notes
    assert "the cache cannot be used, so the decoded images are not kept" in note
    assert "file/cache/packs: cannot be written (Not a directory)" in note
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"file: cannot be written"):
        build_pack(source, settings(), tmp_path / "file" / "out", Recorder())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path, start):
    class_folders(tmp_path / "data")
    count, size = 200, 256  # already more than the two blocks that are in memory at once
    grown = int(output(start(tmp_path / "data", count, size, tmp_path / "cache", "grow")).split()[-1])
    assert grown < 4 * count * size * size * 3 / 10
