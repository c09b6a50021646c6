"""The first ten minutes on a GPU: what only a GPU can show, in seven parts.

    python benchmarks/gpu.py --out FOLDER [--parts 1,2,...] [--data fashion-mnist=PATH]
    python benchmarks/gpu.py --out FOLDER --rehearse      # everything in small; its figures mean nothing

Each part is a process with a time limit. Each measurement is appended to FOLDER/results.jsonl as soon as it is made,
and what the processes print to FOLDER/log.txt, so a part that fails or hangs loses only what it has not measured yet.
If no recorded step equals the eager one in part 2, the later parts are skipped: their figures would mean nothing.

A checkout is enough; flatout need not be installed. Python needs its dependencies. Images for GPUs usually lack
simplejpeg, tomli-w, ijson, shtab and pyarrow: where nothing can be downloaded, bring their wheels (`pip download`).
Without pytest, part 2 has only the comparison of recorded with eager steps. Part 3 needs the four files of
Fashion-MNIST (30 MB), which `--data` names; all other images are random.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part by its name: the function of `gpu_parts` that measures it, and its time limit in seconds."""

    name: str
    limit: int
    about: str


PARTS = {
    1: Part(name="machine", limit=30, about="versions, copies, matrix products, launches of graphs"),
    2: Part(name="tests", limit=120, about="recorded steps against eager ones; tests/engine/test_cuda.py"),
    3: Part(name="command", limit=60, about="flatout train fashion-mnist: phases, seconds, accuracy"),
    4: Part(name="fashion-step", limit=90, about="precision; eager, graph, tuned graph; kernels"),
    5: Part(name="resnet50", limit=170, about="224 pixels from device, memory and disk; tuned; kernels, memory"),
    6: Part(name="fast-cnn", limit=60, about="full and padded step, evaluation"),
    7: Part(name="recovery", limit=60, about="a capture that fails; two ranks on one GPU"),
}
# The part whose comparisons decide whether the later ones make sense.
GATE = 2
# A rehearsal is on a CPU, which takes longer for less.
REHEARSAL_LIMIT = 600


class Results:
    """The lines of one part in `results.jsonl`.

    Attributes:
        failed: the measurements that failed.
    """

    def __init__(self, out: Path, part: str) -> None:
        self.out, self._part = out, part
        self.failed: list[str] = []

    def write(self, name: str, **figures: Any) -> None:
        """Append a line."""
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": self._part, "name": name, **figures}) + "\n")

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[dict[str, Any]]:
        """Write the figures that are put into the dictionary; if the measurement fails, those so far and the error."""
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            figures["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        self.write(name, **figures)


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return the lines of `results.jsonl`."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


# --- the process of a part --------------------------------------------------------------------------------------------


def measure(name: str, out: Path, *, data: Path | None, rehearse: bool) -> None:
    """Measure a part in this process; exit with its failed measurements."""
    import gpu_parts

    results = Results(out, name)
    gpu_parts.PARTS[name](results, gpu_parts.REHEARSAL if rehearse else gpu_parts.FULL, data)
    if results.failed:
        sys.exit(f"failed: {', '.join(results.failed)}")


# --- the process that starts them -------------------------------------------------------------------------------------


def run_part(part: Part, out: Path, options: Sequence[str], limit: int) -> dict[str, Any]:
    """Run a part in a process of its own; return its seconds and, if it failed, the error."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, "--part", part.name, "--out", str(out), *options]
    began = time.perf_counter()
    with (out / "log.txt").open("ab") as log:
        start = log.tell()
        # In a session of its own, so that what it has started ends with it.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    figures: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if code is None:
        figures["error"] = f"not finished after {limit} s"
    elif code != 0:
        printed = (out / "log.txt").read_bytes()[start:].decode(errors="replace").split("\n")
        figures["error"] = next((line.strip() for line in reversed(printed) if line.strip()), f"exit code {code}")
    return figures


def run_parts(numbers: Sequence[int], out: Path, options: Sequence[str], *, rehearse: bool) -> None:
    """Run parts in turn, and write how each ended."""
    is_wrong = False
    for number in numbers:
        part = PARTS[number]
        if is_wrong:
            figures = {"skipped": f"no recorded step equalled the eager one in part {GATE}"}
        else:
            print(f"part {number}, {part.name}: {part.about}", flush=True)
            figures = run_part(part, out, options, REHEARSAL_LIMIT if rehearse else part.limit)
        Results(out, part.name).write("part", **figures)
        if number == GATE and not rehearse:
            is_wrong = not any(line.get("equals_eager") for line in read_results(out))


def summary(lines: list[dict[str, Any]]) -> str:
    """Return a table of all figures; lists are left to the file."""
    rows = []
    for line in lines:
        shown = {key: value for key, value in line.items() if key not in ("part", "name")}
        figures = [f"{key} {_short(value)}" for key, value in shown.items() if not isinstance(value, list | dict)]
        rows.append((line["part"], line["name"], ", ".join(figures)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:2]
    return "\n".join(f"{part:{widths[0]}}  {name:{widths[1]}}  {figures}" for part, name, figures in rows)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of results.jsonl and log.txt")
    parser.add_argument("--parts", default=",".join(map(str, PARTS)), help="numbers of the parts to run")
    parser.add_argument("--data", metavar="fashion-mnist=PATH", help="the folder of Fashion-MNIST, for part 3")
    parser.add_argument("--rehearse", action="store_true", help="everything in small, whatever the comparisons give")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    name, _, path = (args.data or "").partition("=")
    if args.data and (name != "fashion-mnist" or not Path(path).is_dir()):
        parser.error(f"--data {args.data}: must be fashion-mnist=PATH, with an existing folder")
    if args.part:
        measure(args.part, args.out, data=Path(path) if path else None, rehearse=args.rehearse)
        return
    if not set(args.parts.split(",")) <= set(map(str, PARTS)):
        parser.error(f"--parts {args.parts}: must be numbers from 1 to {len(PARTS)}, such as 1,2,4")
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "results.jsonl").exists():
        parser.error(f"--out {args.out}: has results already; name another folder")
    options = [*(["--data", args.data] if args.data else []), *(["--rehearse"] if args.rehearse else [])]
    run_parts(list(map(int, args.parts.split(","))), args.out.resolve(), options, rehearse=args.rehearse)
    print(summary(read_results(args.out)))


if __name__ == "__main__":
    main()
