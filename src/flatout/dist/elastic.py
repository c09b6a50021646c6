"""torch's elastic agent with what it lacks: ranks that hang or are stopped, users' errors, signals, and one display."""
# torch wraps methods of the agent in a decorator that hides their parameters.
# pyright: reportCallIssue=false, reportReturnType=false

import base64
import contextlib
import json
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
from flatout.dist.env import DEVICE, STORE
from flatout.dist.one_host import OneHost
from flatout.dist.rendezvous import Rendezvous
from flatout.errors import RankLost, Stopped, TrainingFailed

# Another host may take this long to tell why its ranks are gone.
_TELLING_SECONDS = 3.0
# Room for what Python prints about the threads of a process that crashed.
_TAIL_LINES = 30
# torch logs what it starts and ends; flatout's messages say the same in one line.
for _name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing", "rendezvous"):
    logging.getLogger(f"torch.distributed.elastic.{_name}").setLevel(logging.CRITICAL)


class Signals:
    """The user's signals: the first one (0 for none), whether a SIGINT followed, and whether they raise exceptions now."""

    def __init__(self) -> None:
        self.number, self.at_once, self.raise_now = 0, False, True

    def note(self, number: int, frame: Any = None) -> None:
        """Handle a signal."""
        self.at_once = self.at_once or (self.number != 0 and number == signal.SIGINT)
        self.number = self.number or number
        if self.raise_now:
            raise self.error()

    def error(self) -> BaseException:
        """Return the exception that the first signal stands for."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else Stopped(self.number)


class Agent(LocalElasticAgent):
    """Runs the ranks of this host, restarts them together with those of other hosts, and finds the cause of failures.

    Attributes:
        error: why the run has failed; None if it has not.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        hosts: OneHost | Rendezvous,
        restarts: int,
        console: Console,
        signals: Signals,
    ) -> None:
        spec = WorkerSpec(
            role="flatout",
            local_world_size=len(names),
            entrypoint=sys.executable,
            args=("-P", "-m", "flatout.dist.worker", str(folder)),
            rdzv_handler=hosts,
            max_restarts=restarts,
            monitor_interval=0.1,
        )
        self.error: BaseException | None = None
        self.names, self.folder, self._hosts, self._console, self._signals = names, folder, hosts, console, signals
        self.board: heartbeat.Board | None = None
        self.environment: dict[str, str] = {}
        self._display: Any = None
        self._line = ""
        super().__init__(spec, _Files(self), exit_barrier_timeout=10)

    # --- starting and stopping ------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # No ranks run, so a signal may end the wait for other hosts.
        self._signals.raise_now = True
        if self._signals.number:
            raise self._signals.error()
        super()._rendezvous(worker_group)
        self._signals.raise_now = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for i in range(len(self.names)):
            (self.folder / f"outcome-{i}").unlink(missing_ok=True)
            (self.folder / f"output-{i}").unlink(missing_ok=True)
        self.board = heartbeat.create(len(self.names))
        self._observer, self._states, self._looked = heartbeat.Observer(self.board), [], 0.0
        # By local rank: when each ended and where; why it was killed; which ones were killed after a failure.
        self._ended: dict[int, tuple[float, str]] = {}
        self._killed: dict[int, str] = {}
        self._swept: set[int] = set()
        self._elsewhere, self._elsewhere_at, self._is_forwarded = "", 0.0, False
        # In the main thread torch would replace the signal handlers, for good.
        with ThreadPoolExecutor(1) as thread:
            started = thread.submit(super()._start_workers, worker_group).result()
        for handler in self._pcontext.subprocess_handlers.values():  # pyright: ignore
            # Closes this process's copies of the output files, with the most harmless signal.
            handler.close(signal.SIGCONT)
        self._hosts.exchange(worker_group.group_rank or 0, worker_group.group_world_size or 1, lambda: self._states)
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        self._end_all()

    def _end_all(self) -> None:
        """Kill the ranks of this host and the processes that they have started."""
        for process in self._processes().values():
            # A group may outlive the process that led it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.board:
            self.board.close()
            self.board = None

    def close(self) -> None:
        """Release everything; nothing is left running."""
        self._end_all()
        if self._display is not None:
            self._display.close()
        self._hosts.leave()
        # Without this cycle the store is released here, and its port closed.
        self._logs_specs = None

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {i: handler.proc for i, handler in handlers.items()}

    # --- watching -------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """See torch. A failure is reported once all ranks of this host have ended, or have been ended."""
        assert self.board
        now, processes = time.monotonic(), self._processes()
        for i, process in processes.items():
            if i not in self._ended and process.poll() is not None:
                self._ended[i] = (now, self.board.read(i).position)
        self._replay()
        running = {i: process for i, process in processes.items() if i not in self._ended}
        if running:
            self._forward_signal(running)
            if now - self._looked >= heartbeat.BEAT_SECONDS:
                self._looked = now
                self._look(running)
            failed = [self._ended[i][0] for i, process in processes.items() if process.returncode]
            if self._elsewhere:
                failed.append(self._elsewhere_at)
            is_late = failed and now - min(failed) > heartbeat.GRACE_SECONDS
            if is_late or self._hosts.silent or self._signals.at_once:
                self._swept |= running.keys()
                for process in running.values():
                    heartbeat.end_process(process.pid)
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        kinds = {failure.error_file_data.get("kind") for failure in result.failures.values()}
        is_recent = now - min(when for when, _ in self._ended.values()) < _TELLING_SECONDS
        if kinds == {"stop"} and not self._signals.number and self._hosts.are_several and is_recent:
            # Other hosts may have stopped the ranks to let a new host in; then torch restarts them.
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            self._judge(result.failures, kinds)
        return result

    def _forward_signal(self, running: dict[int, Any]) -> None:
        """Pass the user's signal on once all ranks are ready for it; they stop at a step that they agree on."""
        if self._signals.number and not self._is_forwarded and all(self.board.read(i).pid for i in running):  # pyright: ignore
            self._is_forwarded = self._hosts.is_closing = True
            for process in running.values():
                process.send_signal(self._signals.number)

    def _look(self, running: dict[int, Any]) -> None:
        """End a rank that is stopped or hangs; find out whether another host is lost."""
        self._states = self._observer.read()
        local = {process.pid: i for i, process in running.items()}
        here = [state for state in self._states if state.pid in local]
        lost = heartbeat.find_lost([*here, *self._hosts.others], is_stopping=self._signals.number != 0)
        if lost and lost[0] in here:
            self._killed.setdefault(local[lost[0].pid], lost[1])
            heartbeat.end_process(lost[0].pid)
        if not self._elsewhere:
            self._elsewhere, self._elsewhere_at = self._hosts.look(), time.monotonic()

    def _replay(self) -> None:
        """Show what rank 0 has written to its display."""
        path = self.folder / "display"
        if self._display is None and path.exists():
            self._display = path.open(encoding="utf-8")
        while self._display and (line := self._display.readline()):
            self._line += line
            if self._line.endswith("\n"):
                self._console.replay(self._line)
                self._line = ""

    # --- the outcome ----------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """Return what the first rank of this host has returned."""
        return _value(json.loads((self.folder / "outcome-0").read_text()))

    def _judge(self, failures: dict[int, ProcessFailure], kinds: set[str | None]) -> None:
        """Find the cause of a failure, and decide whether the ranks are restarted."""
        error, reason = self._cause(failures)
        is_final = self._signals.number or kinds & {"expected", "stop"} or self._hosts.failure or self._hosts.is_stuck
        if self._remaining_restarts > 0 and not is_final:
            total = self._worker_group.spec.max_restarts
            number = total - self._remaining_restarts + 1
            self._console.finish()
            self._console.note(f"{reason}: restart {number} of {total} from the newest checkpoint")
            return
        self._remaining_restarts, self.error = 0, error
        if "stop" not in kinds:
            self._hosts.end_run(reason)

    def _cause(self, failures: dict[int, ProcessFailure]) -> tuple[BaseException, str]:
        """Return the exception that the first cause stands for, and the cause in words."""
        if self._signals.at_once:
            return KeyboardInterrupt(), "the user interrupted the run"
        # Order by time; of those seen together first one by a signal, which explains the others.
        ordered = sorted(failures.items(), key=lambda item: (self._ended[item[1].local_rank][0], item[1].exitcode >= 0))
        causes = [item for item in ordered if self._is_cause(item[1])]
        unexpected = [item for item in causes if _kind(item[1]) not in ("expected", "stop")]
        if causes and not unexpected:
            # As a rule all have raised the same; the lowest rank speaks for the run.
            data = min(causes, key=lambda item: item[0])[1].error_file_data
            return _value(data), data["message"]
        if not unexpected and self._signals.number:
            return self._signals.error(), "the user stopped the run"
        if not unexpected and self._hosts.are_several:
            reason = self._elsewhere or self._hosts.hear(_TELLING_SECONDS) or "the ranks of another host are gone"
            return TrainingFailed(f"{reason}\nThe ranks of this host were ended; see the logs of the other one."), reason
        rank, failure = (unexpected or ordered)[0]
        reason, advice = self._explain(rank, failure)
        error = TrainingFailed if unexpected else RankLost
        return error(f"{reason}; the other ranks were ended.{advice}{self._tail(failure)}"), reason

    def _is_cause(self, failure: ProcessFailure) -> bool:
        """Return whether a rank ended by itself, neither after another one nor by the user's signal."""
        kind, i = _kind(failure), failure.local_rank
        if self._signals.number:
            # A signal may end a rank that was not ready for it.
            return kind in ("expected", "stop", "unexpected", "memory")
        is_first = i in self._killed or (i not in self._swept and kind != "secondary")
        return kind == "expected" or (is_first and not self._elsewhere)

    def _explain(self, rank: int, failure: ProcessFailure) -> tuple[str, str]:
        """Return what happened to a rank and where in training, and what may help."""
        position, kind, message = self._ended[failure.local_rank][1], _kind(failure), failure.error_file_data["message"]
        advice = ""
        if failure.local_rank in self._killed:
            text = f"{self._killed[failure.local_rank]} {position} and was killed"
        elif kind == "memory":
            text = f"ran out of memory {position}: {message}"
            advice = " A smaller batch_size or more devices need less memory on each."
        elif kind:
            text = f"failed {position}: {message}"
        elif failure.exitcode < 0:
            text = f"was killed by {failure.signal_name()} {position}"
            if failure.exitcode == -signal.SIGKILL:
                advice = " The system does that when memory runs out: a smaller batch_size or more devices need less."
        else:
            text = f"ended with exit code {failure.exitcode} {position}"
        return f"rank {rank} ({self.names[failure.local_rank]}, process {failure.pid}) {text}", advice

    def _tail(self, failure: ProcessFailure) -> str:
        """Return the last lines of a rank's log, or of its output before the log was open."""
        path = self.folder / f"output-{failure.local_rank}"
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:
            lines = [f"(cannot be read: {error.strerror})"]
        name = "its output"
        if path.is_symlink():
            log = path.readlink()
            name = log.relative_to(Path.cwd()) if log.is_relative_to(Path.cwd()) else log
        return "\n".join([f" The last lines of {name}:", *(f"  {line}" for line in lines)]) if lines else ""


def _kind(failure: ProcessFailure) -> str | None:
    return failure.error_file_data.get("kind")


def _value(outcome: dict[str, str]) -> Any:
    return pickle.loads(base64.b64decode(outcome["value"]))


class _Files(LogsSpecs):
    """The files for a rank's output and outcome; also the hook through which it gets flatout's variables."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    @property
    def root_log_dir(self) -> str:
        return str(self._agent.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        agent, folder = self._agent, self._agent.folder
        assert agent.board
        for i, variables in envs.items():
            variables |= {**agent.environment, DEVICE: agent.names[i], "FLATOUT_HEARTBEAT": agent.board.path}
            if agent._hosts.store_file:
                variables[STORE] = agent._hosts.store_file
            # torch counts restarts for each host; a host that has come later must resume as well.
            variables["TORCHELASTIC_RESTART_COUNT"] = str(agent._hosts.attempt)
        return LogsDest(
            # The rank itself joins both streams in one file.
            stdouts=dict.fromkeys(envs, os.devnull),
            stderrs={i: str(folder / f"output-{i}") for i in envs},
            error_files={i: str(folder / f"outcome-{i}") for i in envs},
        )
