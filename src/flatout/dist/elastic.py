"""torch's elastic agent with what it lacks: ranks that hang or are stopped, users' errors, signals, and one display."""
# torch wraps methods of the agent in a decorator that hides their parameters.
# pyright: reportCallIssue=false, reportReturnType=false

import base64
import contextlib
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, ProcessFailure

from flatout.console import Console
from flatout.dist import heartbeat
from flatout.dist.rendezvous import Rendezvous
from flatout.dist.worker import read_log
from flatout.errors import RankLost, Stopped, TrainingFailed

# Another host may take this long to tell why its ranks are gone.
_TELLING_SECONDS = 3.0
_TAIL_LINES = 20
# torch logs what it starts and ends; flatout's messages say the same in one line.
for _name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing", "multiprocessing.errors", "rendezvous"):
    logging.getLogger(f"torch.distributed.elastic.{_name}").setLevel(logging.CRITICAL)


class Signals:
    """What the user's signals have asked for.

    Attributes:
        number: the first signal; 0 for none.
        at_once: whether a SIGINT followed.
        raise_now: no ranks run, so a signal raises an exception.
    """

    def __init__(self) -> None:
        self.number, self.at_once, self.raise_now = 0, False, True

    def note(self, number: int, frame: Any = None) -> None:
        """Handle a signal."""
        self.at_once = self.at_once or (self.number != 0 and number == signal.SIGINT)
        self.number = self.number or number
        if self.raise_now:
            raise self.error()

    def error(self) -> BaseException:
        """Return the exception that the signal stands for."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else Stopped(self.number)


class Agent(LocalElasticAgent):
    """Runs the ranks of this host, restarts them together with those of the other hosts, and finds the cause of failures.

    Attributes:
        error: why the run ended; None if it did not fail.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        rendezvous: Rendezvous,
        environment: dict[str, str],
        restarts: int,
        console: Console,
        signals: Signals,
    ) -> None:
        spec = WorkerSpec(
            role="flatout",
            local_world_size=len(names),
            entrypoint=sys.executable,
            args=("-P", "-m", "flatout.dist.worker", str(folder)),
            rdzv_handler=rendezvous,
            max_restarts=restarts,
            monitor_interval=0.1,
        )
        self.error: BaseException | None = None
        self._names, self._folder, self._rendezvous_handler = names, folder, rendezvous
        self._console, self._signals, self._environment = console, signals, environment
        self._board: heartbeat.Board | None = None
        self._display: Any = None
        self._line = ""
        super().__init__(spec, _Files(self), exit_barrier_timeout=10)

    # --- starting and stopping ------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._signals.raise_now = True
        if self._signals.number:
            raise self._signals.error()
        super()._rendezvous(worker_group)
        self._signals.raise_now = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        count = len(self._names)
        for i in range(count):
            for name in ("outcome", "log"):
                (self._folder / f"{name}-{i}").unlink(missing_ok=True)
        self._board = heartbeat.create(count)
        self._observer, self._states, self._looked = heartbeat.Observer(self._board), [], 0.0
        self._ended: dict[int, tuple[float, str]] = {}
        self._killed: dict[int, str] = {}
        self._swept: set[int] = set()
        self._elsewhere, self._is_forwarded = "", False
        # In the main thread torch would replace the signal handlers, for good.
        with ThreadPoolExecutor(1) as thread:
            started = thread.submit(super()._start_workers, worker_group).result()
        for handler in self._pcontext.subprocess_handlers.values():  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            # Closes this process's copies of the output files, with the most harmless signal.
            handler.close(signal.SIGCONT)
        self._rendezvous_handler.exchange(
            worker_group.group_rank or 0, worker_group.group_world_size or 1, lambda: self._states
        )
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        self.end_all()

    def end_all(self) -> None:
        """Kill the ranks of this host and the processes that they have started."""
        for process in self._processes.values():
            # A group may outlive the process that led it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._board:
            self._board.close()
            self._board = None

    @property
    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {i: handler.proc for i, handler in handlers.items()}

    # --- watching -------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """See torch. A failure is reported once all ranks of this host have ended, or have been ended."""
        assert self._board
        now, processes = time.monotonic(), self._processes
        for i, process in processes.items():
            if i not in self._ended and process.poll() is not None:
                self._ended[i] = (now, self._board.read(i).position)
        self._replay()
        running = {i: process for i, process in processes.items() if i not in self._ended}
        if running:
            self._forward_signal(running)
            if now - self._looked >= heartbeat.BEAT_SECONDS:
                self._looked = now
                self._look(running)
            failed = [self._ended[i][0] for i, process in processes.items() if process.returncode]
            if self._signals.at_once or (failed and now - min(failed) > heartbeat.GRACE_SECONDS):
                self._sweep(running)
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        kinds = {failure.error_file_data.get("kind") for failure in result.failures.values()}
        if kinds == {"stop"} and not self._signals.number and self._is_joined_by_others(now):
            return RunResult(state=WorkerState.HEALTHY)
        self._judge(result.failures, kinds)
        return result

    def _is_joined_by_others(self, now: float) -> bool:
        """Return whether other hosts may have stopped the ranks in order to let a new host in."""
        return self._rendezvous_handler.hosts.most > 1 and now - min(self._ended.values())[0] < _TELLING_SECONDS

    def _forward_signal(self, running: dict[int, Any]) -> None:
        """Pass the user's signal on once all ranks are ready for it; they stop at a step that they agree on."""
        if self._signals.number and not self._is_forwarded and all(self._board.read(i).pid for i in running):  # pyright: ignore[reportOptionalMemberAccess]
            self._is_forwarded = True
            self._rendezvous_handler.is_closing = True
            for process in running.values():
                process.send_signal(self._signals.number)

    def _look(self, running: dict[int, Any]) -> None:
        """End a rank that is stopped or hangs; end all where another host is lost."""
        self._states = self._observer.read()
        local = {process.pid: i for i, process in running.items()}
        here = [state for state in self._states if state.pid in local]
        lost = heartbeat.find_lost([*here, *self._rendezvous_handler.others], is_stopping=self._signals.number != 0)
        if lost and lost[0] in here:
            self._killed.setdefault(local[lost[0].pid], lost[1])
            heartbeat.end_process(lost[0].pid)
        self._elsewhere = self._elsewhere or self._rendezvous_handler.look()
        if self._elsewhere:
            self._sweep(running)

    def _sweep(self, running: dict[int, Any]) -> None:
        """Kill the ranks that are left after a failure."""
        self._swept |= running.keys()
        for process in running.values():
            heartbeat.end_process(process.pid)

    def _replay(self) -> None:
        """Show what rank 0 has written to its display."""
        path = self._folder / "display"
        if self._display is None:
            if not path.exists():
                return
            self._display = path.open(encoding="utf-8")
        while line := self._display.readline():
            self._line += line
            if self._line.endswith("\n"):
                self._console.replay(self._line)
                self._line = ""

    def close(self) -> None:
        """Release everything; nothing is left running."""
        self.end_all()
        if self._display is not None:
            self._display.close()
        self._rendezvous_handler.leave()
        # Without this cycle the store is released here, and its port closed.
        self._logs_specs = None

    # --- the cause ------------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """Return what the first rank of this host has returned."""
        import json

        outcome = json.loads((self._folder / "outcome-0").read_text())
        return pickle.loads(base64.b64decode(outcome["value"]))

    def _judge(self, failures: dict[int, ProcessFailure], kinds: set[str | None]) -> None:
        """Find the cause of a failure, and decide whether the ranks are restarted."""
        error, reason = self._cause(failures)
        is_final = bool(self._signals.number or kinds & {"expected", "stop"} or self._rendezvous_handler.failure)
        if self._remaining_restarts > 0 and not is_final and not self._rendezvous_handler.is_stuck:
            spec = self._worker_group.spec
            number = spec.max_restarts - self._remaining_restarts + 1
            self._console.finish()
            self._console.note(f"{reason}: restart {number} of {spec.max_restarts} from the newest checkpoint")
            return
        self._remaining_restarts = 0
        self.error = error
        if not kinds & {"stop"}:
            self._rendezvous_handler.end_run(reason)

    def _cause(self, failures: dict[int, ProcessFailure]) -> tuple[BaseException, str]:
        """Return the exception that the first cause stands for, and the cause in words."""
        signals, by_rank = self._signals, sorted(failures.items())
        if signals.at_once:
            return KeyboardInterrupt(), "the user interrupted it"
        causes = [
            (rank, failure)
            for rank, failure in by_rank
            if failure.local_rank in self._killed
            or (failure.local_rank not in self._swept and failure.error_file_data.get("kind") != "secondary")
        ]
        if signals.number:
            # A signal may end a rank that was not ready for it, or that waits for one that has stopped.
            kinds = ("expected", "stop", "unexpected", "memory")
            causes = [cause for cause in causes if cause[1].error_file_data.get("kind") in kinds]
        elif self._elsewhere:
            causes = []
        unexpected = [cause for cause in causes if cause[1].error_file_data.get("kind") not in ("expected", "stop")]
        if unexpected:
            rank, failure = min(unexpected, key=self._when)
            text = self._explain(rank, failure)
            return TrainingFailed(f"{text}; the other ranks were ended.{self._advice(failure)}{self._tail(failure)}"), text
        if causes:
            # As a rule all have raised the same; rank 0 speaks for the run.
            data = causes[0][1].error_file_data
            return pickle.loads(base64.b64decode(data["value"])), data["message"]
        if signals.number:
            return signals.error(), "the user stopped it"
        is_alone = self._rendezvous_handler.hosts.most == 1
        elsewhere = "" if is_alone else self._elsewhere or self._rendezvous_handler.hear(_TELLING_SECONDS)
        if not is_alone:
            elsewhere = elsewhere or "the ranks of another host are gone"
            return TrainingFailed(f"{elsewhere}\nThe ranks of this host were ended; see the logs of the other one."), elsewhere
        rank, failure = min(by_rank, key=self._when)
        text = self._explain(rank, failure)
        return RankLost(f"{text}; the other ranks were ended.{self._tail(failure)}"), text

    def _when(self, cause: tuple[int, ProcessFailure]) -> tuple[float, bool, int]:
        """Order failures: by time; of those seen together first one by a signal, which explains the others."""
        rank, failure = cause
        return self._ended[failure.local_rank][0], failure.exitcode >= 0, rank

    def _explain(self, rank: int, failure: ProcessFailure) -> str:
        """Return what happened to a rank, and where in training."""
        position = self._ended[failure.local_rank][1]
        kind, message = failure.error_file_data.get("kind"), failure.error_file_data["message"]
        if failure.local_rank in self._killed:
            text = f"{self._killed[failure.local_rank]} {position} and was killed"
        elif kind == "memory":
            text = f"ran out of memory {position}: {message}"
        elif kind:
            text = f"failed {position}: {message}"
        elif failure.exitcode < 0:
            text = f"was killed by {signal.Signals(-failure.exitcode).name} {position}"
        else:
            text = f"ended with exit code {failure.exitcode} {position}"
        return f"rank {rank} ({self._names[failure.local_rank]}, process {failure.pid}) {text}"

    def _advice(self, failure: ProcessFailure) -> str:
        if failure.error_file_data.get("kind") == "memory":
            return " A smaller batch_size or more devices need less memory on each."
        if failure.exitcode == -signal.SIGKILL and failure.local_rank not in self._killed:
            return " The system does that when memory runs out: a smaller batch_size or more devices need less."
        return ""

    def _tail(self, failure: ProcessFailure) -> str:
        """Return the last lines of a rank's log, or of its output before the log was open."""
        path, output = read_log(self._folder, failure.local_rank)
        lines = output.splitlines()[-_TAIL_LINES:]
        if not lines:
            return ""
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd()) if path else None
        return "\n".join([f" The last lines of {path or 'its output'}:", *(f"  {line}" for line in lines)])


class _Files(LogsSpecs):
    """Where a rank's output and outcome go; the hook through which it gets flatout's variables, too."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    @property
    def root_log_dir(self) -> str:
        return str(self._agent._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        agent, folder = self._agent, self._agent._folder
        for i, variables in envs.items():
            variables |= agent._environment | {
                "FLATOUT_DEVICE": agent._names[i],
                "FLATOUT_HEARTBEAT": agent._board.path,  # pyright: ignore[reportOptionalMemberAccess]
                # torch counts restarts for each host; a host that has come later must resume as well.
                "TORCHELASTIC_RESTART_COUNT": str(agent._rendezvous_handler.attempt),
            }
        # Both streams go to one file, once the rank has joined them.
        return LogsDest(
            stdouts=dict.fromkeys(envs, os.devnull),
            stderrs={i: str(folder / f"output-{i}") for i in envs},
            error_files={i: str(folder / f"outcome-{i}") for i in envs},
        )
