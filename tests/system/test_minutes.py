"""A time budget: the steps that fit, what the recipe says afterwards, and what is refused."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from flatout.cli.main import main
from flatout.config import Recipe, load_recipe
from flatout.engine.schedule import learning_rate
from flatout.train import budget
from flatout.train.budget import Budget, Rates
from flatout.utils.errors import InputError
from tests.conftest import Command
from tests.system.run_files import metrics, summary, weights

ON_CPU = ("--devices", "cpu", "--seed", "3")
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train digits for six seconds, none of which is for a report; the length is corrected on the way."""
    out = tmp_path_factory.mktemp("minutes") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "REPORT_SECONDS", 0.0)
        patch.setattr(budget, "TOLERANCE", 0.0)
        flags = ("--minutes", "0.1", "--set", "schedule.name=one-cycle", *ON_CPU)
        assert main(["train", "digits", *flags, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_the_recipe_has_the_steps_that_were_trained_and_repeats_them(run: Path, tmp_path: Path) -> None:
    recipe, figures, lines = load_recipe(run / "recipe.toml"), summary(run), metrics(run)
    assert recipe.max_steps == lines[-1]["step"]
    assert recipe.epochs == len(lines) == figures["epochs_trained"]
    assert sum(line["images"] for line in lines) == figures["images_trained"]
    assert figures["stopped"] is None
    assert any("--minutes 0.1" in note for note in figures["notes"])
    # The recipe repeats the run, although the length was corrected on the way.
    assert len(recipe.schedule.earlier_lengths) > 2
    assert main(["train", str(run / "recipe.toml"), "--devices", "cpu", "--out", str(tmp_path / "again")]) == 0
    torch.testing.assert_close(weights(run), weights(tmp_path / "again"), rtol=0, atol=0)


@pytest.mark.slow
def test_a_finished_run_goes_on_for_some_minutes_more(run: Path, tmp_path: Path) -> None:
    before, out = load_recipe(run / "recipe.toml"), shutil.copytree(run, tmp_path / "run")
    assert main(["train", "--resume", "--minutes", "0.15", "--devices", "cpu", "--out", str(out)]) == 0
    assert load_recipe(out / "recipe.toml").max_steps > before.max_steps


@pytest.mark.parametrize(
    ("minutes", "said"),
    [("0", "must be a finite number greater than 0"), ("inf", "must be a finite"), ("0.02", "does not fit; give")],
)
def test_what_cannot_be_is_refused(minutes: str, said: str, tmp_path: Path, command: Command) -> None:
    assert said in command("train", "digits", "--minutes", minutes, *ON_CPU, "--out", tmp_path / "run", code=2)
    # So that the corrected command can have the same folder.
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten_by_what_is_refused(tmp_path: Path, command: Command) -> None:
    run = ("train", "digits", *ON_CPU, "--out", tmp_path / "run")
    command(*run, "--epochs", "1")
    assert "does not fit; give" in command(*run, "--minutes", "0.02", "--overwrite", code=2)
    assert (tmp_path / "run" / "weights.safetensors").is_file()


# --- the plan, on a clock of its own ----------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


RECIPE = Recipe(model="any", image_size=8, epochs=50, batch_size=10)


@pytest.mark.parametrize(("factor", "changes_at"), [(1.0, 0), (2.0, 0), (2.0, 300), (0.5, 0), (0.5, 300)])
def test_a_run_ends_on_time_whatever_its_steps_take(
    factor: float, changes_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = Clock(monkeypatch), 0
    plan = Budget(300.0, 90.0, Rates(step=0.2, evaluate=3.0, watch=0.5), RECIPE, 100)
    recipe, _ = plan.plan(RECIPE, 0)
    assert recipe.max_steps == int((390 - 3.5 - budget.REPORT_SECONDS - 100) / 0.25)
    while done < recipe.total_steps(10):
        clock.now += 0.25 * (factor if done >= changes_at else 1)
        done += 1
        if plan.is_due():
            recipe = plan.replan(recipe, done)
    assert clock.now == pytest.approx(390 - 3.5 - budget.REPORT_SECONDS, abs=0.03 * 300)
    assert recipe.epochs == -(-recipe.max_steps // 10)


@pytest.mark.parametrize(
    ("began", "step", "said"),
    [
        (60.0, 0.2, ""),
        (0.0, 0.2, "--minutes 2: no time is left for training; one epoch ends after 2 min 15 s in all"),
        (0.0, 5.0, "does not fit; give at least --minutes 3.1"),  # an epoch is long
        (-60.0, 0.2, "does not fit; give at least --minutes 3.3"),  # the set-up was
    ],
)
def test_a_short_epoch_is_trained_after_a_slow_start(
    began: float, step: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch).now = 120.0
    plan = Budget(120.0, began, Rates(step=step, evaluate=3.0, watch=0.0), RECIPE, 100)
    try:
        recipe, late = plan.plan(RECIPE, 0)
    except InputError as error:
        late = str(error)
    else:
        assert (recipe.max_steps == 10) == bool(late)
    assert said in late
    assert bool(said) == bool(late)


def test_the_last_recipe_has_the_rates_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run was interrupted before the last correction, and was given a budget again."""
    clock, rates = Clock(monkeypatch), list[float]()
    recipe = RECIPE.override({"schedule.name": "one-cycle"})
    for stop_at in (230, 10_000):
        plan = Budget(120.0, clock.now, Rates(step=0.2, evaluate=3.0, watch=0.0), recipe, 100)
        recipe, _ = plan.plan(recipe, len(rates))
        while len(rates) < min(stop_at, recipe.total_steps(10)):
            rates.append(learning_rate(recipe, len(rates), 10))
            clock.now += 0.1 + 0.3 * (len(rates) // 40 % 3)
            if plan.is_due():
                recipe = plan.replan(recipe, len(rates))
        if stop_at == 230:
            del rates[205:]  # back to a checkpoint
    assert len(recipe.schedule.earlier_lengths) > 5
    assert rates == [learning_rate(recipe, step, 10) for step in range(len(rates))]
