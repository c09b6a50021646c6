"""Training on augmented and mixed images, on both engines, against a loop written by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.data.batches import epoch_batches
from flatout.distributed.world import World
from flatout.engine.torch.accelerator import CPU
from flatout.engine.torch.engine import TorchEngine
from flatout.train.request import Progress
from tests.engine.engines import make_engine, train
from tests.engine.plain_loop import normalised, plain_loop
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import (
    assert_close,
    engine_weights,
    make_net,
    make_recipe,
    make_samples,
    small_net,
)
from tests.engine.test_xla import small_net as norm_net

MIXED = {
    "augment.flip": True,
    "augment.color_jitter": 0.4,
    "augment.erase": 0.5,
    "augment.mixup": 0.4,
    "augment.cutmix": 1.0,
    "label_smoothing": 0.1,
    "optimizer.lr": 0.05,
}


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_equals_a_plain_loop_with_class_weights(engine: str) -> None:
    samples, recipe, weights = make_samples(), make_recipe(**MIXED, drop_last=True), [0.5, 1.0, 2.0, 1.0, 1.0]
    expected = plain_loop(small_net(), samples, recipe, class_weights=torch.tensor(weights)).state
    class_weights = np.array(weights, np.float32)
    assert_close(engine_weights(small_net(), samples, recipe, engine, class_weights=class_weights), expected)


@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_classes_of_weight_0_train_nothing_and_are_counted(engine: str) -> None:
    """Also where they fill a batch, and the batch norm sees them: they are not padding."""
    samples, recipe, weights = make_samples(), make_recipe(batch_size=4), [1.0, 0.0, 0.0, 0.0, 0.0]
    batches = list(epoch_batches(recipe, samples, 0))
    assert any(samples.labels[batch.samples].all() for batch in batches)
    expected = plain_loop(norm_net(), samples, recipe, class_weights=torch.tensor(weights))
    made = make_engine(engine, norm_net(), recipe, class_weights=np.array(weights, np.float32))
    train(made, recipe, samples, progress=(progress := Progress()))
    assert [record["images"] for record in progress.history] == [len(samples)] * recipe.epochs
    assert_close(
        {k.removeprefix("model."): v for k, v in made.state().items() if k.startswith("model.")}, expected.state
    )


@pytest.mark.parametrize("changes", [{"data.placement": "disk"}, {"norm": "per-device", "micro_batch": 8}])
def test_streaming_and_micro_batches_mix_the_same(changes: dict[str, Any]) -> None:
    first, second = (
        engine_weights(small_net(), make_samples(), make_recipe(**MIXED, **more)) for more in ({}, changes)
    )
    assert_close(second, first, atol=1e-6)


class Seen(nn.Module):
    """Notes the images that it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images.append(x.detach().clone())
        return x


def test_images_are_resampled_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, the grid of the pixels is off by up to a fifth of a pixel at 224."""
    monkeypatch.setattr(CPU, "precisions", lambda self: ["fp32", "bf16"])
    seen = []
    for precision in ("fp32", "bf16"):
        net = nn.Sequential(Seen(), make_net())
        recipe = make_recipe(**{"precision": precision, "augment.rotate": 20.0, "augment.shift": 0.1})
        engine_weights(net, make_samples(), recipe)
        seen.append(net[0].images)
    assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True))


# --- averaged weights, limited gradients ------------------------------------------------------------------------------

AVERAGED = {"ema": 0.7, "clip_norm": 0.5, "optimizer.lr": 0.5}


@pytest.mark.parametrize("is_pretrained", [False, True])
@pytest.mark.parametrize("engine", ["torch", "xla 8"])
def test_the_average_is_evaluated_kept_and_continued(engine: str, is_pretrained: bool) -> None:
    samples, recipe = make_samples(), make_recipe(**AVERAGED, pretrained=is_pretrained)
    expected = plain_loop(norm_net(), samples, recipe).average
    net = norm_net()
    net.load_state_dict(expected)
    with torch.no_grad():
        right = int((net.eval()(normalised(samples, recipe)).argmax(1) == torch.from_numpy(samples.labels)).sum())

    nets = [norm_net(), norm_net()]
    for net in nets:
        net.register_buffer("passing", torch.zeros(3), persistent=False)
    first, second = (make_engine(engine, net, recipe) for net in nets)
    progress = Progress()
    train(first, recipe.override({"epochs": 1}), samples, progress=progress)
    second.load_state(first.state())
    first.close()
    placed = train(second, recipe, samples, progress=progress)
    found = second.state()
    expected = {f"ema.{name}": value for name, value in expected.items() if "num_batches" not in name}
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=2e-3, atol=5e-5)
    assert placed.evaluate().metrics["correct"] == right
    second.restore(second.snapshot(weights_only=True))
    assert placed.evaluate().metrics["correct"] == right
    assert not torch.allclose(found["model.4.weight"], found["ema.4.weight"], atol=1e-3)
    second.close()


def averaged(world: World, shards: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
    results = []
    for shard in shards:
        recipe = make_recipe(**{**MIXED, **AVERAGED}, shard=shard)
        engine = TorchEngine(make_net(), recipe, world=world)
        correct = train(engine, recipe, make_samples(), world=world).evaluate().metrics["correct"]
        results.append({name: value.numpy() for name, value in engine.state().items()} | {"correct": np.array(correct)})
        engine.close()
    return results


@pytest.mark.slow
def test_ranks_mix_and_average_alike() -> None:
    """Partners come from the whole split, wherever the ranks' shares of a batch lie."""
    (alone,) = averaged(World(), ("none",))
    for together in on_ranks(2, averaged, ("none", "full"))[0]:
        for name, value in alone.items():
            np.testing.assert_allclose(together[name], value, rtol=2e-3, atol=5e-5, err_msg=name)
