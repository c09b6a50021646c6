"""Completion in shells: the scripts are run by the shells that are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flatout.cli.commands import COMMANDS
from flatout.cli.flags import completion
from flatout.cli.main import main

# Prints what a function of bash's completes for each line of words; `_` is the empty word.
ASK = r"""
source ./script
while read -ra words; do
    COMP_WORDS=("${words[@]/#_/}"); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    _shtab_flatout 2>/dev/null
    echo "${COMPREPLY[@]}"
done
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what bash offers for some beginnings, in a folder with a file and a folder."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    folder = tmp_path_factory.mktemp("completion")
    (folder / "script").write_text(completion("bash"))
    (folder / "photos").mkdir()
    (folder / "phone.csv").touch()
    lines = [
        "flatout _",
        "flatout train --weig",
        "flatout train --track _",
        "flatout train fashion",
        "flatout train pho",
        "flatout train --set augment.f",
        "flatout train --out pho",
        "flatout predict pho",
        "flatout completion _",
        "flatout pack --resize _",
    ]
    given = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(["bash", "-c", ASK], input=given, cwd=folder, capture_output=True, text=True, check=True)
    return {line: found.split() for line, found in zip(lines, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("flatout train --weig", {"--weights"}),
        ("flatout train --track _", {"tensorboard", "wandb", "trackio", "mlflow"}),
        ("flatout train fashion", {"fashion-mnist", "fashion-mnist-keras"}),
        ("flatout train pho", {"photos", "phone.csv"}),
        ("flatout train --set augment.f", {"augment.flip="}),
        ("flatout train --out pho", {"photos"}),
        ("flatout predict pho", {"photos", "phone.csv"}),
        ("flatout completion _", {"bash", "zsh", "fish"}),
        ("flatout pack --resize _", {"squash", "crop", "pad"}),
    ],
)
def test_bash_completes(begun: str, offered: set[str], asked: dict[str, list[str]]) -> None:
    assert {word.rstrip("/") for word in asked[begun]} == offered


def test_bash_completes_every_command(asked: dict[str, list[str]]) -> None:
    assert set(COMMANDS) <= set(asked["flatout _"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_read_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "fashion-mnist" in script
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, capture_output=True)


def test_another_shell_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zhs"]) == 2
    assert "did you mean 'zsh'?" in capsys.readouterr().err
