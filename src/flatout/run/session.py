"""One training run: its phases in order, in each of its processes."""

import contextlib
import copy
import functools
import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.callbacks.base import Callback
from flatout.console import Console, counted
from flatout.data.order import steps_per_epoch
from flatout.dist.consistency import agree, data_facts
from flatout.dist.env import restart_count
from flatout.dist.hosts import Hosts
from flatout.errors import CallbackFailed, DiskFull, InputError, RankLost, Stopped, TrainingFailed
from flatout.host import available_memory
from flatout.numerics.schedule import describe_scaling, learning_rate
from flatout.recipe import Augment, Recipe, load_recipe, of_run
from flatout.report import run_files
from flatout.run import claim, sanity
from flatout.run.budget import Budget, measure
from flatout.run.calls import Calls
from flatout.run.loop import train
from flatout.run.monitor import Monitor, signals_noted
from flatout.run.own import OwnFunctions
from flatout.run.progress import Progress
from flatout.tasks import task_of, weights_of, with_task

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.feed import Samples
    from flatout.data.pack import Pack
    from flatout.data.shared_pack import SharedPack
    from flatout.data.source import DataRef, Source
    from flatout.dist.world import World
    from flatout.engine.base import DeviceSplit, Engine


# From this factor on, a note says that a longer run has raised the learning rate.
RATE_JUMP = 1.5


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
        allow_code: whether a model named as `package.module:factory` may be imported.
        minutes: the time budget of the whole run; None for the recipe's own length.
        began: when the user asked for the run, by time.perf_counter.
        notes: sentences about the recipe, for the summary and the report.
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
    minutes: float | None = None
    began: float = field(default_factory=time.perf_counter)
    notes: tuple[str, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    own: OwnFunctions = field(default_factory=OwnFunctions)

    @property
    def seconds(self) -> float | None:
        """The time budget."""
        return None if self.minutes is None else 60 * self.minutes

    def __post_init__(self) -> None:
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise InputError(f"--minutes {self.minutes:g}: must be greater than 0")


def check_batch(batch: int, ranks: int) -> None:
    """Raise InputError if a batch has not one sample for each rank."""
    if batch < ranks:
        raise InputError(
            f"batch_size = {batch} is less than one sample for each of the {ranks} ranks: "
            "use a larger batch or fewer devices"
        )


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
        self._claimed: Path | None = None
        # Whether images were still being decoded when the splits were placed.
        self._is_arriving = False
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

    @contextlib.contextmanager
    def prepared(self, console: Console) -> "Iterator[Pack]":
        """Claim the folder and make the pack for the ranks of this host, in this process or in others."""
        from flatout.dist.world import World

        self.console, self.world, self._prepared_at = console, World(), time.time()
        with contextlib.ExitStack() as self._open:
            if self.options.hosts.most == 1:
                self._open.enter_context(self._claim_folder())
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
            progress = progress or Progress()
            placed = self.place(engine, splits)
            self._fit_into_budget(engine, placed, progress)
            with signals_noted(world.control):
                self._check_sanity(engine, placed["train"], progress, len(pack.classes))
                self.calls = Calls(self, pack, progress)
                ended, failure = self._train(engine, placed, progress)
                failure = finish(self, engine, pack, placed, progress, ended, failure)
                failure = self.calls.end(failure)
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
        with contextlib.ExitStack() as stack:
            claimed: Path | InputError | None = self._claimed
            if self.world.is_main and claimed is None:
                options = self.options
                resume = options.resume or (restart_count() > 0 and not options.overwrite)
                held = claim.claimed(options.out, self.recipe.job, resume=resume, overwrite=options.overwrite)
                try:
                    claimed = stack.enter_context(held)
                except InputError as error:
                    claimed = error
            claimed = self.world.broadcast_object(claimed)
            if isinstance(claimed, InputError):
                raise claimed
            assert claimed is not None
            self.out = self._claimed = claimed
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
            with self.world.heartbeat.alone("making the pack"):
                pack = load(data, recipe, cache=self.options.cache, report=self.console, may_be_incomplete=True)
            self.console.finish()
            return pack

        data, recipe = self.data, self.recipe
        if recipe.data.decode == "auto" and self.options.minutes is not None:
            # Steps are measured, and the evaluation, before training starts.
            recipe = self.recipe = recipe.override({"data.decode": "before"})
        self._time("start")
        pack = load_once_per_host(self.world, load_alone)
        self._time("pack")
        with contextlib.nullcontext() if pack.building is None else pack.building.completed():
            yield pack

    def _split(self, pack: "Pack") -> "dict[str, Samples]":
        """Describe and split the pack, and fill in what the recipe leaves to the data."""
        from flatout.data.load import measure, splits_of
        from flatout.tasks.regression import statistics

        self.console.note(pack.describe())
        for sentence in pack.notes:
            self.note(sentence)
        if pack.skipped:
            self.note(f"{len(pack.skipped):,} unreadable images were left out")
        splits = splits_of(pack, self.recipe.data, self.recipe.seed)
        taken = [f"{name} {len(s):,}" for name, s in splits.items() if name not in pack.splits]
        if fold := self.recipe.data.fold:
            held_out = f"train {len(splits['train']):,}, held out {len(splits['valid']):,}"
            self.note(f"fold {fold} of {self.recipe.data.folds}: {held_out}")
        elif taken:
            how = "the same share of all numbers" if pack.task == "regression" else "by class"
            how += " and group" * (pack.groups is not None)
            self.note(f"taken from the training images, {how}: {', '.join(taken)}; train {len(splits['train']):,}")
        if len(splits) == 1:
            self.note("no held-out data: accuracy will not be measured")
        if not self.recipe.data.bits:
            self.recipe = self.recipe.override({"data.bits": pack.bits})
        self._choose_decoding(pack)
        if not self.recipe.data.mean:
            waiting = self.world.heartbeat.alone("decoding the first images")
            with waiting if splits["train"].is_arriving else contextlib.nullcontext():
                mean, std = measure(splits["train"])
            self.recipe = self.recipe.override({"data.mean": mean, "data.std": std})
        before, self.recipe = self.recipe.loss, with_task(self.recipe, pack.task)
        if self.recipe.loss != before:
            self.note(f"loss = {self.recipe.loss}: the labels are {pack.task}")
        if pack.task == "regression" and not self.recipe.data.label_std:
            label_mean, label_std = statistics(splits["train"].labels)
            self.recipe = self.recipe.override({"data.label_mean": label_mean, "data.label_std": label_std})
        self._choose_order(splits["train"])
        check_batch(min(self.recipe.batch_size, len(splits["train"])), self.world.size)
        if self.recipe.optimizer.lr_base_batch not in (0, self.recipe.batch_size):
            self.note(describe_scaling(self.recipe))
        self._time("read")
        return splits

    def _choose_decoding(self, pack: "Pack") -> None:
        """Replace `data.decode = "auto"` by the value of the run that is continued, or one that suits the data."""
        from flatout.data.load import decodes_during_training

        if self.recipe.data.decode == "auto":
            chosen = "during" if decodes_during_training(self.recipe, pack) else "before"
            self.recipe = self.recipe.override({"data.decode": self._of_run("decode") or chosen})
        if pack.arrival is None:
            return
        if self.recipe.data.decode == "before":
            with self.world.heartbeat.alone("making the pack"):
                pack.arrival.wait(np.arange(len(pack.labels)))
        else:
            self.note(f"{len(pack.labels):,} images are decoded during the first epoch (data.decode = during)")

    def _of_run(self, key: str) -> str:
        """Return the value of a key of `data` in the run that is continued; "" in a new run."""
        value = ""
        if self._has_checkpoints() and self.world.is_main:
            value = getattr(of_run(load_recipe(self.out / run_files.RECIPE)).data, key)
        return self.world.broadcast_object(value)

    def _choose_order(self, train: "Samples") -> None:
        """Replace `data.order = "auto"` by the order of the run that is continued, or of one that suits the host."""
        if self.recipe.data.order != "auto":
            return
        order = self._of_run("order")
        free = min(self.world.all_gather_object(available_memory()))
        if not order and train.is_on_disk and train.nbytes > free:
            order = "blocks"
            self.note(
                f"data.order = blocks: {train.nbytes / 2**30:.1f} GiB of training images are more than the "
                f"{free / 2**30:.1f} GiB of available memory"
            )
        self.recipe = self.recipe.override({"data.order": self.world.broadcast_object(order or "full")})

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

    def _load_weights(self, model: "nn.Module") -> None:
        """Load the weights to start from into rank 0's model, which the engine distributes: one rank downloads them."""
        from flatout.models.pretrained import load_pretrained

        failure: InputError | None = None
        if self.world.is_main:
            try:
                with self.world.heartbeat.alone("loading the weights"):
                    load_pretrained(model, self.recipe, self.note)
            except InputError as error:
                failure = error
        failure = self.world.broadcast_object(failure)
        if failure:
            raise failure

    def _make_engine(self, model: "nn.Module", splits: "dict[str, Samples]", pack: "Pack") -> "Engine":
        """Return the engine, with the weights to start from."""
        from flatout.engine.devices import spec_of
        from flatout.engine.factory import make_engine, precisions

        recipe = self.recipe
        if recipe.pretrained or recipe.weights:
            self._load_weights(model)
        elif recipe.freeze:
            self.note("frozen layers keep their random weights: no pre-trained weights were requested")
        task, labels = task_of(recipe), splits["train"].labels
        make = functools.partial(
            make_engine,
            engine=self.options.engine,
            devices=self.options.devices,
            world=self.world,
            class_weights=weights_of(recipe, task, labels, pack.classes),
            **self._own_functions(),
        )
        if recipe.linear_probe and not self._has_checkpoints():
            self._fit_head(model, splits, make)
        formats = precisions(self.options.engine, self.world)
        if recipe.precision == "auto" and "bf16" in formats and not recipe.exact_sums:
            from flatout.run.precision import fastest_precision

            chosen, reason = fastest_precision(
                lambda one: make(copy.deepcopy(model), one, report=lambda sentence: None),
                splits["train"],
                recipe,
                self.world,
                formats,
            )
            self.note(reason)
            recipe = self.recipe = recipe.override({"precision": chosen})
        engine = make(model, recipe, report=self.note)
        engine.task = replace(engine.task, own_metrics=self.options.own.metrics)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        names = [name for names in self.world.all_gather_object(engine.device_names) for name in names]
        self.devices, self.device_count = spec_of(names), len(names)
        for sentence in engine.describe():
            self.console.note(sentence)
        self._time("model")
        return engine

    def _own_functions(self) -> dict[str, Any]:
        """Return the options of the torch engine for functions of the user's; `check` has refused them elsewhere."""
        own = self.options.own
        return {"loss": own.loss, "batch_transforms": own.batch_transforms} if own.loss or own.batch_transforms else {}

    def _fit_head(self, model: "nn.Module", splits: "dict[str, Samples]", make: "Callable[..., Engine]") -> None:
        """Fit the head to the output of the layers before it, computed on the devices of the run."""
        from flatout.models.layers import freeze
        from flatout.run.linear_probe import fit_head, linear_head

        head, backbone = linear_head(model), copy.deepcopy(model)
        freeze(backbone, "all-but-last-0")
        plain = replace(self.recipe, augment=Augment(), shard="none")
        with contextlib.closing(make(backbone, plain, report=lambda sentence: None)) as engine:
            # The images of a fold choose nothing.
            names = ("train",) if self.recipe.data.fold else ("train", "valid")
            chosen = {name: samples for name, samples in splits.items() if name in names}
            features = {name: engine.place(samples).features() for name, samples in chosen.items()}
        found = {name: values for name, values in features.items() if values is not None and values.ndim == 2}
        if head is None or len(found) < len(chosen) or found["train"].shape[1] != head.in_features:
            raise InputError(
                f"linear_probe = true: {self.recipe.model} has no single linear layer as its head, or torch.fx cannot "
                "trace what is before it; set linear_probe = false"
            )
        if self.world.is_main:
            # The engine takes the main process's weights.
            labels = {name: samples.labels for name, samples in chosen.items()}
            self.note(fit_head(head, found, labels, self.recipe))

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
        from flatout.run.checkpoint import Checkpoint, load_newest

        self.data_facts = data_facts(pack, self.recipe)
        if not self._is_continued():
            return None
        newest: Any = None
        if self.world.is_main:
            try:
                newest = load_newest(self.out / run_files.CHECKPOINTS, self.note, self._checkpoints_since())
            except InputError as error:
                newest = error
        state, best = (newest.state, newest.best) if isinstance(newest, Checkpoint) else ({}, {})
        if isinstance(newest, Checkpoint):
            # The engine distributes the tensors.
            newest = replace(newest, state={}, best={})
        newest = self.world.broadcast_object(newest)
        if isinstance(newest, InputError):
            raise newest
        if newest is None:
            self.note("nothing was saved yet: training starts from the beginning")
            return None
        newest.check_resumable(self.recipe, self.data_facts, self.note)
        if newest.progress.best_epoch and self.recipe.keep == "best":
            engine.load_state({**state, **best})
            newest.progress.best = engine.snapshot(weights_only=True)
        engine.load_state(state)
        self.note(f"resumed after epoch {newest.progress.epoch}, step {newest.progress.step}")
        self._continued = newest.recipe
        return newest.progress

    def _begin_folder(self, *, overwrite: bool) -> None:
        """Write the recipe, after an old run is removed if that was requested, and open the logs."""
        if self.world.is_main:
            claim.begin(self.out, self.recipe, overwrite=overwrite)
        self.world.barrier()
        log = self.out / run_files.LOGS / f"rank-{self.world.rank}.log"
        try:
            self.console.device = self.console.device or str(self.world.device)
            self.console.open_log(log)
        except OSError as error:
            raise InputError(f"{log}: cannot be written: {error.strerror}") from None

    # --- training -------------------------------------------------------------------------------------------------

    def place(self, engine: "Engine", splits: "dict[str, Samples]") -> "dict[str, DeviceSplit]":
        """Bring the splits to the devices, and compile the steps."""
        self._is_arriving = self._are_arriving(splits)
        placed = {name: engine.place(samples) for name, samples in splits.items()}
        self._time("place")
        placed["train"].compile()
        self._time("compile")
        return placed

    def place_again(self, engine: "Engine", placed: "dict[str, DeviceSplit]") -> None:
        """Bring the splits to the devices when all images are decoded; until then they are read from the disk."""
        splits = {name: split.samples for name, split in placed.items()}
        if not self._is_arriving or self._are_arriving(splits):
            return
        self._is_arriving = False
        with self.world.heartbeat.alone("placing the images"):
            placed.update({name: engine.place(samples) for name, samples in splits.items()})
            placed["train"].compile()

    def _are_arriving(self, splits: "dict[str, Samples]") -> bool:
        """Return whether images are being decoded on any host."""
        is_arriving = any(samples.is_arriving for samples in splits.values())
        return self.recipe.data.decode == "during" and any(self.world.all_gather_object(is_arriving))

    def _fit_into_budget(self, engine: "Engine", placed: "dict[str, DeviceSplit]", progress: Progress) -> None:
        """Choose the number of steps by the time that some take, where the user has given a time budget."""
        if self.options.minutes is None:
            return
        seconds, images = 60 * self.options.minutes, len(placed["train"].samples)
        rates = measure(engine, placed, self.recipe, self.world, seconds)
        self.budget = Budget(seconds, self.began, rates, self.recipe, images)
        steps = steps_per_epoch(images, self.recipe.batch_size, self.recipe.drop_last)
        done = progress.position(steps)
        planned: Recipe | InputError
        try:
            planned = self.budget.plan(self.recipe, done)
        except InputError as error:
            planned = error
        # The main process's clock decides for all.
        planned = self.world.broadcast_object(planned)
        if isinstance(planned, InputError):
            raise planned
        self.set_length(planned)
        total = self.recipe.total_steps(steps)
        self.note(
            f"--minutes {self.options.minutes:g}: {total - done:,} steps fit, {(total - done) / steps:.1f} epochs, at "
            f"{self.recipe.batch_size / rates.step:,.0f} images per second"
        )
        self._time("measure")

    def _check_sanity(self, engine: "Engine", train: "DeviceSplit", progress: Progress, classes: int) -> None:
        """Before a long run, note what would make it useless. A resumed run has been checked before."""
        recipe = self.recipe
        if (
            self.options.own.loss
            or (progress.epoch, progress.step) != (0, 0)
            or not sanity.is_worthwhile(recipe, len(train.samples))
        ):
            return
        is_fresh = not (recipe.pretrained or recipe.weights)
        for sentence in sanity.check(engine, train, recipe, self.world, classes, is_fresh=is_fresh):
            self.note(sentence)
        self._time("check")

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
        if self._continued and recipe.schedule.name in ("cosine", "one-cycle"):
            steps = steps_per_epoch(images, recipe.batch_size, recipe.drop_last)
            done = progress.position(steps)
            before, now = learning_rate(self._continued, done - 1, steps), learning_rate(recipe, done, steps)
            if now > RATE_JUMP * before:
                name = recipe.schedule.name
                self.note(
                    f"the learning rate rises from {before:.2g} to {now:.2g}: {name} now has {recipe.epochs} epochs"
                )
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

    def note(self, sentence: str) -> None:
        """Print a sentence, and keep it for the summary."""
        self.notes.append(sentence)
        self.console.note(sentence)

    def _time(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._lap
        self._lap = now
