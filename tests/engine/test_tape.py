"""Recorded steps against eager ones without a GPU: a tape stands in for the CUDA graph."""

from typing import Any

import pytest
import torch
from torch import nn

from flatout.config import Recipe
from flatout.config.jobs import builtin_jobs, load_job
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.torch import step
from flatout.engine.torch.batches import Step
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model
from flatout.train.loop import run_loop
from flatout.train.progress import Progress
from flatout.utils.errors import RankLost
from tests.engine.ranks import on_ranks
from tests.engine.tape import FakeAccelerator, HostSynchronisation
from tests.engine.test_against_plain_loop import SILENT, make_net, make_recipe, make_samples
from tests.engine.test_prefix import frozen_net

BATCH, COUNT, CLASSES, EPOCHS = 8, 20, 4, 3
# In each epoch two full batches and a padded one: three eager steps of the full ones, and one padded; then two graphs.
GRAPHS = 2
SIZES = {"cats-dogs": 32, "oct-vgg16": 32, "caltech101": 32, "digits": 8}


def run(recipe: Recipe, net: nn.Module, *, record: bool, world: World | None = None, **options: Any):
    """Train; return the state, the counts of the epochs, and how many steps were recorded."""
    torch.manual_seed(1)
    accelerator = FakeAccelerator()
    with pytest.MonkeyPatch.context() as patch:
        if not record:
            patch.setattr(step, "EAGER_STEPS", 1 << 30)
        engine = TorchEngine(net, recipe, world=world, accelerator=accelerator, **options)
        try:
            samples = make_samples(COUNT, recipe.image_sides[0], recipe.channels, CLASSES)
            if recipe.loss == "binary-cross-entropy":
                samples.labels[:] %= 2
            progress = Progress()
            run_loop(engine, world or World(), recipe, {"train": engine.place(samples)}, progress, SILENT)
            return (
                engine.state(),
                [(r.train_loss, r.metrics["train_accuracy"]) for r in progress.history],
                accelerator.recorded,
            )
        finally:
            engine.close()


def differences(recipe: Recipe, net: Any, *, graphs: int = GRAPHS, **options: Any) -> list[str]:
    """Return what differs between a recorded and an eager training; every bit counts."""
    state, losses, recorded = run(recipe, net(), record=True, **options)
    expected, expected_losses, _ = run(recipe, net(), record=False, **options)
    assert recorded == graphs
    assert state.keys() == expected.keys()
    assert all(value.isfinite().all() for value in expected.values())
    different = [name for name, value in expected.items() if not torch.equal(state[name], value)]
    return different + ["losses"] * (losses != expected_losses)


def job_recipe(job: str, **changes: Any) -> Recipe:
    recipe = load_job(job)
    small = {
        "epochs": EPOCHS, "batch_size": BATCH, "image_size": SIZES.get(job, 28), "drop_last": False,
        "pretrained": False, "keep": "last", "data.valid_fraction": 0.0, "schedule.name": "cosine",
    }  # fmt: skip
    return recipe.override({**small, **changes})


def job_net(recipe: Recipe) -> nn.Module:
    return build_model(recipe, 2 if recipe.loss == "binary-cross-entropy" else CLASSES)


def net_recipe(**changes: Any) -> Recipe:
    return make_recipe(epochs=EPOCHS, batch_size=BATCH, **{"schedule.name": "cosine", "optimizer.lr": 0.05, **changes})


# Sixteen layers take ten times as long as those of the other jobs.
SLOW = {"oct-vgg16": pytest.mark.slow}


@pytest.mark.parametrize("job", [pytest.param(job, marks=SLOW.get(job, ())) for job in builtin_jobs()])
def test_built_in_jobs(job: str) -> None:
    recipe = job_recipe(job)
    assert differences(recipe, lambda: job_net(recipe)) == []


CASES: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.1},
    "micro-batches": {"micro_batch": 3, "norm": "per-device"},
    "momentum": {"optimizer.name": "momentum", "optimizer.nesterov": True},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.01},
    "layer decay": {"optimizer.name": "momentum", "optimizer.layer_decay": 0.5},
    "affine maps": {"augment.rotate": 20.0, "augment.flip": True},
    "colours and rectangles": {"augment.color_jitter": 0.4, "augment.policy": "trivialaugment", "augment.erase": 0.5},
    "mixtures": {"augment.mixup": 0.4, "augment.cutmix": 1.0, "augment.flip": True},
    "streamed mixtures": {"augment.mixup": 0.4, "data.placement": "disk"},
    "averaged weights, limited gradients": {"ema": 0.9, "clip_norm": 0.5},
    "bfloat16": {"precision": "bf16"},
    "streamed images": {"data.placement": "disk"},
}


def norm_net() -> nn.Module:
    return make_net(classes=CLASSES)


def plain_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(600, CLASSES))


@pytest.mark.parametrize("name", CASES)
def test_recipes(name: str) -> None:
    net = plain_net if name == "micro-batches" else norm_net
    assert differences(net_recipe(**CASES[name]), net) == []


def test_a_cached_prefix() -> None:
    assert differences(net_recipe(), frozen_net) == []


