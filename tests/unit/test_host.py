"""What this host is: cores, memory, processor."""

import os
from pathlib import Path

import pytest

from flatout.utils import host


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
