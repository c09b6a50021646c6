"""Learning rates against torch's own schedulers, and against their definitions."""

import math

import pytest
import torch

from flatout.recipe import Recipe
from flatout.schedule import learning_rate, plateau_reductions

BASE = Recipe(model="m", image_size=8, epochs=10, batch_size=4).override({"optimizer.lr": 0.5})
STEPS = 7


def rates(changes: dict[str, object]) -> list[float]:
    recipe = BASE.override(changes)
    return [learning_rate(recipe, step, STEPS) for step in range(recipe.epochs * STEPS)]


def test_constant() -> None:
    assert set(rates({})) == {0.5}


def test_warm_up_rises_to_the_full_rate() -> None:
    found = rates({"schedule.warmup_epochs": 2.0})
    assert found[:14] == sorted(found[:14])
    assert 0 < found[0] < 0.05
    assert found[14:] == [0.5] * 56


def test_cosine_equals_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=70, eta_min=0.05)
    for found in rates({"schedule.name": "cosine", "schedule.final_factor": 0.1}):
        assert math.isclose(found, optimizer.param_groups[0]["lr"], rel_tol=1e-9)
        optimizer.step()
        scheduler.step()


def test_step_equals_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.2)
    found = rates({"schedule.name": "step", "schedule.step_epochs": 3, "schedule.factor": 0.2})
    for epoch in range(10):
        assert all(math.isclose(r, optimizer.param_groups[0]["lr"]) for r in found[epoch * STEPS : (epoch + 1) * STEPS])
        optimizer.step()
        scheduler.step()


def test_one_cycle_equals_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=70, pct_start=21 / 70, cycle_momentum=False
    )
    found = rates({"schedule.name": "one-cycle", "schedule.rise": 20 / 69})
    for step, rate in enumerate(found):
        assert math.isclose(rate, optimizer.param_groups[0]["lr"], rel_tol=1e-6, abs_tol=1e-9), step
        optimizer.step()
        if step < 69:
            scheduler.step()


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_equals_torchs(patience: int) -> None:
    losses = [1.0, 0.9, 0.9, 0.91, 0.89999, 0.9, 0.95, 0.5, 0.6, 0.7, 0.6, 0.55, 0.51, 0.5, 0.50001, float("nan"), 0.4]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=patience)
    for epoch, loss in enumerate(losses):
        scheduler.step(loss)
        expected = round(-math.log10(optimizer.param_groups[0]["lr"]))
        if expected < 8:  # torch stops at differences of 1e-8
            assert plateau_reductions(losses[: epoch + 1], patience, 1e-4) == expected
