"""Run the quick tests with each supported Python on PATH and the oldest and newest torch, each in an environment.

    python tests/versions.py [ARGUMENTS OF PYTEST]

An environment takes about 5.5 GB and is removed after its tests. Output goes to build/versions.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "versions"


def main(tests: list[str]) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (text for text in project["dependencies"] if text.startswith("torch>"))
    oldest = int(re.findall(r"\d+", project["requires-python"])[1])
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for python in (f"python3.{minor}" for minor in range(oldest, oldest + 10)):
        # pyenv has commands for versions that are not chosen, which fail.
        if subprocess.run(["sh", "-c", f"{python} -c ''"], capture_output=True).returncode:
            continue
        for torch in (f"{needed.replace('>=', '==')}.*", "torch"):
            log = LOGS / f"{python}-{re.sub('[^a-z0-9.]+', '-', torch)}.log"
            with tempfile.TemporaryDirectory(prefix="flatout-versions-") as folder:
                own = str(Path(folder) / "bin" / "python")
                steps = (
                    [python, "-m", "venv", folder],
                    [own, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[dev]", torch],
                    [own, "-m", "pytest", "-p", "no:cacheprovider", *(tests or ["-m", "not slow"])],
                )
                with log.open("w", encoding="utf-8") as output:
                    ended = all(subprocess.call(s, cwd=ROOT, stdout=output, stderr=output) == 0 for s in steps)
            failed += not ended
            print(f"{python}  {torch}  {'passed' if ended else f'failed; see {log}'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
