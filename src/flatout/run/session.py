"""One run from the first check to the last picture."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.console import Console
from flatout.dist.consistency import agree
from flatout.dist.rendezvous import Hosts
from flatout.errors import InputError, RankLost, Stopped, TrainingFailed
from flatout.files import write_atomically
from flatout.numerics.schedule import describe_scaling
from flatout.recipe import Recipe
from flatout.report import run_files
from flatout.run.loop import train
from flatout.run.monitor import Watch
from flatout.run.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.feed import Samples
    from flatout.data.pack import Pack
    from flatout.data.source import Found, Source
    from flatout.dist.world import World
    from flatout.engine.base import Engine

# What --overwrite removes: what a run writes, deepest first, and nothing else.
_OWN_FILES = (
    "checkpoints/epoch-*.safetensors",
    "checkpoints",
    "logs/rank-*.log",
    "logs/rank-*.samples.jsonl",
    "logs",
    "predictions.png",
    "curves.png",
    "confusion.png",
    run_files.RECIPE,
    run_files.METRICS,
    run_files.SUMMARY,
    run_files.WEIGHTS,
    run_files.PREDICTIONS,
    run_files.REPORT,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a recipe is run, as against what it says.

    Attributes:
        out: the run folder; None for a new one under `runs/`.
        devices: a device SPEC.
        engine: the engine's name.
        resume: continue the run in `out` from its newest checkpoint.
        overwrite: replace the run in `out`.
        cache: keep the pack in the cache folder for the next run.
        hosts: the hosts that take part.
        allow_code: whether a model named as `package.module:factory` may be imported.
        began: when the user asked for the run, by time.perf_counter.
    """

    out: Path | None = None
    devices: str = "auto"
    engine: str = "torch"
    resume: bool = False
    overwrite: bool = False
    cache: bool = True
    allow_code: bool = False
    hosts: Hosts = field(default_factory=Hosts)
    began: float = field(default_factory=time.perf_counter)


