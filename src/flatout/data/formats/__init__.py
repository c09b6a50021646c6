"""Readers of data, one module for a family of formats."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flatout.data.source import DataSource, ReadOptions


@dataclass(frozen=True)
class Format:
    """A data format.

    Attributes:
        kind: its name; this and the next two are its row of the table in docs/data.md.
        give: the path or value that a user passes.
        recognised_by: how it is recognised.
        recognise: takes a path, a class list or None, and options; returns the data if the path has this format.
    """

    kind: str
    give: str
    recognised_by: str
    recognise: Callable[[Path, Path | None, ReadOptions], DataSource | None]
