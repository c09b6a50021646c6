"""How fast a job is on this machine, and what limits it: `flatout bench`, and `flatout scale` for several devices."""

import contextlib
import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain, count, cycle, islice
from pathlib import Path

from flatout import __version__
from flatout.config import Recipe
from flatout.data.batches import epoch_batches, steps_per_epoch
from flatout.data.build import load
from flatout.data.source import DataSource, ImageDataset
from flatout.distributed.world import World
from flatout.engine.base import DeviceDataset, Engine
from flatout.engine.devices import engine_for, machine, parse_devices
from flatout.inference.run import Run
from flatout.train.recipes import resolve
from flatout.train.request import Options, TrainRequest
from flatout.train.run import place, run_on_all_ranks, set_up
from flatout.utils import style
from flatout.utils.console import Console, aligned, counted, duration
from flatout.utils.errors import InputError, Stopped, TrainingFailed
from flatout.utils.files import check_free, default_folder, make_folder, write_atomically
from flatout.utils.run_files import RECIPE, SCALING, JsonObject, write_json
from flatout.utils.style import shorten

# Minimum seconds of the measurement that determines the number of steps of the others.
RELIABLE_SECONDS = 0.3
# Batches that a feed has ready after a pause. They are consumed untimed; then the same number is measured.
READ_AHEAD = 4
# How often each rate is measured, in turn with the others; the seconds of each measurement; and the seconds after which
# no other round begins.
ROUNDS, SECONDS, LIMIT_SECONDS = 5, 1.0, 30.0
# The batches on which the step alone is timed: at most this many, and this many bytes of images.
MAX_BATCHES, MAX_BYTES = 64, 1 << 28
# Training below this share of its limit is reported.
EFFICIENT = 0.9
RATES = {"input": "the input path alone", "compute": "the step alone", "training": "training"}
SCALE_CHART = "scaling.png"
LAST_LINES = 10  # printed of a run that failed without a message

Steps = Generator[None, None, None]


class Timed:
    """Times steps of `images` each from an endless sequence; all processes take the same ones."""

    def __init__(self, steps: Steps, images: float, engine: Engine, world: World) -> None:
        self.images, self._steps, self._engine, self._world = images, steps, engine, world
        self.close = steps.close  # ends the threads that read ahead

    def seconds(self, steps: int) -> float:
        """Take some steps, wait for them, and return the time of one in the slowest process."""
        began = time.perf_counter()
        self.take(steps)
        return max(self._world.all_gather_object((time.perf_counter() - began) / steps))

    def steps_in(self, seconds: float) -> int:
        """Measure the number of steps that take about `seconds`, at least one."""
        steps, one = 1, self.seconds(1)
        while steps * one < min(RELIABLE_SECONDS, seconds):
            steps *= 2
            one = self.seconds(steps)
        return max(1, round(seconds / one))

    def take(self, steps: int) -> None:
        """Take some steps and wait for them."""
        for _ in islice(self._steps, steps):
            pass
        self._engine.counts()


def facts_of(recipe: Recipe, *keys: str) -> JsonObject:
    """Return what was measured, when and where: some keys of a recipe, date, machine and version."""
    return {
        **{key: getattr(recipe, key) for key in ("job", "model", "batch_size", *keys)},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "version": __version__,
    }


def endless_epochs(split: DeviceDataset, recipe: Recipe) -> Iterator[Iterator[object]]:
    """Begin one epoch after the other, and yield the inputs of its training steps."""
    for epoch in count():
        split.begin_epoch(epoch)
        yield split.feed(epoch_batches(recipe, split.samples, epoch))


def _preparing(epochs: Iterable[Iterable[object]], world: World) -> Steps:
    for _ in chain.from_iterable(epochs):
        world.watch.keep_alive()
        yield


