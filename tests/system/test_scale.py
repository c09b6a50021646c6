"""`flatout scale`: the comparison of runs, and real runs of the digits from the command line."""

import json
import os
import signal
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatout.analysis.throughput import compare_specs, draw_scaling, format_scale, split_specs
from flatout.cli.main import main
from tests.conftest import Command
from tests.system.conftest import START_SECONDS, eventually
from tests.system.run_files import summary, write_class_folders, write_digits


def run(devices: str, world_size: int, rate: float | None, **values: Any) -> dict[str, Any]:
    """Return the figures of a run over 100,000 images."""
    train = 100_000 / (rate or 1000)
    figures = {
        "devices": devices, "kind": "cuda" if "cuda" in devices else "cpu", "world_size": world_size,
        "threads_per_rank": 2, "images_per_second": rate, "epoch_seconds": train / 5, "train_seconds": train,
        "warmup_seconds": 0.0, "wall_seconds": train + 5, "communication_fraction": None, "input_wait_fraction": 0.0,
        "split": "test", "correct": 900, "count": 1000,
    }  # fmt: skip
    return figures | values


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("cpu,2xcpu", ["cpu", "2xcpu"]),
        ("cuda:0,cuda:0,2,3 , 4xcuda", ["cuda:0", "cuda:0,2,3", "4xcuda"]),
        ("cpu,2", ["cpu,2"]),  # refused as a SPEC
    ],
)
def test_specs_are_split_at_the_commas_between_them(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def test_efficiency_is_against_the_fewest_devices_of_the_same_kind(tmp_path: Path) -> None:
    runs = run("4xcpu", 4, 3000), run("cpu", 1, 1000), run("2xcuda", 2, 50_000), run("8xcuda", 8, None, correct=None)
    rows = compare_specs(runs)
    assert [(row["devices"], row["base"], row["speed_up"], row["efficiency"]) for row in rows] == [
        ("4xcpu", "cpu", 3.0, 0.75),
        ("cpu", "cpu", 1.0, 1.0),
        ("2xcuda", "2xcuda", 1.0, 1.0),
        ("8xcuda", "2xcuda", None, None),
    ]
    result = {"job": "sample", "batch_size": 64, "epochs": 5, "specs": rows, "out": "there"}
    table = {line[:20].strip(): line[20:].split("  ") for line in format_scale(result)}
    assert [cell.strip() for cell in table["processes x threads"] if cell] == ["4 x 2", "1 x 2", "2", "8"]
    assert [cell.strip() for cell in table["test images right"] if cell][-1] == "-"
    draw_scaling(tmp_path / "chart.png", result)
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width > image.height > 400


def test_folds_and_heads_alone_are_refused_before_training(tmp_path: Path, command: Command) -> None:
    words = ("scale", "digits", "--devices", "cpu", "--set", "data.folds=3", "--out", tmp_path / "out")
    assert "data.folds = 3: flatout scale measures single runs; leave it out" in command(*words, code=2)
    head = (*words[:4], "--epochs", "0", "--set", "linear_probe=true", *words[-2:])
    assert "epochs = 0: the job only fits a head" in command(*head, code=2)
    assert not (tmp_path / "out").exists()


# --- real runs --------------------------------------------------------------------------------------------------------


def scaling(out: Path) -> dict[str, Any]:
    return json.loads((out / "scaling.json").read_text())


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["digits", "--data", str(write_digits(tmp_path_factory.mktemp("data") / "digits.npz"))]


@pytest.mark.slow
def test_a_recipe_made_for_a_folder_of_images_is_measured_on_both_specs(tmp_path: Path, command: Command) -> None:
    photos, out = write_class_folders(tmp_path / "photos", per_class=20), tmp_path / "out"
    words = ("--devices", "cpu,2xcpu", "--epochs", "2", "--batch-size", "8", "--json", "--out", out)
    printed = json.loads(command("scale", photos, *words))
    result = scaling(out)
    assert printed == result | {"out": str(out)}
    assert result["ended"] is None
    assert [(row["devices"], row["world_size"]) for row in result["specs"]] == [("cpu", 1), ("2xcpu", 2)]
    made = tomllib.loads((out / "recipe.toml").read_text())
    for row in result["specs"]:
        ran = tomllib.loads((out / row["folder"] / "recipe.toml").read_text())
        assert all(ran[key] == made[key] for key in ("model", "image_size", "epochs", "optimizer", "augment"))
        figures = summary(out / row["folder"])
        assert figures["pack_was_cached"], "decoding would be in the time of the first run alone"
        assert row["images_per_second"] == figures["images_per_second"]
        assert len(row["epoch_seconds_each"]) == figures["epochs"] == 2
    answers = [row["correct"] for row in result["specs"]]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_failing_run_passes_on_its_message_and_exit_code(digits: list[str], tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    changes = ("--epochs", "1", "--set", "optimizer.lr=1e30")
    message = command("scale", *digits, "--devices", "cpu,2xcpu", *changes, "--out", out, code=1)
    assert "flatout: cpu: training diverged in epoch 1" in message
    assert "flatout: 2xcpu" not in message
    assert "the loss is not finite" in scaling(out)["ended"]


@pytest.mark.slow
def test_an_interrupt_ends_the_run_first_and_keeps_what_was_measured(
    digits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def interrupt_the_second() -> None:
        if eventually((out / "1xcpu" / "metrics.jsonl").is_file, 2 * START_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt_the_second)
        assert main(["scale", *digits, "--devices", "cpu,1xcpu", "--epochs", "15", "--out", str(out)]) == 130
    assert "Traceback" not in capsys.readouterr().err
    result = scaling(out)
    assert result["ended"] == "stopped"
    assert [row["devices"] for row in result["specs"]] == ["cpu"]
    # Had the run not been waited for, it could still be writing.
    assert "interrupted" in summary(out / "1xcpu")["stopped"]
