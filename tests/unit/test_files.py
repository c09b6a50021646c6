"""Files that are either whole or absent."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flatout.utils.files import sweep_temporary_files, write_atomically


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_atomically(tmp_path / "file", content), contents * 5))
    assert (tmp_path / "file").read_bytes() in contents
    assert len(list(tmp_path.iterdir())) == 1


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in (".a.npy.1-0123abcd.tmp", "logs/.b.json.0123abcd.tmp", ".notes.tmp"):
        (tmp_path / name).touch()
    sweep_temporary_files(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".notes.tmp", "logs"]
