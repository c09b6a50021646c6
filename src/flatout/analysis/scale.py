"""`flatout scale`: train one recipe on several choices of devices, and compare them.

Every run is a separate process, so that none inherits another's warm caches or memory. Repeats alternate between the
choices (A B A B), so that a machine that slows down affects all of them alike.

A row is one SPEC; its base is the SPEC of the same kind with the fewest devices.
"""

import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.analysis.output import check_free, make_folder, spread
from flatout.data.build import load
from flatout.engine.devices import engine_for, machine, parse_devices
from flatout.inference.run import Run
from flatout.train.recipes import resolve
from flatout.utils import style
from flatout.utils.console import Console, aligned, counted, duration
from flatout.utils.errors import InputError, Stopped, TrainingFailed
from flatout.utils.files import write_atomically
from flatout.utils.run_files import RECIPE, write_json
from flatout.utils.style import shorten

SCALE_RESULT, SCALE_CHART = "scaling.json", "scaling.png"
LAST_LINES = 10  # printed of a run that failed without a message

# The compared values of a run: medians over the repeats, with minimum and maximum.
FIGURES = (
    "images_per_second", "epoch_seconds", "train_seconds", "warmup_seconds", "setup_seconds", "wall_seconds",
    "communication_fraction", "input_wait_fraction",
)  # fmt: skip

# Above 90 %, little is left to explain.
GOOD_EFFICIENCY = 0.9
# Caches can make slightly more than ideal possible; higher values are too short or disturbed measurements.
MAX_EFFICIENCY = 1.05
# A share below 5 % is within the variation of repeated runs.
NOTABLE_SHARE = 0.05
# With fewer images per device and step, starting the work takes longer than the work.
FEW_IMAGES = 16
# Repeats on an idle machine differ by a few per cent; from 25 % on, something else was running.
DISTURBED = 1.25

Row = Mapping[str, Any]


def split_specs(text: str) -> list[str]:
    """Split `cpu,cuda:0,2,4xcuda` at its commas; numbers alone belong to the SPEC before them, as in `cuda:0,2`.

    Raises:
        InputError: a SPEC is empty or named twice.
    """
    specs = [spec.strip() for spec in re.split(r",(?!\s*\d+\s*(?:,|$))", text)]
    if not all(specs):
        raise InputError(f"--devices {text}: an empty SPEC between commas; write it as cpu,2xcpu")
    if twice := [spec for spec in specs if specs.count(spec) > 1]:
        raise InputError(f"--devices {text}: {twice[0]} is named twice; --repeats N measures every SPEC N times")
    return specs


