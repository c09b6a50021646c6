"""Completion in shells: the scripts are run by the shells that are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flatout.cli.commands import COMMANDS
from flatout.cli.flags import completion
from tests.conftest import Command

# Prints what a function of bash's completes for each line of words; `_` is the empty word.
ASK = r"""
source ./script
while read -ra words; do
    COMP_WORDS=("${words[@]/#_/}"); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    _shtab_flatout 2>/dev/null
    echo "${COMPREPLY[@]}"
done
"""
OFFERED = {
    "flatout train --weig": {"--weights"},
    "flatout train --track _": {"tensorboard", "wandb"},
    "flatout train pho": {"photos", "phone.csv"},
    "flatout train --set augment.f": {"augment.flip="},
    "flatout train --devices 2": {"2xcpu"},
    "flatout predict pho": {"photos", "phone.csv"},
    "flatout completion _": {"bash", "zsh", "fish"},
}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(completion("bash"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "phone.csv").touch()
    given = "".join(f"{line}\n" for line in ["flatout _", *OFFERED])
    done = subprocess.run(["bash", "-c", ASK], input=given, cwd=tmp_path, capture_output=True, text=True, check=True)
    commands, *found = [{word.rstrip("/") for word in line.split()} for line in done.stdout.splitlines()]
    assert set(COMMANDS) <= commands
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_read_its_script(shell: str, tmp_path: Path, command: Command) -> None:
    script = command("completion", shell)
    assert "augment.flip=" in script
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, capture_output=True)
