"""What a run can go on with, and in which folder."""

import json
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.cli.main import main
from flatout.config import load_recipe
from flatout.engine import factory
from flatout.engine.schedule import learning_rate
from tests.system.interrupted import Killed, assert_same, at_image, command, kill, resume
from tests.system.run_files import metrics, summary, weights

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


def test_a_finished_run_can_be_resumed_for_more_epochs(data: Path, tmp_path: Path) -> None:
    constant = ["--set", "schedule.name=constant"]
    assert main(command(data, tmp_path / "run", *constant, "--epochs", "1")) == 0
    first = summary(tmp_path / "run")
    assert resume(tmp_path / "run", "--epochs", "2") == 0
    # Both parts, of which the last one alone has less than its own set-up and training.
    whole = summary(tmp_path / "run")
    assert whole["wall_seconds"] > first["setup_seconds"] + whole["setup_seconds"] + whole["train_seconds"]
    assert main(command(data, tmp_path / "whole", *constant, "--epochs", "2")) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_the_order_is_chosen_by_memory_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run keeps the order of the checkpoint, however much memory there is now."""
    on_disk = ["--epochs", "1", "--set", "data.stored_size=9"]
    assert main(command(data, tmp_path / "full", *on_disk)) == 0
    assert 'order = "full"' in (tmp_path / "full" / "recipe.toml").read_text()
    monkeypatch.setattr("flatout.train.run.available_memory", lambda: 1)
    assert main(command(data, tmp_path / "run", *on_disk)) == 0
    assert "data.order = blocks: " in capsys.readouterr().out
    monkeypatch.undo()
    assert resume(tmp_path / "run", "--epochs", "2", "--set", "data.order=auto") == 0
    assert 'order = "blocks"' in (tmp_path / "run" / "recipe.toml").read_text()
    assert resume(tmp_path / "run", "--epochs", "3", "--set", "data.order=full") == 2
    assert "the run has data.order = 'blocks'" in capsys.readouterr().err


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return the seconds per image that are measured for each number of processes; the machine has two cores."""
    speeds = {1: 1.0, 2: 1.0}
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(factory, "physical_cores", lambda: 2)
    monkeypatch.setattr(factory, "usable_cores", lambda: 2)
    monkeypatch.setattr(factory, "seconds_per_image", lambda model, recipe, *, ranks=1: speeds[ranks])
    return speeds


AUTO = ("--batch-size", "16", "--set", "schedule.name=constant", "--devices", "auto")


@pytest.mark.slow
def test_the_processes_are_chosen_by_speed_once(data: Path, tmp_path: Path, speeds: dict[int, float]) -> None:
    """A resumed run keeps those that it began with, whatever is faster now, unless the machine lacks them."""
    run = tmp_path / "run"
    speeds[2] = 10.0
    assert main(command(data, run, *AUTO, "--epochs", "1")) == 0
    speeds[2] = 0.1
    assert main(["train", "--resume", "--out", str(run), "--batch-size", "8", "--devices", "2xcpu"]) == 2
    assert main(["train", "--resume", "--out", str(run), "--epochs", "2"]) == 0
    assert "--devices auto: cpu, as in the run that is resumed" in summary(run)["notes"]
    assert summary(run)["world_size"] == 1
    # As a machine with more cores would have left it.
    (run / "logs" / "devices").write_text("3xcpu")
    speeds[2] = 10.0
    assert main(["train", "--resume", "--out", str(run), "--epochs", "3"]) == 0
    lacking = "--devices auto: the resumed run used 3xcpu, which this machine does not have"
    assert lacking in summary(run)["notes"]
    assert summary(run)["world_size"] == 1


@pytest.mark.parametrize(
    ("where", "devices", "kept"),
    [("flatout.train.run.pack_of_host", "cpu", "cpu"), ("flatout.distributed.launch.launch", "auto", "2xcpu")],
)
def test_a_run_that_is_killed_while_it_packs_or_starts_processes_keeps_its_devices(
    where: str, devices: str, kept: str, data: Path, tmp_path: Path, speeds: dict[int, float], monkeypatch
) -> None:
    speeds[2] = 0.1
    monkeypatch.setattr(where, lambda *_, **__: kill())
    with pytest.raises(Killed):
        main(command(data, tmp_path / "run", *AUTO, "--devices", devices))
    assert (tmp_path / "run" / "logs" / "devices").read_text() == kept
    assert (tmp_path / "run" / "recipe.toml").is_file(), "--resume needs no job"


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle", "step"])
def test_more_epochs_continue_the_schedule_of_the_longer_run(schedule: str, data: Path, tmp_path: Path) -> None:
    """The rates are those of a run that had all epochs from the start."""
    chosen = ["--set", f"schedule.name={schedule}", "--set", "schedule.step_epochs=3", "--lr", "0.01"]
    assert main(command(data, tmp_path / "run", *chosen, "--epochs", "4")) == 0
    assert resume(tmp_path / "run", "--epochs", "8") == 0
    lines, recipe = metrics(tmp_path / "run"), load_recipe(tmp_path / "run" / "recipe.toml")
    found = [line["learning_rate"] for line in lines]
    expected = [learning_rate(recipe, line["step"] - 1, lines[0]["step"]) for line in lines]
    assert len(set(expected)) >= 3
    assert found[4:] == expected[4:]
    assert (found == expected) == (schedule == "step")


