"""`flatout scale` from the command line: real runs of the digits."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.analysis.scale import explained_by_rounding
from flatout.cli.main import main
from tests.system.run_files import write_digits

pytestmark = pytest.mark.slow

TWO = ["--devices", "cpu,2xcpu"]


def scaling(out: Path) -> dict[str, Any]:
    return json.loads((out / "scaling.json").read_text())


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["digits", "--data", str(write_digits(tmp_path_factory.mktemp("data") / "digits.npz"))]


def test_two_specs_are_measured_twice(digits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats are interleaved, runs are kept, the same recipe gives the same answer, and findings are printed."""
    out = tmp_path / "out"
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["scale", *digits, *TWO, "--epochs", "2", "--repeats", "2", "--out", str(out)]) == 0
    result, lines = scaling(out), printed.getvalue().splitlines()
    assert [(r["devices"], r["repeat"]) for r in result["runs"]] == [("cpu", 1), ("2xcpu", 1), ("cpu", 2), ("2xcpu", 2)]
    assert result["ended"] is None
    assert [row["world_size"] for row in result["specs"]] == [1, 2]
    for run in result["runs"]:
        summary = json.loads((out / run["folder"] / "summary.json").read_text())
        assert run["correct"] == summary["test_correct"]
        assert run["images_per_second"] == summary["images_per_second"]
        assert len(run["epoch_seconds_each"]) == summary["epochs"] == 2
    answers = [run["correct"] for run in result["runs"]]
    assert answers[0] == answers[2], "two runs of one SPEC"
    assert max(answers) - min(answers) <= explained_by_rounding(min(answers), max(answers), 359)
    assert lines[0].split() == ["devices", "cpu", "2xcpu"]
    rates = next(line for line in lines if line.startswith("images per second")).split()[3:]
    assert rates == [f"{row['images_per_second']['median']:,.0f}" for row in result["specs"]]
    assert set(result["findings"]) <= set(lines)
    with Image.open(out / "scaling.png") as image:
        assert image.width > 1000


def test_a_recipe_made_for_a_folder_of_images_is_the_same_for_every_run(tmp_path: Path, capsys) -> None:
    rng = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "photos" / ("dark" if number % 2 else "light") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 128 if number % 2 else 256, (16, 16), dtype=np.uint8)).save(path)
    out = tmp_path / "out"
    command = ["scale", str(tmp_path / "photos"), "--devices", "cpu", "--epochs", "1", "--batch-size", "8", "--weak"]
    assert main([*command, "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["scaling"], printed["specs"][0]["batch_size"]) == ("weak", 8)
    assert printed["findings"] == scaling(out)["findings"]
    made, ran = (tomllib.loads((folder / "recipe.toml").read_text()) for folder in (out, out / "cpu-1"))
    assert {key: made[key] for key in ("model", "image_size", "epochs", "optimizer", "augment")}.items() <= ran.items()
    summary = json.loads((out / "cpu-1" / "summary.json").read_text())
    assert summary["pack_was_cached"], "decoding would be in the time of the first run alone"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--devices", "cpu,gpu"], "--devices gpu"),
        (["--devices", "cpu,99xcuda"], "99xcuda"),
        (["--devices", "cpu", "--repeats", "0"], "--repeats 0"),
        (["--devices", "cpu,auto", "--weak"], "--weak: auto"),
        (["--devices", "cpu", "--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_found_before_the_first_run(arguments: list[str], named: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["scale", "digits", *arguments, "--out", str(out)]) == 2
    assert named in capsys.readouterr().err
    assert not out.exists()


def test_a_failing_run_passes_on_its_message_and_exit_code(digits: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["scale", *digits, *TWO, "--epochs", "1", "--set", "optimizer.lr=1e30", "--out", str(out)]) == 1
    message = capsys.readouterr().err
    assert "flatout: cpu, run 1 of 1: training diverged in epoch 1" in message
    assert "flatout: 2xcpu" not in message
    assert "the loss is not finite" in scaling(out)["ended"]


def test_an_interrupt_ends_the_run_first_and_keeps_what_was_measured(digits: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--devices", "cpu", "--repeats", "50", "--epochs", "3", "--out", str(out)]
    command = [sys.executable, "-m", "flatout", "scale", *digits, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "cpu-2" / "metrics.jsonl").is_file():  # so that the first run is done and the second at work
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    result = scaling(out)
    assert result["ended"] == "stopped"
    assert result["runs"][0]["devices"] == "cpu"
    # Had the run not been waited for, it could still be writing.
    assert json.loads((out / "cpu-2" / "summary.json").read_text())["wall_seconds"] > 0
