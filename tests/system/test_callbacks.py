"""Callbacks of the user's, and the trackers of experiments, each by its example and offline."""

import importlib.util
import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import cohen_kappa_score
from torch import nn

import flatout
from flatout.cli.main import main
from tests.system.run_files import grey_levels

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("one_picture_in_module")


class Recorder(flatout.Callback):
    """Writes down its calls; may end the training or fail."""

    def __init__(self, end_after: int = 0, fail_in: str = "") -> None:
        self.end_after, self.fail_in = end_after, fail_in
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, run: flatout.RunInfo) -> None:
        self.path, self.process = run.path, os.getpid()
        self.note("start", run.epoch, run.classes, run.devices, run.recipe.epochs, run.parameters)

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> bool:
        self.note("epoch", epoch, metrics)
        return epoch == self.end_after

    def on_end(self, summary: dict[str, Any]) -> None:
        self.note("end", summary)

    def note(self, what: str, *arguments: Any) -> None:
        self.calls.append((what, *arguments))
        if what == self.fail_in:
            raise ValueError(f"no {what} here")

    @property
    def order(self) -> list[Any]:
        return [call[0] if call[0] != "epoch" else call[1] for call in self.calls]


def fit(out: Path, *callbacks: Any, **changes: Any) -> flatout.Run:
    usual: dict[str, Any] = {"data": grey_levels(96), "model": "parallel-cnn", "epochs": 3, "batch_size": 32}
    usual |= {"devices": "cpu", "quiet": True}
    return flatout.fit(out=out, callbacks=callbacks, **usual | changes)


def test_the_methods_are_called_with_what_the_run_folder_has_and_may_end_training(tmp_path: Path) -> None:
    recorder, other = Recorder(end_after=2), Recorder()
    run = fit(tmp_path / "run", recorder, other)
    assert recorder.order == other.order == ["start", 1, 2, "end"]
    assert recorder.path == run.path
    assert recorder.calls[0][1:] == (0, run.classes, "cpu", 3, run.summary["parameters"])
    assert [{"epoch": epoch, **metrics} for _, epoch, metrics in recorder.calls[1:-1]] == run.epochs
    assert recorder.calls[-1][1] == run.summary
    assert run.summary["stopped"] == "Recorder.on_epoch_end ended training"
    whole = fit(tmp_path / "whole", Recorder(end_after=1), epochs=1)
    assert whole.summary["stopped"] is None, "nothing was left to do"


def test_an_exception_ends_the_run_and_keeps_what_was_trained(tmp_path: Path) -> None:
    broken, other = Recorder(fail_in="epoch"), Recorder()
    message = r"callback Recorder.on_epoch_end raised .*no epoch here"
    with pytest.raises(flatout.TrainingFailed, match=message) as raised:
        fit(tmp_path / "run", broken, other)
    assert __file__ in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)
    assert other.order == ["start", "end"]
    assert other.calls[-1][1]["stopped"].startswith("failed: the callback Recorder.on_epoch_end")
    assert other.calls[-1][1]["test_count"] > 0
    again = Recorder()
    run = fit(tmp_path / "run", again, resume=True)
    assert again.order == ["start", 2, 3, "end"]
    assert again.calls[0][1] == 1
    assert run.summary["epochs_trained"] == 3


@pytest.mark.parametrize("where", ["start", "end"])
def test_an_exception_before_or_after_training(where: str, tmp_path: Path) -> None:
    with pytest.raises(flatout.TrainingFailed, match=f"Recorder.on_{where} raised ValueError: no {where} here"):
        fit(tmp_path / "run", Recorder(fail_in=where), epochs=1)
    assert (tmp_path / "run" / "summary.json").is_file() == (where == "end")


