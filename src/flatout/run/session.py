"""One training run: its phases in order, in each of its processes."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console, counted
from flatout.data.order import steps_per_epoch
from flatout.distributed.consistency import agree, data_facts
from flatout.distributed.environment import restart_count
from flatout.errors import CallbackFailed, DiskFull, InputError, RankLost, Stopped, TrainingFailed
from flatout.files import write_atomically
from flatout.numerics.schedule import describe_jump, describe_scaling
from flatout.recipe import Recipe, load_recipe, of_run
from flatout.report import run_files
from flatout.run import claim, sanity
from flatout.run.budget import Budget, measure
from flatout.run.calls import Calls
from flatout.run.fill_in import about_splits, filled_in
from flatout.run.launch import check_batch
from flatout.run.loop import train
from flatout.run.monitor import Monitor, signals_noted
from flatout.run.options import Options
from flatout.run.progress import Progress
from flatout.run.start import start_engine
from flatout.tasks import with_task

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.feed import Samples
    from flatout.data.pack import Pack
    from flatout.data.shared_pack import SharedPack
    from flatout.data.source import DataRef, Source
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceSplit, Engine
    from flatout.run.head_stage import HeadStage


class Session:
    """A training run: `prepared` for all ranks of a host, then `run` on each.

    Attributes:
        out: the run folder; None until it is claimed, if it gets a default name.
        seconds: the time of each phase.
        notes: sentences for the summary.
        data_facts: classes and fingerprint of the data, for checkpoints.
        budget: the time budget, if the run has one and its steps have been measured.
        calls: the callbacks, once the run starts.
    """

    console: Console
    world: "World"
    out: Path
    calls: Calls
    # The folder of the cross-validation that this run is a fold of.
    whole: Path | None = None

    def __init__(
        self,
        recipe: Recipe,
        data: "DataRef | Source | Pack | SharedPack",
        options: Options,
        module: "nn.Module | None" = None,
    ) -> None:
        self.recipe, self.options, self.module, self.data = recipe, options, module, data
        self.began = self._lap = options.began
        self._prepared_at = 0.0
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = [*options.notes]
        self.setup_seconds = 0.0
        self.parameters = self.trained_parameters = 0
        self.devices, self.device_count = "", 0
        self.data_facts: dict[str, Any] = {}
        self.budget: Budget | None = None
        # The head that was fitted before the first step.
        self.stage: HeadStage | None = None
        self._claimed: Path | None = None
        # The recipe of the checkpoint from which a run goes on.
        self._continued: Recipe | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a rank in another process needs; the pack becomes a file that it maps."""
        from flatout.data.pack import Pack
        from flatout.data.shared_pack import share

        state = {name: value for name, value in self.__dict__.items() if name not in ("console", "world", "_open")}
        if isinstance(self.data, Pack):
            state["data"] = self._open.enter_context(share(self.data))
        return state

    def devices_before(self) -> str:
        """Return the devices on which the run that is resumed was trained; "" if it is new or does not tell."""
        if self.options.resume and self.options.out:
            with contextlib.suppress(OSError):
                return (self.options.out / run_files.DEVICES).read_text(errors="replace")
        return ""

    @contextlib.contextmanager
    def prepared(self, console: Console, *, begins: bool = False) -> "Iterator[Pack]":
        """Claim the folder and make the pack for the ranks of this host, in this process or in others.

        If a run `begins`, its folder has the recipe from now on: it can be resumed even if it is killed soon.
        """
        from flatout.distributed.world import World

        self.console, self.world, self._prepared_at = console, World(), time.time()
        with contextlib.ExitStack() as self._open:
            if self.options.hosts.most == 1:
                self._open.enter_context(self._claim_folder())
                if begins and not (self.out / run_files.RECIPE).is_file():
                    claim.begin(self.out, self.recipe, overwrite=False)
            self.data = self._open.enter_context(self._load_pack())
            self.recipe = with_task(self.recipe, self.data.task)
            yield self.data

    def run(self, console: Console, world: "World") -> Path:
        """Train on one rank, and return the run folder. These are the phases of a run.

        Raises:
            InputError, TrainingFailed, Stopped: see `train_recipe`.
        """
        from flatout.run.finish import finish

        with self.set_up(console, world) as (pack, splits, engine):
            progress = self._resume(engine, pack)
            self._begin_folder(overwrite=self.options.overwrite and not progress)
            progress = progress or self._begin(engine)
            self.write_metrics(progress)
            placed = self.place(engine, splits) if self.recipe.epochs else {}
            if placed and not self._fit_into_budget(engine, placed, progress):
                placed = {}
            with signals_noted(world.control):
                ended, failure = "", None
                if placed:
                    self._check_sanity(engine, placed["train"], progress, len(pack.classes))
                self.calls = Calls(self, pack, progress)
                if placed:
                    ended, failure = self._train(engine, placed, progress)
                failure = finish(self, engine, pack, splits, placed, progress, ended, failure)
                failure = self.calls.end(failure)
        # Ranks that have left are not ended where another one ends with an error.
        world.barrier()
        world.leave()
        if failure:
            raise failure
        return self.out

    # --- set-up ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def set_up(self, console: Console, world: "World") -> "Iterator[tuple[Pack, dict[str, Samples], Engine]]":
        """Provide the pack, its splits and the engine on one rank, while the folder is held."""
        self.console, self.world = console, world
        with self._claim_folder(), self._load_pack() as pack:
            splits = self._split(pack)
            agree(world, self.recipe, pack)
            model = self.build_model(pack, self.note)
            with contextlib.closing(self._make_engine(model, splits, pack)) as engine:
                yield pack, splits, engine

    @contextlib.contextmanager
    def _claim_folder(self) -> Iterator[None]:
        """Hold the run folder in the main process, unless the process that started it does; agree on its name."""
        options = self.options
        resume = options.resume or (restart_count() > 0 and not options.overwrite)
        held = claim.claimed(options.out, self.recipe.job, resume=resume, overwrite=options.overwrite)
        with contextlib.ExitStack() as stack:
            self.out = self._claimed = self.world.from_main(lambda: self._claimed or stack.enter_context(held))
            yield

    @contextlib.contextmanager
    def _load_pack(self) -> "Iterator[Pack]":
        """Provide the pack: on each host one process builds it, and the others map the same file."""
        from flatout.data.load import load
        from flatout.data.pack import Pack
        from flatout.data.shared_pack import SharedPack, load_once_per_host

        if isinstance(self.data, Pack):
            yield self.data
            return
        if isinstance(self.data, SharedPack):
            started = sum(self.seconds.values())
            self.seconds["launch"] = time.perf_counter() - self.began - started
            self._lap = time.perf_counter()
            yield self.data.open()
            return

        def load_alone() -> Pack:
            pack = load(data, recipe, cache=self.options.cache, report=self.console)
            self.console.finish()
            return pack

        data, recipe = self.data, self.recipe
        self._time("start")
        pack = load_once_per_host(self.world, load_alone)
        self._time("pack")
        yield pack

    def _split(self, pack: "Pack") -> "dict[str, Samples]":
        """Describe and split the pack, and fill in what the recipe leaves to the data."""
        from flatout.data.load import splits_of

        self.console.note(pack.describe())
        for sentence in pack.notes:
            self.note(sentence)
        if pack.skipped:
            self.note(f"{len(pack.skipped):,} unreadable images were left out")
        splits = splits_of(pack, self.recipe.data, self.recipe.seed)
        for sentence in about_splits(self.recipe, pack, splits):
            self.note(sentence)
        self.recipe = filled_in(self.recipe, pack, splits, self.world, self._of_run, self.note)
        check_batch(min(self.recipe.batch_size, len(splits["train"])), self.world.size)
        if self.recipe.optimizer.lr_base_batch not in (0, self.recipe.batch_size):
            self.note(describe_scaling(self.recipe))
        self._time("read")
        return splits

    def _of_run(self, key: str) -> str:
        """Return the value of a recipe key in the run that is continued; "" in a new run."""
        if not self._has_checkpoints():
            return ""
        return self.world.from_main(lambda: of_run(load_recipe(self.out / run_files.RECIPE)).flat()[key])

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

    def _make_engine(self, model: "nn.Module", splits: "dict[str, Samples]", pack: "Pack") -> "Engine":
        """Return the engine, with the weights to start from."""
        from flatout.engine.devices import spec_of

        engine, self.recipe, self.stage = start_engine(
            model,
            self.recipe,
            splits,
            world=self.world,
            options=self.options,
            pack=pack,
            kept_precision=self._of_run("precision") if self.recipe.precision == "auto" else "",
            note=self.note,
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        names = [name for names in self.world.all_gather_object(engine.device_names) for name in names]
        self.devices, self.device_count = spec_of(names), len(names)
        for sentence in engine.describe():
            self.console.note(sentence)
        self._time("model")
        if self.stage:
            self.seconds |= self.stage.seconds
            self.seconds["model"] -= sum(self.stage.seconds.values())
        return engine

    def _is_continued(self) -> bool:
        """Return whether the run goes on from a checkpoint, if there is one, rather than starting."""
        return self.options.resume or restart_count() > 0

    def _checkpoints_since(self) -> float:
        """Return from when on checkpoints are of this run: after a restart, the run to overwrite may have left some."""
        return self._prepared_at if self.options.overwrite else 0.0

    def _has_checkpoints(self) -> bool:
        from flatout.run.checkpoint import newest_first

        found = self._is_continued() and newest_first(self.out / run_files.CHECKPOINTS, self._checkpoints_since())
        return self.world.broadcast_object(bool(found))

    def _resume(self, engine: "Engine", pack: "Pack") -> Progress | None:
        """Load the newest checkpoint if the run is to be resumed; None where there is none."""
        from flatout.run.checkpoint import restore_newest

        self.data_facts = data_facts(pack, self.recipe)
        if not (self._is_continued() and self.recipe.epochs):
            return None
        folder, since = self.out / run_files.CHECKPOINTS, self._checkpoints_since()
        newest = restore_newest(engine, folder, self.recipe, self.data_facts, self.world, self.note, since)
        if newest is None:
            self.note("nothing was saved yet: training starts from the beginning")
            return None
        self.note(f"resumed after epoch {newest.progress.epoch}, step {newest.progress.step}")
        self._continued = newest.recipe
        return newest.progress

    def _begin(self, engine: "Engine") -> Progress:
        """Return the progress of a new run. A fitted head is the best until an epoch is better."""
        stage = self.stage
        if stage is None:
            return Progress()
        progress = Progress(head=stage.record)
        if stage.training_only is not None and self.recipe.keep == "best" and "valid" in stage.labels:
            weights = engine.snapshot(weights_only=True)
            stage.give(engine)
            progress.best = engine.snapshot(weights_only=True)
            engine.restore(weights)
        return progress

    def keep_devices(self) -> None:
        """Write the devices that a run begins with into its folder."""
        (self.out / run_files.LOGS).mkdir(exist_ok=True)
        write_atomically(self.out / run_files.DEVICES, self.options.devices.encode())

    def _begin_folder(self, *, overwrite: bool) -> None:
        """Write recipe and devices, after an old run is removed if that was requested, and open the logs."""
        if self.world.is_main:
            claim.begin(self.out, self.recipe, overwrite=overwrite)
        self.world.barrier()
        log = self.out / run_files.LOGS / f"rank-{self.world.rank}.log"
        try:
            self.console.device = self.console.device or str(self.world.device)
            self.console.open_log(log)
        except OSError as error:
            raise InputError(f"{log}: cannot be written: {error.strerror}") from None
        if self.world.local_rank == 0:
            given = self.options.devices
            write_atomically(self.out / run_files.DEVICES, (self.devices if given == "auto" else given).encode())

    # --- training -------------------------------------------------------------------------------------------------

    def place(self, engine: "Engine", splits: "dict[str, Samples]") -> "dict[str, DeviceSplit]":
        """Bring the splits to the devices, and compile the steps."""
        placed = (self.stage and self.stage.placed) or {name: engine.place(samples) for name, samples in splits.items()}
        self._time("place")
        placed["train"].compile()
        self._time("compile")
        return placed

    def _fit_into_budget(self, engine: "Engine", placed: "dict[str, DeviceSplit]", progress: Progress) -> bool:
        """Choose the number of steps by the time that some take, where the user has given a time budget.

        Returns:
            Whether to train. A fitted head is the result of a run that has no time for an epoch more.
        """
        seconds, images = self.options.seconds, len(placed["train"].samples)
        if seconds is None:
            return True
        stage = self.stage
        # Behind cached output, an evaluation is faster than the features were.
        rate = stage.record.images_per_second if stage and not stage.placed else None
        tta = self.recipe.tta and stage is not None
        rates = measure(engine, placed, self.recipe, self.world, seconds, tta=tta, feature_rate=rate)
        self.budget = budget = Budget(seconds, self.began, rates, self.recipe, images)
        steps = steps_per_epoch(images, self.recipe.batch_size, self.recipe.drop_last)
        done = progress.position(steps)
        # The main process's clock decides for all.
        if self.stage and not done and not self.world.broadcast_object(budget.fits_epoch()):
            self.budget = None
            # Whatever `keep` says, the weights are those of the head that is evaluated.
            self.stage.give(engine)
            self.note("fine-tuning is left out: an epoch takes longer than what is left of the time")
            self.set_length(self.recipe.override({"epochs": 0, "freeze": ""}))
            return False
        recipe, late = self.world.from_main(lambda: budget.plan(self.recipe, done))
        self.set_length(recipe)
        count, rate = recipe.total_steps(steps) - done, recipe.batch_size / rates.step
        fit = f"{count:,} steps fit, {count / steps:.1f} epochs, at {rate:,.0f} images per second"
        self.note(late or f"--minutes {seconds / 60:g}: {fit}")
        self._time("measure")
        return True

    def _check_sanity(self, engine: "Engine", train: "DeviceSplit", progress: Progress, classes: int) -> None:
        """Before a long run, note what would make it useless. A resumed run has been checked before."""
        recipe = self.recipe
        is_resumed = (progress.epoch, progress.step) != (0, 0)
        if is_resumed or self.options.own.loss or not sanity.is_worthwhile(recipe, len(train.samples)):
            return
        is_fresh = not (recipe.pretrained or recipe.weights)
        for sentence in sanity.check(engine, train, recipe, self.world, classes, is_fresh=is_fresh):
            self.note(sentence)
        self._time("check")

    def write_metrics(self, progress: Progress) -> None:
        """Write the lines of the fitted head and of all finished epochs, if there are any."""
        if self.world.is_main and progress.records:
            run_files.write_metrics(self.out / run_files.METRICS, [record.to_plain() for record in progress.records])

    def set_length(self, recipe: Recipe) -> None:
        """Go on with the main process's recipe, which has another length, and write it into the run folder."""
        recipe = self.world.broadcast_object(recipe)
        if recipe != self.recipe and self.world.is_main:
            claim.begin(self.out, recipe, overwrite=False)
        self.recipe = recipe

    def _train(
        self, engine: "Engine", placed: "dict[str, DeviceSplit]", progress: Progress
    ) -> tuple[str, Exception | None]:
        """Run the loop and save where it ends; return why it ended early, for people and as an exception."""
        recipe, images = self.recipe, len(placed["train"].samples)
        if self._continued:
            steps = steps_per_epoch(images, recipe.batch_size, recipe.drop_last)
            if jump := describe_jump(self._continued, recipe, progress.position(steps), steps):
                self.note(jump)
        self.console.note(
            f"training {recipe.model} ({self.parameters:,} parameters) on {images:,} images, "
            f"{counted(recipe.epochs, 'epoch')}, batch {recipe.batch_size}"
        )
        self.setup_seconds = time.perf_counter() - self.began
        monitor = Monitor(self, engine, placed, progress)
        try:
            ended, failure = train(engine, self.world, self.recipe, placed, progress, monitor), None
        except (RankLost, DiskFull):
            raise  # the ranks can do nothing more together
        except CallbackFailed as error:
            # The training itself is sound: it can go on from here.
            ended, failure = f"failed: {error}", error
        except TrainingFailed as error:
            monitor.restore()
            ended, failure = f"failed: {error}", error
        except Stopped as stopped:
            ended, failure = f"{stopped.how} in epoch {progress.epoch + 1}, step {progress.step}", stopped
        self.console.finish()
        if isinstance(failure, CallbackFailed) or not isinstance(failure, TrainingFailed):
            monitor.checkpoint()
        if ended:
            self.note(ended)
        if isinstance(failure, Stopped):
            folder = shlex.quote(str(self.whole or self.out))
            self.console.note(f"continue with: flatout train --resume --out {folder}")
        return ended, failure

    def wall_seconds(self, progress: Progress) -> float:
        """Return what the run has taken, from its first command, without what was lost when it was killed."""
        return progress.earlier_seconds + time.perf_counter() - self.began

    def note(self, sentence: str) -> None:
        """Print a sentence, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def _time(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._lap
        self._lap = now
