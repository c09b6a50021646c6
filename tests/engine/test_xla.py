"""What only the XLA engine does: parts of a batch, slices of a state, many steps in one program, its compilations."""

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import training_batches
from flatout.distributed.world import World
from flatout.engine.base import Engine
from flatout.engine.xla.program import DeviceBatch
from flatout.train.loop import TrainingLoop
from flatout.train.request import Progress
from flatout.utils.errors import InputError
from tests.engine.engines import make_engine, train
from tests.engine.plain_loop import plain_loop
from tests.engine.test_against_plain_loop import OPTIMIZERS, SILENT, make_net, make_recipe, make_samples
from tests.engine.test_prefix import frozen_net

State = dict[str, torch.Tensor]
SEPARABLE = {"augment.flip": True, "augment.crop": 0.4, "augment.zoom": 0.2, "augment.shift": 0.1}
AUGMENTED = {"augment.rotate": 12.0, "augment.zoom": 0.2, "augment.shear": 0.2, "augment.flip": True}


def trained(engine: Engine, recipe: Recipe, count: int = 70, **samples: Any) -> State:
    train(engine, recipe, make_samples(count, **samples))
    return engine.state()


def assert_same(found: State, expected: State, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def small_net() -> nn.Module:
    """Weights and batch statistics without convolutions, which take XLA long to compile."""
    torch.manual_seed(3)
    # A bias before a normalisation has gradients of nothing but rounding, which Adam scales to whole steps.
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


def test_one_step_equals_the_torch_engines() -> None:
    """The very state, optimizer and batch statistics included; of a batch that eight devices cannot share evenly."""
    changes = {**AUGMENTED, "loss": "binary-cross-entropy", "optimizer.momentum": 0.9}
    recipe = make_recipe(epochs=1, batch_size=50, drop_last=True, **changes)
    engines = (make_engine(name, make_net(classes=1), recipe) for name in ("torch", "xla 8"))
    expected, found = (trained(engine, recipe, classes=2) for engine in engines)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "placement"), [("xla 2", "memory"), ("xla 8", "device")])
def test_evaluation_counts_each_image_once(name: str, placement: str) -> None:
    """101 images on eight devices, and fewer images than devices, by the same weights as the torch engine's."""
    recipe = make_recipe(batch_size=64, **{"data.placement": placement})
    engines = [make_engine(engine_name, small_net(), recipe) for engine_name in ("torch", name)]
    for count in (101, 64, 8, 3):
        samples = make_samples(count)
        placed = [engine.place(samples) for engine in engines]
        everything: Any = {"with_probabilities": True, "with_logits": True, "keep_features": np.array}
        theirs, ours = (split.evaluate(**everything) for split in placed)
        assert ours.metrics["correct"] == theirs.metrics["correct"]
        assert len(ours.labels) == len(theirs.labels) == count
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        for array in ("probabilities", "logits", "features"):
            np.testing.assert_allclose(getattr(ours, array), getattr(theirs, array), atol=2e-6, err_msg=array)


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        (("torch", "xla 8"), "momentum"),
        (("xla 8", "torch"), "adam"),
        pytest.param(("xla 2", "xla 8"), "adagrad", marks=pytest.mark.slow),
    ],
)
def test_either_engine_goes_on_from_the_other(way: tuple[str, str], optimizer: str) -> None:
    recipe = make_recipe(**{f"optimizer.{k}": v for k, v in vars(OPTIMIZERS[optimizer][0]).items()})
    expected = trained(make_engine("torch", small_net(), recipe.override({"epochs": 2})), recipe)
    # Other weights at first, so that what is loaded counts.
    nets, progress, state = (small_net(), small_net().apply(_forget)), Progress(), None
    for name, net, epochs in zip(way, nets, (1, recipe.epochs), strict=True):
        engine = make_engine(name, net, recipe)
        if state:
            engine.load_state(state)
        train(engine, recipe.override({"epochs": epochs}), make_samples(70), progress=progress)
        state = engine.state()
    assert state
    assert_same(state, expected)