def scale(
    job: str,
    data: str | None,
    changes: Mapping[str, Any],
    *,
    devices: str,
    out: Path | None,
    repeats: int,
    weak: bool,
    console: Console,
) -> dict[str, Any]:
    """Train the job on each SPEC, `repeats` times; write scaling.json and scaling.png; return the former's content.

    Args:
        job, data, changes: see `fit`.
        devices: SPECs separated by commas.
        out: a new or empty folder; None for a new one under `runs/`.
        weak: keep the batch per device, rather than the global batch.

    Raises:
        InputError, TrainingFailed, Stopped: an argument is wrong, or a run ended so; the message then names its SPEC,
            and scaling.json has the runs before it.
    """
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: must be at least 1")
    chosen = {spec: parse_devices(spec, engine_for(spec, "auto")) for spec in split_specs(devices)}
    if weak and "auto" in chosen:
        raise InputError("--weak: auto chooses the number of devices by itself; name it, as in 2xcpu or 4xcuda")
    check_free(out)
    accelerated = all(choice.is_accelerated for choice in chosen.values())
    recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console)
    # Decoded here, because otherwise only the first run would include decoding.
    load(found, recipe, cache=True, report=console)
    console.finish()
    out = make_folder(out, f"scale-{recipe.job}")
    title = f"Measured by flatout scale; train it once: flatout train {RECIPE}"
    write_atomically(out / RECIPE, recipe.to_toml(title).encode())
    head = {
        "scaling": "weak" if weak else "strong",
        "repeats": repeats,
        **{key: getattr(recipe, key) for key in ("job", "model", "batch_size", "epochs", "norm")},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "version": __version__,
    }
    runs: list[dict[str, Any]] = []
    try:
        for repeat in range(1, repeats + 1):
            for spec, d in chosen.items():
                batch_size = recipe.batch_size * (len(d.indices) if weak else 1)
                run = _run(out, spec, repeat, batch_size, f"{spec}, run {repeat} of {repeats}", console)
                runs.append({"devices": spec, "kind": d.kind, "repeat": repeat, "batch_size": batch_size, **run})
                # Complete after every run, whatever ends this process.
                write_json(out / SCALE_RESULT, {**head, **compare_specs(runs), "ended": "not finished"})
    except BaseException as error:
        ended = str(error) if isinstance(error, InputError | TrainingFailed) else "stopped"
        write_json(out / SCALE_RESULT, {**head, **compare_specs(runs), "ended": ended})
        if runs:
            console.note(f"the runs finished so far are in {out / SCALE_RESULT}")
        raise
    result = {**head, **compare_specs(runs), "ended": None}
    result["findings"] = findings(result)
    write_json(out / SCALE_RESULT, result)
    draw_scaling(out / SCALE_CHART, result)
    return {**result, "out": str(out)}


def _run(out: Path, spec: str, repeat: int, batch_size: int, name: str, console: Console) -> dict[str, Any]:
    folder = out / f"{re.sub(r'[:,]', '-', spec)}-{repeat}"
    console.note(f"{name}: {folder}")
    flags = ("--devices", spec, "--batch-size", str(batch_size), "--out", str(folder))
    _train(name, out / RECIPE, *flags)
    run = _figures(folder)
    rate = f"{run['images_per_second']:,.0f} images per second, " if run["images_per_second"] else ""
    times = f"training {duration(run['train_seconds'])}, everything {duration(run['wall_seconds'])}"
    console.note(f"{name}: {rate}{times}")
    return run


