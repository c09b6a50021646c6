"""The processes of a run on this host, from their start to the verdict: watched, ended together, explained."""

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from flatout.dist import heartbeat as vitals
from flatout.dist import watchdog
from flatout.console import Console
from flatout.errors import RankLost, Stopped, TrainingFailed
from flatout.dist.rendezvous import Meeting
from flatout.dist.worker import Outcome, log_of, outcome_file

_POLL_SECONDS = 0.1
# What a rank may take to end its interpreter after its outcome is written.
_LEAVING_SECONDS = 10.0
# What another host may take to tell why its ranks are gone.
_TELLING_SECONDS = 5.0
_TAIL_LINES = 20


@dataclass(kw_only=True)
class Rank:
    """One process of this host, as the launcher sees it.

    Attributes:
        number: its rank among all hosts.
        device: torch's name of it.
        local_rank: its slot on the board.
        process: itself.
        ended: time.monotonic of when it was found to have ended, and
        code: its exit code then; negative for a signal.
        place: where it then stood in training, in words.
        outcome: what it reported.
        killed: why the launcher ended it by force; empty if it did not.
        told_to_end: whether the launcher was ending all when it ended.
    """

    number: int
    device: str
    local_rank: int
    process: "Popen[bytes]"
    ended: float = 0.0
    code: int | None = None
    place: str = ""
    outcome: Outcome | None = None
    killed: str = ""
    told_to_end: bool = False

    @property
    def name(self) -> str:
        """Who it is, for messages."""
        return f"rank {self.number} ({self.device}, process {self.process.pid})"

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result."""
        return self.code is not None and (self.outcome is None or self.outcome.error != "")

    @property
    def is_expected(self) -> bool:
        """Whether it ended by an error that is meant for the user."""
        return self.outcome is not None and self.outcome.is_expected

    @property
    def is_secondary(self) -> bool:
        """Whether it ended because another did."""
        if self.outcome is None or self.outcome.is_stop:
            return self.told_to_end and not self.killed
        return self.outcome.is_secondary


@dataclass(kw_only=True)
class Asked:
    """What the user's signals have asked for.

    Attributes:
        number: the first signal; 0 if none has come.
        at_once: whether a SIGINT came after it.
    """

    number: int = 0
    at_once: bool = False


class Supervisor:
    """Watches the ranks of this host.

    Args:
        ranks: started processes.
        folder: the run's temporary one.
        board: the vitals of the ranks.
        meeting: the other hosts.
        console: replays what rank 0 shows.
        asked: what signals have asked for, kept up to date by whoever handles them.
    """

    def __init__(
        self, ranks: list[Rank], folder: Path, board: vitals.Board, meeting: Meeting, console: Console, asked: Asked
    ) -> None:
        self._ranks, self._folder, self._board, self._meeting = ranks, folder, board, meeting
        self._console, self._asked = console, asked
        self._observer, self._looked = watchdog.Observer(board), 0.0
        self._was_forwarded = False
        self._ending_since = 0.0
        self._elsewhere = ""
        self._display: Any = None
        self._line = ""

    def run(self) -> Any:
        """Wait until every rank has ended, see to it that they end together; return the first rank's result.

        Raises:
            InputError, TrainingFailed, Stopped, KeyboardInterrupt: what ended the run.
        """
        while any(rank.code is None for rank in self._ranks):
            now = time.monotonic()
            self._replay()
            self._collect(now)
            self._forward_signals()
            if now - self._looked >= vitals.BEAT_SECONDS:
                self._looked = now
                self._look()
            self._end_others(now)
            time.sleep(_POLL_SECONDS)
        self._replay()
        return self._verdict()

    # --- watching -------------------------------------------------------------------------------------------------

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _collect(self, now: float) -> None:
        """Take note of the ranks that have ended."""
        for rank in self._running():
            rank.code = rank.process.poll()
            if rank.code is None:
                continue
            rank.ended, rank.told_to_end = now, self._ending_since > 0
            rank.place = self._board.read(rank.local_rank).place
            path = outcome_file(self._folder, rank.number)
            if path.exists():
                rank.outcome = pickle.loads(path.read_bytes())

    def _forward_signals(self) -> None:
        """Pass the first signal on, to ranks that are ready for it; they stop at a step that they agree on."""
        if self._asked.at_once:
            end_all(self._ranks)
        elif self._asked.number and not self._was_forwarded:
            running = self._running()
            if all(self._board.read(rank.local_rank).pid for rank in running):
                self._was_forwarded = True
                for rank in running:
                    rank.process.send_signal(self._asked.number)

    def _look(self) -> None:
        """End a rank that is stopped or hangs; learn what happens on other hosts."""
        running = {rank.process.pid: rank for rank in self._running()}
        here = [vital for vital in self._observer.look() if vital.pid in running]
        if self._ending_since:
            return
        others, self._elsewhere = self._meeting.exchange(here)
        silent, hung = watchdog.find_silent(here), watchdog.find_hung([*here, *others])
        sick = silent or (hung if hung in here else None)
        if sick and not running[sick.pid].killed:
            what = "did not answer" if silent else "kept all others waiting"
            seconds = sick.silent_seconds if silent else sick.stalled_seconds
            running[sick.pid].killed = f"{what} for {seconds:.0f} s"
            watchdog.end_process(sick.pid)
        for rank in running.values():
            # An interpreter may hang when it ends, in a library's threads; the outcome is what counts.
            path = outcome_file(self._folder, rank.number)
            if path.exists() and time.time() - path.stat().st_mtime > _LEAVING_SECONDS:
                watchdog.end_process(rank.process.pid)

    def _end_others(self, now: float) -> None:
        """Once a rank has failed, ask the others to end, and then make them.

        A rank that has reported an error that is meant for the user mostly left in order, and the others do the same
        just then; one that lost another may be seen before that other. So both give the rest time by themselves.
        """
        if self._ending_since:
            if now - self._ending_since > watchdog.GRACE_SECONDS:
                for rank in self._running():
                    watchdog.end_process(rank.process.pid)
            return
        failed = [rank for rank in self._ranks if rank.has_failed]
        if not failed and not self._elsewhere:
            return
        is_urgent = any(not rank.is_expected and not rank.is_secondary for rank in failed) or self._elsewhere
        if not is_urgent and now - min(rank.ended for rank in failed) < watchdog.GRACE_SECONDS:
            return
        self._ending_since = now
        for rank in self._running():
            rank.process.terminate()

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

    # --- the verdict ----------------------------------------------------------------------------------------------

    def _verdict(self) -> Any:
        """Return the first rank's result, or raise the first cause."""
        if self._display is not None:
            self._display.close()
        if self._asked.at_once:
            self._meeting.tell("the user interrupted it")
            raise KeyboardInterrupt
        failed = [rank for rank in self._ranks if rank.has_failed]
        if not failed:
            outcome = self._ranks[0].outcome
            assert outcome
            return pickle.loads(outcome.value)
        causes = [rank for rank in failed if not rank.is_secondary]
        if self._asked.number:
            # A signal may end a rank that was not ready for it.
            causes = [rank for rank in causes if rank.outcome or rank.code != -self._asked.number]
        unexpected = [rank for rank in causes if not rank.is_expected]
        if unexpected:
            rank = min(unexpected, key=_when)
            self._meeting.tell(self._explain(rank))
            raise TrainingFailed(f"{self._explain(rank)}{self._tail(rank)}")
        if causes:
            # All raised the same as a rule; rank 0's is the run's own.
            rank = min(causes, key=lambda rank: rank.number)
            assert rank.outcome
            if not rank.outcome.is_stop:
                self._meeting.tell(rank.outcome.error)
            raise pickle.loads(rank.outcome.value)
        if self._asked.number:
            raise KeyboardInterrupt if self._asked.number == signal.SIGINT else Stopped(self._asked.number)
        if elsewhere := self._elsewhere or self._hear():
            raise TrainingFailed(f"{elsewhere}\nThe ranks of this host were ended; the logs of the other one say more.")
        rank = min(failed, key=_when)
        raise RankLost(f"{self._explain(rank)}{self._tail(rank)}")

    def _hear(self) -> str:
        """Wait for another host to tell why the ranks of this one were left alone."""
        if self._meeting.hosts.nodes == 1:
            return ""
        deadline = time.monotonic() + _TELLING_SECONDS
        while time.monotonic() < deadline:
            _, elsewhere = self._meeting.exchange([])
            if elsewhere:
                return elsewhere
            time.sleep(_POLL_SECONDS)
        return "a rank on another host was lost"

    def _explain(self, rank: Rank) -> str:
        """Return what happened to a rank, and where in training."""
        outcome, code = rank.outcome, rank.code
        if rank.killed:
            text = f"{rank.killed} {rank.place} and was killed; the other ranks were ended."
        elif outcome and outcome.is_memory:
            text = f"ran out of memory {rank.place}; the other ranks were ended."
            text += f" A smaller batch_size or more devices need less memory on each. ({outcome.error})"
        elif outcome:
            text = f"failed {rank.place}: {outcome.error}; the other ranks were ended."
        elif code is not None and code < 0:
            text = f"was killed by {signal.Signals(-code).name} {rank.place}; the other ranks were ended."
            if code == -signal.SIGKILL:
                text += " The system does that when memory runs out: a smaller batch_size or more devices need less."
        else:
            text = f"ended with exit code {code} {rank.place}; the other ranks were ended."
        return f"{rank.name} {text}"

    def _tail(self, rank: Rank) -> str:
        """Return the last lines of a rank's log, or of what it said before it had one."""
        path, said = log_of(self._folder, rank.number)
        lines = said.splitlines()[-_TAIL_LINES:]
        if not lines:
            return ""
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd()) if path else None
        return "\n".join([f" The last lines of {path or 'its output'}:", *(f"  {line}" for line in lines)])


def end_all(ranks: list[Rank]) -> None:
    """Leave no rank behind, nor any process that one has started."""
    for rank in ranks:
        # The group may outlive the process that led it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()


def _when(rank: Rank) -> tuple[float, bool, int]:
    """Order failures: the first to be seen; of those seen together, one by a signal, as it explains the others."""
    return rank.ended, rank.code is not None and rank.code >= 0, rank.number
