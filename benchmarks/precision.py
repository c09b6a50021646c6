"""The accuracy of the built-in jobs in bfloat16 against 32 bits, over several seeds; prints a table, writes JSON.

    python benchmarks/precision.py --data-root D [--jobs digits fashion-mnist ...] [--seeds 1 2 3] [--out FILE]

It says nothing about speed: a device without bfloat16 units gives the same accuracies, slowly.
"""

import statistics
from pathlib import Path

from common import about, make_parser, settings, train, write

# Job -> its data below the root, and flags: fewer epochs where all of them take long on two cores. At its published
# rate caltech101 learns nothing in any format.
JOBS = {
    "digits": ("", ""),
    "fashion-mnist": ("fashion-mnist", "--epochs 10"),
    "fashion-mnist-keras": ("fashion-mnist", ""),
    "mnist-parallel": ("mnist.json.gz", ""),
    "caltech101": ("caltech101", "--lr 0.01"),
    "cats-dogs": ("cats-dogs", ""),
}


def accuracy(job: str, root: Path, precision: str, seed: int, devices: str) -> float:
    """Train in a fresh process and return the test accuracy, or that of validation where there is no test split."""
    data, flags = JOBS[job]
    words = [job, "--seed", seed, "--devices", devices, *settings({"precision": precision}), *flags.split()]
    words += ["--data", root / data] if data else []
    summary = train(*words).summary
    return next(value for name in ("test", "valid") if (value := summary[f"{name}_accuracy"]) is not None)


def main() -> None:
    parser = make_parser(__doc__, "precision")
    parser.add_argument("--data-root", type=Path, required=True, help="the folder with the data sets")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()
    result = {
        **about("flatout", "torch"),
        "seeds": args.seeds,
        "flags": {job: JOBS[job][1] for job in args.jobs},
        "accuracies": {},
    }
    print(f"{'job':<22}{'fp32':>18}{'bf16':>18}{'difference':>12}")
    for job in args.jobs:
        found = {
            precision: [accuracy(job, args.data_root, precision, seed, args.devices) for seed in args.seeds]
            for precision in ("fp32", "bf16")
        }
        result["accuracies"][job] = found
        write(result, args.out)
        means = [statistics.mean(values) for values in found.values()]
        spreads = [statistics.pstdev(values) for values in found.values()]
        cells = "".join(f"{mean:>10.4f} ±{spread:.4f}" for mean, spread in zip(means, spreads, strict=True))
        print(f"{job:<22}{cells}{means[1] - means[0]:>+12.4f}", flush=True)


if __name__ == "__main__":
    main()
