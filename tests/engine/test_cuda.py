"""The torch engine on one CUDA device; skipped where there is none."""

import pytest
import torch

from tests.engine.test_against_plain_loop import (
    OPTIMIZERS,
    engine_weights,
    make_net,
    make_recipe,
    make_samples,
    plain_loop,
)
from tests.engine.test_prefix import frozen_net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# TF32 has 10 bits of mantissa; without it the device differs from the CPU by its order of summation alone.
EXACT = {"precision": "fp32"}


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-3, atol=5e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_plain_loop_on_the_cpu(name: str) -> None:
    section, make = OPTIMIZERS[name]
    changes = {f"optimizer.{key}": value for key, value in vars(section).items()}
    recipe, samples, net = make_recipe(**EXACT).override(changes), make_samples(), make_net()
    expected = plain_loop(net, samples, recipe, make(net.parameters())).state_dict()
    assert_close(expected, engine_weights(make_net(), samples, recipe, engine="cuda"))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_recorded_step_equals_the_eager_one(schedule: str) -> None:
    """Many full batches, a padded one at the end, augmentation, and a learning rate that moves."""
    changes = {"schedule.name": schedule, "augment.flip": True, "augment.rotate": 10.0, "epochs": 4}
    recipe, samples = make_recipe(**EXACT, **changes), make_samples(200)
    sentences: list[str] = []
    recorded = engine_weights(make_net(), samples, recipe, engine="cuda", report=sentences.append)
    eager = engine_weights(make_net(), samples, recipe, engine="cuda", capture=False)
    assert "the whole step runs as one CUDA graph" in sentences
    assert_close(eager, recorded)


@pytest.mark.parametrize("placement", ["memory", "disk"])
def test_streamed_images_give_the_same_weights(placement: str) -> None:
    samples = make_samples(200)
    expected = engine_weights(make_net(), samples, make_recipe(**EXACT), engine="cuda")
    recipe = make_recipe(**EXACT, **{"data.placement": placement})
    assert_close(expected, engine_weights(make_net(), samples, recipe, engine="cuda"))


def test_the_cached_prefix_gives_the_same_weights() -> None:
    recipe = make_recipe(**EXACT)
    cached = engine_weights(frozen_net(), make_samples(), recipe, engine="cuda")
    assert_close(cached, engine_weights(frozen_net(), make_samples(), recipe, engine="cuda", cache_prefix=False))


def test_bf16_trains_where_the_hardware_has_it() -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this device has no bf16 units")
    weights = engine_weights(make_net(), make_samples(), make_recipe(precision="bf16"), engine="cuda")
    assert all(value.isfinite().all() for value in weights.values())
