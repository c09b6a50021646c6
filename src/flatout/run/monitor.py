"""What happens beside the loop while it runs: progress is shown, checkpoints are written, signals are heeded."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flatout.data.order import steps_per_epoch
from flatout.dist.control import Flag
from flatout.engine import recorder as record
from flatout.errors import TrainingFailed
from flatout.report import run_files
from flatout.run import checkpoint
from flatout.run.loop import MEND, Callbacks
from flatout.run.progress import Progress

if TYPE_CHECKING:
    from flatout.engine.base import Engine
    from flatout.run.session import Session


class Watch:
    """Keeps the run folder up to date while the loop runs, and shows the progress."""

    # Checkpoints may cost this share of the time.
    CHECKPOINT_SHARE = 0.05
    # About how many training losses a run records: enough for a curve, too few to slow it down.
    RECORDED_LOSSES = 100

    def __init__(self, session: "Session", engine: "Engine", images_per_epoch: int, progress: Progress) -> None:
        self._session, self._engine, self._progress = session, engine, progress
        self._images_per_epoch = images_per_epoch
        recipe = session.recipe
        self._steps_per_epoch = steps_per_epoch(images_per_epoch, recipe.batch_size, recipe.drop_last)
        self._record_every = math.ceil(recipe.epochs * self._steps_per_epoch / self.RECORDED_LOSSES)
        self._loss: float | None = None
        self._saved_at = time.perf_counter()
        self._save_seconds = 0.0
        self._is_saved = False
        self._is_main = session.world.is_main
        engine.recorder = record.asked_for(session.out / "logs", session.world.rank, progress)
        self.last_good = engine.state()

    def callbacks(self) -> Callbacks:
        """Return the callbacks for the loop."""
        return Callbacks(flags=self._flags, step=self._step, poll=self._poll, loss=self._told_loss, epoch=self._epoch)

    def save(self, state: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of where the loop stands, unless the newest one is that; on the main process alone."""
        began = time.perf_counter()
        state = state or self._engine.state()
        if self._is_saved or not self._is_main:
            return
        checkpoint.save(self._session.out / run_files.CHECKPOINTS, state, self._progress, self._session.recipe)
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - began
        self._is_saved = True

    def _flags(self) -> Flag:
        stop = {None: Flag.NONE, signal.SIGINT: Flag.INTERRUPT, signal.SIGTERM: Flag.TERMINATE}
        return stop[self._session.stop_signal] | (Flag.LOSS if self._session.console.is_loss_due() else Flag.NONE)

    def _poll(self, progress: Progress) -> bool:
        every = self._session.recipe.log_every
        return progress.step % self._record_every == 0 or (every > 0 and progress.step % every == 0)

    def _told_loss(self, progress: Progress, loss: float) -> None:
        self._loss = loss
        if progress.step % self._record_every == 0:
            progress.step_losses.append((progress.epoch * self._steps_per_epoch + progress.step, loss))
        every = self._session.recipe.log_every
        if every > 0 and progress.step % every == 0:
            self._session.console.note(f"epoch {progress.epoch + 1} step {progress.step}: loss {loss:.4f}")

    def _step(self, progress: Progress, images: int) -> None:
        self._is_saved = False
        total = self._session.recipe.epochs * self._images_per_epoch
        text = f"epoch {progress.epoch + 1}/{self._session.recipe.epochs}"
        if self._loss is not None:
            text += f" loss {self._loss:.4f}"
        self._session.console.update(progress.images_trained, total, "images trained", text)
        self._session.world.report_step(progress.epoch, progress.step)

    def _epoch(self, progress: Progress) -> None:
        session, record = self._session, progress.history[-1]
        state = self._engine.state()
        if not all(bool(value.isfinite().all()) for value in state.values()):
            raise TrainingFailed(f"a weight is not finite after epoch {record.epoch}; {MEND}")
        self.last_good = state
        self._is_saved = False
        if self._is_main:
            run_files.write_metrics(session.out / run_files.METRICS, [dataclasses.asdict(r) for r in progress.history])
        session.console.note(record.describe(session.recipe.epochs, is_best=record.epoch == progress.best_epoch))
        if time.perf_counter() - self._saved_at >= self._save_seconds / self.CHECKPOINT_SHARE:
            self.save(state)


@contextlib.contextmanager
def signals_stop(session: "Session") -> Iterator[None]:
    """Let SIGINT and SIGTERM end the run after the current step; a second SIGINT ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if session.stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        session.stop_signal = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
