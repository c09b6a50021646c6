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

from flatout.cli import main
from flatout.scale.findings import explained_by_rounding

pytestmark = pytest.mark.slow

TWO = ["--devices", "cpu,2xcpu"]


def scaling(out: Path) -> dict[str, Any]:
    return json.loads((out / "scaling.json").read_text())


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments for digits in a file: no run needs scikit-learn, which takes long to import."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, images=(images * 15).astype(np.uint8).reshape(-1, 8, 8), labels=labels)
    return ["digits", "--data", str(path)]


@pytest.fixture(scope="module")
def measured(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a measurement of two SPECs, two runs each, and what it printed."""
    out = tmp_path_factory.mktemp("scale") / "out"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("FLATOUT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        assert main(["scale", *digits, *TWO, "--epochs", "2", "--repeats", "2", "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_every_run_is_kept_and_repeats_are_interleaved(measured: tuple[Path, str]) -> None:
    out, _ = measured
    result = scaling(out)
    assert [(r["devices"], r["repeat"]) for r in result["runs"]] == [("cpu", 1), ("2xcpu", 1), ("cpu", 2), ("2xcpu", 2)]
    assert result["ended"] is None
    assert [row["world_size"] for row in result["specs"]] == [1, 2]
    for run in result["runs"]:
        summary = json.loads((out / run["folder"] / "summary.json").read_text())
        assert run["correct"] == summary["test_correct"]
        assert run["images_per_second"] == summary["images_per_second"]
        assert len(run["epoch_seconds_each"]) == summary["epochs"] == 2


def test_the_same_recipe_gives_the_same_answer(measured: tuple[Path, str]) -> None:
    answers = [run["correct"] for run in scaling(measured[0])["runs"]]
    assert answers[0] == answers[2], "two runs of one SPEC"
    assert max(answers) - min(answers) <= explained_by_rounding(min(answers), max(answers), 359)


def test_the_table_and_the_findings_are_on_stdout(measured: tuple[Path, str]) -> None:
    out, printed = measured
    result, lines = scaling(out), printed.splitlines()
    assert lines[0].split() == ["devices", "cpu", "2xcpu"]
    rates = next(line for line in lines if line.startswith("images per second")).split()[3:]
    assert rates == [f"{row['images_per_second']['median']:,.0f}" for row in result["specs"]]
    assert result["findings"]
    assert set(result["findings"]) <= set(lines)
    assert str(out) in lines[-1]


def test_the_chart_is_a_picture(measured: tuple[Path, str]) -> None:
    with Image.open(measured[0] / "scaling.png") as image:
        assert image.format == "PNG"
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
        (["--devices", "cpu,cpu"], "cpu is named twice"),
        (["--devices", "cpu,99xcuda"], "99xcuda"),
        (["--devices", "cpu", "--repeats", "0"], "--repeats 0"),
        (["--devices", "cpu,auto", "--weak"], "--weak: auto"),
        (["--devices", "cpu", "--set", "epoch=1"], "epoch"),
        (["--devices", "cpu", "--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_found_before_the_first_run(arguments: list[str], named: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["scale", "digits", *arguments, "--out", str(out)]) == 2
    assert named in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["scale", "digits", *TWO, "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failing_run_passes_on_its_message_and_exit_code(digits: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["scale", *digits, *TWO, "--epochs", "1", "--set", "optimizer.lr=1e30", "--out", str(out)]) == 1
    message = capsys.readouterr().err
    assert "flatout: cpu, run 1 of 1: training diverged in epoch 1" in message
    assert "flatout: 2xcpu" not in message
    assert "the loss is not finite" in scaling(out)["ended"]


def test_an_interrupt_ends_the_run_first_and_keeps_what_was_measured(digits: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "flatout",
        "scale",
        *digits,
        "--devices",
        "cpu",
        "--repeats",
        "50",
        "--epochs",
        "3",
    ]
    process = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
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
