"""Accuracy by the minute: `flatout train DATA --minutes M` on data whose recipe is generated; prints JSON.

    python benchmarks/minutes.py --data-root D [--only fashion-mnist ...] [--out FILE]

Training starts from random weights, so that the figures do not depend on what the host has downloaded. The wall time is
that of the whole process, seen from outside.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from about import about

# Data below the root, and minutes.
CASES = (("fashion-mnist", 5.0), ("mnist", 2.0), ("cats-dogs", 1.0), ("cats-dogs", 10.0), ("caltech101", 10.0))


def measure(data: Path, minutes: float) -> dict[str, Any]:
    """Train in a fresh process and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "flatout", "train", str(data), "--no-pretrained"]
        began = time.perf_counter()
        subprocess.run([*command, "--minutes", str(minutes), "--out", str(out)], check=True, stdout=sys.stderr)
        return figures(out, data.name, minutes, time.perf_counter() - began)


def figures(run: Path, data: str, minutes: float, process_seconds: float) -> dict[str, Any]:
    """Return the figures of a run folder."""
    summary = json.loads((run / "summary.json").read_text())
    keys = ("model", "devices", "epochs", "images_trained", "images_per_second", "test_accuracy", "versions")
    return {"data": data, "minutes": minutes, "process_seconds": process_seconds, **{key: summary[key] for key in keys}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="the folder with the data sets")
    parser.add_argument("--only", nargs="*", default=[], help="data sets; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "minutes.json")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or case[0] in args.only]
    result = {
        **about("flatout", "torch"),
        "runs": [measure(args.data_root / name, minutes) for name, minutes in cases],
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