def _training(epochs: Iterable[Iterable[object]], split: DeviceDataset, engine: Engine, world: World) -> Steps:
    """Train epoch by epoch as the training loop does, at a learning rate of 0, so that the weights stay."""
    for epoch in epochs:
        for number, inputs in enumerate(epoch):
            split.train_step(inputs, 0.0, number)
            world.control.received()
            world.watch.report_step(0, number + 1)
            yield
        engine.counts()


def bench(recipe: Recipe, data: DataSource | ImageDataset, options: Options, console: Console) -> JsonObject:
    """Measure a job; nothing is written.

    The rates are those of batches ordered, read and copied to the devices without a step (`input`), of steps on the
    same few batches (`compute`, augmentation included), and of both, as in a run. `efficiency` is the last by the lower
    of the first two, which `limit` names.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        if not recipe.epochs:
            console.note("epochs = 0: the job only fits a head; these are the rates of training all layers")
        # The devices that suit one epoch suit this measurement, which is about as short.
        recipe = recipe.override({"epochs": 1, "linear_probe": False})
        options = replace(options, out=Path(folder) / "run")
        return run_on_all_ranks(TrainRequest(recipe=recipe, data=data, options=options), console, _bench_on_rank)


def _bench_on_rank(console: Console, world: World, request: TrainRequest) -> JsonObject:
    with set_up(console, world, request) as context, contextlib.ExitStack() as stack:
        recipe, engine, pack = context.recipe, context.engine, context.pack
        train = place(context, only_train=True)["train"]
        console.note("measuring for about 20 s")
        timed = _timed_rates(train, engine, world, recipe)
        for steps in timed.values():
            stack.callback(steps.close)
        rates, communication = _measure_in_turn(timed, engine)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        spreads = {n: {"median": medians[n], "min": min(found), "max": max(found)} for n, found in rates.items()}
        limit = "input" if medians["input"] < medians["compute"] else "compute"
        # Of the same round, in which a slow machine affects both equally.
        shares = [both / alone for both, alone in zip(rates["training"], rates[limit], strict=True)]
        result = {
            **facts_of(recipe, "image_size", "precision"),
            "devices": context.devices,
            "engine": request.options.engine,
            "world_size": world.size,
            "train_images": len(train.samples),
            "input_images_per_second": medians["input"],
            "compute_images_per_second": medians["compute"],
            "images_per_second": medians["training"],
            "spread": spreads,
            "limit": limit,
            "efficiency": statistics.median(shares),
            "communication_fraction": communication,
            "decode_images_per_second": len(pack.labels) / pack.build_seconds if pack.build_seconds else None,
        }
        return {**result, "verdict": _verdict(result)}


def _timed_rates(train: DeviceDataset, engine: Engine, world: World, recipe: Recipe) -> dict[str, Timed]:
    images, batch = len(train.samples), recipe.batch_size
    steps = steps_per_epoch(images, batch, recipe.drop_last)
    mean = batch if recipe.drop_last and images >= batch else images / steps
    kept = min(MAX_BATCHES, max(1, MAX_BYTES // (batch * max(1, train.samples.nbytes // images))))
    train.begin_epoch(0)
    batches = list(islice(epoch_batches(recipe, train.samples, 0), kept))
    inputs, fed = list(train.feed(batches)), sum(batch.count for batch in batches) / len(batches)
    return {
        "input": Timed(_preparing(endless_epochs(train, recipe), world), mean, engine, world),
        "compute": Timed(_training([cycle(inputs)], train, engine, world), fed, engine, world),
        "training": Timed(_training(endless_epochs(train, recipe), train, engine, world), mean, engine, world),
    }


def _measure_in_turn(timed: Mapping[str, Timed], engine: Engine) -> tuple[dict[str, list[float]], float | None]:
    steps = {name: max(READ_AHEAD, one.steps_in(SECONDS)) for name, one in timed.items()}
    rates: dict[str, list[float]] = {name: [] for name in timed}
    spent = dict.fromkeys(timed, 0.0)
    communication = 0.0
    engine.communication_seconds()
    while len(rates["training"]) < ROUNDS and sum(spent.values()) < LIMIT_SECONDS:
        for name, one in timed.items():
            one.take(READ_AHEAD)
            seconds = one.seconds(steps[name])
            rates[name].append(one.images / seconds)
            spent[name] += seconds * steps[name]
            communicated = engine.communication_seconds()
            communication += communicated if name == "training" else 0.0
    return rates, communication / spent["training"] if math.isfinite(communication) else None


def _verdict(result: JsonObject) -> list[str]:
    prepared, computed = result["input_images_per_second"], result["compute_images_per_second"]
    ratio = max(prepared, computed) / min(prepared, computed)
    times = f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"
    if result["limit"] == "compute":
        found = [f"limited by compute: the input path could feed {times} times as many images"]
        found.append("more devices, bf16 or a cheaper model are faster; a faster disk is not")
    else:
        found = [f"limited by input: the step could train {times} times as many images"]
        found.append("memory that holds all images, a faster disk or smaller images are faster; more devices are not")
    efficiency, communication = result["efficiency"], result["communication_fraction"] or 0.0
    reached = f"training reaches {min(efficiency, 1):.0%} of the limit"
    found.append(reached if efficiency >= EFFICIENT else f"{reached}: input and step wait for each other or for cores")
    if communication >= 1 - EFFICIENT:
        found.append(f"exchanging gradients takes {communication:.0%} of the time; a larger batch needs fewer of them")
    return found


def format_bench(result: JsonObject) -> list[str]:
    """Return the table and the verdict, as lines."""
    table = [[f"images per second on {result['devices']}", "median", "least", "most"]]
    for name, what in RATES.items():
        found = result["spread"][name]
        table.append([what, *(f"{found[key]:,.0f}" for key in ("median", "min", "max"))])
    if result["decode_images_per_second"]:
        table.append(["decoding, once", f"{result['decode_images_per_second']:,.0f}"])
    return [*aligned(table), "", *result["verdict"]]


# --- several choices of devices ---------------------------------------------------------------------------------------


def split_specs(text: str) -> list[str]:
    """Split `cpu,cuda:0,2,4xcuda` at its commas; numbers alone belong to the SPEC before them, as in `cuda:0,2`."""
    specs = [spec.strip() for spec in re.split(r",(?!\s*\d+\s*(?:,|$))", text)]
    if not all(specs) or len(set(specs)) < len(specs):
        raise InputError(f"--devices {text}: a SPEC is empty or named twice; write it as cpu,2xcpu")
    return specs


def scale(
    job: str, data: str | None, changes: Mapping[str, object], *, devices: str, out: Path | None, console: Console
) -> JsonObject:
    """Train the job on each SPEC of `devices`; write scaling.json and scaling.png; return the former's content."""
    chosen = {spec: parse_devices(spec, engine_for(spec, "auto")) for spec in split_specs(devices)}
    check_free(out)
    accelerated = all(choice.is_accelerated for choice in chosen.values())
    recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console)
    if recipe.data.folds and not recipe.data.fold:
        raise InputError(f"data.folds = {recipe.data.folds}: flatout scale measures single runs; leave it out")
    if not recipe.epochs:
        raise InputError("epochs = 0: the job only fits a head, which takes no steps; --epochs N compares training")
    # Decoded here, because otherwise only the first run would include decoding.
    load(found, recipe, cache=True, report=console)
    console.finish()
    out = make_folder(out or default_folder(f"scale-{recipe.job}"))
    title = f"Measured by flatout scale; train it once: flatout train {RECIPE}"
    write_atomically(out / RECIPE, recipe.to_toml(title).encode())
    head, runs = facts_of(recipe, "epochs", "norm"), list[JsonObject]()
    ended: str | None = "stopped"
    write_json(out / SCALING, {**head, "specs": [], "ended": ended})  # tells the board what the folder is
    try:
        for spec, choice in chosen.items():
            folder = out / re.sub(r"[:,]", "-", spec)
            console.note(f"{spec}: {folder}")
            _train(spec, out / RECIPE, folder)
            runs.append(run := {"devices": spec, "kind": choice.kind, **_figures(folder)})
            rate = f"{run['images_per_second']:,.0f} images per second, " if run["images_per_second"] else ""
            times = f"training {duration(run['train_seconds'])}, everything {duration(run['wall_seconds'])}"
            console.note(f"{spec}: {rate}{times}")
        ended = None
    except (InputError, TrainingFailed) as error:
        ended = str(error)
        raise
    finally:
        result = {**head, "specs": compare_specs(runs), "ended": ended}
        write_json(out / SCALING, result)
    draw_scaling(out / SCALE_CHART, result)
    return {**result, "out": str(out)}


