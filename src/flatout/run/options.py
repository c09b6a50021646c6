"""How a recipe is run, other than what the recipe says."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from flatout.callbacks.base import Callback
from flatout.distributed.environment import HANG_TIMEOUT, Hosts
from flatout.errors import InputError
from flatout.run.own import OwnFunctions


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a recipe is run, other than what the recipe says.

    Attributes:
        out: the run folder; None for a new one under `runs/`.
        devices: a device SPEC.
        engine: the engine's name.
        resume: continue the run in `out` from its newest checkpoint.
        overwrite: replace the run in `out`.
        cache: keep the pack in the cache folder for the next run.
        hosts: the hosts that take part.
        restarts: how often the ranks are restarted from the newest checkpoint after one was lost; None: as often as
            elastic hosts may be lost.
        hang_timeout: seconds without progress after which a rank of several is ended.
        allow_code: whether a model named as `package.module:factory` may be imported.
        minutes: the time budget of the whole run; None for the recipe's own length.
        began: when the user asked for the run, by time.perf_counter.
        notes: sentences about the recipe, for the summary and the report.
        report: draw the pictures and the report.
        callbacks: called by the main process.
        own: functions given in Python.
    """

    out: Path | None = None
    devices: str = "auto"
    engine: str = "torch"
    resume: bool = False
    overwrite: bool = False
    cache: bool = True
    allow_code: bool = False
    hosts: Hosts = field(default_factory=Hosts)
    restarts: int | None = None
    hang_timeout: float = HANG_TIMEOUT
    minutes: float | None = None
    began: float = field(default_factory=time.perf_counter)
    notes: tuple[str, ...] = ()
    report: bool = True
    callbacks: tuple[Callback, ...] = ()
    own: OwnFunctions = field(default_factory=OwnFunctions)

    @property
    def seconds(self) -> float | None:
        """The time budget."""
        return None if self.minutes is None else 60 * self.minutes

    def __post_init__(self) -> None:
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise InputError(f"--minutes {self.minutes:g}: must be greater than 0")
        if self.restarts is not None and self.restarts < 0:
            raise InputError(f"--restarts {self.restarts}: must be 0 or more")
        if not (self.hang_timeout > 0 and math.isfinite(self.hang_timeout)):
            raise InputError(f"--hang-timeout {self.hang_timeout:g}: must be greater than 0 seconds")