class Session:
    """One run from the first check to the last picture, in each of its processes; owns its folder and its times."""

    def __init__(
        self,
        recipe: Recipe,
        options: Options,
        console: Console,
        module: "nn.Module | None",
        world: "World | None" = None,
    ) -> None:
        from flatout.dist.world import World

        self.recipe, self.options, self.console, self.world = recipe, options, console, world or World()
        self.began = self._lap = options.began
        self.seconds: dict[str, float] = {}
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self.out = options.out or Path("runs") / f"{recipe.job}-{stamp}"
        self.module = module
        self.setup_seconds = 0.0
        self.parameters = self.trained_parameters = 0
        self.devices, self.device_count = "", 0
        self.stop_signal: int | None = None
        self.notes: list[str] = []

    # --- set-up ---------------------------------------------------------------------------------------------------

    def claim_folder(self) -> None:
        """Check that the run folder may be written, before any work is done."""
        if self.options.out is None:
            # Processes that start together need not read the same second from their clocks.
            self.out = self.world.broadcast_object(self.out)
        if not self.world.is_main:
            return
        exists = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        if self.options.resume and self.options.overwrite:
            raise InputError("--resume and --overwrite contradict each other: give one of them")
        if self.options.resume:
            if not (self.out / run_files.CHECKPOINTS).is_dir():
                raise InputError(f"{self.out}: nothing to resume: it has no {run_files.CHECKPOINTS}/")
            return
        if not exists:
            return
        if not self.options.overwrite:
            raise InputError(f"{self.out}: exists; choose another --out, or --resume or --overwrite the run in it")
        if not (self.out / run_files.RECIPE).is_file():
            raise InputError(f"{self.out}: is no run folder, so --overwrite will not touch it; choose another --out")

    def continue_from(self, notes: list[str], seconds: dict[str, float]) -> None:
        """Take over what the process that started this one has noted."""
        self.notes[:0] = notes
        self.seconds = {**seconds, "launch": time.perf_counter() - self.began - sum(seconds.values())}
        self._lap = time.perf_counter()

    def load_pack(self, data: "Found | Source") -> "Pack":
        """Get the pack: on each host one process builds it, and the others map the same file."""
        from flatout.data.load import load
        from flatout.data.shared_pack import handed_over

        self._time("start")
        world, pack = self.world, None
        if world.local_rank == 0:
            with world.heartbeat.alone("making the pack"):
                pack = load(data, self.recipe, cache=self.options.cache, report=self.console)
            self.console.finish()
        if world.is_joined:
            with handed_over(pack) if pack else contextlib.nullcontext() as own:
                handed = world.all_gather_object(own)[world.rank - world.local_rank]
                assert handed is not None
                pack = pack or handed.open()
                # Others may still be opening the file.
                world.barrier()
        assert pack is not None
        self._time("pack")
        return pack

    def read(self, pack: "Pack") -> "dict[str, Samples]":
        """Say what the pack is, split it, and fill in what the recipe leaves to the data."""
        from flatout.data.load import measure, splits_of

        self.console.note(pack.describe())
        for sentence in pack.notes:
            self.note(sentence)
        if pack.skipped:
            self.note(f"{len(pack.skipped):,} unreadable images were left out")
        splits = splits_of(pack, self.recipe.data, self.recipe.seed)
        carved = [f"{name} {len(s):,}" for name, s in splits.items() if name not in pack.splits]
        if carved:
            self.note(
                f"set aside from the training images, by class: {', '.join(carved)}; train {len(splits['train']):,}"
            )
        if not self.recipe.data.mean:
            mean, std = measure(splits["train"])
            self.recipe = self.recipe.override({"data.mean": mean, "data.std": std})
        if self.world.is_joined:
            agree(self.world, self.recipe, pack)
            ranks, batch = self.world.size, min(self.recipe.batch_size, len(splits["train"]))
            if batch < ranks:
                raise InputError(
                    f"batch_size = {batch} is less than one sample for each of the {ranks} ranks: "
                    "use a larger batch or fewer devices"
                )
        if self.recipe.optimizer.lr_base_batch:
            self.note(describe_scaling(self.recipe))
        self._time("read")
        return splits

    def build_model(self, pack: "Pack", report: Callable[[str], None] = lambda sentence: None) -> "nn.Module":
        """Return the model with fresh weights; one given in Python as a copy."""
        from flatout.models.load import build_model

        return build_model(
            self.recipe,
            len(pack.classes),
            module=self.module,
            allow_code=self.options.allow_code,
            report=report,
        )

    def make_engine(self, pack: "Pack", splits: "dict[str, Samples]") -> "Engine":
        """Build the model with the weights to start from, and the engine."""
        from flatout.data.load import class_weights
        from flatout.engine.devices import spec_of
        from flatout.engine.factory import make_engine
        from flatout.models.pretrained import load_pretrained

        recipe, model = self.recipe, self.build_model(pack, self.note)
        shape = {"image_size": recipe.image_size, "channels": recipe.channels}
        if recipe.pretrained or recipe.weights:
            load_pretrained(model, recipe.model, weights=recipe.weights, report=self.note, **shape)
        elif recipe.freeze:
            self.note("frozen layers keep their random weights: no pre-trained weights were asked for")
        weights = None
        if recipe.class_weights == "balanced":
            weights = class_weights(splits["train"].labels, len(pack.classes))
        engine = make_engine(
            model,
            recipe,
            engine=self.options.engine,
            devices=self.options.devices,
            world=self.world,
            class_weights=weights,
            report=self.note,
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        names = [name for names in self.world.all_gather_object(engine.device_names) for name in names]
        self.devices, self.device_count = spec_of(names), len(names)
        for sentence in engine.describe():
            self.console.note(sentence)
        self._time("model")
        return engine

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, engine: "Engine", pack: "Pack", splits: "dict[str, Samples]") -> Path:
        """Run the loop, write checkpoints on the way and the run folder at the end; return the folder."""
        from flatout.run.finish import finish

        recipe, console = self.recipe, self.console
        progress = self._resume(engine) if self.options.resume else Progress()
        self._open_folder()
        placed = {name: engine.place(samples) for name, samples in splits.items()}
        trained = len(splits["train"])
        if len(splits) == 1:
            self.note("there is no test and no validation split, so nothing will say how good the model is")
        console.note(
            f"training {recipe.model} ({self.parameters:,} parameters) on {trained:,} images, "
            f"{recipe.epochs} epochs, batch {recipe.batch_size}"
        )
        self._time("place")
        placed["train"].compile()
        self._time("compile")
        self.setup_seconds = time.perf_counter() - self.began
        watch = Watch(self, engine, trained, progress)
        ended, failure = "", None
        try:
            ended = train(engine, self.world, recipe, placed, progress, watch.callbacks())
        except RankLost:
            # Nothing more can be done together; the newest checkpoint is what there is to go on from.
            raise
        except TrainingFailed as error:
            failure = error
            ended = f"failed: {error}"
            engine.load_state(watch.last_good)
        except Stopped as stopped:
            failure = stopped
            name = signal.Signals(stopped.signal_number).name
            ended = f"{name} in epoch {progress.epoch + 1}, step {progress.step}"
        console.finish()
        if not isinstance(failure, TrainingFailed):
            watch.save()
        if ended:
            self.note(ended)
        terminated = isinstance(failure, Stopped) and failure.signal_number == signal.SIGTERM
        # Whoever terminates a process does not wait for an evaluation.
        evaluated = {} if terminated else {name: split for name, split in placed.items() if name != "train"}
        finish(self, engine, pack, evaluated, splits, progress, ended)
        if failure is not None:
            raise failure
        return self.out

    def _open_folder(self) -> None:
        """Make the run folder, an old run in it removed if that was asked for, and write the recipe."""
        if self.world.is_main:
            remove = self.options.overwrite and self.out.exists()
            for path in (
                p for name in (_OWN_FILES if remove else ()) for p in sorted(self.out.glob(name), reverse=True)
            ):
                if path.is_file():
                    path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()
        self.world.barrier()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.console.device = self.console.device or str(self.world.device)
            self.console.open_log(self.out / "logs" / f"rank-{self.world.rank}.log")
        except OSError as error:
            raise InputError(f"{self.out}: cannot be written: {error.strerror}") from None
        if self.world.is_main:
            head = f"Repeat this run: flatout train {run_files.RECIPE}"
            write_atomically(self.out / run_files.RECIPE, self.recipe.to_toml(head).encode())

    def _resume(self, engine: "Engine") -> Progress:
        from flatout.run import checkpoint

        newest = checkpoint.load_newest(self.out / run_files.CHECKPOINTS) if self.world.is_main else None
        newest = self.world.broadcast_object(newest)
        state, progress, recipe, problems = newest  # pyright: ignore[reportGeneralTypeIssues]
        checkpoint.check_resumable(recipe, self.recipe, progress)
        for problem in problems:
            self.note(problem)
        engine.load_state(state)
        self.note(f"resumed after epoch {progress.epoch}, step {progress.step}")
        return progress

    def note(self, sentence: str) -> None:
        """Say something, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def _time(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what] = now - self._lap
        self._lap = now