def _forget(layer: nn.Module) -> None:
    for parameter in layer.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def test_slices_change_nothing() -> None:
    recipe = make_recipe(**{"optimizer.name": "adam", "optimizer.lr": 0.001})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 5))
    expected = trained(make_engine("xla 8", copy.deepcopy(net), recipe), recipe)
    engine: Any = make_engine("xla 8", net, recipe.override({"shard": "full"}))
    assert_same(trained(engine, recipe), expected, rtol=1e-4, atol=1e-6)
    weight = engine._state.trained["1.weight"]
    assert {shard.data.size for shard in weight.addressable_shards} == {144 * 64 // engine.sharding.size}


def test_many_steps_in_one_program() -> None:
    """Five steps an epoch: some dispatches are full, the last of an epoch is not."""
    recipe = make_recipe(**SEPARABLE, **{"data.placement": "device"})
    expected = trained(make_engine("torch", small_net(), recipe), recipe)
    engine = make_engine("xla 2", small_net(), recipe, steps_per_dispatch=3)
    assert_same(trained(engine, recipe), expected)
    placed = engine.place(make_samples())
    placed.begin_epoch(0)
    for number, inputs in enumerate(placed.feed(training_batches(recipe.seed, 0, 70, 16))):
        placed.train_step(inputs, 0.01, number)
        if number == 0:
            # The first step of a dispatch, fetched for the running loss.
            assert engine.counts()[0].count == 16
    # What waits for a full dispatch is counted too.
    assert engine.counts()[0].count == 70 - 16


def test_jax_settings_are_restored() -> None:
    names = ("jax_platforms", "jax_compilation_cache_dir")
    before = [getattr(jax.config, name) for name in names]
    engine = make_engine("xla 1", nn.Sequential(nn.Flatten(), nn.Linear(144, 5)), make_recipe())
    engine.place(make_samples()).compile()
    assert [getattr(jax.config, name) for name in names] == before


@pytest.mark.slow
def test_statistics_of_each_device_alone() -> None:
    recipe = make_recipe(norm="per-device", epochs=1, **{"optimizer.lr": 0.05})
    expected = plain_loop(make_net(), make_samples(64), recipe, shares=2).state
    found = trained(make_engine("xla 2", make_net(), recipe), recipe, 64)
    assert_same({name: found[f"model.{name}"] for name in expected}, expected)


def test_nothing_is_compiled_after_the_first_epoch(request: pytest.FixtureRequest) -> None:
    compilations: list[str] = []

    def note(event: str, *_: object, **__: object) -> None:
        compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(note))
    recipe = make_recipe(epochs=1, **SEPARABLE)
    engine = make_engine("xla 8", small_net(), recipe)
    placed = engine.place(make_samples())
    placed.compile()
    before = sum("backend_compile" in event for event in compilations)
    assert before > 0
    splits = {"train": placed, "valid": placed}
    TrainingLoop(engine, World(), recipe, splits, Progress(), SILENT).run()
    first = sum("backend_compile" in event for event in compilations)
    TrainingLoop(engine, World(), recipe.override({"epochs": 3}), splits, Progress(), SILENT).run()
    engine.state()
    # The evaluation was compiled in the first epoch, and the search for numbers that are not finite.
    assert first - before <= 2
    assert sum("backend_compile" in event for event in compilations) == first


def test_dropout_differs_between_steps_and_repeats_with_the_seed() -> None:
    recipe = Recipe(model="net", image_size=16, channels=1, epochs=1, batch_size=16, loss="binary-cross-entropy")
    recipe = recipe.override({"data.mean": [0.4], "data.std": [0.3]})
    engine = make_engine("xla 2", nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 1)), recipe)
    placed = engine.place(make_samples(64, size=16, classes=2))
    placed.compile()
    runs = []
    for seed in (1, 1, 2):
        placed.begin_epoch(0)
        losses = []
        for inputs in placed.feed([next(training_batches(1, 0, 64, 16))] * 3):
            placed.train_step(inputs, 0.0, seed * 1000 + len(losses))
            losses.append(engine.counts()[0].loss)
        assert len(set(losses)) == 3
        runs.append(losses)
    assert runs[0] == runs[1] != runs[2]


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    recipe = make_recipe(**{"optimizer.lr": 1e30, "data.placement": "device"})
    with pytest.raises(Exception, match=r"epoch 1: the loss is not finite in step [2-5]"):
        trained(make_engine("xla 2", small_net(), recipe, steps_per_dispatch=3), recipe)


def test_precision_that_the_platform_lacks() -> None:
    with pytest.raises(InputError, match="tf32"):
        make_engine("xla 1", make_net(), make_recipe(precision="tf32"))


@pytest.mark.parametrize(("precision", "is_highest"), [("fp32", True), ("bf16", False)])
def test_a_frozen_prefix_has_the_precision_of_the_recipe(precision: str, is_highest: bool) -> None:
    """TPUs would round the factors of products to bfloat16, also those of the features that a head is fitted to."""
    engine: Any = make_engine("xla 1", frozen_net(), make_recipe(precision=precision))
    samples = {"targets": np.zeros(8, np.int32), "weights": np.ones(8, np.float32)}
    inputs = DeviceBatch(images=np.zeros((8, 12, 12, 1), np.uint8), **samples)
    program = engine.program
    lowered = engine.sharding.lower(program, program.prefix, program.initial_state(), inputs).as_text()
    assert ("HIGHEST" in lowered) == is_highest