def test_a_run_is_not_continued_without_its_functions(tmp_path: Path) -> None:
    given: dict[str, Any] = {"loss": torch.nn.CrossEntropyLoss(reduction="none")}
    fit(tmp_path / "run", epochs=1, **given)
    with pytest.raises(flatout.InputError, match=r"trained with loss given in Python: continue with flatout\.fit"):
        fit(tmp_path / "run", epochs=2, resume=True)
    assert fit(tmp_path / "run", epochs=2, resume=True, **given).summary["epochs_trained"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_functions_reach_two_processes_and_the_attributes_come_back(tmp_path: Path) -> None:
    class Local(Recorder):
        """Of no module, as the functions: they travel as their code."""

    recorder = Local()
    own: dict[str, Any] = {
        "loss": lambda logits, targets: nn.functional.cross_entropy(logits, targets, reduction="none"),
        "metrics": {"kappa": lambda labels, answers: cohen_kappa_score(labels, answers)},
        "transform": lambda image: image.flip(-1),
        # With too much noise to know the class always.
        "data": grey_levels(noise=120, step=45),
        "augment": None,
        "seed": 3,
    }
    run, alone = fit(tmp_path / "run", recorder, **own, devices="2xcpu"), fit(tmp_path / "alone", **own)
    assert run.epochs[0]["train_loss"] == pytest.approx(alone.epochs[0]["train_loss"], rel=1e-3)
    with np.load(run.path / "predictions.npz") as saved:
        expected = cohen_kappa_score(saved["labels"], saved["predicted"])
    assert run.summary["test_kappa"] == pytest.approx(expected)
    assert recorder.order == ["start", 1, 2, 3, "end"]
    assert recorder.process != os.getpid()
    assert recorder.calls[0][3] == run.summary["devices"] == "2xcpu"
    with pytest.raises(flatout.TrainingFailed, match=r"Local.on_epoch_end raised ValueError: no epoch here"):
        fit(tmp_path / "failed", Local(fail_in="epoch"), devices="2xcpu")
    assert "Traceback" in (tmp_path / "failed" / "logs" / "rank-0.log").read_text()
    assert "Traceback" not in (tmp_path / "failed" / "logs" / "rank-1.log").read_text()


class Misnamed(flatout.Callback):
    def on_epoch_ends(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Recorder, r"write Recorder\(\) for a class that is, with some of on_start, on_epoch_end, on_end"),
        (Misnamed(), r"Misnamed.on_epoch_ends is never called; did you mean 'on_epoch_end'\?"),
        (print, r"not an object of a class derived from flatout.Callback"),
        ("wandbb", r"'wandbb' is not a tracker; did you mean 'wandb'\?"),
    ],
)
def test_what_is_no_callback(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(flatout.InputError, match=message):
        fit(tmp_path / "run", given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert main(["train", "digits", "--track", name]) == 2
    assert f"needs the package {name}: pip install 'flatout[{name}]'" in capsys.readouterr().err


def example(name: str) -> dict[str, Any]:
    """Run an example in this folder; return its variables."""
    return runpy.run_path(str(EXAMPLES / name))


def test_the_example_of_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = example("callback.py")
    assert values["run"].summary["stopped"] == "StopAt.on_epoch_end ended training"
    assert values["run"].summary["valid_accuracy"] >= values["stop"].accuracy
    assert values["stop"].best == values["run"].summary["valid_accuracy"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs flatout[tensorboard]")
    monkeypatch.chdir(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = example("track_tensorboard.py")["run"]
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    found = {event.step: event.value for event in events.Scalars("valid_accuracy")}
    assert found == pytest.approx({line["epoch"]: line["valid_accuracy"] for line in run.epochs})
    assert (events.Images("curves")[0].width, events.Images("curves")[0].height) == (3, 2)
    assert events.Scalars("test_accuracy")[0].value == pytest.approx(run.summary["test_accuracy"])
    assert b"optimizer.lr = " in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]
    flatout.fit(job="digits", epochs=1, out=run.path, overwrite=True, devices="cpu", quiet=True)
    assert not (run.path / "tensorboard").exists(), "the files of a run that is overwritten are removed"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs flatout[wandb]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = example("track_wandb.py")["run"]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    known = json.loads((run.path / "logs" / "trackers.json").read_text())["wandb"]
    assert folder.name.endswith(known)
    # The file of an offline run is a log of protobuf records, in which text is plain.
    content = (folder / f"run-{known}.wandb").read_bytes()
    assert b"optimizer.lr" in content
    for line in run.epochs:
        assert str(line["valid_accuracy"]).encode() in content
    assert list((folder / "files" / "media" / "images").glob("curves_*.png"))
