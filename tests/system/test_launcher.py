"""How a run ends when its launcher is stopped or killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.system import rank_functions as ranks
from tests.system.conftest import SHORT_LIMITS
from tests.system.launchers import LauncherServer, eventually, is_alive

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_nothing_outlives_a_launcher_that_is_killed(launchers: LauncherServer, tmp_path: Path) -> None:
    launcher = launchers.start(ranks.stay, tmp_path)
    # A stopped rank cannot see for itself that the launcher is gone.
    os.kill(launcher.ranks[0], signal.SIGSTOP)
    launcher.process.kill()
    assert eventually(lambda: not any(map(is_alive, launcher.ranks)))


KILLED_BEFORE_RANKS = """
import os, signal
from flatout.distributed.elastic import Agent
from tests.system import rank_functions as ranks

Agent.run = lambda self: os.kill(os.getpid(), signal.SIGKILL)
ranks.run(ranks.do_nothing)
"""


def test_the_next_run_removes_what_a_launcher_left_that_was_killed_before_it_had_ranks() -> None:
    """The folder has the model in it, and no rank that could remove it."""
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_RANKS], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(Path(tempfile.gettempdir()).iterdir())) == 1
    ranks.run(ranks.do_nothing)
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "Stopped: 2"), (signal.SIGTERM, "Stopped: 15")])
def test_a_signal_reaches_all_ranks_and_they_end_by_themselves(
    number: int, error: str, launchers: LauncherServer, tmp_path: Path
) -> None:
    launcher = launchers.start(ranks.stay, tmp_path)
    launcher.process.send_signal(number)
    assert launcher.error() == f"flatout.errors.{error}"
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}


def test_sigterm_ends_ranks_that_wait_for_each_other(launchers: LauncherServer, tmp_path: Path) -> None:
    launcher = launchers.start(ranks.wait_for_each_other, tmp_path, **SHORT_LIMITS)
    launcher.process.terminate()
    assert launcher.error() == "flatout.errors.Stopped: 15"
    assert not any(map(is_alive, launcher.ranks))


def test_a_second_interrupt_ends_all_at_once(launchers: LauncherServer, tmp_path: Path) -> None:
    launcher = launchers.start(ranks.ignore_signals, tmp_path)
    launcher.process.send_signal(signal.SIGINT)
    assert eventually(lambda: len(list(tmp_path.glob("heard-*"))) == 2)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.error() == "KeyboardInterrupt"
    assert not any(map(is_alive, launcher.ranks))
