"""Gradient accumulation: a batch that does not fit is computed in micro-batches, with the same result."""

import resource
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flatout.utils.errors import InputError, TrainingFailed
from tests.engine.plain_loop import plain_loop
from tests.engine.test_against_plain_loop import assert_close, engine_weights, make_net, make_recipe, make_samples


class Greedy(nn.Module):
    """Has room for so many samples at once, and not for one more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.room, self.seen = room, set()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(150, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
        self.seen.add(len(x))
        return self.layers(x)


@pytest.fixture
def limited() -> Iterator[None]:
    """A limit to the address space, though none that matters: only with one does a process on the CPU get an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_micro_batches_are_as_large_as_fits_and_equal_the_plain_loop(limited: None) -> None:
    samples, recipe, sentences = make_samples(), make_recipe(**{"optimizer.lr": 0.05}), []
    net = Greedy(room=100)
    expected = plain_loop(net, samples, recipe).state
    net = Greedy(room=7)
    found = engine_weights(net, samples, recipe, report=sentences.append)
    # 16 samples do not fit, nor do 8; four micro-batches of 4 do.
    assert net.seen == {4}
    assert any(sentence == "gradient accumulation: 4 micro-batches of up to 4" for sentence in sentences)
    assert_close(found, expected)


def test_micro_batch_sets_the_size(limited: None) -> None:
    samples = make_samples()
    net = Greedy(room=100)
    engine_weights(net, samples, make_recipe(micro_batch=6))
    # Three micro-batches: 6, 5 and 5 samples.
    assert net.seen == {5, 6}


def test_nothing_fits(limited: None) -> None:
    with pytest.raises(TrainingFailed, match=r"out of memory: no room for one sample; .* smaller batch_size"):
        engine_weights(Greedy(room=0), make_samples(), make_recipe())


def test_batch_normalisation_needs_its_batch() -> None:
    with pytest.raises(InputError, match="micro_batch = 4: the model uses batch normalisation"):
        engine_weights(make_net(), make_samples(), make_recipe(micro_batch=4))


def test_the_attempt_leaves_no_trace(limited: None) -> None:
    samples, recipe = make_samples(), make_recipe()
    tried = engine_weights(make_net(), samples, recipe)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    plain = engine_weights(make_net(), samples, recipe)
    assert all(torch.equal(tried[key], plain[key]) for key in plain)
