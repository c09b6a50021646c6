"""`flatout lr` from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatout.analysis.lr_finder import format_lr, suggest
from flatout.cli.main import main
from tests.conftest import Command
from tests.system.run_files import write_digits

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["digits", "--data", str(write_digits(tmp_path_factory.mktemp("data") / "digits.npz")), "--devices", "cpu"]


def find(arguments: list[str], command: Command) -> dict[str, Any]:
    """Return what --json prints."""
    return json.loads(command("lr", *arguments, "--json"))


def test_the_suggestion_trains_better_than_others(digits: list[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "lr"
    assert main(["lr", *digits, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"lr.json", "lr.png"}
    with Image.open(out / "lr.png") as picture:
        assert picture.width > 1000
    result = json.loads((out / "lr.json").read_text())
    assert 1e-3 < result["lr"] < 0.03

    losses = []
    for number, factor in enumerate((1, 1 / 30, 30)):
        run = tmp_path / f"run-{number}"
        rate = str(result["lr"] * factor)
        assert main(["train", *digits, "--lr", rate, "--epochs", "2", "--out", str(run)]) == 0
        losses.append(json.loads((run / "summary.json").read_text())["valid_loss"])
    assert losses[0] < 0.8 * min(losses[1:])


def test_the_rates_rise_and_the_loss_ends_the_test(digits: list[str], tmp_path: Path, command: Command) -> None:
    """Checked against a plain computation of the average from the losses by step."""
    result = find([*digits, "--set", "optimizer.name=adamw", "--out", str(tmp_path / "out")], command)
    rates, losses, smoothed = map(np.array, zip(*result["points"], strict=True))
    assert rates[0] == pytest.approx(1e-7)
    assert np.diff(np.log(rates)) == pytest.approx(7 * np.log(10) / 139)
    weights = 0.9 ** np.arange(len(losses))
    expected = [np.average(losses[: n + 1], weights=weights[n::-1]) for n in range(len(losses))]
    assert smoothed == pytest.approx(expected)
    assert result["steps"] == len(rates) < 140
    assert rates[-1] < result["diverged"] <= 1
    assert smoothed[-1] < 4 * smoothed.min()
    assert losses[0] > 2 > losses.min()


def test_where_the_loss_stays_low_the_highest_rate_counts() -> None:
    """The lowest point of a wide valley is anywhere in it, as the noise has it."""
    rates, draws = np.geomspace(1e-7, 1e-2, 100), np.random.default_rng(0)
    clean = 1.2 + 0.5 * (rates < 1e-5) + 2 * np.clip(np.log10(rates / 1e-3), 0, None)
    for _ in range(20):
        losses = clean + draws.normal(0, 0.3, 100)
        smoothed = [np.average(losses[: n + 1], weights=0.9 ** np.arange(n, -1, -1)) for n in range(100)]
        assert 4e-5 < (suggest(rates.tolist(), losses.tolist(), smoothed) or 0) < 4e-4
    assert suggest(rates.tolist(), [1.0] * 100, [1.0] * 100) is None


def test_a_rate_for_the_base_batch(digits: list[str], tmp_path: Path, command: Command) -> None:
    """The recipe's own rate changes nothing but what the suggestion is converted to."""
    settings = ["--set", "optimizer.lr=0.5", "--set", "optimizer.lr_base_batch=16", "--set", "augment.rotate=0"]
    result = find([*digits, "--seed", "3", *settings, "--out", str(tmp_path / "out")], command)
    assert result["recipe_rate"] == pytest.approx(0.5 * 2)
    assert result["lr"] == pytest.approx(result["rate"] / 2, rel=0.05)
    assert f"train with it: --lr {result['lr']:g}" in format_lr(result)


def test_a_loss_that_never_falls_gets_no_suggestion(tmp_path: Path, command: Command) -> None:
    """Images are all alike, so no rate makes the loss fall below that of guessing."""
    data, out = tmp_path / "data.npz", tmp_path / "out"
    np.savez(data, images=np.full((256, 8, 8), 100, np.uint8), labels=np.arange(256) % 10)
    means = ["--set", "data.mean=0.4", "--set", "data.std=0.2"]
    frozen = ["--set", "freeze=all-but-last-0", "--set", "augment.rotate=0", "--set", "augment.zoom=0"]
    words = ["lr", "digits", "--data", str(data), "--devices", "cpu", *means, *frozen, "--out", str(out)]
    assert "no suggestion: the loss fell at no learning rate" in command(*words)
    result = json.loads((out / "lr.json").read_text())
    assert result["lr"] is result["rate"] is None


@pytest.mark.slow
def test_on_several_devices(digits: list[str], tmp_path: Path, command: Command) -> None:
    """The first losses, before the weights differ by rounding, are those of one device."""
    words = [*digits, "--batch-size", "16"]
    alone = find([*words, "--out", str(tmp_path / "alone")], command)
    result = find([*words, "--devices", "2xcpu", "--out", str(tmp_path / "out")], command)
    first = [[loss for _, loss, _ in found["points"][:40]] for found in (alone, result)]
    assert first[0] == pytest.approx(first[1], rel=1e-3)