def test_other_classes_are_rejected_and_other_content_is_reported(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other, pixels = tmp_path / "run", tmp_path / "other", np.load(data / "images.npy")
    assert main(command(data, out, "--epochs", "1")) == 0
    before = (out / "weights.safetensors").read_bytes()
    other.mkdir()
    np.save(other / "images.npy", 255 - pixels)
    np.save(other / "labels.npy", np.arange(120) % 4)
    assert resume(out, "--epochs", "2", "--data", str(other)) == 2
    assert "was trained on the classes 0, 1, 2, but the data has 0, 1, 2, 3" in capsys.readouterr().err
    assert (out / "weights.safetensors").read_bytes() == before
    np.save(other / "labels.npy", np.load(data / "labels.npy"))
    for changes in ([], ["the data has changed since the run began: images and labels differ"]):
        np.save(other / "images.npy", 255 - pixels if changes else pixels)
        assert resume(out, "--epochs", str(2 + len(changes)), "--data", str(other)) == 0
        assert [note for note in summary(out)["notes"] if "the data has changed" in note] == changes


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_run_in_use_is_left_alone(flag: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, codes = tmp_path / "run", []
    assert main(command(data, out, "--epochs", "1")) == 0
    arguments = ["train", "--resume", "--out", str(out)] if flag == "--resume" else command(data, out, flag)
    with at_image(24, lambda: codes.append(main(arguments))):
        assert main(command(data, out, "--overwrite", "--epochs", "1")) == 0
    assert codes == [2]
    assert f"{out}: in use by process {os.getpid()}" in capsys.readouterr().err


def test_a_restart_never_continues_the_run_to_overwrite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert main(command(data, out, "--epochs", "2")) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(command(data, out, "--epochs", "1", "--overwrite")) == 0
    assert summary(out)["epochs_trained"] == 1


def test_default_folders_differ_also_within_a_second(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = type("Clock", (), {"now": staticmethod(lambda: datetime(2026, 1, 1))})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatout.utils.files.datetime", clock)
    arguments = [a for a in command(data, tmp_path, "--epochs", "1") if a not in ("--out", str(tmp_path))]
    assert [main(arguments) for _ in range(2)] == [0, 0]
    first, second = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert second == f"{first}-2"


def test_a_folder_that_cannot_be_written_gets_a_message(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(command(data, out, "--epochs", "1")) == 0

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert main(command(data, out, "--overwrite")) == 2
    assert "cannot be removed: Permission denied" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        assert main(command(data, tmp_path / "new")) == 2
    assert "new: cannot be written: Permission denied" in capsys.readouterr().err


OLDER = Path(__file__).parent / "older-run"  # twelve epochs, killed in the fourth, with the recipe keys of then


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run by the recipe of the older one."""
    out = tmp_path_factory.mktemp("anew") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_RECORD", "1")
        assert main(["train", str(OLDER / "recipe.toml"), "--devices", "cpu", "--out", str(out)]) == 0
    return out


def test_an_older_recipe_trains_as_it_did(anew: Path) -> None:
    """Sample order and augmentation are the same, and so are the metrics."""
    old, new = ((run / "logs" / "rank-0.samples.jsonl").read_text().splitlines() for run in (OLDER, anew))
    for before, now in zip(map(json.loads, old), map(json.loads, new), strict=False):
        assert (before.keys(), before["samples"]) == (now.keys(), now["samples"])
        assert before["transforms"].keys() == now["transforms"].keys()
        for name, rows in before["transforms"].items():
            np.testing.assert_allclose(now["transforms"][name], rows, atol=1e-6, err_msg=name)
    for before, now in zip(metrics(OLDER), metrics(anew), strict=False):
        for key in ("step", "learning_rate", "train_loss", "valid_loss"):
            assert now[key] == pytest.approx(before[key], rel=1e-3), key


def test_an_older_checkpoint_is_continued(anew: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLDER, tmp_path / "run")
    assert resume(tmp_path / "run") == 0
    output = capsys.readouterr().out
    assert "resumed after epoch 3, step 0" in output
    assert "changed" not in output
    torch.testing.assert_close(weights(tmp_path / "run"), weights(anew), rtol=0, atol=1e-3)
