"""What happens beside the loop: progress is shown, checkpoints are written, signals are noted."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flatout.data.order import steps_per_epoch
from flatout.distributed.world import Flag
from flatout.engine.recorder import requested_recorder
from flatout.errors import signals_handled
from flatout.recipe import Recipe
from flatout.report import run_files
from flatout.run.checkpoint import Checkpoint
from flatout.run.live import LiveFile
from flatout.run.loop import Callbacks
from flatout.run.progress import Progress

if TYPE_CHECKING:
    from flatout.distributed.world import Control
    from flatout.engine.base import DeviceSplit, Engine
    from flatout.run.session import Session

# Checkpoints take this share of the time at most, and within an epoch come no more often than this.
CHECKPOINT_SHARE = 0.05
CHECKPOINT_SECONDS = 10.0
# About how many training losses a run records: enough for a curve, too few to slow it down.
RECORDED_LOSSES = 100


class Monitor(Callbacks):
    """Keeps the run folder and the console up to date while the loop runs."""

    def __init__(
        self, session: "Session", engine: "Engine", placed: "dict[str, DeviceSplit]", progress: Progress
    ) -> None:
        self._session, self._engine, self._placed, self._progress = session, engine, placed, progress
        self._console, recipe = session.console, session.recipe
        images_per_epoch = len(placed["train"].samples)
        self._steps = steps_per_epoch(images_per_epoch, recipe.batch_size, recipe.drop_last)
        self._images_per_epoch = images_per_epoch
        self._record_every = math.ceil(recipe.total_steps(self._steps) / RECORDED_LOSSES)
        self._loss: float | None = None
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self._saved_position: tuple[int, int] | None = None
        self._is_requested = False
        self._good = None if progress.best else engine.snapshot(weights_only=True)
        engine.recorder = requested_recorder(session.out / run_files.LOGS, session.world.rank, progress)
        live = session.out / run_files.LIVE
        self._live = LiveFile(live, progress, self._steps, engine.peak_memory_bytes) if session.world.is_main else None

    @property
    def _recipe(self) -> Recipe:
        return self._session.recipe

    def replan(self) -> Recipe:
        """Return the recipe with the steps that still fit into the time budget."""
        session, progress = self._session, self._progress
        assert session.budget is not None
        session.set_length(session.budget.replan(self._recipe, progress.position(self._steps)))
        return self._recipe

    def flags(self) -> Flag:
        """Return what this process requests of all with the next step."""
        flags = Flag.LOSS if self._console.is_loss_due() else Flag.NONE
        if not self._is_requested and self._is_checkpoint_due(CHECKPOINT_SECONDS):
            # Only once: it may be some steps until all know.
            self._is_requested = True
            flags |= Flag.CHECKPOINT
        if self._session.world.is_main and self._session.budget and self._session.budget.is_due():
            flags |= Flag.REPLAN
        return flags

    def step(self) -> None:
        """Show the progress after a step."""
        progress, recipe = self._progress, self._recipe
        loss = "" if self._loss is None else f" loss {self._loss:.4f}"
        text = f"epoch {progress.epoch + 1}/{recipe.epochs}{loss}"
        images = round(recipe.total_steps(self._steps) * self._images_per_epoch / self._steps)
        self._console.update(progress.images_trained, images, "images trained", text)
        self._session.world.watch.report_step(progress.epoch, progress.step)
        if self._live:
            self._live.step(self._loss)

    def wants_loss(self) -> bool:
        """Return whether the loss is fetched after this step whatever was requested; the same on every process."""
        return any(every and self._progress.step % every == 0 for every in (self._record_every, self._recipe.log_every))

    def loss(self, loss: float) -> None:
        """Show and record the mean loss since the last call."""
        self._loss, progress, every = loss, self._progress, self._recipe.log_every
        if progress.step % self._record_every == 0:
            progress.step_losses.append((progress.position(self._steps), loss))
        if every and progress.step % every == 0:
            self._console.note(f"epoch {progress.epoch + 1} step {progress.step}: loss {loss:.4f}")

    def epoch(self, *, is_best: bool) -> str:
        """Note a finished epoch; keep its weights if the recipe says so. Return why callbacks end the run, or ""."""
        session, progress, recipe = self._session, self._progress, self._recipe
        if is_best and recipe.keep == "best":
            progress.best, self._good = self._engine.snapshot(weights_only=True), None
        elif not progress.best:
            self._good = self._engine.snapshot(weights_only=True)
        session.write_metrics(progress)
        shown = dict.fromkeys((self._engine.task.step_metric, self._engine.task.metric_names[0]))
        self._console.note(progress.history[-1].describe(recipe.epochs, tuple(shown), is_best=is_best))
        if session.world.broadcast_object(self._is_checkpoint_due(0.0)):
            self.checkpoint()
        ended = session.calls.epoch(progress.history[-1].to_plain())
        return ended if progress.position(self._steps) < recipe.total_steps(self._steps) else ""

    def checkpoint(self) -> None:
        """Write a checkpoint, unless the newest one is of the same step. Every process must call this."""
        progress, session = self._progress, self._session
        position, self._is_requested = (progress.epoch, progress.step), False
        if position == self._saved_position:
            return
        began = time.perf_counter()
        state = self._engine.state()
        best = self._engine.state(progress.best) if progress.best else {}
        if session.world.is_main:
            kept = dataclasses.replace(progress, earlier_seconds=session.wall_seconds(progress))
            checkpoint = Checkpoint(state=state, best=best, progress=kept, recipe=self._recipe, data=session.data_facts)
            checkpoint.save(session.out / run_files.CHECKPOINTS)
        self._saved_at, self._saved_position = time.perf_counter(), position
        self._save_seconds = self._saved_at - began

    def restore(self) -> None:
        """Load the weights of the last good epoch, unless those of the best are loaded anyway."""
        if self._good is not None:
            self._engine.restore(self._good)

    def _is_checkpoint_due(self, least_seconds: float) -> bool:
        interval = max(least_seconds, self._save_seconds / CHECKPOINT_SHARE)
        return self._session.world.is_main and time.perf_counter() - self._saved_at >= interval


@contextlib.contextmanager
def signals_noted(control: "Control") -> Iterator[None]:
    """Let SIGINT and SIGTERM end the run after the current step or batch; a second SIGINT ends it at once."""

    def note(number: int, frame: Any) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        control.stop |= Flag.TERMINATE if number == signal.SIGTERM else Flag.INTERRUPT

    seen: list[int] = []
    with signals_handled(note, signal.SIGINT, signal.SIGTERM):
        yield
