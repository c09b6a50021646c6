"""The processes of a run: one for each device, started, watched and ended together.

They are started through torchrun's library, but not through its agent, whose rendezvous listens on every interface.
`vitals.py` says who watches what.
"""

import contextlib
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import vitals
from flatout.console import Console
from flatout.errors import RankLost, Stopped, TrainingFailed
from flatout.hosts import Hosts, Meeting
from flatout.rank import Outcome, Payload, log_file, outcome_file, said_file

if TYPE_CHECKING:
    from subprocess import Popen

    from flatout.engine.choose import Devices

__all__ = ["Hosts", "run_on_ranks"]

_POLL_SECONDS = 0.1
# What a rank may take to end its interpreter after its outcome is written.
_LEAVING_SECONDS = 10.0
_TAIL_LINES = 10
_TORCH_LOG = "torch.distributed.elastic.multiprocessing"


def run_on_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    devices: "Devices",
    hosts: Hosts | None = None,
    threads: int,
    console: Console,
) -> Any:
    """Call a function in one new process for each device, and return what the first of them returns.

    Args:
        function: called as function(console, *args) in each process, which is a rank of torch.distributed as the usual
            variables say (RANK, WORLD_SIZE, LOCAL_RANK, ...). It and its arguments may be defined in `__main__`.
        args: its arguments.
        devices: one process is started for each.
        hosts: the hosts of the run; each calls this. Default: this one alone.
        threads: OMP_NUM_THREADS of each process, unless the user has set it.
        console: shows what rank 0's console is told.

    Raises:
        InputError, TrainingFailed, Stopped, KeyboardInterrupt: as the function raised them.
        TrainingFailed: a rank died, hung, or raised something else; all others were ended. The message names it, and has
            the last lines of its log.
    """
    import cloudpickle

    call = cloudpickle.dumps((function, tuple(args)))
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="flatout-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        meeting = Meeting(hosts or Hosts(), len(devices.names))
        stack.callback(meeting.close)
        board = vitals.create(len(devices.names))
        stack.callback(board.close)
        payload = Payload(
            launcher=os.getpid(),
            path=[os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],  # noqa: PTH100
            python_path=os.environ.get("PYTHONPATH"),
            call=call,
            shows=console.has_display,
            has_bar=console.has_bar,
            lines=console.hand_over(),
        )
        (folder / "payload").write_bytes(pickle.dumps(payload))
        asked = stack.enter_context(_signals())
        environments = {
            i: _environment(meeting, i, len(devices.names), name, board.path, threads)
            for i, name in enumerate(devices.names)
        }
        ranks = [
            _Rank(number=meeting.first_rank + i, device=name, local_rank=i) for i, name in enumerate(devices.names)
        ]
        run = _Run(ranks, folder, board, meeting, console, asked)
        try:
            run.start(environments)
            run.supervise()
        except BaseException:
            run.end_all()
            raise
        run.end_all()
        return run.verdict()


def _environment(meeting: Meeting, local_rank: int, local_size: int, device: str, path: str, threads: int) -> dict:
    """Return the variables of one rank, those that torch's env:// and torchrun's users know among them."""
    environment = {
        "RANK": meeting.first_rank + local_rank,
        "WORLD_SIZE": meeting.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        # The launcher keeps the store: every rank is its client.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "FLATOUT_DEVICE": device,
        "FLATOUT_VITALS": path,
        # So that flatout is found as it was here, whatever changed sys.path.
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str)),
    }
    defaults = {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": meeting.interface,
        "NCCL_SOCKET_IFNAME": f"={meeting.interface}",
    }
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in environment.items()}


