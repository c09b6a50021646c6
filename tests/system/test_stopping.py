"""A run that is stopped, killed or fails is usable, and a resumed run equals an uninterrupted one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flatout
from flatout.cli.main import main
from flatout.train import monitor
from tests.system.interrupted import Killed, assert_same, at_image, command, kill, resume
from tests.system.run_files import grey_levels, summary, weights

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(command(data, out)) == 0
    return out


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_usable_and_resumes_bit_for_bit(
    number: signal.Signals, data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with at_image(112, lambda: os.kill(os.getpid(), number)):
        assert main(command(data, out)) == 128 + number
    how = "interrupted" if number == signal.SIGINT else "terminated"
    assert summary(out)["stopped"] == f"{how} in epoch 2, step 2"
    assert f"continue with: flatout train --resume --out {out}" in capsys.readouterr().out
    assert (summary(out)["test_accuracy"] is None) == (number == signal.SIGTERM)
    assert not list(out.glob(".*"))
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    assert main(["predict", str(out), str(tmp_path / "image.png")]) == 0
    assert resume(out) == 0
    assert summary(out)["stopped"] is None
    assert_same(whole, out)


def test_a_run_that_is_stopped_after_it_was_finished_has_no_predictions_of_earlier_weights(
    data: Path, tmp_path: Path
) -> None:
    constant, out = ["--set", "schedule.name=constant"], tmp_path / "run"
    assert main(command(data, out, *constant, "--epochs", "1")) == 0
    assert (out / "predictions.npz").is_file()
    with at_image(112, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert resume(out, "--epochs", "2") == 128 + signal.SIGTERM
    assert not (out / "predictions.npz").exists()


class Stopping(nn.Module):
    """A net with a frozen layer that terminates its process in a batch of a pass without gradients."""

    def __init__(self, path: Path, *, at: int, rank: str = "0", freeze: bool = False) -> None:
        super().__init__()
        self.path, self.at, self.rank = str(path), at, rank
        self.first, self.last = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 3)
        if freeze:
            self.first.requires_grad_(False)
            self.first.register_forward_hook(self.count)
        else:
            self.register_forward_hook(self.count)

    def count(self, *call: Any) -> None:
        if torch.is_grad_enabled() or len(call[-1]) < 4:  # training, or the check of the outputs
            return
        rank = os.environ.get("RANK", "0")
        with Path(f"{self.path}-{rank}").open("a") as file:
            file.write("batch\n")
        if rank == self.rank and len(Path(f"{self.path}-{rank}").read_text().splitlines()) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def images() -> dict[str, Any]:
    return {name: grey_levels(60, noise=256, step=0, seed=seed) for seed, name in enumerate(("train", "valid"))}


@pytest.mark.parametrize(
    ("frozen", "at"),
    [(False, 3), (False, 18), (False, 33), (True, 3)],
    ids=["evaluation", "evaluation of the last epoch", "last evaluation", "features"],
)
def test_a_signal_ends_a_pass_between_batches(frozen: bool, at: int, tmp_path: Path) -> None:
    calls, out = tmp_path / "calls", tmp_path / "run"
    net = Stopping(calls, at=at, freeze=frozen)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, "devices": "cpu", "quiet": True, "out": out}
    settings["schedule.name"] = "constant"
    with pytest.raises(KeyboardInterrupt):
        flatout.fit(net, images(), **settings)
    assert len(Path(f"{calls}-0").read_text().splitlines()) == at
    assert summary(out)["stopped"].startswith("terminated")
    assert list((out / "checkpoints").iterdir())
    fresh = [Stopping(tmp_path / "none", at=0, freeze=frozen) for _ in range(2)]
    for net in fresh:
        net.load_state_dict(fresh[0].state_dict())
    resumed = flatout.fit(fresh[0], images(), **settings, resume=True)
    assert [line["epoch"] for line in resumed.epochs] == [1, 2]
    assert resumed.epochs[0]["learning_rate"] == resumed.recipe.optimizer.lr


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_the_evaluation_of_all(tmp_path: Path) -> None:
    calls, out = tmp_path / "calls", tmp_path / "run"
    net = Stopping(calls, at=2, rank="1")
    with pytest.raises(KeyboardInterrupt):
        flatout.fit(net, images(), epochs=2, batch_size=4, devices="2xcpu", quiet=True, out=out)
    assert all(len(Path(f"{calls}-{rank}").read_text().splitlines()) <= 3 for rank in range(2))
    assert list((out / "checkpoints").iterdir())


class Dying(nn.Module):
    """A net whose second rank is killed in a step; until then, checkpoints are written as often as possible."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.steps = at, 0
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and "RANK" in os.environ:
            monitor.CHECKPOINT_SECONDS, monitor.CHECKPOINT_SHARE = 0.0, 1e9
            self.steps += 1
            if os.environ["RANK"] == "1" and self.steps == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.net(x)


