"""`precision = "auto"` on a CPU that computes bfloat16, which is simulated: any CPU can compute it, if slowly."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.cli.main import main
from flatout.config import load_recipe
from flatout.engine.torch.accelerator import CPU
from flatout.train import budget, run
from tests.conftest import Command
from tests.system.run_files import summary, weights

ONE_EPOCH = ("train", "digits", "--epochs", "1", "--devices", "cpu")
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds of a step in each format, which the test may change; steps are taken, their time is not."""
    seconds = {"fp32": 1.0, "bf16": 1.0}
    real = budget.seconds_per_step

    def fake(engine: Any, train: Any, recipe: Any, world: Any, wanted: float, *, first_steps: int) -> float:
        assert real(engine, train, recipe, world, 0.0, first_steps=first_steps) > 0
        return seconds[recipe.precision]

    monkeypatch.setattr(CPU, "precisions", lambda self: ["fp32", "bf16"])
    monkeypatch.setattr(budget, "seconds_per_step", fake)
    return seconds


@pytest.mark.parametrize(("bf16", "chosen", "said"), [(0.5, "bf16", "2.0 times"), (0.9, "fp32", "1.1 times")])
def test_the_format_that_pays_is_used_and_written_down(
    bf16: float, chosen: str, said: str, measured: dict[str, float], tmp_path: Path
) -> None:
    measured["bf16"] = bf16
    assert main([*ONE_EPOCH, "--out", str(tmp_path / "run")]) == 0
    assert load_recipe(tmp_path / "run/recipe.toml").precision == chosen
    assert any(f"precision = {chosen}" in note and said in note for note in summary(tmp_path / "run")["notes"])
    # The recipe repeats the run, whatever a measurement would say then.
    measured["bf16"] = 1 - bf16
    assert main(["train", str(tmp_path / "run/recipe.toml"), "--devices", "cpu", "--out", str(tmp_path / "again")]) == 0
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "again"), rtol=0, atol=0)


def test_a_resumed_run_keeps_its_format(measured: dict[str, float], tmp_path: Path) -> None:
    """The recipe given says `auto` again; a second measurement could choose another format in the middle of the run."""
    out = tmp_path / "run"
    measured["bf16"] = 0.5
    flatout.fit(job="digits", epochs=1, devices="cpu", out=out, quiet=True)
    measured["bf16"] = 2.0
    flatout.fit(job="digits", epochs=2, devices="cpu", out=out, quiet=True, resume=True)
    assert load_recipe(out / "recipe.toml").precision == "bf16"


def test_all_folds_compute_alike(measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one decides, also for those that a later command trains: another measurement may say otherwise."""
    measured["bf16"] = 0.5
    real, decided = run.fastest_precision, list[str]()

    def once(*arguments: Any) -> tuple[str, str]:
        chosen, reason = real(*arguments)
        decided.append(chosen)
        measured["bf16"] = 2.0
        return chosen, reason

    monkeypatch.setattr(run, "fastest_precision", once)
    out = tmp_path / "run"
    assert main([*ONE_EPOCH, "--folds", "3", "--out", str(out)]) == 0
    shutil.rmtree(out / "fold-3")
    assert main([*ONE_EPOCH, "--folds", "3", "--out", str(out), "--resume"]) == 0
    assert main([*ONE_EPOCH, "--epochs", "2", "--folds", "3", "--out", str(out), "--resume"]) == 0
    assert decided == ["bf16"]
    assert {load_recipe(out / f"fold-{fold}/recipe.toml").precision for fold in (1, 2, 3)} == {"bf16"}


@pytest.mark.slow
def test_a_run_goes_on_where_the_format_is_missing(
    measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    measured["bf16"] = 0.5
    run = str(tmp_path / "run")
    assert main([*ONE_EPOCH, "--out", run]) == 0
    monkeypatch.setattr(CPU, "precisions", lambda self: ["fp32"])
    go_on = ["train", "--resume", "--epochs", "2", "--devices", "cpu", "--out", run]
    assert "cpu here supports only fp32; use --set precision=auto" in command(*go_on, code=2)
    assert main(["evaluate", run, "--devices", "cpu"]) == 0
    assert main([*go_on, "--set", "precision=auto"]) == 0
