"""What containers of several kinds share; tests of a single kind have files of their own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.data.source import Source
from flatout.errors import InputError
from tests.data import containers as c
from tests.data.small_sets import png, read, shard, table

LABELS = [["cat", "dog"], ["dog"], [], ["cat"]]
ROWS = [[1, 1], [0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["parquet", "JSON lines", "WebDataset"])
def test_lists_of_labels_and_numbers(tmp_path: Path, kind: str):
    def with_labels(labels: list[Any]) -> Source:
        if kind == "parquet":
            return read(table(tmp_path / "a.parquet", image=[png()] * 4, label=labels))
        if kind == "WebDataset":
            members = {f"{i}.json": json.dumps({"label": label}).encode() for i, label in enumerate(labels)}
            members |= {f"{i}.png": png() for i in range(4)}
            return read(shard(tmp_path / "a.tar", dict(sorted(members.items()))))
        for i in range(4):
            c.write(tmp_path / f"{i}.png", png())
        rows = (json.dumps({"file_name": f"{i}.png", "label": label}) for i, label in enumerate(labels))
        c.write(tmp_path / "metadata.jsonl", "\n".join(rows).encode())
        return read(tmp_path)

    for labels in (LABELS, ROWS):
        source = with_labels(labels)
        assert (source.task, source.labels.tolist()) == ("multi-label", ROWS)
        assert source.classes == (("cat", "dog") if labels is LABELS else ("0", "1"))
    source = with_labels([0.5, 1.25, -3.0, 2.75])
    assert (source.task, source.labels.tolist()) == ("regression", [0.5, 1.25, -3.0, 2.75])
    with pytest.raises(InputError, match=r"(row 2|line 3|2\.json): not a (finite )?number: (nan|NaN)"):
        with_labels([0.5, 1.25, float("nan"), 2.75])


@pytest.mark.parametrize(
    ("library", "write", "extra"),
    [("google_crc32c", c.tf_records(c.tf_encoded), "tfrecord")],
)
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, write, extra: str):
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"pip install 'flatout\[{extra}\]'"):
        read(path)
