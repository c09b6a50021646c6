"""The hooks of the loop that show progress, write checkpoints and metrics, and handle signals."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from flatout.config import Recipe
from flatout.distributed.world import Control, Flag
from flatout.engine.base import DeviceDataset
from flatout.train.budget import Budget, with_length
from flatout.train.callbacks import call_on_epoch_end
from flatout.train.loop import LoopHooks
from flatout.train.request import Progress, TrainContext, metrics_of
from flatout.train.run_dir import BEST, Checkpoint, facts_of
from flatout.utils import run_files
from flatout.utils.errors import signals_handled
from flatout.utils.run_files import JsonObject
from flatout.utils.style import number

# Checkpoints take at most this share of the time, and within an epoch have at least this interval.
CHECKPOINT_SHARE = 0.05
CHECKPOINT_SECONDS = 10.0
# Approximate number of training losses that a run records: enough for a curve, too few to slow it down.
RECORDED_LOSSES = 100
# Seconds between lines: at least this many, and this share of the time since the first.
LIVE_SECONDS, LIVE_SHARE = 2.0, 0.004


class Monitor(LoopHooks):
    """Keeps the run folder and the console up to date; its context has the length that fits the time budget."""

    def __init__(self, context: TrainContext, progress: Progress, budget: Budget | None) -> None:
        engine, world = context.engine, context.world
        self.context, self._progress, self._budget = context, progress, budget
        self._engine, self._console, self._steps = engine, context.log.console, context.steps_per_epoch
        self._record_every = math.ceil(self.context.recipe.total_steps(self._steps) / RECORDED_LOSSES)
        self._loss: float | None = None
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self._saved_position: tuple[int, int] | None = None
        self._is_requested = False
        self._good = None if progress.best else engine.snapshot(weights_only=True)
        logs, live = context.run_dir / run_files.LOGS, context.run_dir / run_files.LIVE
        is_recording = os.environ.get("FLATOUT_RECORD", "0") not in ("", "0")
        self._samples = logs / f"rank-{world.rank}.samples.jsonl" if is_recording else None
        self._live = LiveFile(live, progress, self._steps, engine.peak_memory_bytes) if world.is_main else None

    def replan(self) -> Recipe:
        assert self._budget is not None
        planned = self._budget.replan(self.context.recipe, self._progress.position(self._steps))
        self.context = with_length(self.context, planned)
        return self.context.recipe

    def begin_step(self, train: DeviceDataset, inputs: object) -> Flag:
        if self._samples:
            self._record(self._samples, train, inputs)
        flags = Flag.LOSS if self._console.is_loss_due() else Flag.NONE
        if not self._is_requested and self._is_checkpoint_due(CHECKPOINT_SECONDS):
            # Only once: it may take some steps until all ranks know.
            self._is_requested = True
            flags |= Flag.CHECKPOINT
        if self.context.world.is_main and self._budget and self._budget.is_due():
            flags |= Flag.REPLAN
        return flags

    def _record(self, path: Path, train: DeviceDataset, inputs: object) -> None:
        """With FLATOUT_RECORD=1, write the step's samples and draws: in rank order, the same on any devices."""
        samples, transforms = train.draws(inputs)
        line = {"epoch": self._progress.epoch + 1, "step": self._progress.step + 1, "samples": samples.tolist()}
        if transforms:
            line["transforms"] = {name: rows.tolist() for name, rows in transforms.items()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def step(self) -> bool:
        progress, recipe = self._progress, self.context.recipe
        loss = "" if self._loss is None else f" loss {self._loss:.4f}"
        text = f"epoch {progress.epoch + 1}/{recipe.epochs}{loss}"
        images = round(recipe.total_steps(self._steps) * len(self.context.splits["train"]) / self._steps)
        self._console.update(progress.images_trained, images, "images trained", text)
        self.context.world.watch.report_step(progress.epoch, progress.step)
        if self._live:
            self._live.step(self._loss)
        return any(every and progress.step % every == 0 for every in (self._record_every, recipe.log_every))

    def loss(self, loss: float) -> None:
        self._loss, progress, every = loss, self._progress, self.context.recipe.log_every
        if progress.step % self._record_every == 0:
            progress.step_losses.append((progress.position(self._steps), loss))
        if every and progress.step % every == 0:
            self._console.note(f"epoch {progress.epoch + 1} step {progress.step}: loss {loss:.4f}")

    def epoch(self, *, is_best: bool) -> str:
        context, progress, recipe = self.context, self._progress, self.context.recipe
        if is_best and recipe.keep == "best":
            progress.best, self._good = self._engine.snapshot(weights_only=True), None
        elif not progress.best:
            self._good = self._engine.snapshot(weights_only=True)
        write_metrics(context, progress)
        shown = dict.fromkeys((self._engine.task.step_metric, self._engine.task.metric_names[0]))
        described = describe(progress.history[-1], recipe.epochs, shown)
        self._console.note(f"{described}  best so far" if is_best else described)
        if context.world.broadcast_object(self._is_checkpoint_due(0.0)):
            self.checkpoint()
        ended = call_on_epoch_end(context, progress.history[-1])
        return ended if progress.position(self._steps) < recipe.total_steps(self._steps) else ""

    def checkpoint(self) -> None:
        """Write a checkpoint, unless the newest one is of the same step. All ranks call this."""
        progress, context = self._progress, self.context
        position, self._is_requested = (progress.epoch, progress.step), False
        if position == self._saved_position:
            return
        began = time.perf_counter()
        tensors = self._engine.state()
        if progress.best:
            tensors |= {BEST + name: value for name, value in self._engine.state(progress.best).items()}
        if context.world.is_main:
            kept = dataclasses.replace(progress, best=None, earlier_seconds=context.log.wall_seconds(progress))
            checkpoint = Checkpoint(tensors=tensors, progress=kept, recipe=context.recipe, data=facts_of(context))
            checkpoint.save(context.run_dir / run_files.CHECKPOINTS)
        self._saved_at, self._saved_position = time.perf_counter(), position
        self._save_seconds = self._saved_at - began

    def restore(self) -> None:
        """Load the weights of the last good epoch, unless the best are loaded anyway."""
        if self._good is not None:
            self._engine.restore(self._good)

    def _is_checkpoint_due(self, least_seconds: float) -> bool:
        interval = max(least_seconds, self._save_seconds / CHECKPOINT_SHARE)
        return self.context.world.is_main and time.perf_counter() - self._saved_at >= interval


class LiveFile:
    """Appends lines to `logs/live.jsonl` while the loop runs.

    `loss` is the mean since it was last fetched, `cpu_percent` 100 for each busy core, and `device_bytes` the peak.
    """

    def __init__(self, path: Path, progress: Progress, steps: int, device_bytes: Callable[[], int | None]) -> None:
        self._path, self._progress, self._steps, self._device_bytes = path, progress, steps, device_bytes
        self._process = psutil.Process()
        self._process.cpu_percent()  # the next call measures from here
        self._began = self._last = time.perf_counter()
        self._before = progress.images_trained, progress.train_seconds, progress.wait_seconds

    def step(self, loss: float | None) -> None:
        """Write a line if one is due."""
        now = time.perf_counter()
        if now - self._last < max(LIVE_SECONDS, LIVE_SHARE * (now - self._began)):
            return
        self._last, before, progress = now, self._before, self._progress
        self._before = progress.images_trained, progress.train_seconds, progress.wait_seconds
        images, seconds, waited = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        line = {
            "time": round(time.time(), 2),
            "epoch": round(progress.position(self._steps) / self._steps, 4),
            "loss": loss,
            "images_per_second": round(images / seconds, 1) if seconds > 0 else None,
            "wait_fraction": round(waited / seconds, 4) if seconds > 0 else None,
            "cpu_percent": self._process.cpu_percent(),
            "rss_bytes": self._process.memory_info().rss,
            "device_bytes": self._device_bytes(),
        }
        # Nothing depends on this file: training continues. Unbuffered: when the disk is full, no partial line remains
        # to be written on close.
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())


def write_metrics(context: TrainContext, progress: Progress) -> None:
    """Write the lines of the fitted head and of all finished epochs, if any."""
    if context.world.is_main and progress.records:
        run_files.write_metrics(context.run_dir / run_files.METRICS, progress.records)


def describe(record: JsonObject, epochs: int, shown: Iterable[str]) -> str:
    """Return the line that is printed after the epoch of several, with some metrics."""
    parts = [f"epoch {record['epoch']}/{epochs}"]
    for split in ("train", "valid", "test"):
        found = metrics_of(record, split)
        figures = [f"{name.replace('_', ' ')} {number(found[name], 4)}" for name in shown if name in found]
        if figures:
            parts.append(f"{split} " + ", ".join([f"loss {number(found['loss'], 4)}", *figures]))
    return "  ".join([*parts, f"{record['images_per_second']:,.0f} images/s"])


@contextlib.contextmanager
def signals_noted(control: Control) -> Iterator[None]:
    """End the run on SIGINT or SIGTERM after the current step or batch; on a second SIGINT at once."""

    def note(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        control.note_signal(number)

    seen: list[int] = []
    with signals_handled(note, signal.SIGINT, signal.SIGTERM):
        yield
