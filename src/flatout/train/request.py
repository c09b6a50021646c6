"""The user's request: a recipe, its data, and how to run it."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config import Recipe
from flatout.distributed.environment import HANG_TIMEOUT, Hosts, launched
from flatout.train.callbacks import Callback
from flatout.train.user_functions import UserFunctions
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.pack import Pack, SharedPack
    from flatout.data.source import DataSource, ImageDataset


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a recipe is run, except for what the recipe defines.

    Attributes:
        out: the run folder; None for a new one under `runs/`.
        devices: a device SPEC.
        engine: the engine's name.
        resume: continue the run in `out` from its newest checkpoint.
        overwrite: replace the run in `out`.
        cache: keep the pack in the cache folder for the next run.
        hosts: the participating hosts.
        restarts: how often the ranks are restarted from the newest checkpoint after losing one; None: as often as
            elastic hosts may be lost.
        allow_code: whether a model named as `package.module:factory` may be imported.
        hang_timeout: seconds without progress after which one of several ranks is ended.
        minutes: the time budget of the whole run; None for the recipe's own length.
        began: the time of the user's request, by time.perf_counter.
        notes: sentences about the recipe, for the summary and the report.
        report: draw the pictures and the report.
        callbacks: called by the main process.
        functions: the user's functions, given in Python.
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
    functions: UserFunctions = field(default_factory=UserFunctions)

    @property
    def seconds(self) -> float | None:
        """The time budget."""
        return None if self.minutes is None else 60 * self.minutes

    def __post_init__(self) -> None:
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise InputError(f"--minutes {self.minutes:g}: must be greater than 0")
        if not (self.hang_timeout > 0 and math.isfinite(self.hang_timeout)):
            raise InputError(f"--hang-timeout {self.hang_timeout:g}: must be greater than 0 seconds")
        if self.restarts is not None and self.restarts < 0:
            raise InputError(f"--restarts {self.restarts}: must be 0 or more")


def check(recipe: Recipe, options: Options) -> None:
    """Check that a recipe can be run with the options, independent of the data.

    Raises:
        InputError: it cannot; the message names the key or the flag and the fix.
    """
    folds, minutes = f"data.folds = {recipe.data.folds}", f"--minutes {options.minutes or 0:g}"
    if not recipe.data.folds or recipe.data.fold:
        return
    if options.minutes is not None:
        raise InputError(f"{minutes}: cannot be combined with {folds}; give --epochs")
    if options.hosts.most > 1 or launched() is not None:
        raise InputError(f"{folds}: folds are trained on the devices of one host; start flatout there alone")
    if recipe.schedule.name == "plateau":
        raise InputError(
            f"schedule.name = 'plateau': with {folds}, the held-out images must not set the learning rate; "
            "choose another schedule"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """A run to be made. It can be sent to other processes once its data is a `SharedPack`.

    Attributes:
        recipe: complete except for values measured on the data.
        data: recognised data, or its pack.
        options: how to run.
        module: the model, if given in Python.
        run_dir: the run folder, if the process that starts the ranks holds it.
        phase_seconds: the time of finished phases.
        prepared_at: the time when the folder was claimed, by time.time.
    """

    recipe: Recipe
    data: "DataSource | ImageDataset | Pack | SharedPack"
    options: Options
    module: "nn.Module | None" = None
    run_dir: Path | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    prepared_at: float = 0.0
