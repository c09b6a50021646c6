"""Other loops and libraries against flatout, alternately, each run a fresh process; prints a table, writes JSON.

    python benchmarks/compare.py fashion-mnist --data-root FOLDER [--epochs 5] [--repeats 3]

FOLDER holds the data sets: fashion-mnist/, caltech101/, mnist.json.gz. See README.md beside this file.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, about, make_parser, run_process, train, write
from flatout.engine.devices import cpu_threads
from flatout.utils.console import aligned

PACKAGES = ("flatout", "torch", "torchvision", "numpy", "pillow", "simplejpeg")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one run came to.

    Attributes:
        images_per_second: over the training passes from the second epoch on.
        images_per_second_all_epochs: over all training passes.
        first_epoch_seconds: the first training pass.
        process_seconds: the whole process, from its start to its end, as seen from outside.
        full_job_seconds: the same for as many epochs as the job has: measured if that many were run, else the epochs
            that were not are taken to cost, with evaluation and all else between epochs, what the later ones did.
        accuracy: after the last epoch.
    """

    images_per_second: float
    images_per_second_all_epochs: float
    first_epoch_seconds: float
    process_seconds: float
    full_job_seconds: float
    accuracy: float


# For each figure, which way is better; None where flatout and the loop should agree.
BETTER: dict[str, Callable[..., float] | None] = {
    "images_per_second": max,
    "images_per_second_all_epochs": max,
    "first_epoch_seconds": min,
    "process_seconds": min,
    "full_job_seconds": min,
    "accuracy": None,
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A job of flatout and the loops that do the same without it.

    Attributes:
        job: a built-in job of flatout; None for a recipe generated from the data.
        data: the data set in the data root.
        variants: name -> a script and its flags; the fastest is the yardstick.
        epochs: epochs of the full job.
        split: the split on which the loops give their accuracy.
        flags: further flags of flatout.
    """

    job: str | None
    data: str
    variants: dict[str, tuple[str, ...]]
    epochs: int
    split: str
    flags: tuple[str, ...] = ()


def with_and_without_workers(script: str) -> dict[str, tuple[str, ...]]:
    return {"plain": (script, "--workers", "0"), "plain, 2 workers": (script, "--workers", "2")}


FASHION: dict[str, Any] = {"job": "fashion-mnist", "data": "fashion-mnist", "split": "test", "epochs": 50}
FASHION_LOOPS = with_and_without_workers("plain_fashion_mnist.py")
KERAS, RANKS = "keras_fashion_mnist.py", ("--devices", "2xcpu")
COMPARISONS = {
    "fashion-mnist": Comparison(**FASHION, variants=FASHION_LOOPS),
    "fashion-mnist-same-batch": Comparison(
        **FASHION,
        variants={
            f"{name}, batch 1024": (*command, "--batch-size", "1024", "--lr", "0.08")
            for name, command in FASHION_LOOPS.items()
        },
    ),
    "fashion-mnist-peers": Comparison(
        **FASHION,
        variants={
            "plain": FASHION_LOOPS["plain"],
            "Lightning": ("lightning_fashion_mnist.py",),
            "Lightning, in memory": ("lightning_fashion_mnist.py", "--in-memory"),
            "Keras on JAX": (KERAS,),
            "Keras on torch": (KERAS, "--backend", "torch"),
        },
        flags=RANKS,
    ),
    "fashion-mnist-xla": Comparison(**FASHION, variants={"Keras on JAX": (KERAS,)}, flags=("--engine", "xla")),
    "resnet18": Comparison(
        job=None,
        data="cats-dogs",
        variants={
            "plain, fp32": ("plain_resnet18.py", "--precision", "fp32"),
            "plain, autocast": ("plain_resnet18.py", "--precision", "bf16"),
        },
        epochs=30,
        split="test",
        flags=(
            *("--devices", "auto", "--model", "timm:resnet18", "--no-pretrained", "--batch-size", "64"),
            *("--set", "image_size=160"),
        ),
    ),
    "caltech101": Comparison(
        job="caltech101",
        data="caltech101",
        variants=with_and_without_workers("plain_caltech101.py"),
        epochs=50,
        split="valid",
    ),
    "mnist-parallel": Comparison(
        job="mnist-parallel",
        data="mnist.json.gz",
        variants={"plain": ("plain_mnist_parallel.py",)},
        epochs=2,
        split="test",
    ),
}


def full_job(process_seconds: float, later_epoch_seconds: float, epochs: int, full_epochs: int) -> float:
    return process_seconds + max(0, full_epochs - epochs) * later_epoch_seconds


def run_plain(comparison: Comparison, variant: str, data: Path, epochs: int, threads: int) -> Figures:
    """Run a loop; its last line of output is its figures."""
    script, *flags = comparison.variants[variant]
    command = [sys.executable, str(HERE / script), "--data", str(data), "--epochs", str(epochs), *flags]
    seconds, printed = run_process(command)
    result = json.loads(printed.splitlines()[-1])
    if result["threads"] != threads:
        sys.exit(f"{script} ran on {result['threads']} threads, not {threads}")
    later = statistics.mean(result["epoch_train_seconds"][1:]) + statistics.mean(result["epoch_evaluate_seconds"][1:])
    return Figures(
        process_seconds=seconds,
        full_job_seconds=full_job(seconds, later, epochs, comparison.epochs),
        **{key: result[key] for key in ("images_per_second", "images_per_second_all_epochs", "first_epoch_seconds")},
        accuracy=result["accuracy"],
    )


def run_flatout(comparison: Comparison, data: Path, epochs: int) -> Figures:
    """Run the job without a cache, so that every run decodes the images itself, and read its run folder."""
    what = [comparison.job, "--data", data] if comparison.job else [data]
    run = train(*what, "--devices", "cpu", "--epochs", epochs, "--no-cache", *comparison.flags)
    seconds, summary, records = run.seconds, run.summary, run.epochs
    first, *rest = records
    trained_for, times = sum(r["seconds"] for r in rest), summary["time_seconds"]
    # One evaluation more than there are epochs, as the end of the run has its own. The rest of the run's time, beside
    # set-up and pictures, went into checkpoints and figures between the epochs.
    known = summary["setup_seconds"] + sum(times[part] for part in ("train", "evaluate", "pictures"))
    between = summary["wall_seconds"] - known
    later = trained_for / len(rest) + times["evaluate"] / (epochs + 1) + max(0.0, between) / epochs
    accuracy = records[-1].get(f"{comparison.split}_accuracy")
    return Figures(
        images_per_second=sum(r["images"] for r in rest) / trained_for,
        images_per_second_all_epochs=summary["images_per_second"],
        first_epoch_seconds=first["seconds"],
        process_seconds=seconds,
        full_job_seconds=full_job(seconds, later, epochs, comparison.epochs),
        accuracy=summary[f"{comparison.split}_accuracy"] if accuracy is None else accuracy,
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(rounds: list[dict[str, Figures]]) -> dict[str, Any]:
    """Return, for each figure, its spread for every side, the yardstick, and how many times better flatout is.

    The yardstick is the variant of the loop with the best median in that very figure. Ratios are taken round by round.
    """
    summary = {}
    for name, better in BETTER.items():
        sides = {side: [getattr(figures[side], name) for figures in rounds] for side in rounds[0]}
        entry: dict[str, Any] = {side: spread(values) for side, values in sides.items()}
        if better is not None:
            medians = {statistics.median(values): side for side, values in sides.items() if side != "flatout"}
            yardstick = medians[better(medians)]
            pairs = list(zip(sides[yardstick], sides["flatout"], strict=True))
            ratios = [ours / theirs if better is max else theirs / ours for theirs, ours in pairs]
            entry |= {"yardstick": yardstick, "times_better": {**spread(ratios), "by_round": ratios}}
        summary[name] = entry
    return summary


def table(summary: dict[str, Any], sides: list[str]) -> str:
    """Return medians with (min to max) of every side, and the ratio to the yardstick, marked with a star."""

    def cell(entry: dict[str, Any], side: str) -> str:
        numbers = [entry[side][key] for key in ("median", "min", "max")]
        digits = 4 if numbers[0] < 1 else 2 if numbers[0] < 100 else 0
        median, low, high = (f"{n:,.{digits}f}" for n in numbers)
        return f"{median} ({low} to {high}){' *' if entry.get('yardstick') == side else ''}"

    rows = [["", *sides, "times better"]]
    for name, entry in summary.items():
        ratio = entry.get("times_better")
        words = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else ""
        rows.append([name, *(cell(entry, side) for side in sides), words])
    return "\n".join(aligned(rows))


def read_once(data: Path) -> None:
    """Bring the files into the page cache, so that the first run is no colder than the others."""
    for file in [data] if data.is_file() else (p for p in data.rglob("*") if p.is_file()):
        file.read_bytes()


def run_rounds(comparison: Comparison, data: Path, epochs: int, repeats: int, threads: int) -> list[dict[str, Figures]]:
    """Run all sides one after the other, `repeats` times."""
    rounds: list[dict[str, Figures]] = []
    for number in range(1, repeats + 1):
        rounds.append({})
        for side in [*comparison.variants, "flatout"]:
            if side == "flatout":
                figures = run_flatout(comparison, data, epochs)
            else:
                figures = run_plain(comparison, side, data, epochs, threads)
            rounds[-1][side] = figures
            rate, seconds = figures.images_per_second, figures.process_seconds
            print(f"round {number}, {side}: {rate:,.0f} images per second, process {seconds:.1f} s", file=sys.stderr)
    return rounds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("name", choices=list(COMPARISONS))
    parser.add_argument("--data-root", type=Path, required=True, help="the folder that holds the data sets")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of every run, at least 2")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all sides")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: results/NAME.json beside this file")
    args = parser.parse_args()
    comparison, data = COMPARISONS[args.name], args.data_root / COMPARISONS[args.name].data
    if args.epochs < 2 or args.repeats < 1:
        parser.error("--epochs must be at least 2 and --repeats at least 1")
    if not data.exists():
        parser.error(f"--data-root {args.data_root}: has no {comparison.data}")

    threads = cpu_threads()
    read_once(data)
    rounds = run_rounds(comparison, data, args.epochs, args.repeats, threads)
    summary = summarise(rounds)
    is_extrapolated = args.epochs < comparison.epochs
    result = {
        "comparison": args.name,
        **about(*PACKAGES),
        "threads": threads,
        "epochs": args.epochs,
        "epochs_of_full_job": comparison.epochs,
        "full_job_is_extrapolated": is_extrapolated,
        "repeats": args.repeats,
        "summary": summary,
        "rounds": [{side: asdict(figures) for side, figures in one.items()} for one in rounds],
    }
    out = args.out or RESULTS / f"{args.name}.json"
    write(result, out)
    print(table(summary, [*comparison.variants, "flatout"]))
    print("* the yardstick: the best of the loops in that figure")
    print(f"full job: {comparison.epochs} epochs" + f", extrapolated from {args.epochs}" * is_extrapolated)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
