"""Run the tests with each supported Python and the oldest and newest torch, each pair in an environment of its own.

    python tests/versions.py                                          # all quick tests with every pair
    python tests/versions.py --python python3.12 --torch 2.11 newest -- tests/unit

An environment takes about 5.5 GB and is removed after its tests. Output goes to DIR/PYTHON-torch-VERSION.log.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "newest"


def supported() -> tuple[list[str], list[str]]:
    """Return the commands of Python on PATH, and the oldest and the newest torch, that pyproject.toml admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (text for text in project["dependencies"] if text.startswith("torch>"))
    torches = [needed.removeprefix("torch>="), NEWEST]
    oldest = int(re.fullmatch(r">=3\.(\d+)", project["requires-python"])[1])  # pyright: ignore
    pythons = [f"python3.{minor}" for minor in range(oldest, oldest + 10)]
    return [name for name in pythons if _runs(name)], torches


def _runs(python: str) -> bool:
    """Return whether a command starts Python; pyenv has commands for versions that are not chosen, which fail."""
    return bool(shutil.which(python)) and not subprocess.run([python, "-c", ""], capture_output=True).returncode


def main() -> int:
    pythons, torches = supported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=pythons, metavar="COMMAND", help=f"default: {' '.join(pythons)}")
    parser.add_argument("--torch", nargs="+", default=torches, metavar="VERSION", help=f"default: {' '.join(torches)}")
    parser.add_argument("--extras", default="dev", help="of flatout, that are installed (dev)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "versions", metavar="DIR")
    parser.add_argument("tests", nargs="*", metavar="-- TESTS", help="arguments of pytest (-m 'not slow')")
    args = parser.parse_args()
    if missing := [name for name in args.python if not _runs(name)]:
        parser.error(f"cannot be started: {', '.join(missing)}")
    if not args.python:
        parser.error("no supported Python is on PATH; name one with --python")
    args.logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for python in args.python:
        for torch in args.torch:
            began, log = time.monotonic(), args.logs / f"{Path(python).name}-torch-{torch}.log"
            with log.open("w", encoding="utf-8") as output:
                step = _failed_step(python, torch, args.extras, args.tests or ["-m", "not slow"], output)
            failed += bool(step)
            result = f"failed: {step}; see {log}" if step else "passed"
            print(f"{Path(python).name}  torch {torch}  {result}  {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


def _failed_step(python: str, torch: str, extras: str, tests: list[str], log: TextIO) -> str:
    """Return which step failed for a pair; empty if none did."""
    with tempfile.TemporaryDirectory(prefix="flatout-versions-") as folder:
        own = str(Path(folder) / "bin" / "python")
        pinned = [] if torch == NEWEST else [f"torch=={torch}.*"]
        install = [own, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[{extras}]", *pinned]
        steps = {
            "environment": [python, "-m", "venv", folder],
            "installation": install,
            "versions": [own, "-m", "flatout", "--version"],
            "tests": [own, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        }
        for name, command in steps.items():
            if subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode:
                return name
    return ""


if __name__ == "__main__":
    sys.exit(main())
