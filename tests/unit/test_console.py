"""What a person sees while something runs."""

import io
import os
import pty
import re
from pathlib import Path

import pytest

from flatout.utils.console import Console, duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the console reads, in seconds, as a list of one value to change."""
    now = [0.0]
    monkeypatch.setattr("flatout.utils.console.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("rank", "requests"), [(0, range(18, 21)), (1, range(1))])
def test_the_loss_is_requested_every_second_however_often_progress_is_shown(
    rank: int, requests: range, clock: list[float]
) -> None:
    console, asked = Console(rank=rank), 0
    for step in range(200):
        clock[0] += 0.1
        asked += console.is_loss_due()
        console.update(step, 200)
    assert asked in requests


def test_progress_in_a_file_becomes_rarer(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(stream)
    for second in range(7200):
        clock[0] = float(second)
        console.update(second, 7200, text="epoch 1/1")
    lines = stream.getvalue().splitlines()
    assert 20 < len(lines) < 70  # one every 10 s at first; a line every 10 s throughout would be 720
    assert lines[0] == "epoch 1/1  1 h 59 min left  1/s  10 of 7,200 images"


def test_a_full_disk_ends_no_training_by_its_log() -> None:
    console = Console()
    console.open_log(Path("/dev/full"), "cpu")
    console.note("one")
    console.close()


def show_progress() -> str:
    """Return all that a terminal gets of some progress and one line. It arrives in pieces, later: a mark ends it."""
    ours, theirs = pty.openpty()
    shown = b""
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, os.fdopen(ours, "rb", buffering=0) as terminal:
        console = Console(stream)
        for done in (1, 20_000, 30_000, 60_000):
            console._last_shown = 0.0
            console.update(done, 60_000, text="epoch 10/300 loss 2.3862")
            if bar := getattr(console._display, "_progress", None):
                bar.refresh()  # a thread does it ten times a second
        console.note("done")
        console.close()
        print("\a", file=stream, end="", flush=True)
        while not shown.endswith(b"\a"):
            shown += terminal.read(100_000)
    return shown.removesuffix(b"\a").decode()


@pytest.mark.parametrize("columns", [20, 80])
def test_the_bar_is_one_line_in_a_terminal_of_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    shown = show_progress()
    frames = [frame for frame in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)) if frame]
    assert max(map(len, frames)) <= columns
    assert sum("epoch" in frame for frame in frames) >= 4
    assert shown.count("\n") <= 2, "the line, and where the bar was"
    assert " 0/s" not in shown, "no rate is known at first"
    assert "100%" in frames[-1]
    if columns > 20:
        assert "━" * 10 in frames[-1]
        assert "epoch 10/3" in frames[-1]


def test_no_color_is_respected_and_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    colour = re.compile(r"\x1b\[[0-9;]*[34][0-9]")
    assert colour.search(show_progress())
    monkeypatch.setenv("NO_COLOR", "1")
    shown = show_progress()
    assert "━" in shown
    assert not colour.search(shown)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show_progress()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.14, "3.1 s"), (9.97, "10 s"), (99.4, "99 s"), (269, "4 min 29 s"), (3720, "1 h 02 min")],
)
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text
