"""CIFAR's binary files."""

from pathlib import Path

import pytest

from flatout.errors import InputError
from tests.data import containers as c
from tests.data.small_sets import read


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch", "batches.meta"), ("train", "test", "meta")])
def test_pickles_are_refused(tmp_path: Path, names: tuple[str, ...]):
    for name in names:
        c.write(tmp_path / name, b"x")
    with pytest.raises(InputError, match=r"is the Python version of CIFAR, .*get the binary version"):
        read(tmp_path)


def test_a_truncated_batch_is_named(tmp_path: Path):
    c.cifar10(tmp_path)
    content = (tmp_path / "data_batch_2.bin").read_bytes()
    c.write(tmp_path / "data_batch_2.bin", content[:-1])
    with pytest.raises(InputError, match=r"data_batch_2\.bin: has [\d,]+ bytes, no multiple of 3,073"):
        read(tmp_path)
