"""What a person sees while something runs."""

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
