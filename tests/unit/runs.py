"""The figures of a run, and a run folder that has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config import Optimizer, Recipe
from flatout.data.source import ImageDataset

RECIPE = Recipe(
    job="sample", model="cnn", image_size=28, channels=1, epochs=4, batch_size=64, optimizer=Optimizer(lr=0.05)
)


def epoch_line(epoch: int, **values: Any) -> dict[str, Any]:
    line = {"epoch": epoch, "step": 10 * epoch, "learning_rate": 0.05, "train_loss": 1 / epoch, "train_accuracy": 0.8}
    return line | {"valid_loss": 1 / epoch, "valid_accuracy": 0.8, "test_loss": None, "test_accuracy": None} | values


def summary_of(classes: list[str], **values: Any) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "job": "sample", "engine": "torch", "devices": "cpu", "epochs": 4, "parameters": 1234, "classes": classes,
        "images_per_second": 1000.0, "train_seconds": 60.0, "wall_seconds": 65.0, "best_epoch": 2, "stopped": None,
        "test_accuracy": 0.8, "test_correct": 80, "test_count": 100, "valid_accuracy": 0.8, "notes": [], "verdict": [],
        "time_seconds": {"train": 60.0, "evaluate": 2.0}, "versions": {"torch": "2.15"}, "skipped_images": {},
    }  # fmt: skip
    return summary | values


def blank_images(count: int, *, size: int, channels: int, classes: int = 10, train: int | None = None) -> ImageDataset:
    """Return images without content, of which only the shapes matter; those after the first `train` are for testing."""
    stop = count if train is None else train
    return ImageDataset(
        kind="images",
        path=None,
        images=np.broadcast_to(np.uint8(0), (count, size, size, channels)),
        labels=np.arange(count) % classes,
        classes=tuple(map(str, range(classes))),
        splits={"train": (0, stop)} | ({"test": (stop, count)} if stop < count else {}),
    )


def write_run(
    run: Path,
    classes: list[str],
    *,
    size: int = 28,
    channels: int = 1,
    count: int = 60,
    metrics: list[dict[str, Any]] | None = None,
    **values: Any,
) -> Path:
    """Write a run folder in which every third answer is wrong."""
    rng = np.random.default_rng(0)
    K = len(classes)
    labels = np.arange(count) % K
    answers = np.where(np.arange(count) % 3 == 0, (labels + 1) % K, labels)
    probabilities = np.full((count, K), 0.1 / K, np.float32)
    probabilities[np.arange(count), answers] += 0.9
    sample = np.arange(min(count, 50))
    wrong = np.flatnonzero(answers[sample] != labels[sample])
    run.mkdir()
    (run / "recipe.toml").write_text(RECIPE.to_toml(), encoding="utf-8")
    metrics = metrics if metrics is not None else [epoch_line(e) for e in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics), encoding="utf-8")
    (run / "summary.json").write_text(json.dumps(summary_of(classes, **values)), encoding="utf-8")
    images = rng.integers(0, 256, (len(sample), size, size, channels), dtype=np.uint8)
    np.savez(
        run / "predictions.npz", split="test", probabilities=probabilities, labels=labels, sample=sample,
        images=images, grid=sample[:25], mistakes=wrong,
    )  # fmt: skip
    return run