def evaluated(recipe: Recipe, *, record: bool, world: World | None = None) -> tuple[list[dict[str, float]], int]:
    """Train with a validation split; return the metrics of the epochs, and how many graphs were recorded."""
    accelerator, world = FakeAccelerator(), world or World()
    with pytest.MonkeyPatch.context() as patch:
        if not record:
            patch.setattr(TorchEngine, "is_captured", False)
        engine = TorchEngine(norm_net(), recipe, world=world, accelerator=accelerator)
        splits = {"train": make_samples(COUNT, classes=CLASSES), "valid": make_samples(COUNT + 7, classes=CLASSES)}
        progress = Progress()
        placed = {name: engine.place(samples) for name, samples in splits.items()}
        run_loop(engine, world, recipe, placed, progress, SILENT)
        engine.close()
    return [record.metrics for record in progress.history], accelerator.recorded


@pytest.mark.parametrize(
    "changes", [{}, {"ema": 0.9}, {"data.placement": "disk"}], ids=["plain", "averaged", "streamed"]
)
def test_recorded_evaluations(changes: dict[str, Any]) -> None:
    recipe = net_recipe(**changes)
    found, recorded = evaluated(recipe, record=True)
    expected, without = evaluated(recipe, record=False)
    # Each of full batches and of the padded one.
    assert (recorded, without) == (2 * GRAPHS, GRAPHS)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_loaded_state_and_another_split_are_recorded_anew() -> None:
    recipe = net_recipe(**{"optimizer.name": "momentum"})
    states = []
    for eager_steps in (step.EAGER_STEPS, 1 << 30):
        accelerator = FakeAccelerator()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "EAGER_STEPS", eager_steps)
            engine = TorchEngine(norm_net(), recipe, accelerator=accelerator)
            for count in (COUNT, COUNT + BATCH):
                split = engine.place(make_samples(count, classes=CLASSES))
                run_loop(engine, World(), recipe, {"train": split}, Progress(), SILENT)
                engine.load_state(engine.state())
                run_loop(engine, World(), recipe, {"train": split}, Progress(), SILENT)
            states.append(engine.state())
            engine.close()
        assert accelerator.recorded == (8 if eager_steps < 4 else 0)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("reason", ["capture fails", "a collective fails", "too little memory"])
def test_without_a_record_training_goes_on(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be")
        except RuntimeError as error:
            if reason == "a collective fails":
                raise RankLost("rank 0 lost touch with the others") from error
            # As the end of a capture does.
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(FakeAccelerator, "capture", fail)
    if reason == "too little memory":
        monkeypatch.setattr(FakeAccelerator, "has_room_for_graph", lambda self: False)
    notes: list[str] = []
    state, *_ = run(net_recipe(), norm_net(), record=True, report=notes.append)
    expected, *_ = run(net_recipe(), norm_net(), record=False)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    (note,) = notes
    assert note.startswith("the step runs without a CUDA graph: ")
    assert note.endswith("beside eager steps" if reason == "too little memory" else "capturing")


# --- planted defects --------------------------------------------------------------------------------------------------


def test_a_python_number_of_the_batch_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the constants, the padded batch replays the record of a full one: its padding enters the statistics."""
    monkeypatch.setattr(Step, "constants", property(lambda inputs: (len(inputs.batch.samples),)))
    assert "model.3.running_var" in differences(net_recipe(), norm_net, graphs=1)


def test_a_learning_rate_that_is_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    build = optim.build
    monkeypatch.setattr(optim, "build", lambda *args, capturable: build(*args, capturable=False))
    assert "model.0.weight" in differences(net_recipe(), norm_net)
    assert "model.4.weight" in differences(net_recipe(**{"optimizer.layer_decay": 0.5}), norm_net)


class Waits(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "item":
            return x * (1.0 if x.mean().item() > 0 else 2.0)
        if self.how == "if":
            return x if x.mean() > 0 else 2 * x
        if self.how == "mask":
            return x + x[x > 0].mean()
        if self.how == "tolist":
            return x * (1.0 if x.mean(dim=(1, 2, 3)).tolist()[0] > 0 else 2.0)
        return x + torch.tensor(0.5)


@pytest.mark.parametrize("how", ["item", "if", "mask", "tolist", "constant"])
def test_a_synchronisation(how: str) -> None:
    with pytest.raises(HostSynchronisation):
        run(net_recipe(), nn.Sequential(Waits(how), norm_net()), record=True)


# --- several ranks ----------------------------------------------------------------------------------------------------


def compare_on_ranks(world: World) -> dict[str, list[str]]:
    """Compare recorded with eager training on each rank; return what differs in each case."""
    # As if NCCL added the gradients: gloo works on the same tensors.
    world.backend = "nccl"
    found = {"sgd": differences(net_recipe(), norm_net, world=world)}
    own, (expected, _) = (
        evaluated(net_recipe(), record=True, world=world),
        evaluated(net_recipe(), record=False, world=world),
    )
    found["evaluation"] = [] if own[0] == [pytest.approx(metrics, rel=1e-6) for metrics in expected] else ["metrics"]
    found["per-device"] = differences(net_recipe(norm="per-device"), norm_net, world=world)
    found["dropout, adam"] = differences(net_recipe(**{"optimizer.name": "adam"}), plain_net, world=world)
    with pytest.MonkeyPatch.context() as patch:
        # Shares of 4 and 4 samples, then 4 and 0: the first rank's share is full, and only the total differs.
        patch.setattr(Step, "constants", property(lambda inputs: (len(inputs.batch.samples),)))
        found["planted"] = differences(net_recipe(), norm_net, graphs=1, world=world)
    return found


def test_ranks() -> None:
    found = on_ranks(2, compare_on_ranks, backend="gloo")
    planted = [cases.pop("planted") for cases in found]
    assert not any(names for cases in found for names in cases.values()), found
    assert "model.3.running_var" in planted[0]
