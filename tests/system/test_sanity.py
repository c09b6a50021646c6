"""Checks before long runs: a note for each planted fault, none for healthy jobs, and no trace in the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.models.weights import read_weights
from flatout.train import probes

pytestmark = pytest.mark.usefixtures("no_pictures")

# 7 steps an epoch: 360 epochs are long enough to be checked. Training ends after the first ones without progress.
LONG: dict[str, Any] = {"batch_size": 64, "epochs": 360, "early_stopping": 1, "devices": "cpu", "quiet": True}


@pytest.fixture
def short_runs_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks take any share of a run."""
    monkeypatch.setattr(probes, "LARGEST_SHARE", 1.0)


@pytest.fixture(scope="module")
def images() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 8, 8] with a bright row or column for each of 10 classes, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(500) % 10
    pixels = rng.integers(0, 100, (500, 8, 8), dtype=np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        (image if label < 5 else image.T)[label % 5] += 120
    return pixels, labels


class Net(nn.Module):
    """A small net with batch normalisation and dropout."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(288, 10)
        with torch.no_grad():
            self.head.weight *= scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Faint(Net):
    """Its outputs hardly depend on its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-6 * super().forward(x)


def linear() -> nn.Module:
    """Return a model without normalisation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def warnings_of(images: Any, out: Path, make: Callable[[], nn.Module] = Net, **changes: Any) -> list[str]:
    """Return what the checks found, from the notes of a run's summary."""
    torch.manual_seed(0)
    options: Any = LONG | {"optimizer": "adam", "lr": 1e-3} | changes
    run = flatout.fit(make(), *images, out=out, **options)
    return [note for note in run.summary["notes"] if "usual causes" in note]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"lr": 1e-9}, "25 steps on one batch left its loss at 2"),
        ({"make": Faint}, "25 steps on one batch left its loss at 2.3"),
        ({"make": lambda: Net(100.0)}, "and that of guessing one of 10 classes 2.3: usual causes"),
        (
            {"make": linear, "data.mean": [0.0], "data.std": [0.001]},
            "and that of guessing one of 10 classes 2.3: usual causes",
        ),
    ],
    ids=["low rate", "faint outputs", "large weights", "wrong std"],
)
def test_a_planted_fault_is_noted(changes: dict[str, Any], found: str, images: Any, tmp_path: Path) -> None:
    assert any(found in note for note in warnings_of(images, tmp_path / "run", **changes))


def test_too_high_a_rate_is_noted_before_training_fails(images: Any, tmp_path: Path) -> None:
    with pytest.raises(flatout.utils.errors.TrainingFailed):
        warnings_of(images, tmp_path / "run", lr=1e4, optimizer="sgd")
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "25 steps on one batch raised its loss from 2" in log
    assert "too high a learning rate (1e+04; flatout lr finds one)" in log


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "one-cycle", "lr": 0.01},
        {"label_smoothing": 0.2, "augment": {"mixup": 0.5, "shift": 0.1}, "ema": 0.99},
    ],
)
def test_healthy_runs_have_no_notes(
    changes: dict[str, Any], images: Any, tmp_path: Path, short_runs_checked: None
) -> None:
    assert warnings_of(images, tmp_path / "run", epochs=4, **changes) == []


def test_healthy_jobs_have_no_notes(tmp_path: Path, short_runs_checked: None) -> None:
    """Neither have trained weights, to which the first loss says nothing and which fit the batch already."""
    words: dict[str, Any] = {"job": "digits", "epochs": 4, "devices": "cpu", "quiet": True}
    first = flatout.fit(out=tmp_path / "first", **words)
    again = flatout.fit(out=tmp_path / "again", pretrained=True, weights=str(first.path), **words)
    for run in (first, again):
        assert "check" in run.summary["time_seconds"]
        assert [note for note in run.summary["notes"] if "usual causes" in note] == []


def test_short_and_resumed_runs_are_not_checked(images: Any, tmp_path: Path) -> None:
    assert warnings_of(images, tmp_path / "run", lr=1e-9, epochs=350) == []
    assert warnings_of(images, tmp_path / "run", lr=1e-9, resume=True) == []


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "momentum", "ema": 0.9, "augment": {"mixup": 0.5}, "schedule": "one-cycle"}]
)
def test_checked_and_unchecked_runs_are_identical_to_the_bit(
    options: dict[str, Any], images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = LONG | {"optimizer": "adam", "lr": 0.01, "seed": 3, "keep": "last"} | options
    found = []
    for name in ("checked", "unchecked"):
        monkeypatch.setattr(probes, "LARGEST_SHARE", probes.LARGEST_SHARE if name == "checked" else 0.0)
        torch.manual_seed(0)
        run = flatout.fit(Net(), *images, out=tmp_path / name, **words)
        assert ("check" in run.summary["time_seconds"]) == (name == "checked")
        losses = [line["valid_loss"] for line in run.epochs]
        found.append((losses, read_weights(tmp_path / name / "weights.safetensors")[0]))
    (losses, weights), (other_losses, other_weights) = found
    assert losses == other_losses
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
