"""`flatout scale`: train one recipe on several choices of devices, and compare them.

Every run is a process of its own, so that none inherits another's warm caches or memory. Repeats alternate between the
choices (A B A B), so that a machine that slows down affects all of them alike.
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
from flatout.console import Console, aligned, duration
from flatout.errors import InputError, Stopped, TrainingFailed
from flatout.files import write_atomically
from flatout.inference.run import Run
from flatout.report.run_files import RECIPE, write_json
from flatout.scale.chart import draw_scaling
from flatout.scale.findings import findings, is_plausible

RESULT, CHART = "scaling.json", "scaling.png"
LAST_LINES = 10  # printed of a run that failed without a message

# What is compared of a run: medians over the repeats, with the least and the most.
FIGURES = (
    "images_per_second", "epoch_seconds", "train_seconds", "warmup_seconds", "setup_seconds", "wall_seconds",
    "communication_fraction", "input_wait_fraction",
)  # fmt: skip


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


def check_free(out: Path | None) -> None:
    """Raise InputError where a folder to write to holds something already."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty folder; choose another --out")


def make_folder(out: Path | None, name: str) -> Path:
    """Make the folder `out`, or a new one under `runs/`; raise InputError where it cannot be written."""
    out = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
    return out


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
        job: a built-in job, a recipe file or the path of data.
        data: the path of the data; None takes the job's.
        changes: dotted recipe keys to override.
        devices: SPECs separated by commas.
        out: a new or empty folder; None for a new one under `runs/`.
        repeats: runs of every SPEC.
        weak: keep the batch per device, rather than the global batch.

    Raises:
        InputError: something given is wrong, or a run says so; the message then names its SPEC.
        TrainingFailed: a run failed. What was measured before is in scaling.json.
        Stopped: a run was stopped by a signal of its own.
    """
    from flatout.data.load import load
    from flatout.engine.devices import engine_for, machine, parse_devices
    from flatout.run.resolve import resolve

    if repeats < 1:
        raise InputError(f"--repeats {repeats}: must be at least 1")
    chosen = {spec: parse_devices(spec, engine_for(spec, "auto")) for spec in split_specs(devices)}
    if weak and "auto" in chosen:
        raise InputError("--weak: auto chooses the number of devices by itself; name it, as in 2xcpu or 4xcuda")
    check_free(out)
    accelerated = all(choice.is_accelerated for choice in chosen.values())
    recipe, found = resolve(job, data, changes, accelerated=accelerated, console=console)
    # Decoded here, or only the first run would include decoding in its time.
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
        # scaling.json is complete after every run, whatever ends this process.
        for repeat in range(1, repeats + 1):
            for spec, d in chosen.items():
                name, folder = f"{spec}, run {repeat} of {repeats}", out / folder_name(spec, repeat)
                console.note(f"{name}: {folder}")
                batch_size = recipe.batch_size * (len(d.indices) if weak else 1)
                _train(name, out / RECIPE, "--devices", spec, "--batch-size", str(batch_size), "--out", str(folder))
                run = {"devices": spec, "kind": d.kind, "repeat": repeat, "batch_size": batch_size, **_measured(folder)}
                runs.append(run)
                rate = f"{run['images_per_second']:,.0f} images per second, " if run["images_per_second"] else ""
                times = f"training {duration(run['train_seconds'])}, everything {duration(run['wall_seconds'])}"
                console.note(f"{name}: {rate}{times}")
                write_json(out / RESULT, {**head, **compare(runs), "ended": "not finished"})
    except BaseException as error:
        ended = str(error) if isinstance(error, InputError | TrainingFailed) else "stopped"
        write_json(out / RESULT, {**head, **compare(runs), "ended": ended})
        if runs:
            console.note(f"the runs finished so far are in {out / RESULT}")
        raise
    result = {**head, **compare(runs), "ended": None}
    result["findings"] = findings(result)
    write_json(out / RESULT, result)
    draw_scaling(out / CHART, result)
    return {**result, "out": str(out)}


def folder_name(spec: str, repeat: int) -> str:
    """Return the name of the run folder of a repeat, counted from 1."""
    return f"{re.sub(r'[:,]', '-', spec)}-{repeat}"


def _train(name: str, recipe: Path, *options: str) -> None:
    """Train in a process of its own; raise what it ended with, its message under the name of the run."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: a random.py in the current folder is none of our imports.
            [sys.executable, "-P", "-m", "flatout", "train", str(recipe), *options],
            stdin=subprocess.DEVNULL,
            stdout=2 if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=errors,
            # A session of its own: Ctrl-C then reaches the run through us, once, and not from the terminal as well.
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
    """Wait for the run; what stops this process is passed on to it, and it may finish its checkpoint before we go."""
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


