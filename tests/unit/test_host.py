"""What this host is: cores, memory, processor."""

import atexit
import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.utils import host


def test_cores_and_memory_are_counted() -> None:
    assert 1 <= host.physical_cores() <= host.usable_cores() <= (os.cpu_count() or 1)
    assert host.available_memory() > 0
    assert host.peak_rss_bytes() > 2**20
    assert host.processor_name()


def test_usable_cores_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    for quota, cores in (("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert host.usable_cores() == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert host.usable_cores() == host.physical_cores() == 1


def test_the_file_cache_of_a_container_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("999000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 800000\ninactive_file 700000\n")
    assert host.available_memory() == 701_000


def test_garbage_is_collected_as_usual_once_imports_are_done() -> None:
    before = gc.get_threshold()
    try:
        host.start_quickly()
        assert gc.get_threshold()[0] > 10_000
        host.collect_garbage_as_usual()
        assert gc.get_threshold() == before
        host.collect_garbage_as_usual()  # as the second engine of a process does
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)
        atexit.unregister(host.end_quickly)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("usual", ["", "; collect_garbage_as_usual()"])
def test_a_quick_process_ends_without_reports_of_leaks(usual: str) -> None:
    """Triton, which timm and torchvision import through torch, reports objects that are not freed at the end."""
    code = (
        f"from flatout.utils.host import collect_garbage_as_usual, start_quickly; start_quickly(); import triton{usual}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
