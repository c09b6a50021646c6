"""Optimizers beyond one rate for all weights, against loops written by hand with torch's parameter groups."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.dist.world import World
from flatout.engine.eager.engine import TorchEngine
from flatout.run.loop import train
from flatout.run.progress import Progress
from tests.engine.engines import make_engine
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import (
    SILENT,
    assert_close,
    engine_weights,
    make_net,
    make_recipe,
    make_samples,
    plain_loop,
)

DECAYED = {"optimizer.layer_decay": 0.5, "optimizer.lr": 0.05, "optimizer.weight_decay": 0.01}


def decayed_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of `make_net`: two convolutions, each with its norm, and the head."""
    names = {0.0125: ("0.", "3."), 0.025: ("4.", "6."), 0.05: ("8.",)}
    named = list(net.named_parameters())
    return [{"params": [p for name, p in named if name.startswith(n)], "lr": lr} for lr, n in names.items()]


DECAYED_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.01),
}


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
@pytest.mark.parametrize("name", DECAYED_OPTIMIZERS)
def test_layers_learn_at_their_own_rates(name: str, engine: str) -> None:
    samples, recipe, net = make_samples(), make_recipe(**DECAYED, **{"optimizer.name": name}), make_net()
    expected = plain_loop(net, samples, recipe, DECAYED_OPTIMIZERS[name](decayed_groups(net))).state_dict()
    assert_close(engine_weights(make_net(), samples, recipe, engine), expected)


@pytest.mark.parametrize("engines", [("torch", "xla 8"), ("xla 8", "torch")])
def test_the_other_engine_continues_with_the_same_rates(engines: tuple[str, str]) -> None:
    samples, recipe, net = make_samples(), make_recipe(**DECAYED, **{"optimizer.name": "momentum"}), make_net()
    expected = plain_loop(net, samples, recipe, DECAYED_OPTIMIZERS["momentum"](decayed_groups(net))).state_dict()
    state, progress = {}, Progress()
    for epochs, name in enumerate(engines, 1):
        engine = make_engine(name, make_net(), recipe)
        placed = engine.place(samples)
        placed.compile()
        engine.load_state(state) if state else None
        train(engine, World(), recipe.override({"epochs": epochs}), {"train": placed}, progress, SILENT)
        state = engine.state()
        engine.close()
    assert_close({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, expected)


def decayed(world: World, shard: str) -> dict[str, np.ndarray]:
    recipe = make_recipe(**DECAYED, shard=shard, **{"optimizer.name": "momentum"})
    engine = TorchEngine(make_net(), recipe, world=world)
    train(engine, world, recipe, {"train": engine.place(make_samples())}, Progress(), SILENT)
    state = {name: value.numpy() for name, value in engine.state().items()}
    engine.close()
    return state


def test_sharded_layers_learn_at_their_own_rates() -> None:
    (alone,), (together, _) = on_ranks(1, decayed, "none"), on_ranks(2, decayed, "full")
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=2e-3, atol=5e-5, err_msg=name)
