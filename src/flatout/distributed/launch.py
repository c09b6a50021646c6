"""Start a process for each device of this host, restart them if one is lost, and return the first rank's result.

torch's elastic agent starts, watches and ends the ranks. It runs in a thread, so that this one can show rank 0's output
and forward the user's signals. An agent is used for one attempt: this module decides whether another follows.
"""

import contextlib
import logging
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from flatout.data.cache import temporary_folder
from flatout.distributed.environment import Hosts
from flatout.distributed.rank import Outcome, end_group, read_position, ready_ranks
from flatout.distributed.rendezvous import RankFiles, Rendezvous, SeveralHosts
from flatout.utils.console import Console
from flatout.utils.errors import InputError, RankLost, Stopped, TrainingFailed, signals_handled

_LOOK_SECONDS = 0.1
# Time after which torch's agent kills ranks that are still running after another has failed.
_KILL_SECONDS = 30.0
# Time for another host's launcher to report why its ranks have ended.
_REASON_SECONDS = 3.0
# Maximum time between the ends of hosts.
_EXIT_SECONDS = 60.0
# Lines of the log of a rank that hung or crashed.
_TAIL_LINES = 30
_HUNG = re.compile(r"^Timeout \((\d+:\d\d:\d\d)", re.MULTILINE)


def launch(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    names: Sequence[str],
    threads: int,
    console: Console,
    hosts: Hosts | None = None,
    restarts: int = 0,
) -> Any:
    """Call function(console, *args) in one new process for each device name; see `engine.factory.run_on_devices`."""
    import cloudpickle

    try:
        call = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:  # users' objects may raise anything
        raise InputError(
            "the model, the data or a callback cannot be sent to the processes of the devices "
            f"({type(error).__name__}: {error}); remove locks, open files and the like from them, "
            "and from the global variables that they use"
        ) from error
    payload = (os.getpid(), call, console.has_bar, console.hand_over())
    # torch's warnings about lost connections repeat what the messages say.
    variables = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    try:
        with contextlib.ExitStack() as stack:
            try:
                folder, held = temporary_folder()
                stack.callback(os.close, held)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                (folder / "payload").write_bytes(pickle.dumps(payload))
            except OSError as error:
                raise TrainingFailed(
                    f"the temporary folder cannot be written: {error.strerror or error}; free space in it, or set "
                    "TMPDIR to another one"
                ) from None
            return _Launch(stack, folder, names, variables, console, hosts or Hosts()).run(restarts)
    except (InputError, TrainingFailed, Stopped, KeyboardInterrupt) as error:
        # Its traceback, which a notebook keeps, would keep the store and its port alive.
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904


@dataclass(frozen=True, kw_only=True)
class _EndedRank(Outcome):
    """How a rank of this host ended; its name is for messages, and its exit code is negative for a signal."""

    local_rank: int
    name: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class _End:
    """How an attempt ended: None or an error, the reason in words, whether to restart, and whether that counts."""

    error: BaseException | None = None
    value: Any = None
    reason: str = ""
    may_restart: bool = False
    is_counted: bool = True


