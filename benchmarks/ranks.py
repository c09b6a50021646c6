"""What ranks change on a CPU: a job on one thread, on all threads, and on a rank for each core.

    python benchmarks/ranks.py --data-root FOLDER [--repeats 3] [--jobs fashion-mnist,caltech101] [--out FILE]

All compute in 32-bit floats. Every run is a fresh `flatout train`; the variants alternate, round after round. See
README.md beside this file.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from common import about, make_parser, median_ratio, settings, train, write
from compare import PACKAGES
from flatout.utils.host import physical_cores

# Job -> data set in the data root, epochs, further flags: enough for some seconds on one thread.
JOBS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "fashion-mnist": ("fashion-mnist", 4, ()),
    "fashion-mnist-keras": ("fashion-mnist", 2, ()),
    "mnist-parallel": ("mnist.json.gz", 2, ()),
    "caltech101": ("caltech101", 6, ()),
    "cats-dogs": ("cats-dogs", 2, ()),
    "oct-vgg16": ("oct", 2, ("--no-pretrained", "--set", "image_size=128")),
}


def run(job: str, data: Path, devices: str, threads: int) -> dict[str, float]:
    """Train once; return the figures of the run."""
    _, epochs, flags = JOBS[job]
    words = (job, "--data", data, "--epochs", epochs, *flags, "--devices", devices)
    run = train(*words, *settings({"early_stopping": 0, "precision": "fp32"}), OMP_NUM_THREADS=str(threads))
    summary, later = run.summary, run.epochs[1:]
    return {
        "images_per_second": sum(r["images"] for r in later) / sum(r["seconds"] for r in later),
        "communication_fraction": summary["communication_fraction"],
        "process_seconds": run.seconds,
        "overhead_seconds": run.seconds - summary["train_seconds"] - summary["time_seconds"]["evaluate"],
        "test_correct": summary["test_correct"],
    }


def measure(job: str, root: Path, repeats: int) -> dict[str, Any]:
    """Run the variants in turn; return all figures, and medians of the ratios of each round."""
    count, data = physical_cores(), root / JOBS[job][0]
    variants = {"one thread": ("cpu", 1), "threads": ("cpu", count), "ranks": (f"{count}xcpu", 1)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, variant in variants.items():
            rounds[name].append(run(job, data, *variant))
            print(f"{job} {repeat + 1}/{repeats} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)

    def ratio(of: str, over: str) -> float:
        return median_ratio(*([one["images_per_second"] for one in rounds[name]] for name in (of, over)))

    return {
        "rounds": rounds,
        "ranks_over_one_thread": ratio("ranks", "one thread"),
        "ranks_over_threads": ratio("ranks", "threads"),
        "communication_fraction": statistics.median(r["communication_fraction"] for r in rounds["ranks"]),
        "launch_seconds": statistics.median(
            a["overhead_seconds"] - b["overhead_seconds"]
            for a, b in zip(rounds["ranks"], rounds["one thread"], strict=True)
        ),
    }


def main() -> None:
    parser = make_parser(__doc__, "ranks")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {**about(*PACKAGES), "jobs": {}}
    for job in args.jobs.split(","):
        result["jobs"][job] = measured = measure(job, args.data_root, args.repeats)
        write(result, args.out)
        ratios = ", ".join(f"{name} {value:.3g}" for name, value in measured.items() if name != "rounds")
        print(f"{job}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
