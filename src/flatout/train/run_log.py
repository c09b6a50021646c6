"""The messages of a run, and the time of its phases, on one rank."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.train.progress import Progress
    from flatout.train.request import TrainRequest
    from flatout.utils.console import Console


class RunLog:
    """Collects messages and times for the summary.

    Attributes:
        console: prints the messages.
        notes: the messages so far.
        seconds: the time of each finished phase, without gaps.
        setup_seconds: the time before the first step.
    """

    def __init__(self, console: "Console", request: "TrainRequest") -> None:
        self.console = console
        self.notes = [*request.options.notes]
        self.seconds = dict(request.phase_seconds)
        self.setup_seconds = 0.0
        self._began = request.options.began
        self._lap = self._began + sum(self.seconds.values())

    def note(self, sentence: str) -> None:
        """Print a message, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def lap(self, phase: str, parts: Mapping[str, float] = MappingProxyType({})) -> None:
        """End a phase; `parts` are the seconds of nested phases, which are subtracted."""
        now = time.perf_counter()
        self.seconds |= {phase: now - self._lap - sum(parts.values()), **parts}
        self._lap = now

    def end_setup(self) -> None:
        """Mark the end of the set-up."""
        self.setup_seconds = time.perf_counter() - self._began

    def wall_seconds(self, progress: "Progress") -> float:
        """Return the time since the run's first command, without time lost when it was killed."""
        return progress.earlier_seconds + time.perf_counter() - self._began