class _Launch:
    """The ranks of this host, in all attempts."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        names: Sequence[str],
        variables: dict[str, str],
        console: Console,
        hosts: Hosts,
    ) -> None:
        # torch logs starts and ends of processes, which flatout's messages report in one line.
        torch_log = logging.getLogger("torch.distributed.elastic")
        torch_log.propagate = False
        torch_log.addHandler(logging.NullHandler())
        self._folder, self._names, self._console, self._hosts = folder, names, console, hosts
        self._rendezvous = Rendezvous() if hosts.most == 1 else SeveralHosts(hosts)
        stack.callback(self._rendezvous.leave)
        # Children must find flatout even if sys.path was changed.
        search_path = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
        command = (
            f"import sys; sys.path[:] = {search_path!r}; from flatout.distributed import rank; sys.exit(rank.main())"
        )
        self._spec = WorkerSpec(
            role="flatout",
            local_world_size=len(names),
            entrypoint=sys.executable,
            args=("-P", "-c", command, str(folder)),
            rdzv_handler=self._rendezvous,
            max_restarts=0,
            monitor_interval=_LOOK_SECONDS,
        )
        self._files = RankFiles(folder, names, variables, self._rendezvous)
        display = folder / "display"
        display.touch()
        self._display = stack.enter_context(display.open(encoding="utf-8"))
        self._line = ""
        # The user's signal, if any; whether it was forwarded; and whether a SIGINT followed.
        self._signal: int | None = None
        self._is_forwarded = self._is_urgent = False

    def run(self, restarts: int) -> Any:
        """Run the ranks, with restarts; return the first one's result or raise its error."""
        restart = 0
        with signals_handled(self._note_signal, signal.SIGINT, signal.SIGTERM):
            while True:
                end = self._run_once()
                if end.error is None:
                    return end.value
                if not end.may_restart or (end.is_counted and restart == restarts):
                    self._rendezvous.end_run(end.reason or str(end.error))
                    raise end.error
                if end.is_counted:
                    restart += 1
                    self._console.finish()
                    self._console.note(f"{end.reason}: restart {restart} of {restarts} from the newest checkpoint")

    def _run_once(self) -> _End:
        agent = LocalElasticAgent(self._spec, self._files, exit_barrier_timeout=_EXIT_SECONDS)
        # In the main thread, torch would replace the signal handlers permanently.
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(agent.run)
            while not running.done():
                wait([running], _LOOK_SECONDS)
                self._show()
                self._forward_signal(agent)
        self._show()
        # A group may outlive its leader.
        _end_groups(agent)
        # Not raised here: a reference cycle of traceback and frame would keep the store alive.
        if error := running.exception():
            return _End(error=self._of_rendezvous(error))
        result: Any = running.result()
        if result is None:
            return _End(error=InputError("the run has ended; it had as many hosts as it could use, without this one"))
        return self._judge(self._ended_ranks(agent, result))

    def _of_rendezvous(self, error: BaseException) -> BaseException:
        where, rendezvous = f"--rendezvous {self._hosts.rendezvous}", self._rendezvous
        if self._signal:
            return self._signal_error()
        if isinstance(error, RendezvousTimeoutError):
            within = f"within {self._hosts.timeout:g} s"
            if rendezvous.attempt >= 0:
                fix = "start all hosts again with --resume"
                return TrainingFailed(f"{where}: a host was lost, and did not return {within}; {fix}")
            return InputError(
                f"{where}: {rendezvous.missing()} {within}; start the same command on the others, or wait longer with "
                "--rendezvous-timeout"
            )
        if isinstance(error, (RendezvousError, DistError)):
            return InputError(f"{where}: the run has ended: {rendezvous.reason() or 'see the first host'}")
        return error

    def _show(self) -> None:
        while line := self._display.readline():
            self._line += line
            if self._line.endswith("\n"):
                self._console.replay(self._line)
                self._line = ""

    # --- the user's signals ---------------------------------------------------------------------------------------

    def _note_signal(self, number: int, frame: object) -> None:
        self._is_urgent = self._is_urgent or (self._signal is not None and number == signal.SIGINT)
        self._signal = self._signal or number

    def _signal_error(self) -> BaseException:
        assert self._signal is not None
        return KeyboardInterrupt() if self._signal == signal.SIGINT else Stopped(self._signal)

    def _forward_signal(self, agent: LocalElasticAgent) -> None:
        """Forward the user's signal once all ranks are ready; they stop after the same step."""
        if self._is_urgent:
            _end_groups(agent)
        if self._signal is None or self._is_forwarded:
            return
        ready = ready_ranks(self._folder)
        ended = {int(path.name.partition("-")[2]) for path in self._folder.glob("outcome-*")}
        if len({*ready} | ended) == len(self._names) or self._rendezvous.is_waiting:
            self._is_forwarded = True
            self._rendezvous.end_run("the user stopped the run")
            for pid in ready.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self._signal)

    # --- how an attempt ended -------------------------------------------------------------------------------------

    def _ended_ranks(self, agent: LocalElasticAgent, result: RunResult) -> list[_EndedRank]:
        ended = []
        for worker in agent.get_worker_group().workers:
            outcome = Outcome(kind="killed", value=RankLost("all ranks were ended"), time=time.time())
            with contextlib.suppress(OSError):
                outcome = pickle.loads((self._folder / f"outcome-{worker.local_rank}").read_bytes())
            failure = result.failures.get(worker.global_rank)
            name = f"rank {worker.global_rank} ({self._names[worker.local_rank]}, process {worker.id})"
            code = failure.exitcode if failure else 0
            ended.append(_EndedRank(**vars(outcome), local_rank=worker.local_rank, name=name, exit_code=code))
        return ended

    def _judge(self, ranks: list[_EndedRank]) -> _End:
        """Find the first cause, and whether another attempt makes sense."""
        hosts = self._rendezvous
        if all(rank.kind == "done" for rank in ranks):
            return _End(value=ranks[0].value)
        if self._is_urgent:
            return _End(error=KeyboardInterrupt(), reason="the user interrupted the run")
        if refused := [rank for rank in ranks if rank.kind == "error"]:
            # Usually all have raised the same error; report that of the lowest rank.
            return _End(error=refused[0].value)
        if cause := self._cause(ranks):
            return self._explain(cause, ranks)
        if self._signal:
            return _End(error=self._signal_error(), reason="the user stopped the run")
        first = min((rank for rank in ranks if rank.kind != "done"), key=lambda rank: rank.time)
        if first.kind == "stopped":
            # Another host may have stopped the ranks to let a new host in.
            is_over = not hosts.are_several or hosts.reason() != ""
            return _End(error=first.value, reason="the run was stopped", may_restart=not is_over, is_counted=False)
        if not hosts.are_several:
            return _End(error=first.value, reason=str(first.value), may_restart=True)
        told = hosts.reason(_REASON_SECONDS)
        reason = told or (str(first.value) if first.kind == "silent" else "the ranks of another host are gone")
        error = TrainingFailed(f"{reason}\nThe ranks of this host were ended; see the logs of the other hosts.")
        return _End(error=error, reason=reason, may_restart=not told)

    def _cause(self, ranks: list[_EndedRank]) -> _EndedRank | None:
        """Return the rank that ended first: not because of another rank, nor by a signal of the user or the agent.

        The time when a killed rank ended is not known; of several, the one with the lowest number is returned.
        """
        if crashed := [rank for rank in ranks if rank.kind in ("crash", "memory")]:
            return min(crashed, key=lambda rank: rank.time)
        killed = [rank for rank in ranks if rank.kind == "killed" and rank.exit_code not in (0, -signal.SIGTERM)]
        if died := [rank for rank in killed if rank.exit_code != -signal.SIGKILL]:
            return died[0]
        # The agent kills ranks, too, but only after others have waited for it.
        is_by_agent = any(rank.kind != "killed" and time.time() - rank.time > _KILL_SECONDS for rank in ranks)
        is_for_silence = any(rank.kind == "silent" for rank in ranks)
        is_cause = killed and not self._signal and (is_for_silence or not is_by_agent)
        return killed[0] if is_cause else None

    def _explain(self, cause: _EndedRank, ranks: list[_EndedRank]) -> _End:
        """Describe what happened to a rank, its position in training, a possible fix, and the end of its log."""
        output, advice = self._folder / f"output-{cause.local_rank}", ""
        position = read_position(self._folder, cause.local_rank)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        waited = [str(rank.value) for rank in ranks if rank.kind == "silent"]
        if cause.kind == "memory":
            reason = f"ran out of memory {position}: {cause.value}"
            advice = " A smaller batch_size or more devices need less memory on each."
        elif cause.kind == "crash":
            reason = f"failed {position}: {cause.value}"
        elif cause.exit_code == 1 and (hung := _HUNG.search(text)):  # the log of a resumed run has earlier ones
            reason = f"made no progress for {hung[1]} {position} (--hang-timeout)"
        elif waited:
            reason = f"did not answer {position} and was killed ({waited[0]})"
        elif cause.exit_code < 0:
            reason = f"was killed by {signal.Signals(-cause.exit_code).name} {position}"
            if cause.exit_code == -signal.SIGKILL:
                advice = " The system does that when memory runs out: fewer ranks or a smaller batch_size need less."
        else:
            reason = f"ended with exit code {cause.exit_code} {position}"
        reason, tail = f"{cause.name} {reason}", ""
        if text:
            log = output.readlink() if output.is_symlink() else "its output"
            tail = "\n  ".join([f" The last lines of {log}:", *text.splitlines()[-_TAIL_LINES:]])
        error = TrainingFailed(f"{reason}; the other ranks were ended.{advice}{tail}")
        return _End(error=error, reason=reason, may_restart=not self._signal)


def _end_groups(agent: LocalElasticAgent) -> None:
    for worker in agent.get_worker_group().workers:
        if worker.id:
            end_group(worker.id)