def _train(name: str, recipe: Path, *flags: str) -> None:
    """Train in a separate process; raise its error with the name of the run."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: a random.py in the current folder must not be imported.
            [sys.executable, "-P", "-m", "flatout", "train", str(recipe), *flags],
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
        raise InputError(f"{name}: {message}")
    if code > 128:
        raise Stopped(code - 128)
    raise TrainingFailed(f"{name}: {message if code > 0 else f'killed by {signal.Signals(-code).name}'}")


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


def _figures(folder: Path) -> dict[str, Any]:
    run = Run(folder)
    summary = run.summary
    epochs = [line["seconds"] for line in run.epochs]
    figures: dict[str, Any] = {name: summary.get(name) for name in FIGURES}
    figures["epoch_seconds"] = statistics.median(epochs[1:] or epochs)
    if figures["warmup_seconds"] is None and len(epochs) > 1:
        # Too few steps to separate warm-up: compare the first epoch with the others.
        figures["warmup_seconds"] = max(0.0, epochs[0] - figures["epoch_seconds"])
    split = "test" if summary["test_count"] else "valid"
    return {
        "folder": folder.name,
        **{key: summary[key] for key in ("world_size", "images_trained", "stopped", "runs_on")},
        "threads_per_rank": summary.get("threads_per_rank"),
        **figures,
        "epoch_seconds_each": epochs,
        "split": split,
        **{name: summary.get(f"{split}_{name}") for name in ("accuracy", "correct", "count", "loss")},
    }


def compare_specs(runs: Sequence[Row]) -> dict[str, Any]:
    """Return `specs`, a row of figures for each SPEC that was measured, and `runs`, in their order.

    A figure is {median, min, max} over the repeats, or None if it was not measured. `speed_up` and `efficiency` are
    against `base`, the SPEC of the same kind with the fewest devices: speed-up is the ratio of the images per second,
    efficiency the speed-up divided by the ratio of the numbers of devices (processes, on CPUs).
    """
    rows: list[dict[str, Any]] = []
    for spec in dict.fromkeys(run["devices"] for run in runs):
        mine = [run for run in runs if run["devices"] == spec]
        keys = ("devices", "kind", "batch_size", "world_size", "split", "count", "threads_per_rank")
        row = {key: mine[-1][key] for key in keys}
        row |= {name: spread(run[name] for run in mine) for name in (*FIGURES, "accuracy")}
        row["correct"] = [run["correct"] for run in mine]
        if row["kind"] != "cpu":  # the threads of an accelerator's process do not compute
            row["threads_per_rank"] = None
        rows.append(row)
    for row in rows:
        base = min((other for other in rows if other["kind"] == row["kind"]), key=lambda other: other["world_size"])
        rates = [r["images_per_second"] for r in (row, base)]
        speed_up = rates[0]["median"] / rates[1]["median"] if all(rates) else None
        row["base"], row["speed_up"] = base["devices"], speed_up
        row["efficiency"] = speed_up / (row["world_size"] / base["world_size"]) if speed_up else None
    return {"specs": rows, "runs": list(runs)}


def findings(result: Row) -> list[str]:
    """Return a sentence or two for each finding on the content of scaling.json; unknown figures are None."""
    rows = result["specs"]
    bases = {row["base"]: row for row in rows if row["base"] == row["devices"]}
    larger = [row for row in rows if row["base"] != row["devices"] and row["speed_up"] is not None]
    return [
        *(_against_base(row, bases[row["base"]], result) for row in larger),
        *_between_kinds([row for row in bases.values() if row["images_per_second"]]),
        *_answers(rows, result),
        *_repeats(result),
    ]


def _against_base(row: Row, base: Row, result: Row) -> str:
    sentence = _faster(row, base, row["speed_up"], f"{row['devices']} ({_size(row)})")
    if _overlap(row, base):
        return f"{sentence}, but their repeats overlap: the difference is within the noise of this machine."
    efficiency = row["speed_up"] / _ideal_speed_up(row, base)
    sentence += f", an efficiency of {row['efficiency']:.0%}"
    if not math.isclose(efficiency, row["efficiency"]):
        # Processes with fewer threads each are compared with fewer processes of more threads.
        sentence += f" counted by processes, and of {efficiency:.0%} counted by threads"
    if efficiency > MAX_EFFICIENCY:
        return (
            f"{sentence}. More than 100% is not plausible: the runs were too short or disturbed."
            " Measure again with --repeats 3 and more --epochs."
        )
    if efficiency >= GOOD_EFFICIENCY or row["world_size"] == base["world_size"]:
        return f"{sentence}."
    reasons = "; ".join(_reasons(row, base, result))
    return f"{sentence}. Causes: {reasons}." if reasons else f"{sentence}."


def _reasons(row: Row, base: Row, result: Row) -> Iterator[str]:
    cores, threads = result["machine"]["cores"], _threads(row)
    if threads is not None and threads > cores:
        yield f"{threads} threads share {cores} cores"
    if (share := _median(row, "communication_fraction")) >= NOTABLE_SHARE:
        yield f"{share:.0%} of the time is communication and waiting for other devices"
    if (share := _median(row, "input_wait_fraction")) >= NOTABLE_SHARE:
        yield f"{share:.0%} is waiting for images"
    batch, ranks = row["batch_size"], row["world_size"]
    largest = math.ceil(batch / ranks)
    if (share := 1 - batch / ranks / largest) >= NOTABLE_SHARE:
        yield f"a batch of {batch} does not divide by {ranks}: devices are idle for {share:.0%} of the time"
    if largest < FEW_IMAGES <= base["batch_size"] / base["world_size"]:
        yield f"{largest} images per device and step are too few to keep it busy; try a larger --batch-size"


def _between_kinds(bases: Sequence[Row]) -> Iterator[str]:
    rates = [_median(row, "images_per_second") for row in bases]
    for row, rate in zip(bases, rates, strict=True):
        slowest = bases[rates.index(min(rates))]
        if row is not slowest:
            noise = ", but their repeats overlap" if _overlap(row, slowest) else ""
            yield f"{_faster(row, slowest, rate / min(rates), row['devices'])}{noise}."


def _faster(row: Row, base: Row, ratio: float, name: str) -> str:
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
    return f"{name} trains {times} times as fast as {base['devices']} ({_size(base)})"


def _answers(rows: Sequence[Row], result: Row) -> Iterator[str]:
    """Report whether all SPECs gave the same predictions, and if not, why."""
    answers = [n for row in rows for n in row["correct"] if n is not None]
    if len(answers) < 2:
        return
    least, most, count, split = min(answers), max(answers), rows[0]["count"], rows[0]["split"]
    if least == most:
        yield f"Every run gives the same answer: {most:,} of {count:,} {split} images right."
        return
    if result["scaling"] == "weak":
        reason = "with --weak the batch grows with the devices, which changes training itself"
    elif result["norm"] == "per-device" and len({row["world_size"] for row in rows}) > 1:
        reason = 'norm = "per-device" normalises over each device\'s share, so the number of devices changes the result'
    elif most - least <= explained_by_rounding(least, most, count):
        reason = "the order of summation explains that"
    else:
        reason = (
            "more than the order of summation explains. Compare the notes in the run folders;"
            " --set precision=fp32 makes all devices compute alike"
        )
    yield f"The runs differ by {most - least:,} of {count:,} {split} images ({least:,} to {most:,} right): {reason}."


def explained_by_rounding(least: int, most: int, count: int) -> float:
    """Return how many predictions may differ between runs that only sum in another order.

    Rounding differences grow over the steps until the runs are as far apart as two seeds at most, whose accuracies
    scatter by less than the binomial standard error of an accuracy on as many images. One image is always allowed.
    """
    share = (least + most) / 2 / count
    return max(1.0, math.sqrt(count * share * (1 - share)))


def _repeats(result: Row) -> Iterator[str]:
    rates = [row["images_per_second"] for row in result["specs"] if row["images_per_second"]]
    worst = max((rate["max"] / rate["min"] for rate in rates), default=1.0)
    if worst >= DISTURBED:
        yield f"Repeats differ by a factor of up to {worst:.1f}: the machine was busy with other work as well."
    if result["repeats"] == 1 and len(result["specs"]) > 1:
        yield "Each SPEC was run once, so noise cannot be told from a difference; --repeats 3 measures it."


def _overlap(row: Row, other: Row) -> bool:
    first, second = row["images_per_second"], other["images_per_second"]
    repeated = len(row["correct"]) > 1 and len(other["correct"]) > 1
    return repeated and first["min"] <= second["max"] and second["min"] <= first["max"]


def _ideal_speed_up(row: Row, base: Row) -> float:
    threads, base_threads = _threads(row), _threads(base)
    return threads / base_threads if threads and base_threads else row["world_size"] / base["world_size"]


def _median(row: Row, name: str) -> float:
    return row[name]["median"] if row[name] else 0.0


def _threads(row: Row) -> int | None:
    return row["world_size"] * row["threads_per_rank"] if row["threads_per_rank"] else None


def _size(row: Row) -> str:
    count, threads = row["world_size"], row["threads_per_rank"]
    return counted(count, "device") if threads is None else f"{count} x {counted(threads, 'thread')}"


def format_scale(result: Row) -> list[str]:
    """Return the table, a column for each SPEC, and the findings, as lines; `result` is what `scale` returned."""
    columns = [_cells(row) for row in result["specs"]]
    table = [[name, *(column[name] for column in columns)] for name in columns[0]]
    files = f"{result['out']}: {SCALE_RESULT}, {SCALE_CHART} and a folder for each run"
    return [*aligned(table), "", *result["findings"], files]


def _cells(row: Row) -> dict[str, str]:
    def median(name: str, text: Callable[[float], str]) -> str:
        return text(row[name]["median"]) if row[name] else "-"

    rate, threads, efficiency = row["images_per_second"], row["threads_per_rank"], row["efficiency"]
    answers = sorted({n for n in row["correct"] if n is not None})
    right = "..".join(f"{n:,}" for n in dict.fromkeys((*answers[:1], *answers[-1:])))
    return {
        "devices": row["devices"],
        "processes x threads": f"{row['world_size']} x {threads}" if threads else f"{row['world_size']}",
        "batch": f"{row['batch_size']:,}",
        "images per second": median("images_per_second", "{:,.0f}".format),
        "  least to most": f"{rate['min']:,.0f} to {rate['max']:,.0f}" if rate else "-",
        "speed-up": f"{row['speed_up']:.2f}" if row["speed_up"] else "-",
        "efficiency": "-" if efficiency is None else f"{efficiency:.0%}",
        "  against": row["base"],
        "time per epoch": median("epoch_seconds", "{:.3g} s".format),
        "training time": median("train_seconds", duration),
        "  of it warm-up": median("warmup_seconds", duration),
        "everything included": median("wall_seconds", duration),
        "communication": median("communication_fraction", "{:.1%}".format),
        "waiting for input": median("input_wait_fraction", "{:.1%}".format),
        f"{row['split']} images right": f"{right} of {row['count']:,}" if right else "-",
    }


def draw_scaling(path: Path, result: Row) -> None:
    """Write a PNG with a bar for each SPEC: on the left images per second, with the ideal; on the right seconds."""
    rows, by_name = result["specs"], {row["devices"]: row for row in result["specs"]}
    batch = f"{'per device' if result['scaling'] == 'weak' else 'global'} batch {result['batch_size']}"
    title = f"{shorten(result['job'], 40)}: {result['scaling']} scaling, {batch}, {counted(result['epochs'], 'epoch')}"
    figure = style.new_figure(9.0, 3.9, title=title)
    throughput, time = figure.subplots(1, 2)
    repeats = f", median of {result['repeats']} (least and most)" if result["repeats"] > 1 else ", a single run"
    style.style_panel(throughput, f"Images per second{repeats}")
    nothing = {"median": 0.0, "min": 0.0, "max": 0.0}
    style.draw_bars(throughput, list(by_name), [row["images_per_second"] or nothing for row in rows], "{:,.0f}".format)
    bases = [by_name[row["base"]] for row in rows]
    ideal = [_median(b, "images_per_second") * _ideal_speed_up(r, b) for r, b in zip(rows, bases, strict=True)]
    left, right = ([position + side for position in range(len(rows))] for side in (-0.35, 0.35))
    throughput.hlines(ideal, left, right, color=style.ORANGE, linewidth=1.5, label="ideal")
    style.style_panel(time, "Seconds: training, and everything included")
    for name, label, colour in (
        ("wall_seconds", "set-up and the rest", style.FAINT),
        ("train_seconds", "training", style.RIGHT),
        ("warmup_seconds", "warm-up", style.ORANGE),
    ):
        # Each is a part of the one before.
        seconds = [_median(row, name) for row in rows]
        time.bar(range(len(rows)), seconds, width=0.55, color=colour, label=label if any(seconds) else "")
    for position, row in enumerate(rows):
        train, wall = _median(row, "train_seconds"), _median(row, "wall_seconds")
        style.add_label(time, position, wall, f"{duration(train)} of {duration(wall)}")
    style.name_ticks(time, list(by_name))
    for axes in (throughput, time):
        style.start_at_zero(axes, headroom=0.25)
        style.add_legend(axes, loc="upper left", ncols=3)
    style.write_png(figure, path)
