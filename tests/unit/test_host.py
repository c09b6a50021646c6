"""What this host is: cores, memory, processor."""

import atexit
import gc
import importlib.util
import os
import subprocess
import sys

import pytest

from flatout import host


def test_cores_and_memory_are_counted_once() -> None:
    assert 1 <= host.physical_cores() <= host.usable_cores() <= (os.cpu_count() or 1)
    assert host.available_memory() > 0
    assert host.peak_rss_bytes() > 2**20
    assert host.processor_name()


def test_usable_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert host.usable_cores() == host.physical_cores() == 1


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
    code = f"from flatout.host import collect_garbage_as_usual, start_quickly; start_quickly(); import triton{usual}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
