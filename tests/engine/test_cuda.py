"""The torch engine on one CUDA device; skipped where there is none."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from flatout.config import Recipe
from flatout.config.jobs import builtin_jobs
from flatout.models.build import build_model
from tests.engine.plain_loop import plain_loop
from tests.engine.recorded import CASES, CLASSES, EXACT, Waits, job_net, job_recipe, net_of, net_recipe, plain_net
from tests.engine.test_against_plain_loop import (
    OPTIMIZERS,
    assert_close,
    engine_weights,
    make_net,
    make_recipe,
    make_samples,
)
from tests.engine.test_prefix import frozen_net

# The device differs from the CPU by its order of summation.
assert_close = functools.partial(assert_close, atol=5e-5)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums in a fixed order: networks with batch norm of few values would multiply any difference."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_plain_loop_on_the_cpu(name: str) -> None:
    section, make = OPTIMIZERS[name]
    changes = {f"optimizer.{key}": value for key, value in vars(section).items()}
    recipe, samples, net = make_recipe(**EXACT).override(changes), make_samples(), make_net()
    expected = plain_loop(net, samples, recipe, make(net.parameters())).state
    assert_close(expected, engine_weights(make_net(), samples, recipe, engine="cuda"))


def check_recorded(make: Callable[[], nn.Module], recipe: Recipe) -> None:
    """Compare training by recorded steps with training by eager ones."""
    samples, sentences = make_samples(100, recipe.image_sides[0], recipe.channels, CLASSES), list[str]()
    if recipe.loss == "binary-cross-entropy":
        samples.labels[:] %= 2
    recorded = engine_weights(make(), samples, recipe, engine="cuda", report=sentences.append)
    eager = engine_weights(make(), samples, recipe, engine="cuda", capture=False)
    assert "the whole step runs as one CUDA graph" in sentences
    if recipe.optimizer.name == "torch:RMSprop":  # recorded, torch multiplies in another order
        assert_close(eager, recorded)
    else:
        assert {name for name, value in eager.items() if not torch.equal(value, recorded[name])} == set()


@pytest.mark.parametrize("name", [name for name in CASES if name != "bfloat16"])
def test_each_way_to_train_is_recorded(name: str) -> None:
    check_recorded(lambda: net_of(name), net_recipe(**EXACT | CASES[name]))


@pytest.mark.parametrize("job", builtin_jobs())
def test_built_in_jobs_are_recorded(job: str) -> None:
    recipe = job_recipe(job, **EXACT)
    check_recorded(lambda: job_net(recipe), recipe)


@pytest.mark.parametrize("model", ["test_efficientnet", "test_vit", "test_convnext", "resnet18"])
def test_networks_of_timm_are_recorded(model: str) -> None:
    recipe = net_recipe(model=f"timm:{model}", image_size=32, **EXACT)
    check_recorded(lambda: build_model(recipe, CLASSES), recipe)


class Synchronises(nn.Module):
    """Waits for the device in a way that only a capture refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x


def train_after_a_refused_step(_: int, how: str) -> None:
    """Train a model that cannot be recorded, then one that can; both have dropout, whose state a capture changes."""
    waiting = Synchronises() if how == "synchronize" else Waits()
    recipe, sentences = net_recipe(**EXACT), list[str]()
    net = nn.Sequential(plain_net(), waiting)
    weights = engine_weights(net, make_samples(100, classes=CLASSES), recipe, engine="cuda", report=sentences.append)
    assert [sentence for sentence in sentences if "without a CUDA graph" in sentence], sentences
    assert all(value.isfinite().all() for value in weights.values())
    check_recorded(plain_net, recipe)


@pytest.mark.parametrize("how", ["item", "synchronize"])
def test_training_goes_on_after_a_step_that_cannot_be_recorded(how: str) -> None:
    # In a process of its own: a failed capture may spoil all that follows.
    spawn(train_after_a_refused_step, (how,))


def test_the_cached_prefix_gives_the_same_weights() -> None:
    recipe = make_recipe(**EXACT)
    cached = engine_weights(frozen_net(), make_samples(), recipe, engine="cuda")
    assert_close(cached, engine_weights(frozen_net(), make_samples(), recipe, engine="cuda", cache_prefix=False))
