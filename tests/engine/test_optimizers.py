"""Optimizers beyond one rate for all weights, against loops written by hand with torch's parameter groups."""

import copy
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim.lamb import Lamb
from timm.optim.lion import Lion
from torch import nn

import flatout
from flatout.config import Optimizer, Recipe
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.torch.engine import TorchEngine
from flatout.train.request import Progress
from flatout.utils.errors import InputError
from tests.engine.engines import make_engine, train
from tests.engine.plain_loop import plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import assert_close, engine_weights, make_net, make_recipe, make_samples

DECAYED = {"optimizer.layer_decay": 0.5, "optimizer.lr": 0.05, "optimizer.weight_decay": 0.01}


def decayed_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of `make_net`: two convolutions, each with its norm, and the head."""
    names = {0.0125: ("0.", "3."), 0.025: ("4.", "6."), 0.05: ("8.",)}
    named = list(net.named_parameters())
    return [{"params": [p for name, p in named if name.startswith(n)], "lr": lr} for lr, n in names.items()]


def sharded(world: World) -> dict[str, torch.Tensor]:
    """Train shards with rates of their own, which classes of libraries refuse."""
    message = "'timm:lamb' is not available with shard = 'full'; use sgd, momentum, adagrad, adam, adamw"
    with pytest.raises(InputError, match=f"^optimizer.name = {message}$"):
        TorchEngine(make_net(), library_recipe("timm:lamb").override({"shard": "full"}), world=world)
    recipe = make_recipe(**DECAYED, shard="full", **{"optimizer.name": "momentum"})
    return engine_weights(make_net(), make_samples(), recipe, world=world)


def test_layers_learn_at_their_own_rates() -> None:
    samples, recipe, net = make_samples(), make_recipe(**DECAYED, **{"optimizer.name": "momentum"}), make_net()
    optimizer = torch.optim.SGD(decayed_groups(net), momentum=0.9, weight_decay=0.01)
    expected = plain_loop(net, samples, recipe, optimizer).state
    for engine in ("torch", "xla 8"):
        assert_close(engine_weights(make_net(), samples, recipe, engine), expected)
    assert_close(on_ranks(2, sharded)[0], expected, atol=5e-5)


# --- classes of torch and timm ----------------------------------------------------------------------------------------

LIBRARY: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "torch:RMSprop": ({"momentum": 0.9, "eps": 1e-6, "weight_decay": 0.01}, torch.optim.RMSprop),
    # The weight decay of a recipe is 0, whatever the class's own default is.
    "torch:AdamW": ({}, functools.partial(torch.optim.AdamW, weight_decay=0.0)),
    "timm:lamb": ({"weight_decay": 0.1}, Lamb),
    "timm:lion": ({"betas": (0.9, 0.95)}, Lion),
}


def library_recipe(name: str, **keys: Any) -> Recipe:
    return make_recipe(
        **{"optimizer.name": name, "optimizer.lr": 0.005, **{f"optimizer.{k}": v for k, v in keys.items()}}
    )


@pytest.mark.parametrize("name", LIBRARY)
def test_classes_of_libraries_train_as_in_a_plain_loop(name: str) -> None:
    keys, make = LIBRARY[name]
    samples, net, recipe = make_samples(), make_net(), library_recipe(name, **keys)
    expected = plain_loop(net, samples, recipe, make(net.parameters(), lr=0.005, **keys)).state
    assert_close(engine_weights(make_net(), samples, recipe), expected)


def flat_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 5))


# Numbers and tensors of all kinds, kept for a parameter or for a group.
KINDS = ("torch:Adafactor", "torch:ASGD", "timm:lamb", "timm:muon")


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(name: str) -> None:
    """Also after an epoch was undone: whatever an optimizer keeps is copied, numbers of Python included."""
    has_momentum = "momentum" in inspect.signature(optim.class_of(Optimizer(name=name))).parameters
    samples, recipe = make_samples(40), library_recipe(name, **({"momentum": 0.9} if has_momentum else {}))

    def engine_after(epochs: int, progress: Progress, engine: TorchEngine) -> TorchEngine:
        train(engine, recipe.override({"epochs": epochs}), samples, progress=progress)
        return engine

    whole = engine_after(2, Progress(), TorchEngine(flat_net(), recipe))
    expected = whole.state()
    whole.close()
    progress = Progress()
    first = engine_after(1, progress, TorchEngine(flat_net(), recipe))
    saved, snapshot, position = first.state(), first.snapshot(), copy.deepcopy(progress)
    engine_after(2, progress, first)
    first.restore(snapshot)
    engine_after(2, copy.deepcopy(position), first)
    again = first.state()
    first.close()
    second = TorchEngine(flat_net(), recipe)
    second.load_state(saved)
    assert_equal(second.state(), saved)
    found = engine_after(2, position, second).state()
    second.close()
    assert_equal(again, expected)
    assert_equal(found, expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "torch:RMSProp": ({}, "torch has no optimizer called 'RMSProp'; did you mean 'RMSprop'?"),
    "timm:lam": ({}, "timm has no optimizer called 'lam'; did you mean 'lamb'?"),
    "torch:LBFGS": (
        {},
        "optimizer.name = 'torch:LBFGS' is not supported: it computes the loss several times in a step",
    ),
    "timm:lion": ({"eps": 1e-3}, "optimizer.eps = 0.001: timm:lion has none; leave the key out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_train_is_named_before_the_data_is_read(name: str, tmp_path: Path) -> None:
    keys, message = WRONG[name]
    recipe = library_recipe(name, **keys)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / "broken.png").write_bytes(b"")
    with pytest.raises(InputError, match=re.escape(message)):
        flatout.fit(data=tmp_path / "images", job=recipe, out=tmp_path / "run", quiet=True)


def test_xla_has_none_of_them() -> None:
    message = "is not available with --engine xla; use sgd, momentum, adagrad, adam, adamw, or --engine torch"
    with pytest.raises(InputError, match=re.escape(message)):
        make_engine("xla 8", make_net(), library_recipe("torch:NAdam")).place(make_samples()).compile()