def _train(spec: str, recipe: Path, folder: Path) -> None:
    """Train in a separate process; raise its error with the SPEC."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: a random.py in the current folder must not be imported.
            [sys.executable, "-P", "-m", "flatout", "train", str(recipe), "--devices", spec, "--out", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=2 if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=errors,
            # A separate session: Ctrl-C reaches the run only once, through us, and not from the terminal as well.
            start_new_session=True,
        )
        code = _wait(child)
        errors.seek(0)
        output = errors.read().decode(errors="replace").strip()
    if code == 0:
        return
    found = re.search(r"^flatout: (.*)", output, re.MULTILINE | re.DOTALL)
    message = found[1] if found else "\n".join([f"ended with exit code {code}", *output.splitlines()[-LAST_LINES:]])
    if code == 2:
        raise InputError(f"{spec}: {message}")
    if code > 128:
        raise Stopped(code - 128)
    raise TrainingFailed(f"{spec}: {message if code > 0 else f'killed by {signal.Signals(-code).name}'}")


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the run; signals are forwarded to it, and it can finish its checkpoint before this process ends."""
    stopped: BaseException | None = None
    while child.returncode is None:
        try:
            child.wait()
        except BaseException as error:
            child.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            stopped = stopped or error
    if stopped is not None:
        raise stopped
    return child.returncode


