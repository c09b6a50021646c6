"""Damaged weights: whatever the bytes, a reader gives tensors or one InputError, runs nothing, and takes little memory.

Damage that keeps a format's checksums right goes deeper. `FLATOUT_FUZZ_SECONDS` is as in `tests/data/test_fuzz.py`: 60
seconds are more than 10,000 files of most formats.
"""

import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flatout.convert import keras_arrays
from flatout.convert.table import masked

from flatout.errors import InputError
from flatout.models.convert.readers import find_file
from flatout.models.pretrained import read_file
from tests.convert.networks import FIXTURES
from tests.data.damage import read_damaged

EXAMPLES = 600
INDEX = "tf-small-objects/ckpt-1.index"


def with_checksums(content: bytes) -> bytes:
    """Return a table whose blocks, of the size that they had, have the right checksums."""
    changed = bytearray(content.ljust(48, b"\0"))
    whole = (FIXTURES / INDEX).read_bytes()
    position = len(whole) - 48
    ends = []
    for _ in range(2):  # the meta index and the index
        (offset, position), (size, _) = (number(whole, position), number(whole, number(whole, position)[1]))
        position = number(whole, position)[1]
        ends.append((offset, size))
    ends.append((0, min(offset for offset, _ in ends) - 5))
    for offset, size in ends:
        changed[offset + size + 1 : offset + size + 5] = masked(bytes(changed[offset : offset + size + 1]))
    # The end as it was: nothing would be read otherwise.
    return bytes(changed[: len(whole) - 48]) + whole[-48:]


def number(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def with_weights(content: bytes) -> bytes:
    """Return a `.keras` file with these weights."""
    stream = io.BytesIO()
    with zipfile.ZipFile(FIXTURES / "keras-small.keras") as old, zipfile.ZipFile(stream, "w") as new:
        new.writestr("config.json", old.read("config.json"))
        new.writestr("model.weights.h5", content)
    return stream.getvalue()


def with_code(marker: Path) -> Callable[[bytes], bytes]:
    """Return a function that puts a call of os.mkdir into a pickle, before its end."""

    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(marker),)

    # Without entries of the memo: they would shift those of the pickle.
    code = pickletools.optimize(pickle.dumps(Code(), protocol=2))[2:-1]
    return lambda content: content[:2] + code + b"0" + content[2:]


# The file to damage; where it lies among others; what repairs it.
FILES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "Paddle": ("paddle-small.pdparams", bytes),
    "Paddle, protocol 2": ("paddle-small-protocol2.pdparams", bytes),
    "TensorFlow, index": (INDEX, bytes),
    "TensorFlow, index, right checksums": (INDEX, with_checksums),
    "TensorFlow, data": ("tf-small-objects/ckpt-1.data-00000-of-00001", bytes),
    "Keras, h5": ("keras2-small.h5", bytes),
    "Keras, h5 of weights": ("keras2-small-weights.h5", bytes),
    "Keras, weights.h5": ("keras-small.weights.h5", bytes),
    "Keras, keras": ("keras-small.keras", bytes),
    "Keras, keras, zip intact": ("keras-small.weights.h5", with_weights),
    "torch": ("torch-small.pth", bytes),
    "torch, legacy": ("torch-small-legacy.pt", bytes),
    "Lightning": ("torch-small.ckpt", bytes),
    "safetensors": ("torch-small.safetensors", bytes),
}


# Reads the files that it is told, each in a process of its own with the limits of `keras_files`, and says the error.
READER = """
import json, os, sys
from pathlib import Path
import h5py
from flatout.convert import keras_arrays
from flatout.errors import InputError
for line in sys.stdin:
    path = Path(line.rstrip())
    if os.fork() == 0:
        keras_arrays.limit(1, (2 << 30) + 8 * path.stat().st_size)
        try:
            said = None if keras_arrays.read(path).arrays else "nothing"
        except InputError as error:
            said = str(error)
        print(json.dumps(said), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        ended = os.WIFSIGNALED(status)  # by HDF5, or because it did not end: `keras_files` reports that
        print(json.dumps(f"{path}: ended" if ended else "failed"), flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[Callable[[Path], None]]:
    """Return a function that reads a file of Keras, as `keras_files.read` does but without a new Python for each."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-P", "-c", READER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def read(file: Path) -> None:
            print(file, file=asked, flush=True)
            if said := json.loads(told.readline()):
                raise InputError(said)

        yield read


def check(
    name: str, examples: int, tmp_path: Path, *, at_length: bool = False, reader: Callable[[Path], None] | None = None
) -> None:
    source, repair = FILES[name]
    marker = tmp_path / "canary"
    file = tmp_path / "files" / Path(source).name
    if "/" in source:
        shutil.copytree((FIXTURES / source).parent, file.parent)
    else:
        file.parent.mkdir()
    if repair is with_weights:
        file = file.with_name("model.keras")
    content = (FIXTURES / source).read_bytes()
    before = set(tmp_path.rglob("*")) | {file}

    def read(content: bytes) -> None:
        file.write_bytes(repair(content))
        try:
            if reader is not None:
                reader(file)
            elif "Keras" in name:
                assert keras_arrays.read(file).arrays
            else:
                assert read_file(find_file(file)).tensors
        except InputError as error:
            assert str(file.parent) in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 1000

    read_damaged(name, examples, content, read, at_length=at_length)
    assert not marker.exists()
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", FILES)
def test_damaged_weights(name: str, tmp_path: Path):
    check(name, 15, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_weights_at_length(name: str, tmp_path: Path, reader: Callable[[Path], None]):
    check(name, EXAMPLES, tmp_path, at_length=True, reader=reader if "Keras" in name else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paddle-small.pdparams", "paddle-small-protocol2.pdparams", "torch-small-legacy.pt"])
def test_damaged_code_at_length(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pickle that makes a folder where it is run, damaged in many ways."""
    monkeypatch.chdir(tmp_path)
    marker, file = Path("canary"), tmp_path / name
    content = with_code(marker)((FIXTURES / name).read_bytes())
    pickle.loads(content)
    assert marker.exists()  # it does where it is let
    marker.rmdir()

    def read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            read_file(file)
        except InputError as error:
            assert str(file) in str(error)
            assert len(str(error)) < 1000
        assert not marker.exists()

    read_damaged(name, EXAMPLES, content, read, at_length=True)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path):
    """Of text, bytes and an index of the memo, which Python's own unpickler takes memory for before it looks."""
    for code, size in ((b"\x8d", 8), (b"\x8e", 8), (b"\x96", 8), (b"X", 4), (b"B", 4), (b"r", 4)):
        huge = struct.pack("<Q" if size == 8 else "<I", 2 ** (40 if size == 8 else 31))
        (tmp_path / "a.pdparams").write_bytes(b"\x80\x04}" + code + huge + b".")
        with pytest.raises(InputError, match=r"a\.pdparams: "):
            read_file(tmp_path / "a.pdparams")
