"""What only the XLA engine does: parts of a batch, slices of a state, many steps in one program, its compilations."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.data.order import training_batches
from flatout.dist.world import World
from flatout.engine.base import Engine
from flatout.errors import InputError
from flatout.models.nets import CatsDogsCNN
from flatout.numerics.augment import epoch_transforms
from flatout.recipe import Recipe
from flatout.run.loop import train
from flatout.run.progress import Progress
from tests.engine import test_data_parallel as parallel
from tests.engine.engines import XLA, make_engine
from tests.engine.test_against_plain_loop import OPTIMIZERS, SILENT, make_net, make_recipe, make_samples

State = dict[str, torch.Tensor]
AUGMENTED = {"augment.rotate": 12.0, "augment.zoom": 0.2, "augment.shear": 0.2, "augment.flip": True}


def trained(engine: Engine, recipe: Recipe, count: int = 70, **samples: Any) -> State:
    placed = engine.place(make_samples(count, **samples))
    placed.compile()
    train(engine, World(), recipe, {"train": placed}, Progress(), SILENT)
    return engine.state()


def assert_same(found: State, expected: State, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class Recorder:
    def __init__(self) -> None:
        self.steps: list[tuple[list[int], Any]] = []

    def step(self, samples: np.ndarray, transforms: np.ndarray | None) -> None:
        self.steps.append((samples.tolist(), None if transforms is None else transforms.tolist()))


@pytest.mark.parametrize("changes", [{}, {"augment.flip": True}, AUGMENTED, {"loss": "binary-cross-entropy"}])
@pytest.mark.parametrize("name", XLA)
def test_one_step_equals_the_torch_engines(name: str, changes: dict[str, Any]) -> None:
    """The very state, optimizer and batch statistics included; of a batch that eight devices cannot share evenly."""
    recipe = make_recipe(epochs=1, batch_size=50, drop_last=True, **{"optimizer.momentum": 0.9, **changes})
    classes = 1 if "loss" in changes else 5
    states, recorders = [], []
    for engine_name in ("torch", name):
        engine, recorder = make_engine(engine_name, make_net(classes=classes), recipe), Recorder()
        engine.recorder = recorder  # pyright: ignore[reportAttributeAccessIssue]
        states.append(trained(engine, recipe, classes=max(2, classes)))
        recorders.append(recorder.steps)
    assert_same(states[1], states[0], rtol=1e-5, atol=1e-6)
    assert len(recorders[0]) == 1
    assert recorders[0] == recorders[1]


@pytest.mark.parametrize("name", XLA)
@pytest.mark.parametrize("count", [101, 100, 8, 3])
def test_evaluation_counts_each_image_once(count: int, name: str) -> None:
    """101 images on eight devices, and fewer images than devices, by the same weights as the torch engine's."""
    recipe, samples = make_recipe(batch_size=64), make_samples(count)
    results = []
    for engine_name in ("torch", name):
        engine = make_engine(engine_name, make_net(), recipe)
        results.append(engine.place(samples).evaluate(with_probabilities=True))
    ours, theirs = results[1], results[0]
    assert ours.counts.correct == theirs.counts.correct
    assert ours.counts.count == theirs.counts.count == count
    assert ours.counts.loss == pytest.approx(theirs.counts.loss, rel=1e-6)
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad"])
@pytest.mark.parametrize("way", [("torch", "xla 8"), ("xla 8", "torch"), ("xla 2", "xla 8")])
def test_either_engine_goes_on_from_the_other(way: tuple[str, str], optimizer: str) -> None:
    changes = {f"optimizer.{k}": v for k, v in vars(OPTIMIZERS[optimizer][0]).items()}
    recipe = make_recipe(**changes)
    expected = trained(make_engine("torch", make_net(), recipe.override({"epochs": 2})), recipe)
    count, progress = 70, Progress()
    first = make_engine(way[0], make_net(), recipe)
    placed = first.place(make_samples(count))
    placed.compile()
    train(first, World(), recipe.override({"epochs": 1}), {"train": placed}, progress, SILENT)
    # Other weights at first, so that what is loaded counts.
    second = make_engine(way[1], nn.Sequential(*make_net().children()).apply(_forget), recipe)
    second.load_state(first.state())
    placed = second.place(make_samples(count))
    placed.compile()
    train(second, World(), recipe, {"train": placed}, progress, SILENT)
    assert_same(second.state(), expected)


def _forget(layer: nn.Module) -> None:
    for parameter in layer.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize("name", ["xla 2", "xla 8"])
def test_slices_change_nothing(name: str) -> None:
    recipe = make_recipe(**{"optimizer.name": "adam", "optimizer.lr": 0.001})
    expected = trained(make_engine(name, make_net(), recipe), recipe)
    engine = make_engine(name, make_net(), recipe.override({"shard": "full"}))
    assert_same(trained(engine, recipe), expected, rtol=1e-4, atol=1e-6)


