"""`flatout scale`: train one recipe on several choices of devices, and compare them.

Every run is a separate process, so that none inherits another's warm caches or memory.
"""

import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.analysis.output import check_free, make_folder
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

Row = Mapping[str, Any]


def split_specs(text: str) -> list[str]:
    """Split `cpu,cuda:0,2,4xcuda` at its commas; numbers alone belong to the SPEC before them, as in `cuda:0,2`."""
    specs = [spec.strip() for spec in re.split(r",(?!\s*\d+\s*(?:,|$))", text)]
    if not all(specs) or len(set(specs)) < len(specs):
        raise InputError(f"--devices {text}: a SPEC is empty or named twice; write it as cpu,2xcpu")
    return specs


def scale(
    job: str, data: str | None, changes: Mapping[str, Any], *, devices: str, out: Path | None, console: Console
) -> dict[str, Any]:
    """Train the job on each SPEC of `devices`; write scaling.json and scaling.png; return the former's content."""
    chosen = {spec: parse_devices(spec, engine_for(spec, "auto")) for spec in split_specs(devices)}
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
        **{key: getattr(recipe, key) for key in ("job", "model", "batch_size", "epochs", "norm")},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "version": __version__,
    }
    runs: list[dict[str, Any]] = []
    ended: str | None = "stopped"
    try:
        for spec, choice in chosen.items():
            runs.append({"devices": spec, "kind": choice.kind, **_run(out, spec, console)})
        ended = None
    except (InputError, TrainingFailed) as error:
        ended = str(error)
        raise
    finally:
        result = {**head, "specs": compare_specs(runs), "ended": ended}
        write_json(out / SCALE_RESULT, result)
    draw_scaling(out / SCALE_CHART, result)
    return {**result, "out": str(out)}


def _run(out: Path, spec: str, console: Console) -> dict[str, Any]:
    folder = out / re.sub(r"[:,]", "-", spec)
    console.note(f"{spec}: {folder}")
    _train(spec, out / RECIPE, "--devices", spec, "--out", str(folder))
    run = _figures(folder)
    rate = f"{run['images_per_second']:,.0f} images per second, " if run["images_per_second"] else ""
    times = f"training {duration(run['train_seconds'])}, everything {duration(run['wall_seconds'])}"
    console.note(f"{spec}: {rate}{times}")
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
    """Return what is compared of a run; None for what was not measured."""
    run = Run(folder)
    summary, epochs = run.summary, [line["seconds"] for line in run.epochs]
    split = "test" if summary["test_count"] else "valid"
    copied = (
        *("world_size", "threads_per_rank", "images_trained", "stopped", "runs_on", "images_per_second"),
        *("train_seconds", "setup_seconds", "wall_seconds", "warmup_seconds", "communication_fraction"),
        "input_wait_fraction",
    )
    return {
        "folder": folder.name,
        **{key: summary.get(key) for key in copied},
        "epoch_seconds": statistics.median(epochs[1:] or epochs),
        "epoch_seconds_each": epochs,
        "split": split,
        **{name: summary.get(f"{split}_{name}") for name in ("accuracy", "correct", "count", "loss")},
    }


def compare_specs(runs: Sequence[Row]) -> list[dict[str, Any]]:
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


def format_scale(result: Row) -> list[str]:
    """Return the table, a column for each SPEC, as lines."""
    columns = [_cells(row) for row in result["specs"]]
    table = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [*aligned(table), "", f"{result['out']}: {SCALE_RESULT}, {SCALE_CHART} and a folder for each run"]


def _cells(row: Row) -> dict[str, str]:
    def cell(key: str, text: Callable[[float], str]) -> str:
        return "-" if row[key] is None else text(row[key])

    threads = _threads(row)
    return {
        "devices": row["devices"],
        "processes x threads": f"{row['world_size']}" + (f" x {row['threads_per_rank']}" if threads else ""),
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


def _threads(row: Row) -> int | None:
    """Return the threads of all processes; None on accelerators, where threads do not compute."""
    return row["world_size"] * row["threads_per_rank"] if row["kind"] == "cpu" and row["threads_per_rank"] else None


def draw_scaling(path: Path, result: Row) -> None:
    """Write a PNG with a bar for each SPEC: on the left images per second, with the ideal; on the right seconds.

    The ideal counts threads where they compute: a process of two threads is compared with two of one.
    """
    rows = {row["devices"]: row for row in result["specs"]}
    title = f"{shorten(result['job'], 40)}: global batch {result['batch_size']}, {counted(result['epochs'], 'epoch')}"
    figure = style.new_figure(9.0, 3.9, title=title)
    throughput, time = figure.subplots(1, 2)
    style.style_panel(throughput, "Images per second")
    style.draw_bars(throughput, list(rows), [row["images_per_second"] or 0 for row in rows.values()], "{:,.0f}".format)
    for position, row in enumerate(rows.values()):
        base = rows[row["base"]]
        work, base_work = _threads(row) or row["world_size"], _threads(base) or base["world_size"]
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
    style.name_ticks(time, list(rows))
    for axes in (throughput, time):
        style.start_at_zero(axes, headroom=0.25)
        style.add_legend(axes, loc="upper left", ncols=3)
    style.write_png(figure, path)
