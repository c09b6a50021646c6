"""Several devices from a plain script and from the interactive interpreter."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WAIT_SECONDS = 90
DEFINITIONS = """
import numpy as np, torch, flatout
from torch import nn
class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, classes)
    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))

labels = np.arange(120) % 3
images = (np.random.default_rng(0).integers(0, 40, (120, 10, 10)) + 90 * labels[:, None, None]).astype(np.uint8)
"""
SETTINGS = 'batch_size=16, devices="2xcpu", optimizer=flatout.Adam(lr=0.02)'


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from torch import nn\nclass Head(nn.Linear):\n    pass\n")
    text = (
        f"{DEFINITIONS}\nfrom beside import Head\nprint('top level')\n"
        "net = Net()\nnet.head = Head(8, 3)\n"
        f"run = flatout.fit(net, (images, labels), epochs=1, out='run', {SETTINGS})\n"
        "print(type(run.model), type(run.model.head), run.summary['devices'])\n"
    )
    (tmp_path / "script.py").write_text(text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=elsewhere,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines.count("top level") == 1
    assert lines[-1] == "<class '__main__.Net'> <class 'beside.Head'> 2xcpu"
    for rank in (0, 1):
        assert "top level" not in (elsewhere / "run" / "logs" / f"rank-{rank}.log").read_text()


class Interpreter:
    """`python -i` on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        # The plain prompt: newer interpreters have an editor that draws.
        own = {"TERM": "xterm", "PYTHON_BASIC_REPL": "1", "HOME": str(folder), "INPUTRC": os.devnull}
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"],
            cwd=folder,
            env=environment() | own,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, pattern: str) -> str:
        """Return what is printed up to a pattern."""
        deadline, text = time.monotonic() + WAIT_SECONDS, ""
        while not re.search(pattern, text):
            ready, _, _ = select.select([self._ours], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{pattern!r} never came: {text}"
            text += os.read(self._ours, 4096).decode(errors="replace")
        return text

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def interpreter(folder: Path) -> Iterator[Interpreter]:
    opened = Interpreter(folder)
    try:
        yield opened
    finally:
        opened.close()


def test_the_interactive_interpreter(tmp_path: Path) -> None:
    with interpreter(tmp_path) as python:
        for line in DEFINITIONS.splitlines():
            python.type(line)
        python.type("print('re' + 'ady')")
        python.until("ready")
        python.type(f"run = flatout.fit(Net(), (images, labels), epochs=1, out='run', {SETTINGS})")
        python.type("print('devices' + ':', run.summary['devices'], type(run.model))")
        assert "2xcpu <class '__main__.Net'>" in python.until(r"devices: .*\n")
        python.type("exit()")
        assert python.process.wait(timeout=WAIT_SECONDS) == 0
