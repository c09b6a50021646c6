"""Processes of a run: what comes back from them, and how they end if they, their launcher or the user end them."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import PContext

from flatout.cli.main import main
from flatout.distributed.launch import launch
from flatout.engine.factory import run_on_devices
from flatout.utils.console import Console
from flatout.utils.errors import InputError, RankLost, Stopped, TrainingFailed
from tests.system import rank_functions as ranks
from tests.system.conftest import START_SECONDS, eventually, is_alive
from tests.system.rank_functions import TWO, run
from tests.system.run_files import metrics, summary, weights, write_digits

pytestmark = pytest.mark.usefixtures("nothing_left")

# --- what comes back --------------------------------------------------------------------------------------------------


def test_the_first_rank_answers_and_is_shown_and_each_keeps_its_log(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shown = io.StringIO()
    console = Console(shown)
    console.note("before the start")
    answer = launch(ranks.describe, (tmp_path,), names=TWO, threads=3, console=console)
    assert answer == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    assert shown.getvalue().splitlines() == ["before the start", "rank 0 notes"]
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert re.search(rf"^\d{{4}}-\S+ rank {rank} \(cpu\)  rank {rank} notes$", log, re.MULTILINE)
        assert "said before the log\n" in log
        assert "written past Python\n" in log
    assert ["before the start" in log for log in logs] == [True, False]


# --- ranks that do not go on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exception", "failed in epoch 1, step 17: ZeroDivisionError: of all things"),
        ("memory", "ran out of memory in epoch 1, step 17: .*can't allocate memory.* smaller batch_size "),
        ("SIGSEGV", "was killed by SIGSEGV in epoch 1, step 17"),
    ],
)
def test_a_lost_rank_ends_the_run_and_is_named(how: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed) as caught:
        run(ranks.fail, tmp_path, how)
    assert not isinstance(caught.value, RankLost)
    assert re.match(rf"rank 1 \(cpu, process \d+\) {said}", str(caught.value))
    assert "the other ranks were ended" in str(caught.value)
    assert "rank-1.log" in str(caught.value)
    assert "rank 1 (cpu)  the last line" in str(caught.value)


@pytest.mark.slow
def test_a_rank_without_progress_is_named_and_its_stack_is_shown() -> None:
    """A long set-up and a wait for the work of the first rank before that do not count as a hang."""
    options: dict[str, Any] = {"spec": "2xcpu", "engine": "torch", "console": Console()}
    with pytest.raises(TrainingFailed, match=r"rank 1 .*made no progress for 0:00:01 in epoch 1, step 5") as caught:
        run_on_devices(ranks.prepare_long_and_stay_behind, (), hang_timeout=1.0, **options)
    assert re.search(r'File ".*rank_functions.py", line \d+ in stay_behind', str(caught.value))


@pytest.mark.slow
def test_a_stopped_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's agent gives it two seconds to end, not 30."""
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 2))
    monkeypatch.setattr("flatout.distributed.launch._KILL_SECONDS", 1.5)
    with pytest.raises(
        TrainingFailed, match=r"rank 1 .* did not answer in epoch 1, step 5 and was killed \(rank 1 did"
    ):
        run(ranks.stop_soon_after)