def _measured(folder: Path) -> dict[str, Any]:
    """Return the figures of a finished run."""
    run = Run(folder)
    summary = run.summary
    epochs = [line["seconds"] for line in run.epochs]
    figures: dict[str, Any] = {name: summary.get(name) for name in FIGURES}
    figures["epoch_seconds"] = statistics.median(epochs[1:] or epochs)
    if figures["warmup_seconds"] is None and len(epochs) > 1:
        # Too few steps to tell the first ones from the rest: compare the first epoch with the others.
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


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `specs`, a row of figures for each SPEC that was measured, and `runs`, as they came.

    A figure is {median, min, max} over the repeats, or None where it was not measured. `speed_up` and `efficiency` are
    against `base`, the SPEC of the same kind with the fewest devices: speed-up is the ratio of the images per second,
    efficiency the speed-up divided by the ratio of the numbers of devices (processes, on CPUs).
    """
    rows: list[dict[str, Any]] = []
    for spec in dict.fromkeys(run["devices"] for run in runs):
        mine = [run for run in runs if run["devices"] == spec]
        keys = ("devices", "kind", "batch_size", "world_size", "split", "count", "threads_per_rank")
        row = {key: mine[-1][key] for key in keys}
        row |= {name: spread([run[name] for run in mine]) for name in (*FIGURES, "accuracy")}
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


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return {median, min, max} of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return the table, a column for each SPEC, and the findings, as lines; `result` is what `scale` returned."""
    bases = {row["devices"]: row for row in result["specs"]}
    columns = [_cells(row, bases[row["base"]]) for row in result["specs"]]
    table = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [*aligned(table), "", *result["findings"], f"{result['out']}: {RESULT}, {CHART} and a folder for each run"]


def _cells(row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    def median(name: str, text: Callable[[float], str]) -> str:
        return text(row[name]["median"]) if row[name] else "-"

    rate, threads, efficiency = row["images_per_second"], row["threads_per_rank"], row["efficiency"]
    doubt = "" if is_plausible(row, base) else " (unreliable)"
    answers = sorted({n for n in row["correct"] if n is not None})
    right = "..".join(f"{n:,}" for n in dict.fromkeys((*answers[:1], *answers[-1:])))
    return {
        "devices": row["devices"],
        "processes x threads": f"{row['world_size']} x {threads}" if threads else f"{row['world_size']}",
        "batch": f"{row['batch_size']:,}",
        "images per second": median("images_per_second", "{:,.0f}".format),
        "  least to most": f"{rate['min']:,.0f} to {rate['max']:,.0f}" if rate else "-",
        "speed-up": f"{row['speed_up']:.2f}" if row["speed_up"] else "-",
        "efficiency": "-" if efficiency is None else f"{efficiency:.0%}{doubt}",
        "  against": row["base"],
        "time per epoch": median("epoch_seconds", "{:.3g} s".format),
        "training time": median("train_seconds", duration),
        "  of it warm-up": median("warmup_seconds", duration),
        "everything included": median("wall_seconds", duration),
        "communication": median("communication_fraction", "{:.1%}".format),
        "waiting for input": median("input_wait_fraction", "{:.1%}".format),
        f"{row['split']} images right": f"{right} of {row['count']:,}" if right else "-",
    }
