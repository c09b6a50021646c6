"""What the scripts of this folder share: flags, runs in fresh processes, and the form of results.

Importing it loads neither flatout nor torch: the loops that flatout is compared with use it too.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def make_parser(description: str | None, out: str = "") -> argparse.ArgumentParser:
    """Return a parser that shows a description as it is written; with --out, by default the result called `out`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        made.add_argument("--out", type=Path, default=RESULTS / f"{out}.json", help="where the result goes")
    return made


def about(*packages: str) -> dict[str, Any]:
    """Return date, machine and versions; called after processes have been measured, as it loads torch."""
    from flatout.engine.devices import machine

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
    }


def write(result: dict[str, Any], out: Path) -> None:
    """Write a result as JSON, replacing an earlier one at once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".new")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(out)


def in_turn(ways: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call functions one after the other, round after round; return the results of each."""
    rounds = [{name: call() for name, call in ways.items()} for _ in range(repeats)]
    return {name: [one[name] for one in rounds] for name in ways}


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within a round: of values that were measured in turn with others."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def image_files(folder: Path, *endings: str) -> list[Path]:
    """Return the files below a folder with one of some endings, by default those of JPEG."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in (endings or (".jpg", ".jpeg")))


# --- processes --------------------------------------------------------------------------------------------------------


class RunFailed(SystemExit):
    """A process ended with an error."""


def run_process(command: Sequence[str], **environment: str) -> tuple[float, str]:
    """Run a command to its end; return the seconds it took and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        text = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RunFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{text}")
    return seconds, done.stdout


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run: the seconds of its process, seen from outside, and the content of its files."""

    seconds: float
    summary: dict[str, Any]
    epochs: list[dict[str, Any]]
    recipe: dict[str, Any]


def train(*words: object, **environment: str) -> Trained:
    """Run `flatout train` in a process of its own and a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="flatout-benchmark-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "flatout", "train", *map(str, words), "--out", str(run)]
        seconds, _ = run_process(command, **environment)
        metrics = run / "metrics.jsonl"  # missing if no epoch was trained
        return Trained(
            seconds=seconds,
            summary=json.loads((run / "summary.json").read_text()),
            epochs=[json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
            recipe=tomllib.loads((run / "recipe.toml").read_text()),
        )


def settings(changes: dict[str, Any]) -> list[str]:
    """Return recipe keys as flags."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


# --- loops without flatout --------------------------------------------------------------------------------------------


def loop_parser(description: str | None, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser with the flags of all loops."""
    made = make_parser(description)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--epochs", type=int, default=epochs)
    made.add_argument("--batch-size", type=int, default=batch_size)
    made.add_argument("--lr", type=float, default=lr)
    return made


def read_idx(path: Path) -> np.ndarray:
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def print_figures(
    began: float,
    images: Sequence[int],
    train_seconds: list[float],
    evaluate_seconds: list[float],
    *,
    accuracy: float,
    threads: int,
) -> None:
    """Print the figures of a loop that began at a time, for `compare.py`; images and seconds are of each epoch."""
    later = sum(train_seconds[1:])
    result = {
        "images_per_second": sum(images[1:]) / later if later else None,
        "images_per_second_all_epochs": sum(images) / sum(train_seconds),
        "first_epoch_seconds": train_seconds[0],
        "epoch_train_seconds": train_seconds,
        "epoch_evaluate_seconds": evaluate_seconds,
        "total_seconds": time.perf_counter() - began,
        "accuracy": accuracy,
        "threads": threads,
    }
    print(json.dumps(result))
