"""The losses of several labels and of numbers against a plain loop, on both engines."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.config import Recipe
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.tasks import task_of
from flatout.train.request import Progress, metrics_of
from tests.engine.engines import make_engine, train
from tests.engine.plain_loop import normalised, plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import assert_close, make_recipe, make_samples, small_net

LABEL_MEAN, LABEL_STD = 30.0, 8.0
SEVERAL = {"task": "multi-label", "loss": "binary-cross-entropy", "optimizer.lr": 0.3}
NUMBERS = {"task": "regression", "data.label_mean": LABEL_MEAN, "data.label_std": LABEL_STD, "optimizer.lr": 0.02}
CASES = {
    "several labels, smoothed": {**SEVERAL, "label_smoothing": 0.2},
    "several labels, balanced": {**SEVERAL, "class_weights": "balanced"},
    "several labels, mixed": {**SEVERAL, "augment.mixup": 0.5},
    "mse, mixed": {**NUMBERS, "loss": "mse", "augment.mixup": 0.5},
    "huber": {**NUMBERS, "loss": "huber"},
}


def samples_of(recipe: Recipe, count: int = 70) -> Split:
    """Return noise with labels of the recipe's task."""
    rng, samples = np.random.default_rng(3), make_samples(count)
    if recipe.task == "regression":
        return replace(samples, labels=(LABEL_MEAN + 3 * LABEL_STD * rng.standard_normal(count)).astype(np.float32))
    return replace(samples, labels=(rng.random((count, 5)) < [0.1, 0.3, 0.5, 0.6, 0.9]).astype(np.uint8))


def net_of(recipe: Recipe) -> torch.nn.Module:
    return small_net(classes=1 if recipe.task == "regression" else 5)


def trained(world: World, changes: dict[str, Any], engine: str = "torch") -> dict[str, Any]:
    """Train; return the weights, and of the training epoch and of an evaluation the sums and answers."""
    recipe = make_recipe(**changes)
    samples, task, progress = samples_of(recipe), task_of(recipe), Progress()
    weights = task.class_weights(samples.labels, 5) if task.is_balanced else None
    made = make_engine(engine, net_of(recipe), recipe, world=world, class_weights=weights)
    placed = train(made, recipe, samples, world=world, progress=progress)
    state, result = made.state(), placed.evaluate(with_probabilities=True)
    made.close()
    return {
        "weights": {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")},
        "train": metrics_of(progress.history[-1], "train"),
        "loss": result.loss,
        "predicted": result.predicted,
        "probabilities": result.probabilities,
        "metrics": result.metrics,
    }


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop(engine: str, case: str) -> None:
    recipe = make_recipe(**CASES[case])
    found, samples = trained(World(), CASES[case], engine), samples_of(recipe)
    net = net_of(recipe)
    assert_close(found["weights"], plain_loop(net, samples, recipe).state)
    with torch.no_grad():
        logits = net.eval()(normalised(samples, recipe))
    if recipe.task == "regression":
        np.testing.assert_allclose(found["predicted"], logits[:, 0] * LABEL_STD + LABEL_MEAN, atol=2e-2)
        assert found["metrics"]["mae"] == pytest.approx(np.abs(found["predicted"] - samples.labels).mean(), rel=1e-5)
        assert found["probabilities"].shape == (70, 1)
    else:
        np.testing.assert_allclose(found["predicted"], logits.sigmoid(), atol=1e-3)
        assert (found["probabilities"] == found["predicted"]).all()


@pytest.mark.parametrize("case", ["several labels, balanced", "huber"])
def test_any_number_of_ranks(case: str) -> None:
    alone = trained(World(), CASES[case])
    ranks = on_ranks(2, trained, CASES[case])
    assert_close(ranks[0]["weights"], alone["weights"])
    for rank in ranks:
        assert rank["train"] == pytest.approx(alone["train"], rel=1e-4)
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        np.testing.assert_allclose(rank["predicted"], alone["predicted"], rtol=1e-3, atol=2e-3)
