"""The commands in documents with their output: run again and compared. `python -m tests.consoles PAGE` writes it anew.

A block of the kind `console` has commands after `$ ` and below each its output, where a line `...` stands for any
lines.
Blocks of the kind `python` are run too, in the order of the page, in one folder.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.cli.main import main

_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.M | re.S)
# Progress within an epoch appears as time passes.
_PROGRESS = re.compile(r"^(epoch \d+/\d+ loss|.*\d+ of [\d,]+ images trained$).*\n?", re.M)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
# Times and rates depend on the machine; so do losses, and which epoch is the best one so far.
_OF_THE_MACHINE = re.compile(
    rf"(?<=loss ){_NUMBER.pattern}|(?<!\w){_NUMBER.pattern}(?= (?:images/s|s|ms|min|MB|per second)\b)|  best so far"
)
# So many images more or less, of those that one of two runs classifies correctly, are rounding, too.
_IMAGES = 2


@dataclass(frozen=True)
class Command:
    words: list[str]
    expected: str
    at: tuple[int, int]  # where the expected output is in the text of the page


def steps(text: str) -> Iterator[Command | str]:
    """Yield the commands of a page, and the code of its Python blocks."""
    for block in _BLOCK.finditer(text):
        if block[1] == "python":
            yield block[2]
            continue
        for found in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[2], re.M):
            start = block.start(2)
            yield Command(
                shlex.split(found[1], comments=True), found[2], (start + found.start(2), start + found.end(2))
            )


def run(step: Command | str) -> str:
    """Run a step in this process and this folder; return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        if isinstance(step, str):
            exec(compile(step, "page", "exec"), {"__name__": "page"})
        else:
            assert step.words[0] == "flatout", step.words
            assert main(step.words[1:]) == 0, f"{step.words}\n{out.getvalue()}"
    return _PROGRESS.sub("", out.getvalue())


def difference(expected: str, printed: str) -> str:
    """Return how an output differs from the expected one, but for what depends on the machine; empty if it does not."""
    wanted, found = (
        [_OF_THE_MACHINE.sub("", line).rstrip() for line in text.splitlines()] for text in (expected, printed)
    )
    position, skipping = 0, False
    for line in wanted:
        if line == "...":
            skipping = True
            continue
        rest = range(position, len(found) if skipping else min(position + 1, len(found)))
        match = next((index for index in rest if _alike(line, found[index])), None)
        if match is None:
            return f"not printed: {line!r}; printed: {found[position:]}"
        position, skipping = match + 1, False
    return "" if skipping or position == len(found) else f"also printed: {found[position:]}"


def _alike(wanted: str, found: str) -> bool:
    """Return whether two lines are equal; rounding differs between processors, so numbers may by a twentieth."""
    if _NUMBER.sub("", wanted) != _NUMBER.sub("", found):
        return False
    pairs = zip(_NUMBER.findall(wanted), _NUMBER.findall(found), strict=True)
    most = _IMAGES if " is right on " in wanted else 0
    return all(one == other or _is_near(one, other, most) for one, other in pairs)


def _is_near(one: str, other: str, most: int) -> bool:
    """Return whether two figures are near; small whole numbers, such as those of epochs, may differ by `most`."""
    a, b = (float(text.replace(",", "")) for text in (one, other))
    is_figure = "." in one or a > 100
    return abs(a - b) <= (0.05 * max(abs(a), abs(b), 0.2) if is_figure else most)


def write_anew(page: Path, folder: Path) -> None:
    """Run a page in a folder and put the real output into it; outputs with `...` stay where they still fit."""
    text = page.read_text(encoding="utf-8")
    with contextlib.chdir(folder):
        printed = [(step, run(step)) for step in steps(text)]
    for step, output in reversed(printed):
        if isinstance(step, Command) and difference(step.expected, output):
            text = text[: step.at[0]] + output + text[step.at[1] :]
    page.write_text(text, encoding="utf-8")
    # The translation has the same commands and outputs.
    translation, blocks = page.with_suffix(".zh-CN.md"), re.compile(r"^```console\n.*?^```$", re.M | re.S)
    if translation.exists():
        found = iter(blocks.findall(text))
        translated = blocks.sub(lambda _: next(found), translation.read_text(encoding="utf-8"))
        translation.write_text(translated, encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as temporary:
            write_anew(Path(name).absolute(), Path(temporary))