@pytest.mark.parametrize(
    ("function", "args", "error", "said"),
    [
        (ranks.lose, (), TrainingFailed, r"^rank 1 .* ValueError: the cause"),
        (ranks.lose_on_one, (), RankLost, "lost touch"),
        (ranks.refuse_on_one, (), InputError, "not mine"),
        (ranks.raise_the_same, (TrainingFailed("the loss is not finite"),), TrainingFailed, "^the loss is not finite$"),
        (ranks.raise_the_same, (Stopped(15),), Stopped, "^15$"),
    ],
)
def test_the_first_cause_is_raised(
    function: Callable[..., None], args: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        run(function, *args)
    assert type(caught.value) is error


def test_what_a_rank_has_started_ends_with_it() -> None:
    pid = run(ranks.start_grandchild)
    assert eventually(lambda: not is_alive(pid))


def test_ranks_are_restarted_together_but_not_after_wrong_input(tmp_path: Path) -> None:
    shown = io.StringIO()
    options: dict[str, Any] = {"names": TWO, "threads": 1, "console": Console(shown), "restarts": 2}
    assert launch(ranks.die_on_each_rank_once, (), **options) == (2, "2")
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        said = rf"rank {rank} \(cpu, process \d+\) was killed by SIGKILL in epoch 1, step {rank}"
        assert re.fullmatch(rf"{said}: restart {rank + 1} of 2 from the newest checkpoint", line)
    with pytest.raises(InputError, match="not this"):
        run(ranks.refuse_once, tmp_path, names=["cpu"], restarts=3)
    assert [path.name for path in tmp_path.glob("attempt-*")] == ["attempt-0"]


# --- launchers that are stopped or killed -----------------------------------------------------------------------------

LAUNCHER = """
import sys
from pathlib import Path
from tests.system import rank_functions as ranks

ranks.run(ranks.stay, Path(sys.argv[1]))
"""


def announced(folder: Path) -> list[int]:
    """Return the processes of two ranks once they have announced themselves in a folder."""
    files = [folder / f"pid-{rank}" for rank in (0, 1)]
    eventually(lambda: all(f.exists() and f.read_text() for f in files), START_SECONDS)
    return [int(f.read_text()) for f in files]


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    pids = announced(tmp_path)
    # A stopped rank cannot see for itself that the launcher is gone.
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    assert eventually(lambda: not any(map(is_alive, pids)))


def run_and_signal(function: Callable[..., None], folder: Path, *numbers: int) -> None:
    """Launch two ranks in this process, which gets signals: each when both ranks have left another file."""

    def send() -> None:
        for count, number in enumerate(numbers):
            if eventually(lambda count=count: len(list(folder.glob("*-*"))) == 2 * (count + 1), START_SECONDS):
                os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(send)
        run(function, folder)


def test_a_signal_reaches_all_ranks_and_they_end_by_themselves(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=r"^15$"):
        run_and_signal(ranks.stay, tmp_path, signal.SIGTERM)
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_and_signal(ranks.ignore_signals, tmp_path, signal.SIGINT, signal.SIGINT)
    assert len(list(tmp_path.glob("heard-*"))) == 2
    assert not any(map(is_alive, announced(tmp_path)))


# A user's own model. In the tenth training step of the first attempt (seven are an epoch), the first rank is killed.
MODEL = """
import os, signal
import torch

class Net(torch.nn.Sequential):
    steps = 0

    def forward(self, x):
        # Smaller batches only try the model out.
        self.steps += self.training and len(x) > 50
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.steps == 10 and is_first and os.environ["RANK"] == os.environ["KILLED"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def make(num_classes):
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_restarted_run_gives_the_result_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(MODEL)
    data = ["digits", "--data", str(write_digits(tmp_path / "digits.npz")), "--epochs", "2", "--batch-size", "200"]
    command = ["train", *data, "--model", f"{tmp_path / 'faulty.py'}:make", "--devices", "2xcpu", "--restarts", "1"]
    for name, killed in (("restarted", "0"), ("whole", "none")):
        monkeypatch.setenv("KILLED", killed)
        began = time.perf_counter()
        assert main([*command, "--out", str(tmp_path / name)]) == 0
        # The restarted rank does not count what the checkpoint counts.
        assert summary(tmp_path / name)["wall_seconds"] <= time.perf_counter() - began
        log = (tmp_path / name / "logs" / "rank-0.log").read_text()
        assert log.count("resumed after epoch") == (name == "restarted")
    torch.testing.assert_close(weights(tmp_path / "restarted"), weights(tmp_path / "whole"), rtol=0, atol=0)
    losses = [[line["train_loss"] for line in metrics(tmp_path / name)] for name in ("restarted", "whole")]
    assert losses[0] == losses[1]
