"""A small run, a way to interrupt it, and what an equal run is."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.cli.main import main
from flatout.train import monitor
from tests.system.run_files import metrics, summary, weights

EPOCHS = 3


def command(data: Path, out: Path, *changes: str) -> list[str]:
    recipe = ["--model", "parallel-cnn", "--batch-size", "8", "--epochs", str(EPOCHS), "--devices", "cpu"]
    return ["train", str(data), *recipe, "--out", str(out), *changes]


def resume(out: Path, *changes: str) -> int:
    return main(["train", "--resume", "--out", str(out), "--devices", "cpu", *changes])


def assert_same(first: Path, second: Path) -> None:
    torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=0)
    figures = [summary(run) for run in (first, second)]
    for key in ("test_correct", "test_loss", "valid_loss", "best_epoch", "images_trained"):
        assert figures[0][key] == figures[1][key], key
    for a, b in zip(metrics(first), metrics(second), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-12)
        assert (a["epoch"], a["learning_rate"], a["valid_loss"]) == (b["epoch"], b["learning_rate"], b["valid_loss"])


@contextlib.contextmanager
def at_image(images: int, action: Any) -> Iterator[None]:
    """Call `action` after the step that trains this image."""
    step = monitor.Monitor.step

    def called(self: monitor.Monitor) -> bool:
        wants_loss = step(self)
        if self._progress.images_trained == images:
            action()
        return wants_loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor.Monitor, "step", called)
        yield


class Killed(BaseException):
    """Stands for SIGKILL: nothing in flatout handles it."""


def kill() -> None:
    raise Killed
