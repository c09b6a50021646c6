"""Files that are either whole or absent."""

import fcntl
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.data.cache import temporary_folder
from flatout.utils.files import sweep_temporary_files, write_atomically


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_atomically(tmp_path / "file", content), contents * 5))
    assert (tmp_path / "file").read_bytes() in contents
    assert len(list(tmp_path.iterdir())) == 1


def test_what_killed_processes_left_is_swept_whatever_runs_under_their_number(tmp_path: Path) -> None:
    """In a container there always is a process 1."""
    left = (tmp_path / ".a.npy.1-0123abcd.tmp", tmp_path / "logs" / ".b.json.0123abcd.tmp")
    kept = tmp_path / ".notes.tmp"
    (tmp_path / "logs").mkdir()
    for path in (*left, kept):
        path.touch()

    def write(path: Path) -> None:
        sweep_temporary_files(tmp_path)
        path.write_text("whole")

    write_atomically(tmp_path / "file", write)
    assert (tmp_path / "file").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".notes.tmp", "file", "logs"]


def test_a_file_system_without_locks_gets_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        temporary_folder()
    assert not list(tmp_path.iterdir())
