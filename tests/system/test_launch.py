"""Processes of a run: what comes back from them, and how they end when one of them does not go on."""

import io
import json
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.console import Console
from flatout.distributed.launch import launch
from flatout.errors import InputError, RankLost, Stopped, TrainingFailed
from flatout.run.launch import run_on_devices
from tests.system import rank_functions as ranks
from tests.system.launchers import END_SECONDS, START_SECONDS, eventually, is_alive
from tests.system.rank_functions import TWO, run

pytestmark = pytest.mark.usefixtures("nothing_left")

# --- what comes back --------------------------------------------------------------------------------------------------


def test_the_first_rank_answers_and_is_shown_and_each_keeps_its_log(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    shown = io.StringIO()
    console = Console(shown)
    console.note("before the start")
    answer = spawn(ranks.describe, (tmp_path,), names=TWO, threads=3, console=console)
    assert answer == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    assert shown.getvalue().splitlines() == ["before the start", "rank 0 notes"]
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert re.search(rf"^\d{{4}}-\S+ rank {rank} \(cpu\)  rank {rank} notes$", log, re.MULTILINE)
        assert "said before the log\n" in log
        assert "written past Python\n" in log
    assert "before the start" in logs[0]
    assert "before the start" not in logs[1]


@pytest.mark.parametrize("error", [InputError("--flag 1: no"), TrainingFailed("the loss is not finite"), Stopped(15)])
def test_an_error_for_the_user_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run(ranks.raise_the_same, error)
    assert caught.value.args == error.args


SCRIPT = """
    import sys
    from flatout.console import Console
    from flatout.distributed.launch import launch

    class Model:
        def __init__(self, size):
            self.size = size

    def grow(console, model):
        return Model(model.size + 1)

    grown = spawn(grow, (Model(3),), names=["cpu", "cpu"], threads=1, console=Console(sys.stdout))
    print(type(grown) is Model, grown.size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_classes_of_a_script_without_a_guard_go_and_come_back(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, script if how == "a file" else "-"],
        input="" if how == "a file" else script.read_text(),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True 4\n", "")


def test_it_works_beside_the_main_thread() -> None:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(run(ranks.do_nothing)))
    thread.start()
    thread.join(START_SECONDS)
    assert result == [None]


@pytest.mark.slow
def test_a_rank_that_ends_first_is_not_taken_for_lost() -> None:
    assert run(ranks.end_while_looked_at) == "went on"


# --- ranks that do not go on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exception", "failed in epoch 1, step 17: ZeroDivisionError: of all things"),
        ("memory", "ran out of memory in epoch 1, step 17: .*can't allocate memory.* smaller batch_size "),
        ("exit", "ended with exit code 7 in epoch 1, step 17"),
        ("SIGKILL", "was killed by SIGKILL in epoch 1, step 17"),
        ("SIGSEGV", "was killed by SIGSEGV in epoch 1, step 17"),
        ("SIGSTOP", r"did not answer for \d+ s in epoch 1, step 17 and was killed"),
        ("hang", r"kept all others waiting for \d+ s in epoch 1, step 17 and was killed"),
    ],
)
@pytest.mark.usefixtures("short_limits")
def test_a_lost_rank_ends_the_run_and_is_named(how: str, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        run(ranks.fail, tmp_path, how)
    assert time.monotonic() - began < START_SECONDS + END_SECONDS
    assert not isinstance(caught.value, RankLost)
    assert re.match(rf"rank 1 \(cpu, process \d+\) {said}", str(caught.value))
    assert "the other ranks were ended" in str(caught.value)
    assert "rank-1.log" in str(caught.value)
    assert "rank 1 (cpu)  the last line" in str(caught.value)


def test_a_rank_that_lost_another_is_never_the_cause() -> None:
    with pytest.raises(TrainingFailed, match=r"^rank 1 .* ValueError: the cause"):
        run(ranks.lose)


def test_ranks_that_lost_touch_say_so_where_nothing_else_is_known() -> None:
    with pytest.raises(RankLost, match="lost touch"):
        run(ranks.lose_all)


@pytest.mark.usefixtures("short_limits")
def test_what_one_rank_refuses_ends_the_run() -> None:
    with pytest.raises(InputError, match="not mine"):
        run(ranks.refuse_on_one)


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
def test_ranks_meet_on_loopback_alone_and_are_named_where_they_part(tmp_path: Path) -> None:
    """Ranks in different collectives would otherwise wait for each other for ever."""
    options: dict[str, Any] = {"spec": "2xcpu", "engine": "torch", "console": Console(), "threads": 1}
    tensors = r"rank 1 .* waited in broadcast .*rank 0 in sum .* for \d+ s while starting and was killed"
    with pytest.raises(TrainingFailed, match=tensors):
        run_on_devices(ranks.meet_and_part, (tmp_path,), **options)
    objects = "rank 0 calls broadcast_object in .*meet_and_part, rank 1 calls barrier in"
    for rank in (0, 1):
        total, listening = json.loads((tmp_path / f"met-{rank}").read_text())
        assert total == 3
        assert listening
        assert set(listening) == {"127.0.0.1"}
        assert re.search(objects, (tmp_path / f"said-{rank}").read_text())


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_limits")
def test_ranks_are_restarted_together() -> None:
    shown = io.StringIO()
    options: dict[str, Any] = {"names": TWO, "threads": 1, "console": Console(shown), "restarts": 2}
    assert spawn(ranks.die_on_each_rank_once, (), **options) == (2, "2")
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        said = rf"rank {rank} \(cpu, process \d+\) was killed by SIGKILL in epoch 1, step {rank}"
        assert re.fullmatch(rf"{said}: restart {rank + 1} of 2 from the newest checkpoint", line)


def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not this"):
        run(ranks.refuse_once, tmp_path, names=["cpu"], restarts=3)
    assert [path.name for path in tmp_path.glob("attempt-*")] == ["attempt-0"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_full_temporary_folder_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(TrainingFailed, match=r"temporary folder cannot be written: File too large; .*TMPDIR"):
            run(ranks.describe, Path("nowhere"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_rank_that_dies_while_it_writes_its_outcome_is_named() -> None:
    with pytest.raises(TrainingFailed, match=r"rank 0 .* ended with exit code 9"):
        run(ranks.die_while_reporting, names=["cpu"])


def test_what_a_rank_has_started_ends_with_it() -> None:
    pid = run(ranks.start_grandchild)
    assert eventually(lambda: not is_alive(pid))
