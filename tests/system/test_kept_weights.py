"""Which weights a run keeps: those of the best epoch, or the last that were finite; and which labels they predict."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.cli.main import main
from flatout.config import from_dict
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.train.loop import LoopHooks, TrainingLoop
from flatout.train.request import Progress
from flatout.utils.run_files import read_run
from tests.conftest import Command
from tests.system.run_files import metrics, summary, weights, write_digits


class Scripted(torch.nn.Module):
    """Gives the logits of a script, [epochs, 3, K]: in each epoch those for dark, grey and bright images."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.script = torch.as_tensor(script, dtype=torch.float32)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epoch = torch.nn.Buffer(torch.tensor(0))
        self.spoilt = torch.nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level = x.mean((1, 2, 3)).round().long() + 1
        if self.training:
            self.epoch += 1
        return self.script[(self.epoch - 1).clamp(min=0)][level] + 0 * self.weight


def fit_scripted(net: Scripted, out: Path, **changes: Any) -> flatout.Run:
    """Train one step an epoch on 24 dark, 12 grey and 4 bright images, of a class each."""
    labels = np.repeat([0, 1, 2], [24, 12, 4])
    pixels = np.broadcast_to(np.array([0, 127, 255], np.uint8)[labels][:, None, None, None], (40, 4, 4, 1)).copy()
    splits = dict.fromkeys(("train", "valid", "test"), (pixels, labels))
    settings = {"epochs": len(net.script), "batch_size": 40, "devices": "cpu", "quiet": True, "out": out}
    return flatout.fit(net, splits, **settings, **{"data.mean": (0.5,), "data.std": (0.5,)}, **changes)


def answers(*epochs: list[int]) -> torch.Tensor:
    return 2.0 * torch.nn.functional.one_hot(torch.tensor(epochs), 3)


@pytest.mark.parametrize(("weights", "best"), [("none", 1), ("balanced", 2)])
@pytest.mark.usefixtures("no_pictures")
def test_the_best_epoch_goes_by_balanced_accuracy_where_the_loss_is_balanced(
    weights: str, best: int, tmp_path: Path
) -> None:
    run = fit_scripted(Scripted(answers([0, 0, 0], [1, 1, 2])), tmp_path / "run", class_weights=weights)
    assert [line["valid_accuracy"] for line in run.epochs] == [0.6, 0.4]
    assert [line["valid_balanced_accuracy"] for line in run.epochs] == pytest.approx([1 / 3, 2 / 3])
    assert run.summary["best_epoch"] == best
    assert run.summary["test_correct"] == (24, 16)[best - 1]


@pytest.mark.usefixtures("no_pictures")
def test_early_stopping_and_plateau(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "some.npz"
    with np.load(write_digits(tmp_path / "digits.npz")) as digits:
        np.savez(data, images=digits["images"][:600], labels=digits["labels"][:600])
    changes = ["--set", "early_stopping=2", "--set", "schedule.name=plateau", "--set", "schedule.patience=0"]
    changes += ["--data", str(data), "--lr", "0.02", "--devices", "cpu"]
    assert main(["train", "digits", *changes, "--out", str(out)]) == 0
    figures = summary(out)
    assert figures["epochs_trained"] < 30
    assert "early stopping" in figures["stopped"]
    lines = metrics(out)
    assert figures["best_epoch"] == max(lines, key=lambda r: (r["valid_accuracy"], -r["valid_loss"]))["epoch"]
    assert lines[-1]["learning_rate"] < lines[0]["learning_rate"]
    # As after a kill between the last epoch and the report.
    assert main(["train", "--resume", "--out", str(out), "--devices", "cpu"]) == 0
    assert (metrics(out), summary(out)["stopped"]) == (lines, figures["stopped"])


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_has_trained_all_its_epochs_was_not_stopped(tmp_path: Path) -> None:
    worse = Scripted(answers([0, 0, 0], [1, 1, 2]))
    run = fit_scripted(worse, tmp_path / "run", early_stopping=1, class_weights="none")
    assert (run.summary["epochs_trained"], run.summary["best_epoch"], run.summary["stopped"]) == (2, 1, None)


@pytest.mark.parametrize(("head", "accuracy", "kept"), [(0.8, 0.9, 2), (0.91, 0.9, 1), (0.8, 0.825, 1)])
def test_after_a_fitted_head_a_lower_loss_counts_within_a_standard_error(
    head: float, accuracy: float, kept: int
) -> None:
    """Epochs of 0.925, with an error of 0.042, and of `accuracy`, with a lower loss."""
    counts = [36, 1, 3] if accuracy == 0.9 else [33, 4, 3]
    labels = np.repeat([0, 1, 2], counts)
    pixels = np.array([0, 127, 255], np.uint8)[labels][:, None, None, None]
    sizes = {"model": "python:Scripted", "image_size": 1, "channels": 1, "epochs": 2, "batch_size": 40}
    recipe = from_dict({**sizes, "task": "single-label", "data": {"mean": [0.5], "std": [0.5]}})
    right, sure = 0.1 * answers([0, 1, 1])[0], 20.0 * torch.eye(3)[[0, 0, 0]]
    engine = TorchEngine(Scripted(torch.stack([right, sure * torch.tensor([[1.0], [0.01], [0.01]])])), recipe)
    samples = Split(images=pixels, rows=np.arange(40), labels=labels)
    placed = {name: engine.place(samples) for name in ("train", "valid")}
    placed["train"].compile()
    progress = Progress(head={"valid_accuracy": head, "valid_loss": 1.0})
    TrainingLoop(engine, World(), recipe, placed, progress, LoopHooks()).run()
    assert [line["valid_accuracy"] for line in progress.history] == pytest.approx([0.925, accuracy])
    assert progress.history[1]["valid_loss"] < progress.history[0]["valid_loss"]
    assert progress.best_epoch == kept


def test_a_diverging_loss_ends_with_1_and_keeps_the_last_good_weights(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    diverging = ["--set", "optimizer.name=sgd", "--lr", "1e30", "--set", "schedule.name=constant", "--epochs", "4"]
    message = command("train", "digits", *diverging, "--devices", "cpu", "--out", out, code=1)
    assert "training diverged in epoch 1: the loss is not finite in step" in message
    assert all(torch.isfinite(value).all() for value in weights(out).values())
    assert "failed" in summary(out)["stopped"]
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("no_pictures")
def test_weights_that_are_not_finite_are_never_the_best(tmp_path: Path) -> None:
    class Spoilt(Scripted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and self.epoch == 1:
                self.spoilt.fill_(torch.nan)
            return super().forward(x)

    with pytest.raises(flatout.TrainingFailed, match="diverged in epoch 2: a weight is not finite"):
        fit_scripted(Spoilt(answers([0, 0, 0], [0, 1, 2], [0, 1, 2])), tmp_path / "run")
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    assert summary(tmp_path / "run")["best_epoch"] == 1


@pytest.mark.usefixtures("no_pictures")
def test_headline_and_confusion_matrix_agree_where_probabilities_are_equal(tmp_path: Path) -> None:
    # The logits of the grey and the bright images differ, their probabilities in 32 bits do not.
    almost = [0.0, 1e-9, -20.0]
    script = torch.tensor([[[20.0, 0.0, 0.0], almost, almost]])
    assert script.softmax(-1)[0, 1, 0] == script.softmax(-1)[0, 1, 1]
    run = fit_scripted(Scripted(script), tmp_path / "run")
    shown = read_run(run.path).predictions
    assert shown is not None
    assert (shown.predicted == shown.labels).sum() == run.summary["test_correct"] == 36
