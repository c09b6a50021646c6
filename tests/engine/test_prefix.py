"""The frozen prefix: found where it is, cached, and equal to the uncached run."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from flatout.engine.torch.accelerator import Accelerator
from flatout.engine.torch.engine import TorchEngine
from flatout.models.layers import cut_frozen_prefix, freeze, head_modules, set_train_mode
from tests.engine.engines import make_engine
from tests.engine.plain_loop import normalised
from tests.engine.test_against_plain_loop import engine_weights, make_net, make_recipe, make_samples


def frozen_net() -> nn.Module:
    net = make_net()
    for index in (0, 3):
        for parameter in net[index].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
    return net


@pytest.mark.parametrize("placement", ["auto", "memory", "disk"])
def test_cached_equals_uncached(placement: str) -> None:
    recipe = make_recipe(**{"optimizer.lr": 0.05, "data.placement": placement})
    sentences: list[str] = []
    cached = engine_weights(frozen_net(), make_samples(), recipe, report=sentences.append)
    uncached = engine_weights(frozen_net(), make_samples(), recipe, cache_prefix=False)
    assert "computed once" in " ".join(sentences)
    torch.testing.assert_close(cached, uncached, rtol=0, atol=0)
    assert not torch.equal(cached["8.weight"], make_net().state_dict()["8.weight"])


def test_the_cache_on_disk_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing remains of it, even if the process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = TorchEngine(frozen_net(), make_recipe(**{"data.placement": "disk"}))
    source = engine.place(make_samples()).source
    assert isinstance(source.samples.images, np.memmap)
    assert list(tmp_path.iterdir()) == []


def test_features_are_what_the_head_reads() -> None:
    net, samples = frozen_net(), make_samples()
    (head,) = head_modules(net).values()
    seen: list[torch.Tensor] = []
    with torch.no_grad(), head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0])):
        logits = net.eval()(normalised(samples, make_recipe()))
    found = TorchEngine(frozen_net(), make_recipe()).place(samples).evaluate(with_logits=True, keep_features=np.array)
    assert found.features is not None
    assert found.logits is not None
    np.testing.assert_allclose(found.features, seen[0].flatten(1), atol=1e-5)
    np.testing.assert_allclose(found.logits, logits, atol=1e-5)


def test_no_cut_with_augmentation_or_two_sizes_or_nothing_frozen() -> None:
    assert TorchEngine(frozen_net(), make_recipe()).cut is not None
    assert TorchEngine(frozen_net(), make_recipe(**{"augment.flip": True})).cut is None
    assert TorchEngine(frozen_net(), make_recipe(**{"data.eval_size": 16})).cut is None
    assert TorchEngine(make_net(), make_recipe()).cut is None


class Branching(nn.Module):
    """A residual block whose skip passes a frozen layer: the only safe cut is after the addition."""

    def __init__(self, drop: bool = False) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.drop:
            x = functional.dropout(x, 0.5, training=self.training)
        x = functional.relu(x + self.block(x))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("drop", "patterns", "at"),
    [(False, "block.*,stem.*", "mean"), (False, "stem.*", "stem"), (True, "block.*,stem.*", "stem")],
)
def test_cuts_only_where_one_value_carries_everything(drop: bool, patterns: str, at: str) -> None:
    net = Branching(drop)
    freeze(net, patterns)
    set_train_mode(net)
    cut = cut_frozen_prefix(net)
    assert cut is not None
    graph = cut.prefix.graph
    assert isinstance(graph, fx.Graph)
    assert str(graph.output_node().args[0]).startswith(at)
    x = torch.randn(3, 1, 8, 8)
    assert drop or torch.equal(net(x), cut.train_suffix(cut.prefix(x)))


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_that_moves_ends_the_prefix(affine: bool) -> None:
    """One without weights cannot be frozen, so its statistics move in training."""
    norm = nn.BatchNorm2d(4, affine=affine)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    freeze(net, "0.*,1.*,2.*" if affine else "0.*,2.*")
    set_train_mode(net)
    cut = cut_frozen_prefix(net)
    assert cut is not None
    assert cut.layers == (3 if affine else 1)


@pytest.mark.parametrize(
    ("engine", "views", "places"),
    [("xla 2", 0, ""), ("xla 2", 2, ""), ("torch", 3, "device disk device"), ("torch", 3, "disk device disk")],
)
def test_every_engine_caches_each_view_once_where_there_is_room(
    engine: str, views: int, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last epoch repeats the first view. The oracle runs the prefix in every step."""
    changes: dict[str, object] = {"epochs": max(views, 2) + 1, "optimizer.lr": 0.003}
    if views:
        changes |= {"augment.flip": True, "augment.shift": 0.2, "augment.views": views}
    recipe, sentences = make_recipe(**changes), []
    uncached = engine_weights(frozen_net(), make_samples(), recipe, cache_prefix=False)
    if places:
        of_images = iter(["device", *places.split()])
        monkeypatch.setattr(Accelerator, "placement", lambda *_: next(of_images))
    cached = engine_weights(frozen_net(), make_samples(), recipe, engine, report=sentences.append)
    assert (f"for {views} views" if views else "computed once") in " ".join(sentences)
    for name, values in uncached.items():
        np.testing.assert_allclose(cached[name], values, atol=1e-4)


@pytest.mark.parametrize("name", ["torch", "xla 2"])
def test_cached_views_are_evaluated_without_augmentation(name: str) -> None:
    changes = {"augment.flip": True, "augment.shift": 0.2, "augment.views": 2, "epochs": 2}
    split = make_engine(name, frozen_net(), make_recipe(**changes)).place(make_samples())
    split.compile()
    plain = make_engine(name, frozen_net(), make_recipe()).place(make_samples())
    assert split.evaluate().loss == pytest.approx(plain.evaluate().loss, rel=1e-5)