@dataclass(kw_only=True)
class _Rank:
    """One process of this host, as the launcher sees it.

    Attributes:
        number: its rank among all hosts.
        ended: time.monotonic of when it was found to have ended, and
        code: its exit code then; negative for a signal.
        killed: why the launcher ended it by force; empty if it did not.
        told_to_end: whether the launcher was ending all when it ended.
    """

    number: int
    device: str
    local_rank: int
    process: "Popen[bytes] | None" = None
    ended: float = 0.0
    code: int | None = None
    outcome: Outcome | None = None
    place: str = "while starting"
    killed: str = ""
    told_to_end: bool = False

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def name(self) -> str:
        return f"rank {self.number} ({self.device}, process {self.pid})"

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result."""
        return self.code is not None and (self.outcome is None or bool(self.outcome.error))

    @property
    def is_secondary(self) -> bool:
        """Whether it ended because another did."""
        if self.outcome and self.outcome.error:
            return self.outcome.is_secondary
        return self.told_to_end and not self.killed


@dataclass
class _Asked:
    """What the user's signals have asked for.

    Attributes:
        number: the first signal; 0 if none has come.
        at_once: whether a second SIGINT came.
    """

    number: int = 0
    at_once: bool = False


@contextlib.contextmanager
def _signals() -> Iterator[_Asked]:
    """Note SIGINT and SIGTERM instead of dying of them; other threads than the main one get none."""
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        asked.at_once = asked.at_once or (asked.number != 0 and number == signal.SIGINT)
        asked.number = asked.number or number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Run:
    """The ranks of this host, from their start to the verdict."""

    ranks: list[_Rank]
    folder: Path
    board: vitals.Board
    meeting: Meeting
    console: Console
    asked: _Asked
    _forwarded: bool = False
    _ending_since: float = 0.0
    _elsewhere: str = ""
    _display: Any = None
    _line: str = field(default="")

    def start(self, environments: dict[int, dict[str, str]]) -> None:
        """Start the processes."""
        from torch.distributed.elastic.multiprocessing import start_processes

        # torch tells what it starts and ends; here the message at the end does.
        logging.getLogger(_TORCH_LOG).setLevel(logging.CRITICAL)
        command = {rank.local_rank: ("-P", "-m", "flatout.rank", str(self.folder)) for rank in self.ranks}
        files = {rank.local_rank: str(said_file(self.folder, rank.number)) for rank in self.ranks}
        failure: list[BaseException] = []
        handlers: dict[int, Any] = {}

        def call() -> None:
            try:
                context: Any = start_processes("flatout", sys.executable, command, environments, _logs_specs(files))
                handlers.update(context.subprocess_handlers)
            except BaseException as error:
                failure.append(error)

        # In a thread of its own, as in the main one torch would replace the signal handlers, for good.
        starter = threading.Thread(target=call, name="start ranks")
        starter.start()
        starter.join()
        for rank in self.ranks if handlers else ():
            rank.process = handlers[rank.local_rank].proc
        if failure:
            raise failure[0]

    def supervise(self) -> None:
        """Wait until every rank has ended, and see to it that they end together."""
        observer, looked = vitals.Observer(self.board), 0.0
        while any(rank.code is None for rank in self.ranks):
            now = time.monotonic()
            self._replay()
            self._collect(now)
            self._forward_signals()
            if now - looked >= vitals.BEAT_SECONDS:
                looked = now
                self._look(observer.look(), now)
            self._end_others(now)
            time.sleep(_POLL_SECONDS)
        self._replay()

    def end_all(self) -> None:
        """Leave no process of this run behind, nor any that a rank has started."""
        for rank in self.ranks:
            if rank.process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.process.wait()

    def verdict(self) -> Any:
        """Return the first rank's result, or raise what ended the run."""
        failed = [rank for rank in self.ranks if rank.has_failed]
        if not failed and not self._elsewhere:
            outcome = self.ranks[0].outcome
            assert outcome
            return pickle.loads(outcome.value)
        causes = [rank for rank in failed if not rank.is_secondary]
        if self.asked.at_once:
            raise KeyboardInterrupt
        expected = [rank for rank in causes if rank.outcome and rank.outcome.is_expected]
        if causes and len(expected) == len(causes):
            # All raised the same as a rule; rank 0's is the run's own.
            self._raise(min(expected, key=lambda rank: rank.number))
        unexpected = [rank for rank in causes if rank not in expected]
        if unexpected:
            raise TrainingFailed(self._tell(min(unexpected, key=_when)))
        if self.asked.number:
            raise KeyboardInterrupt if self.asked.number == signal.SIGINT else Stopped(self.asked.number)
        if self._elsewhere:
            raise TrainingFailed(
                f"{self._elsewhere}\nThat was on another host: its log says more. This host's ranks were ended."
            )
        if self.meeting.hosts.nodes > 1:
            raise TrainingFailed("a rank on another host was lost: see the logs there. This host's ranks were ended.")
        first = min(failed, key=_when)
        raise RankLost(self._tell(first))

    # --- watching -------------------------------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        for rank in self.ranks:
            if rank.code is not None or rank.process is None:
                continue
            code = rank.process.poll()
            if code is None:
                continue
            rank.code, rank.ended, rank.told_to_end = code, now, self._ending_since > 0
            rank.place = self.board.read(rank.local_rank).place
            path = outcome_file(self.folder, rank.number)
            if path.exists():
                rank.outcome = pickle.loads(path.read_bytes())

    def _forward_signals(self) -> None:
        if self.asked.at_once:
            self.end_all()
        elif self.asked.number and not self._forwarded:
            self._forwarded = True
            for rank in self.ranks:
                if rank.code is None:
                    os.kill(rank.pid, self.asked.number)

    def _look(self, seen: list[vitals.Vital], now: float) -> None:
        """End a rank that is stopped or hangs; learn what happened on other hosts."""
        present = {rank.pid: rank for rank in self.ranks if rank.code is None}
        seen = [vital for vital in seen if vital.pid in present]
        silent, hung = vitals.find_silent(seen), vitals.find_hung(seen)
        sick = silent or hung
        if sick and not self._ending_since and not present[sick.pid].killed:
            rank = present[sick.pid]
            how = "did not answer for" if silent else "kept all others waiting for"
            seconds = sick.silent_seconds if silent else sick.stalled_seconds
            rank.killed = f"{how} {seconds:.0f} s"
            vitals.end_process(rank.pid)
        for rank in present.values():
            # An interpreter may hang when it ends, in a library's threads; the outcome is what counts.
            path = outcome_file(self.folder, rank.number)
            if path.exists() and time.time() - path.stat().st_mtime > _LEAVING_SECONDS:
                vitals.end_process(rank.pid)
        if not self._elsewhere and not self._ending_since:
            self._elsewhere = self.meeting.failure()

    def _end_others(self, now: float) -> None:
        """Once a rank has failed, ask the others to end, and then make them.

        A rank that has reported an error that is meant for the user left in order, and the others mostly do the same
        just then; so they get time before they are asked.
        """
        if not self._ending_since:
            failed = [rank for rank in self.ranks if rank.has_failed]
            in_order = all(rank.outcome and rank.outcome.is_expected for rank in failed)
            if not failed and not self._elsewhere:
                return
            if failed and in_order and now - min(rank.ended for rank in failed) < vitals.GRACE_SECONDS:
                return
            self._ending_since = now
            if failed:
                first = min(failed, key=_when)
                self.meeting.tell(self._tell(first, tail=False))
            for rank in self.ranks:
                if rank.code is None:
                    os.kill(rank.pid, signal.SIGTERM)
        elif now - self._ending_since > vitals.GRACE_SECONDS:
            for rank in self.ranks:
                if rank.code is None:
                    vitals.end_process(rank.pid)

    def _replay(self) -> None:
        """Show what rank 0 has written to its display."""
        path = self.folder / "display"
        if self._display is None:
            if not path.exists():
                return
            self._display = path.open(encoding="utf-8")
        while line := self._display.readline():
            self._line += line
            if self._line.endswith("\n"):
                self.console.replay(self._line)
                self._line = ""

    # --- telling --------------------------------------------------------------------------------------------------

    def _raise(self, rank: _Rank) -> None:
        outcome = rank.outcome
        assert outcome
        if not outcome.value:
            raise TrainingFailed(self._tell(rank))
        raise pickle.loads(outcome.value)

    def _tell(self, rank: _Rank, *, tail: bool = True) -> str:
        """Return what happened to a rank, where in training, and the last lines of its log."""
        outcome = rank.outcome
        if rank.killed:
            what = f"{rank.killed}: it was killed"
        elif outcome and outcome.is_memory:
            what = f"ran out of memory ({outcome.error})"
        elif outcome and outcome.error:
            what = f"failed with {outcome.error}"
        elif rank.code is not None and rank.code < 0:
            what = f"was killed by {signal.Signals(-rank.code).name}"
        else:
            what = f"ended with exit code {rank.code}"
        text = f"{rank.name} {what} {rank.place}; the other ranks were ended."
        if outcome and outcome.is_memory:
            text += " A smaller batch_size or more devices need less memory on each."
        elif rank.code == -signal.SIGKILL and not rank.killed:
            text += (
                " The system does that when memory runs out; a smaller batch_size or more devices need less on each."
            )
        if not tail:
            return text
        path, lines = self._last_lines(rank)
        return f"{text} The last lines of {path}:\n" + "\n".join(f"  {line}" for line in lines) if lines else text

    def _last_lines(self, rank: _Rank) -> tuple[str, list[str]]:
        named = log_file(self.folder, rank.number)
        path = Path(named.read_text(encoding="utf-8")) if named.exists() else said_file(self.folder, rank.number)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return "", []
        if not named.exists():
            return "what it said", lines
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        return str(path), lines


def _when(rank: _Rank) -> tuple[float, bool, int]:
    """Order failures: the first to be seen; of those seen together, one by a signal, as it explains the others."""
    return rank.ended, rank.code is not None and rank.code >= 0, rank.number


def _logs_specs(files: dict[int, str]) -> Any:
    """Return where the ranks' output goes: both streams to one file, which `rank.main` sees to."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Files(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(Path(files[0]).parent)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nowhere = dict.fromkeys(envs, os.devnull)
            return LogsDest(stdouts=nowhere, stderrs=files, error_files=nowhere)

    return Files()
