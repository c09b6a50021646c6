"""What ranks change on a CPU: a job on one thread, on all threads, and on a rank for each core.

    python benchmarks/ranks.py --data-root FOLDER [--repeats 3] [--jobs fashion-mnist,caltech101] [--out FILE]

All compute in 32-bit floats. Every run is a fresh `flatout train`; the variants alternate, round after round. See
README.md beside this file.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from about import about
from compare import HERE, PACKAGES, run_process
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

FP32 = ("--set", "precision=fp32")


def run(job: str, data: Path, devices: str, threads: int, folder: Path) -> dict[str, float]:
    """Train once; return the figures of the run."""
    _, epochs, flags = JOBS[job]
    command = [sys.executable, "-m", "flatout", "train", job, "--data", str(data), "--epochs", str(epochs), *flags]
    command += ["--devices", devices, "--out", str(folder), "--overwrite", "--set", "early_stopping=0", *FP32]
    seconds, _ = run_process(command, OMP_NUM_THREADS=str(threads))
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    later = records[1:]
    return {
        "images_per_second": sum(r["images"] for r in later) / sum(r["seconds"] for r in later),
        "communication_fraction": summary["communication_fraction"],
        "process_seconds": seconds,
        "overhead_seconds": seconds - summary["train_seconds"] - summary["time_seconds"]["evaluate"],
        "test_correct": summary["test_correct"],
    }


def measure(job: str, root: Path, repeats: int, folder: Path) -> dict[str, Any]:
    """Run the variants in turn; return all figures, and medians of the ratios of each round."""
    count, data = physical_cores(), root / JOBS[job][0]
    variants = {"one thread": ("cpu", 1), "threads": ("cpu", count), "ranks": (f"{count}xcpu", 1)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, variant in variants.items():
            rounds[name].append(run(job, data, *variant, folder / f"{job}-{name}".replace(" ", "-")))
            print(f"{job} {repeat + 1}/{repeats} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)

    def ratio(of: str, over: str) -> float:
        rates = (
            (a["images_per_second"], b["images_per_second"]) for a, b in zip(rounds[of], rounds[over], strict=True)
        )
        return statistics.median(a / b for a, b in rates)

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ranks.json")
    args = parser.parse_args()
    result: dict[str, Any] = {**about(*PACKAGES), "jobs": {}}
    with tempfile.TemporaryDirectory(prefix="flatout-ranks-") as folder:
        for job in args.jobs.split(","):
            result["jobs"][job] = measured = measure(job, args.data_root, args.repeats, Path(folder))
            args.out.write_text(json.dumps(result, indent=2) + "\n")
            ratios = ", ".join(f"{name} {value:.3g}" for name, value in measured.items() if name != "rounds")
            print(f"{job}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
