import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.data import digests
from flatout.data.cache import DIGEST_BYTES, combined_digest


def digest_files(paths: list[Path], memo: Path | None) -> list[bytes]:
    return list(digests.digest_files(paths, memo=memo))


def blake(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    paths = [folder / f"{i}.bin" for i in range(200)]
    for i, path in enumerate(paths):
        path.write_bytes(f"content {i % 150}".encode())
    time.sleep(0.15)  # a digest is remembered only when the file has rested
    return paths


def change_what_is_remembered(memo: Path) -> bytes:
    """Put another first digest into the memo, so that an answer from the memo can be told from one read anew."""
    (file,) = memo.iterdir()
    other = b"from the memo".ljust(DIGEST_BYTES)
    file.write_bytes(other + file.read_bytes()[DIGEST_BYTES:])
    return other


def test_digests_are_of_the_content_in_the_order_asked(files, tmp_path):
    expected = [blake(path.read_bytes()) for path in files]
    assert digest_files(files, memo=None) == expected
    assert digest_files([files[3], files[1], files[3]], memo=None) == [expected[3], expected[1], expected[3]]
    assert digest_files(files, memo=tmp_path / "memo") == expected
    assert digest_files(files, memo=tmp_path / "memo") == expected


def test_an_unchanged_file_is_not_read_again(files, tmp_path):
    memo = tmp_path / "cache" / "memo"
    digest_files(files, memo=memo)
    other = change_what_is_remembered(memo)
    assert digest_files(files, memo=memo)[0] == other


def test_changed_content_of_equal_size_and_time_is_seen(files, tmp_path):
    memo = tmp_path / "memo"
    before = digest_files(files, memo=memo)
    status = files[0].stat()
    files[0].write_bytes(files[0].read_bytes()[::-1])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files[0].stat().st_mtime_ns == status.st_mtime_ns
    after = digest_files(files, memo=memo)
    assert after[0] == blake(files[0].read_bytes()) != before[0]
    assert after[1:] == before[1:]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path):
    path, memo = tmp_path / "fresh", tmp_path / "memo"
    path.write_bytes(b"one")
    digest_files([path], memo=memo)
    assert not memo.exists()


def test_a_damaged_memo_is_replaced(files, tmp_path):
    memo = tmp_path / "memo"
    expected = digest_files(files, memo=memo)
    (file,) = memo.iterdir()
    os.truncate(file, 100)
    assert digest_files(files, memo=memo) == expected
    other = change_what_is_remembered(memo)
    assert digest_files(files, memo=memo) == [other, *expected[1:]]


def test_where_no_memo_can_be_written_everything_is_read(files, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert digest_files(files, memo=tmp_path / "file" / "memo") == digest_files(files, memo=None)


def test_two_processes_share_a_memo(files, tmp_path):
    memo = tmp_path / "memo"
    code = (
        "import sys; from pathlib import Path; from flatout.data.cache import digest_files\n"
        "files = sorted(Path(sys.argv[1]).iterdir())\n"
        "for _ in range(20): list(digest_files(files, memo=Path(sys.argv[2])))\n"
        "print(b''.join(digest_files(files, memo=Path(sys.argv[2]))).hex())"
    )
    arguments = [sys.executable, "-c", code, str(files[0].parent), str(memo)]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] == b"".join(digest_files(sorted(files), memo=None)).hex()


def test_a_file_that_cannot_be_read_has_a_digest_of_its_own_and_is_not_remembered(files, tmp_path):
    memo = tmp_path / "memo"
    content = files[5].read_bytes()
    files[5].unlink()
    missing = digest_files(files, memo=memo)[5]
    assert missing not in {blake(b""), blake(content)}
    files[5].write_bytes(content)
    assert digest_files(files, memo=memo)[5] == blake(content)


def test_the_combined_digest_sees_order_and_boundaries():
    variants = [[b"a", b"bc"], [b"ab", b"c"], [b"bc", b"a"], [b"abc"]]
    assert len({combined_digest(parts) for parts in variants}) == 4
    assert combined_digest(iter(variants[0])) == combined_digest(variants[0])