def _figures(folder: Path) -> JsonObject:
    """Return the compared figures of a run; those that were not measured are None."""
    run = Run(folder)
    # Epoch 0 is a fitted head.
    summary, epochs = run.summary, [line["seconds"] for line in run.epochs if line["epoch"]]
    split = "test" if summary["test_count"] else "valid"
    copied = (
        "world_size threads_per_rank images_trained stopped runs_on images_per_second train_seconds setup_seconds"
        " wall_seconds warmup_seconds communication_fraction input_wait_fraction"
    )
    return {
        "folder": folder.name,
        **{key: summary.get(key) for key in copied.split()},
        "epoch_seconds": statistics.median(epochs[1:] or epochs) if epochs else None,
        "epoch_seconds_each": epochs,
        "split": split,
        **{name: summary.get(f"{split}_{name}") for name in ("accuracy", "correct", "count", "loss")},
    }


def compare_specs(runs: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the runs with `base`, the SPEC of the same kind with the fewest devices, `speed_up` and `efficiency`.

    Speed-up is the ratio of the images per second, None without them; efficiency is the speed-up divided by the ratio
    of the numbers of devices (processes, on CPUs).
    """
    rows = []
    for run in runs:
        base = min((other for other in runs if other["kind"] == run["kind"]), key=lambda other: other["world_size"])
        rate, other = run["images_per_second"], base["images_per_second"]
        speed_up = rate / other if rate and other else None
        efficiency = speed_up / (run["world_size"] / base["world_size"]) if speed_up else None
        rows.append({**run, "base": base["devices"], "speed_up": speed_up, "efficiency": efficiency})
    return rows


def format_scale(result: JsonObject) -> list[str]:
    """Return the table, a column for each SPEC, as lines."""
    columns = [_cells(row) for row in result["specs"]]
    table = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [*aligned(table), "", f"{result['out']}: {SCALING}, {SCALE_CHART} and a folder for each run"]


def _cells(row: JsonObject) -> dict[str, str]:
    def cell(key: str, text: Callable[[float], str]) -> str:
        return "-" if row[key] is None else text(row[key])

    threads = f" x {_threads(row)}" if _threads(row) else ""
    return {
        "devices": row["devices"],
        "processes x threads": f"{row['world_size']}{threads}",
        "images per second": cell("images_per_second", "{:,.0f}".format),
        "speed-up": cell("speed_up", "{:.2f}".format),
        "efficiency": cell("efficiency", "{:.0%}".format),
        "  against": row["base"],
        "time per epoch": cell("epoch_seconds", "{:.3g} s".format),
        "training time": cell("train_seconds", duration),
        "  of it warm-up": cell("warmup_seconds", duration),
        "everything included": cell("wall_seconds", duration),
        "communication": cell("communication_fraction", "{:.1%}".format),
        "waiting for input": cell("input_wait_fraction", "{:.1%}".format),
        f"{row['split']} images right": cell("correct", lambda right: f"{right:,} of {row['count']:,}"),
    }


def _threads(row: JsonObject) -> int:
    """Return the threads of each process; 0 on accelerators, where threads do not compute."""
    return row["threads_per_rank"] or 0 if row["kind"] == "cpu" else 0


def draw_scaling(path: Path, result: JsonObject) -> None:
    """Write a PNG with a bar for each SPEC: on the left images per second, with the ideal; on the right seconds.

    The ideal counts threads where they compute: a process of two threads is compared with two of one.
    """
    rows = {row["devices"]: row for row in result["specs"]}
    job = shorten(result["job"], 40)
    title = f"{job}: global batch {result['batch_size']}, {counted(result['epochs'], 'epoch')}"
    figure = style.new_figure(9.0, 3.9, title=title)
    throughput, time = figure.subplots(1, 2)
    style.style_panel(throughput, "Images per second")
    for position, row in enumerate(rows.values()):
        rate, base = row["images_per_second"] or 0, rows[row["base"]]
        throughput.bar(position, rate, width=0.55, color=style.RIGHT)
        style.add_label(throughput, position, rate, f"{rate:,.0f}")
        work, base_work = (one["world_size"] * (_threads(one) or 1) for one in (row, base))
        ideal = (base["images_per_second"] or 0) * work / base_work
        label = "" if position else "ideal"
        throughput.hlines(ideal, position - 0.35, position + 0.35, color=style.ORANGE, linewidth=1.5, label=label)
        times = f"{duration(row['train_seconds'])} of {duration(row['wall_seconds'])}"
        style.add_label(time, position, row["wall_seconds"], times)
    style.style_panel(time, "Seconds: training, and everything included")
    for key, label, colour in (
        ("wall_seconds", "set-up and the rest", style.FAINT),
        ("train_seconds", "training", style.RIGHT),
        ("warmup_seconds", "warm-up", style.ORANGE),
    ):
        # Each is a part of the one before.
        seconds = [row[key] or 0 for row in rows.values()]
        time.bar(range(len(rows)), seconds, width=0.55, color=colour, label=label if any(seconds) else "")
    for axes in (throughput, time):
        axes.set_xticks(range(len(rows)), [shorten(name, 16) for name in rows])
        # Room for labels and the legend.
        axes.set(xlim=(-0.7, len(rows) - 0.3), ylim=(0, 1.25 * axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter("{x:,.4g}" if axes.get_ylim()[1] < 10 else "{x:,.0f}")
        style.add_legend(axes, loc="upper left", ncols=3)
    style.write_png(figure, path)
