"""What a person sees while something runs."""

import io
import os
import pty
from collections.abc import Iterator

import pytest

from flatout.console import Console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the console reads, in seconds, as a list of one value to change."""
    now = [0.0]
    monkeypatch.setattr("flatout.console.time.monotonic", lambda: now[0])
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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[io.TextIOWrapper, int]]:
    """Return a stream to a terminal 60 columns wide, and the other end of it."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, ours
    os.close(ours)


def test_a_narrow_terminal_keeps_the_bar_and_wraps_between_words(terminal: tuple[io.TextIOWrapper, int]) -> None:
    stream, ours = terminal
    console = Console(stream)
    console.note("epoch 1/3  train loss 2.3862, accuracy 0.2830  valid loss 1.3884, accuracy 0.5833  4,006 images/s")
    console.update(1, 60_000)
    console.update(30_000, 60_000, text="epoch 1/3 loss 2.3862")
    console.close()
    shown = os.read(ours, 100_000).decode()
    lines = [line.strip() for line in shown.split("\r\n")[:2]]
    assert lines == [
        "epoch 1/3  train loss 2.3862, accuracy 0.2830  valid loss",
        "1.3884, accuracy 0.5833  4,006 images/s",
    ]
    assert "━" * 15 in shown
    assert "0%" in shown


def test_progress_in_a_file_becomes_rarer(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(stream)
    for second in range(7200):
        clock[0] = float(second)
        console.update(second, 7200, text="epoch 1/1")
    lines = stream.getvalue().splitlines()
    assert 20 < len(lines) < 70  # one every 10 s at first; a line every 10 s throughout would be 720
    assert lines[0] == "epoch 1/1  1 h 59 min left  1/s  10 of 7,200 images"
