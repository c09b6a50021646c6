"""What this host is: cores, memory, processor."""

import os

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