@pytest.mark.slow
def test_ranks_write_a_checkpoint_after_the_same_step(tmp_path: Path) -> None:
    net, out = Dying(9), tmp_path / "run"
    start = {name: value.clone() for name, value in net.state_dict().items()}
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 4, "quiet": True}
    with pytest.raises(flatout.TrainingFailed, match="rank 1"):
        flatout.fit(net, images(), devices="2xcpu", out=out, **settings)
    (newest, *_) = sorted((path.name for path in (out / "checkpoints").iterdir()), reverse=True)
    assert newest in {f"epoch-00000-step-{step:07d}.safetensors" for step in range(3, 9)}
    resumed, whole = Dying(0), Dying(0)
    for each in (resumed, whole):
        each.load_state_dict(start)
    flatout.fit(resumed, images(), devices="cpu", out=out, resume=True, **settings)
    flatout.fit(whole, images(), devices="cpu", out=tmp_path / "whole", **settings)
    torch.testing.assert_close(weights(out), weights(tmp_path / "whole"))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_run_killed_within_an_epoch_resumes_within_it(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(monitor, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "CHECKPOINT_SHARE", 1e9)
    with at_image(48, kill), pytest.raises(Killed):
        main(command(data, out))
    capsys.readouterr()
    assert resume(out) == 0
    assert "resumed after epoch 0, step 5" in capsys.readouterr().out
    assert_same(whole, out)


def test_checkpoints_take_a_small_share_of_the_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = [0.0], []

    def save(self: Any, folder: Path) -> None:
        saved.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr("flatout.train.run_dir.Checkpoint.save", save)
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])

    def advance(self: monitor.Monitor) -> None:
        now[0] += 3.0

    monkeypatch.setattr(monitor.Monitor, "step", advance)
    assert main(command(data, tmp_path / "run", "--epochs", "20")) == 0
    # The last checkpoint is written whatever it costs.
    gaps = np.diff(saved[:-1])
    assert len(gaps) > 5
    assert gaps.min() >= 2.0 / 0.05
    assert gaps.max() <= 2.0 / 0.05 + 8.0


def test_one_command_starts_and_continues_a_run(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, repeated = tmp_path / "run", command(data, tmp_path / "run", "--resume")
    for image in (48, 112):  # before and after the first checkpoint
        with at_image(image, kill), pytest.raises(Killed):
            main(repeated)
    assert main(repeated) == 0
    assert "nothing was saved yet: training starts from the beginning" in capsys.readouterr().out
    assert_same(whole, out)
    assert main(["train", "digits", "--resume", "--out", str(out)]) == 2
    assert f"the run in {out} is not of digits" in capsys.readouterr().err


def test_damaged_and_foreign_checkpoints_are_passed_over(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    out = tmp_path / "run"
    with at_image(232, kill), pytest.raises(Killed):
        main(command(data, out))
    folder = out / "checkpoints"
    newest = max(folder.iterdir())  # a slow epoch leaves a second one
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "epoch-00008-step-0000000.safetensors").write_bytes(damaged)
    save_file({"weight": torch.zeros(1)}, folder / "epoch-00009-step-0000000.safetensors")
    assert resume(out) == 0
    said = capsys.readouterr().out
    assert "epoch-00009-step-0000000.safetensors: is not a checkpoint of flatout" in said
    assert "epoch-00008-step-0000000.safetensors: is damaged" in said
    assert_same(whole, out)
    assert [path.name[:11] for path in folder.iterdir()].count("epoch-00009") == 0
    for path in folder.iterdir():
        path.write_bytes(b"")
    assert resume(out, "--epochs", "4") == 2
    assert "checkpoints are damaged" in capsys.readouterr().err


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_dead_process_blocks_nobody(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = (
        "import os, signal, sys; from flatout.train import monitor\n"
        "monitor.Monitor.step = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from flatout.cli.main import main; main(sys.argv[1:])"
    )
    assert subprocess.run([sys.executable, "-c", code, *command(data, out)], check=False).returncode == -signal.SIGKILL
    assert (out / ".lock").is_file()
    left = [out / ".summary.json.00aa11bb.tmp", out / "checkpoints" / ".epoch.safetensors.22cc33dd.tmp"]
    left[1].parent.mkdir()
    for path in left:
        path.write_text("half")
    assert resume(out) == 0
    assert not any(path.exists() for path in left)
    assert not list(out.rglob(".*"))
    assert_same(whole, out)


def test_a_full_disk_ends_with_1_and_keeps_the_last_checkpoint(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def fsync(descriptor: int) -> None:
        if "epoch-00002" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flatout.utils.files.os.fsync", fsync)
        patch.setattr(monitor, "CHECKPOINT_SHARE", 1e9)
        assert main(command(data, out)) == 1
    assert "epoch-00002-step-0000000.safetensors: cannot be written: No space left" in capsys.readouterr().err
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["epoch-00001-step-0000000.safetensors"]
    assert resume(out) == 0
    assert_same(whole, out)
