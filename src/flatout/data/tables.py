"""Rows of text files, read one after the other: CSV, JSON lines, and lists of file and class."""

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.errors import InputError

_DELIMITERS = ",;\t"
# The first line of files that Excel is to open in any country.
_GIVEN_DELIMITER = re.compile(r"sep=([,;\t|])\r?\n", re.IGNORECASE)
_BAR = "|"  # more often between the labels of a cell
# Lines, and characters, that show the delimiter of a CSV file.
_SHOWN_LINES, _SHOWN_CHARACTERS = 20, 65536


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Return line number and cells of each row that is not blank; JSON lines have their keys as the first row.

    Raises:
        InputError: the file is no UTF-8 text; or, when the row is reached, not of its format.
    """
    return _rows(path, _open_text(path))


def _rows(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        keys = list(dict.fromkeys(key for _, table in _json_tables(path, text) for key in table))
        text.seek(0)
        if keys:
            yield 0, keys
        for number, table in _json_tables(path, text):
            yield number, [table.get(key, "") for key in keys]
    elif suffix == ".txt":
        for number, line in _lines(text):
            yield number, line.rsplit(maxsplit=1)
    else:
        given = _GIVEN_DELIMITER.fullmatch(text.readline())
        before = 1 if given else text.seek(0)
        reader = csv.reader(text, delimiter=given[1] if given else _delimiter(text), strict=True, skipinitialspace=True)
        first = before + 1
        try:
            for cells in reader:
                first = before + reader.line_num + 1
                stripped = [cell.strip() for cell in cells]
                if any(stripped):
                    yield before + reader.line_num, stripped
        except csv.Error as error:
            what = "a quotation mark is not closed" if "end of data" in str(error) else error
            raise InputError(f"{path}: line {first}: is no CSV: {what}") from None


def _open_text(path: Path) -> io.TextIOWrapper:
    try:
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise InputError(f"{path}: line {line}: holds a NUL character; save it as UTF-8 text")
    return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")


def _lines(text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, without the spaces around them, and their numbers."""
    return ((number, stripped) for number, line in enumerate(text, start=1) if (stripped := line.strip()))


def _json_tables(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in _lines(text):
        try:
            table = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: line {number}: is no JSON: {error}") from None
        if not isinstance(table, dict):
            raise InputError(f'{path}: line {number}: is no JSON object, such as {{"file_name": ..., "label": ...}}')
        yield number, {key: _cell(value) for key, value in table.items()}


def _cell(value: object) -> str:
    """Return a value of JSON as the text of a cell."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def list_in(cell: str) -> Any:
    """Return the list in a cell, in JSON or as Python prints it; of other cells the text."""
    if cell[:1] == "[" and cell[-1:] == "]":
        for text in (cell, cell.replace("'", '"')):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return cell


def _delimiter(text: io.TextIOWrapper) -> str:
    """Return the delimiter that most of the first lines hold: a bar if none hold another, a comma if none holds any."""
    lines = [line for line in text.read(_SHOWN_CHARACTERS).splitlines() if line.strip()][:_SHOWN_LINES]
    text.seek(0)
    found = max(
        _DELIMITERS, key=lambda mark: (sum(mark in line for line in lines), lines[0].count(mark) if lines else 0)
    )
    return _BAR if all(_BAR in line and found not in line for line in lines) and lines else found
