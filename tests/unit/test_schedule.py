"""Learning rates against torch's own schedulers, and against their definitions."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from flatout.config import Recipe
from flatout.engine.schedule import describe_scaling, learning_rate, plateau_reductions

BASE = Recipe(model="m", image_size=8, epochs=10, batch_size=4).override({"optimizer.lr": 0.5})
STEPS = 7


def rates(changes: dict[str, object]) -> list[float]:
    recipe = BASE.override(changes)
    return [learning_rate(recipe, step, STEPS) for step in range(recipe.epochs * STEPS)]


TORCHS: dict[str, tuple[dict[str, object], Callable[[Any], Any]]] = {
    "cosine": ({"schedule.final_factor": 0.1}, partial(lr_scheduler.CosineAnnealingLR, T_max=70, eta_min=0.05)),
    "step": (
        {"schedule.step_epochs": 3, "schedule.factor": 0.2},
        partial(lr_scheduler.StepLR, step_size=3 * STEPS, gamma=0.2),
    ),
    "one-cycle": (
        {"schedule.rise": 20 / 69},
        partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=70, pct_start=21 / 70, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_equal_torchs(name: str) -> None:
    changes, make = TORCHS[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = make(optimizer)
    for step, found in enumerate(rates({"schedule.name": name, **changes})):
        assert math.isclose(found, optimizer.param_groups[0]["lr"], rel_tol=1e-6, abs_tol=1e-9), step
        optimizer.step()
        if step < 69:
            scheduler.step()


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_equals_torchs(patience: int) -> None:
    losses = [1.0, 0.9, 0.9, 0.91, 0.89999, 0.9, 0.95, 0.5, 0.6, 0.7, 0.6, 0.55, 0.51, 0.5, 0.50001, float("nan"), 0.4]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=patience)
    for epoch, loss in enumerate(losses):
        scheduler.step(loss)
        expected = round(-math.log10(optimizer.param_groups[0]["lr"]))
        if expected < 8:  # torch stops at differences of 1e-8
            assert plateau_reductions(losses[: epoch + 1], patience, 1e-4) == expected


LARGE = {"batch_size": 32, "optimizer.lr_base_batch": 8}


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 4.0), ("adagrad", 4.0), ("adam", 2.0), ("adamw", 2.0)])
def test_a_larger_batch_scales_the_rate_as_suits_the_optimizer(optimizer: str, scale: float) -> None:
    assert rates({**LARGE, "optimizer.name": optimizer, "optimizer.lr": 0.5})[-1] == 0.5 * scale


@pytest.mark.parametrize(("changes", "start", "full"), [({}, 0.0, 0.5), (LARGE, 0.5, 2.0)])
def test_a_warm_up_rises_to_the_full_rate_from_0_or_the_unscaled_rate(
    changes: dict[str, object], start: float, full: float
) -> None:
    found = rates({**changes, "schedule.warmup_epochs": 3.0})
    rise = [after - before for before, after in itertools.pairwise([start, *found[:22]])]
    assert all(math.isclose(step, (full - start) / 22) for step in rise)
    assert found[21:] == [full] * 49


@pytest.mark.parametrize(
    ("epochs", "steps", "warmup_steps"), [(5, 0, 4), (10, 0, 7), (50, 0, 35), (90, 0, 35), (90, 10 * STEPS, STEPS)]
)
def test_without_a_warm_up_a_larger_batch_gets_five_epochs_or_a_tenth_of_the_run(
    epochs: int, steps: int, warmup_steps: int
) -> None:
    found = rates({**LARGE, "epochs": epochs, "max_steps": steps})
    assert 0.5 < found[0] < found[warmup_steps - 1] < 2.0
    assert set(found[warmup_steps:]) == {2.0}


@pytest.mark.parametrize("warmup", [0.0, 2.0])
def test_a_smaller_batch_scales_down_and_warms_up_as_ever(warmup: float) -> None:
    small = rates({"batch_size": 4, "optimizer.lr_base_batch": 16, "schedule.warmup_epochs": warmup})
    assert small == [rate / 4 for rate in rates({"schedule.warmup_epochs": warmup})]


@pytest.mark.parametrize(("name", "first"), [("cosine", STEPS), ("step", STEPS), ("one-cycle", 0)])
def test_schedules_start_from_the_scaled_rate_after_the_warm_up(name: str, first: int) -> None:
    changes = {"schedule.name": name, "schedule.warmup_epochs": float(first > 0)}
    found, unscaled = rates({**LARGE, **changes}), rates(changes)
    assert found[first:] == [4 * rate for rate in unscaled[first:]]


def test_the_run_can_say_what_the_rate_came_to() -> None:
    scaled = "learning rate 2 for batches of 32: 0.5 for batches of 8, scaled (linear)"
    assert describe_scaling(BASE.override(LARGE), 10) == f"{scaled}; warm-up from 0.5 over 1 epoch"
    assert describe_scaling(BASE.override({**LARGE, "schedule.name": "one-cycle"}), 10) == scaled
