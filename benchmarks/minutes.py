"""Accuracy by the minute: `flatout train DATA --minutes M` on data whose recipe is generated; prints JSON.

    python benchmarks/minutes.py --data-root D [--only fashion-mnist ...] [--out FILE]

Training starts from random weights, so that the figures do not depend on what the host has downloaded. The wall time is
that of the whole process, seen from outside.
"""

import json
from pathlib import Path
from typing import Any

from common import about, make_parser, train, write

# Data below the root, and minutes.
CASES = (("fashion-mnist", 5.0), ("mnist", 2.0), ("cats-dogs", 1.0), ("cats-dogs", 10.0), ("caltech101", 10.0))


def measure(data: Path, minutes: float) -> dict[str, Any]:
    """Train in a fresh process and return its figures."""
    run = train(data, "--no-pretrained", "--minutes", minutes)
    keys = ("model", "devices", "epochs", "images_trained", "images_per_second", "test_accuracy", "versions")
    figures = {key: run.summary[key] for key in keys}
    return {"data": data.name, "minutes": minutes, "process_seconds": run.seconds, **figures}


def main() -> None:
    parser = make_parser(__doc__, "minutes")
    parser.add_argument("--data-root", type=Path, required=True, help="the folder with the data sets")
    parser.add_argument("--only", nargs="*", default=[], help="data sets; default: all")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or case[0] in args.only]
    result = {
        **about("flatout", "torch"),
        "runs": [measure(args.data_root / name, minutes) for name, minutes in cases],
    }
    write(result, args.out)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
