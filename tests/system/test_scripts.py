"""Several devices from a plain script and from the interactive interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.system.test_notebook import SETUP

pytestmark = pytest.mark.slow

WAIT_SECONDS = 90
DEFINITIONS = SETUP + 'Options.__init__.__kwdefaults__["report"] = False\n'


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from torch import nn\nclass Head(nn.Linear):\n    pass\n")
    text = (
        f"{DEFINITIONS}\nfrom beside import Head\nprint('top level')\n"
        "net = Net()\nnet.head = Head(8, 3)\n"
        "run = flatout.fit(net, (images, labels), out='run', **settings | dict(epochs=1))\n"
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


# pexpect forks and starts the interpreter at once; other tests of this process may have loaded JAX.
@pytest.mark.filterwarnings("ignore:os.fork")
def test_the_interactive_interpreter(tmp_path: Path) -> None:
    # The plain prompt: newer interpreters have an editor that draws.
    own: dict[str, Any] = {"TERM": "xterm", "PYTHON_BASIC_REPL": "1", "HOME": str(tmp_path), "INPUTRC": os.devnull}
    python = pexpect.spawn(
        sys.executable, ["-i", "-q"], cwd=str(tmp_path), env=environment() | own, timeout=WAIT_SECONDS, encoding="utf-8"
    )
    for line in DEFINITIONS.splitlines():
        python.sendline(line)
    python.sendline("run = flatout.fit(Net(), (images, labels), out='run', **settings | dict(epochs=1))")
    python.sendline("print('devices' + ':', run.summary['devices'], type(run.model))")
    python.expect(r"devices: 2xcpu <class '__main__\.Net'>")
    python.sendline("exit()")
    python.expect(pexpect.EOF)
    python.close()
    assert python.exitstatus == 0
