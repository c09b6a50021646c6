"""`flatout bench`: the rates of the input path, the step and both, and what limits training."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.data.batches import Split
from flatout.engine.torch.dataset import TorchDataset
from tests.conftest import Command


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.analysis.throughput.ROUNDS", 2)
    monkeypatch.setattr("flatout.analysis.throughput.SECONDS", 0.05)


@pytest.mark.parametrize(
    ("owner", "name", "limit"), [(Split, "read", "input"), (TorchDataset, "train_step", "compute")]
)
def test_what_is_slow_limits_the_job(
    owner: type, name: str, limit: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """A method takes 0.052 s longer, many times as long as a batch of digits takes."""
    method = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.052)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    flags = ("--devices", "cpu", "--set", "data.placement=disk", "--batch-size", "100")
    found = json.loads(command("bench", "digits", "--json", *flags))
    assert found["limit"] == limit
    assert found["verdict"][0].startswith(f"limited by {limit}: ")
    # 0.052 s for 100 images is 1,923 images per second; some may have been begun before the clock.
    assert found[f"{limit}_images_per_second"] <= 2000
    assert found["images_per_second"] <= 2000
    other = {"input": "compute", "compute": "input"}[limit]
    assert found[f"{other}_images_per_second"] > found[f"{limit}_images_per_second"]
    assert (found["world_size"], found["train_images"]) == (1, 1258)


def test_nothing_is_written_and_people_get_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = command("bench", "digits", "--devices", "cpu").splitlines()
    assert lines[0].split() == ["images", "per", "second", "on", "cpu", "median", "least", "most"]
    assert [line[:8] for line in lines[1:4]] == ["the inpu", "the step", "training"]
    assert any(line.startswith("limited by ") for line in lines)
    assert not list(tmp_path.iterdir())
