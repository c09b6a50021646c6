"""Damaged containers: whatever the bytes, a reader gives data or one InputError, soon and in little memory.

`FLATOUT_FUZZ_SECONDS=600 pytest -n 0 -s -m slow tests/data/test_fuzz*.py` reads for 600 seconds of CPU time in each
format and prints the number of examples.
"""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatout.data.detect import recognise
from flatout.errors import InputError
from tests.data import containers as c
from tests.data.damage import EXAMPLES, read_damaged


def small_samples() -> list[c.Sample]:
    samples = []
    for i in range(6):
        stream = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), 40 * i, np.uint8)).save(stream, "PNG")
        samples.append(c.Sample("train", i % 2, f"{i}.png", stream.getvalue()))
    return samples


def tar_of(samples: list[c.Sample], compression: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}", format=tarfile.PAX_FORMAT) as out:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for sample in samples:
            c.add_member(out, f"{sample.class_name}/{'long' * 30}{sample.name}", sample.data)
    return stream.getvalue()


def webdataset_of(samples: list[c.Sample]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        for i, sample in enumerate(samples):
            c.add_member(out, f"{i}.png", sample.data)
            c.add_member(out, f"{i}.json", json.dumps({"label": sample.label}).encode())
    return stream.getvalue()


def zip_of(samples: list[c.Sample]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as out:
        for sample in samples:
            out.writestr(f"{sample.class_name}/{sample.name}", sample.data)
    return stream.getvalue()


def parquet_of(samples: list[c.Sample]) -> bytes:
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(c.table_of(samples), stream, row_group_size=2)
    return stream.getvalue()


def arrow_of(samples: list[c.Sample]) -> bytes:
    import pyarrow

    stream = io.BytesIO()
    table = c.table_of(samples)
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return stream.getvalue()


def with_tar_checksums(content: bytes) -> bytes:
    """Return the content with the right checksum in each header, so that what it says is read."""
    changed = bytearray(content)
    for start in range(0, len(content) - 511, 512):
        if content[start + 257 : start + 262] == b"ustar":
            header = changed[start : start + 512]
            changed[start + 148 : start + 156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(changed)


def with_crcs(content: bytes) -> bytes:
    """Return a file of one record."""
    return c.tf_record(content)


FORMATS: dict[str, tuple[str, Callable[[list[c.Sample]], bytes], Callable[[bytes], bytes]]] = {
    "tar": ("a.tar", tar_of, bytes),
    "tar, right checksums": ("a.tar", tar_of, with_tar_checksums),
    "tar.gz": ("a.tar.gz", lambda samples: tar_of(samples, "gz"), bytes),
    "WebDataset": ("a.tar", webdataset_of, with_tar_checksums),
    "zip": ("a.zip", zip_of, bytes),
    "TFRecord": (
        "a.tfrecord",
        lambda samples: b"".join(c.tf_record(c.example(c.tf_encoded(sample))) for sample in samples),
        bytes,
    ),
    "tf.train.Example": ("a.tfrecord", lambda samples: c.example(c.tf_encoded(samples[0])), with_crcs),
    "Parquet": ("a.parquet", parquet_of, bytes),
    "saved data set": ("a.arrow", arrow_of, bytes),
}


@cache
def content_of(name: str) -> bytes:
    return FORMATS[name][1](small_samples())


def read_all(path: Path) -> None:
    """Read a container as packing does; a bad image raises OSError, everything else InputError."""
    try:
        source = recognise(path).read()
    except InputError as error:
        assert path.stem in str(error)
        return
    for file in source.files or ():
        try:
            file.read_bytes()
        except OSError as error:
            assert error.strerror


def check(name: str, examples: int, tmp_path: Path, *, at_length: bool = False) -> None:
    file, _, repair = FORMATS[name]
    path = data = tmp_path / file
    if path.suffix == ".arrow":
        data = tmp_path
        c.write(tmp_path / "dataset_info.json", "{}")
        c.write(tmp_path / "state.json", json.dumps({"_data_files": [{"filename": file}]}))

    def read(content: bytes) -> None:
        path.write_bytes(repair(content))
        read_all(data)

    read_damaged(name, examples, content_of(name), read, at_length=at_length)


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_containers(name: str, tmp_path: Path):
    check(name, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_containers_at_length(name: str, tmp_path: Path):
    check(name, EXAMPLES, tmp_path, at_length=True)
