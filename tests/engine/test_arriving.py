"""Training on images that are decoded meanwhile: both engines, on any number of ranks."""

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.data.arrival import Arrival, is_available
from flatout.data.feed import Samples
from flatout.data.order import block_size, decoding_order, epoch_batches
from flatout.dist.control import Flag
from flatout.dist.world import World
from flatout.engine.eager.engine import TorchEngine
from flatout.errors import InputError, Stopped
from flatout.run.loop import train
from flatout.run.progress import Progress
from tests.engine.engines import make_engine
from tests.engine.ranks import on_ranks
from tests.engine.test_against_plain_loop import SILENT, make_net, make_recipe, make_samples, plain_loop
from tests.engine.test_block_order import small_windows

pytestmark = pytest.mark.skipif(not is_available(), reason="needs /proc")

DURING = make_recipe(**{"data.decode": "during", "optimizer.lr": 0.05})


def expected() -> dict[str, torch.Tensor]:
    net = make_net()
    with small_windows():
        return plain_loop(net, make_samples(), DURING, torch.optim.SGD(net.parameters(), lr=0.05)).state_dict()


def assert_close(found: dict[str, torch.Tensor]) -> None:
    for key, value in expected().items():
        torch.testing.assert_close(found[key.removeprefix("model.")], value, rtol=1e-3, atol=2e-5)


@contextmanager
def arriving(folder: Path, count: int = 70, until: int = 70) -> Iterator[Samples]:
    """Samples whose images are written into a file little by little, in the order of the first epoch."""
    whole, path = make_samples(count), folder / "images.npy"
    with small_windows():
        order = decoding_order(DURING, {"train": whole})
    images = np.lib.format.open_memmap(path, "w+", np.uint8, whole.images.shape)
    arrival = Arrival(order, lambda arrival: None)

    def write() -> None:
        for start in range(0, until, 5):
            time.sleep(0.01)
            images[order[start : start + 5]] = whole.images[order[start : start + 5]]
            arrival.announce(start + 5)
        if until < len(order):
            arrival.fail(InputError("one cannot be decoded"))

    thread = threading.Thread(target=write)
    mapped = np.load(path, mmap_mode="r")
    thread.start()
    yield Samples(images=mapped, rows=whole.rows, labels=whole.labels, arrival=arrival)
    thread.join()


def test_the_order_of_decoding_is_that_of_the_first_epoch():
    samples = make_samples(192)
    splits = {
        "train": Samples(images=samples.images, rows=np.arange(0, 192, 2), labels=samples.labels[::2]),
        "valid": Samples(images=samples.images, rows=np.arange(1, 192, 2), labels=samples.labels[1::2]),
    }
    with small_windows():
        assert block_size(DURING, samples, 0) == 8
        assert block_size(DURING, samples, 1) == 0
        order = decoding_order(DURING, splits)
        batches = list(epoch_batches(DURING, splits["train"], 0))
        assert len(batches[0].ahead) == 2
        trained = splits["train"].rows[np.concatenate([batch.samples[: batch.count] for batch in batches])]
    # Three blocks of eight to a window, each in the order of the file.
    for start in (0, 24, 48, 72):
        assert order[start : start + 24].tolist() == sorted(trained[start : start + 24])
    assert order[96:].tolist() == list(range(1, 192, 2))
    measured = decoding_order(DURING.override({"data.mean": [], "data.std": []}), splits)
    assert measured.tolist() == list(range(0, 192, 2)) + list(range(1, 192, 2))


@pytest.mark.parametrize("engine", ["torch", "xla 2"])
def test_equals_a_plain_loop(engine: str, tmp_path: Path) -> None:
    with small_windows(), arriving(tmp_path) as samples:
        made = make_engine(engine, make_net(), DURING)
        placed = made.place(samples)
        placed.compile()
        train(made, World(), DURING, {"train": placed}, Progress(), SILENT)
        state = made.state()
        made.close()
    assert_close({key.removeprefix("model."): value for key, value in state.items()})


def train_on_rank(world: World, pickled: bytes, path: Path) -> dict[str, torch.Tensor] | str:
    arrival, whole = pickle.loads(pickled), make_samples()
    samples = Samples(images=np.load(path, mmap_mode="r"), rows=whole.rows, labels=whole.labels, arrival=arrival)
    engine = TorchEngine(make_net(), DURING, world=world)
    try:
        with small_windows():
            train(engine, world, DURING, {"train": engine.place(samples)}, Progress(), SILENT)
    except InputError as error:
        return str(error)
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def test_two_ranks_wait_for_the_same_images(tmp_path: Path) -> None:
    with arriving(tmp_path) as samples:
        found = on_ranks(2, train_on_rank, pickle.dumps(samples.arrival), tmp_path / "images.npy")
    for one in found:
        assert_close(one)


def test_all_ranks_learn_that_images_cannot_be_decoded(tmp_path: Path) -> None:
    with arriving(tmp_path, until=40) as samples:
        found = on_ranks(2, train_on_rank, pickle.dumps(samples.arrival), tmp_path / "images.npy")
    assert found == ["one cannot be decoded"] * 2


def test_a_run_that_waits_can_be_stopped(tmp_path: Path) -> None:
    with small_windows(), arriving(tmp_path, count=140, until=100) as samples:
        assert samples.arrival is not None
        samples.arrival.fail = lambda error: None
        world, progress = World(), Progress()
        engine = TorchEngine(make_net(), DURING, world=world)
        placed = engine.place(samples)
        threading.Timer(0.5, lambda: setattr(world.control, "stop", Flag.INTERRUPT)).start()
        with pytest.raises(Stopped):
            train(engine, world, DURING, {"train": placed}, progress, SILENT)
        engine.close()
    assert 0 < progress.step < 7
    assert progress.counts.count == 16 * progress.step