def test_every_device_keeps_its_slice_alone() -> None:
    recipe = make_recipe(shard="full")
    engine = make_engine("xla 8", nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.Linear(64, 5)), recipe)
    engine.place(make_samples()).compile()
    weight = engine._state.trained["1.weight"]  # pyright: ignore[reportAttributeAccessIssue]
    assert {shard.data.size for shard in weight.addressable_shards} == {144 * 64 // 8}


@pytest.mark.parametrize("steps", [2, 3])
def test_many_steps_in_one_program(steps: int) -> None:
    """Five steps an epoch: some dispatches are full, the last of an epoch is not."""
    recipe = make_recipe(**AUGMENTED)
    expected = trained(make_engine("xla 2", make_net(), recipe), recipe)
    engine = make_engine("xla 2", make_net(), recipe, steps_per_dispatch=steps)
    assert_same(trained(engine, recipe), expected, rtol=1e-4, atol=1e-6)
    placed = engine.place(make_samples())
    placed.begin_epoch(epoch_transforms(recipe.augment, recipe.seed, 0, 70))
    for number, inputs in enumerate(placed.feed(training_batches(recipe.seed, 0, 70, 16))):
        placed.train_step(inputs, 0.01, number)
    # What waits for a full dispatch is counted too.
    assert engine.counts()[0].count == 70


def test_statistics_of_each_device_alone() -> None:
    recipe = make_recipe(norm="per-device", epochs=1, **{"optimizer.lr": 0.05})
    samples = make_samples(64)
    net = make_net()
    x = (torch.from_numpy(samples.images).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.3
    batches = [b.samples[: b.count] for b in training_batches(recipe.seed, 0, 64, 16)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    expected, _ = parallel.plain_loop(
        net, x, torch.from_numpy(samples.labels), batches, optimizer, batch_size=16, shares=2
    )
    found = trained(make_engine("xla 2", make_net(), recipe), recipe, 64)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[f"model.{name}"], value, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )


def test_nothing_is_compiled_after_the_first_epoch() -> None:
    import jax

    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compilations.append(event))
    recipe = make_recipe(epochs=1, **AUGMENTED)
    engine = make_engine("xla 8", make_net(), recipe)
    placed = engine.place(make_samples())
    placed.compile()
    before = sum("backend_compile" in event for event in compilations)
    assert before > 0
    splits = {"train": placed, "valid": placed}
    train(engine, World(), recipe, splits, Progress(), SILENT)
    first = sum("backend_compile" in event for event in compilations)
    train(engine, World(), recipe.override({"epochs": 3}), splits, Progress(), SILENT)
    engine.state()
    # The evaluation was compiled in the first epoch.
    assert first - before <= 1
    assert sum("backend_compile" in event for event in compilations) == first


def test_dropout_differs_between_steps_and_repeats_with_the_seed() -> None:
    recipe = Recipe(model="net", image_size=16, channels=1, epochs=1, batch_size=16, loss="binary-cross-entropy")
    recipe = recipe.override({"data.mean": [0.4], "data.std": [0.3]})
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        net = CatsDogsCNN(image_size=16, channels=1)
        engine = make_engine("xla 2", net, recipe.override({"seed": seed}))
        placed = engine.place(make_samples(64, size=16, classes=2))
        placed.compile()
        placed.begin_epoch(None)
        losses = []
        for inputs in placed.feed([next(training_batches(1, 0, 64, 16))] * 3):
            placed.train_step(inputs, 0.0, seed * 1000 + len(losses))
            losses.append(engine.counts()[0].loss)
        assert len(set(losses)) == 3
        states.append(losses)
    assert states[0] == states[1] != states[2]


def test_frozen_weights_stay() -> None:
    net = make_net()
    next(net.children()).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    recipe = make_recipe(**{"optimizer.weight_decay": 0.1, "optimizer.lr": 0.1})
    state = trained(make_engine("xla 2", net, recipe), recipe)
    assert torch.equal(state["model.0.weight"], before["0.weight"])
    assert not any(name.startswith("optimizer.0.") for name in state)
    assert not torch.equal(state["model.8.weight"], before["8.weight"])


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    recipe = make_recipe(**{"optimizer.lr": 1e30})
    with pytest.raises(Exception, match=r"epoch 1: the loss is not finite in step [2-5]"):
        trained(make_engine("xla 2", make_net(), recipe, steps_per_dispatch=3), recipe)


def test_the_cost_of_padding_is_told() -> None:
    sentences: list[str] = []
    engine = make_engine("xla 8", make_net(), make_recipe(batch_size=50), report=sentences.append)
    engine.place(make_samples()).compile()
    assert any("each batch of 50 samples is padded to 56" in sentence for sentence in sentences)


def test_precision_that_the_platform_lacks() -> None:
    with pytest.raises(InputError, match="tf32"):
        make_engine("xla 1", make_net(), make_recipe(precision="tf32"))
