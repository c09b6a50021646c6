"""The figures of a run, as its folder has them."""

from typing import Any

from flatout.recipe import Optimizer, Recipe

RECIPE = Recipe(
    job="sample", model="cnn", image_size=28, channels=1, epochs=4, batch_size=64, optimizer=Optimizer(lr=0.05)
)


def epoch_line(epoch: int, **values: Any) -> dict[str, Any]:
    line = {"epoch": epoch, "step": 10 * epoch, "learning_rate": 0.05, "train_loss": 1 / epoch, "train_accuracy": 0.8}
    return line | {"valid_loss": 1 / epoch, "valid_accuracy": 0.8, "test_loss": None, "test_accuracy": None} | values


def summary_of(classes: list[str], **values: Any) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "job": "sample", "engine": "torch", "devices": ["cpu"], "epochs": 4, "parameters": 1234, "classes": classes,
        "images_per_second": 1000.0, "train_seconds": 60.0, "wall_seconds": 65.0, "best_epoch": 2, "stopped": None,
        "test_accuracy": 0.8, "test_correct": 80, "test_count": 100, "valid_accuracy": 0.8, "notes": [], "verdict": [],
        "time_seconds": {"train": 60.0, "evaluate": 2.0}, "versions": {"torch": "2.15"}, "skipped_images": {},
    }  # fmt: skip
    return summary | values
