"""Whole runs on the XLA engine: the same run folder, weights for any engine, several hosts, and what is missing."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import flatout
from flatout.cli.main import main
from flatout.engine.xla.mesh import find
from tests.conftest import Command
from tests.system.rank_functions import FLATOUT
from tests.system.run_files import free_port, summary, weights, write_digits

NET = ("--model", "fashion-cnn", "--set", "image_size=16", "--batch-size", "100", "--set", "keep=last", "--lr", "0.01")
SGD = ("--set", "optimizer.name=sgd", "--set", "schedule.name=constant")
TRAIN = ("train", "digits", *NET, *SGD)
SMALL = """
from torch import nn

def make(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))
"""
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


def run(*arguments: str, **environment: str) -> str:
    """Run a command that must succeed; return what it printed."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(printed):
        assert main(arguments) == 0, printed.getvalue()
    return printed.getvalue()


def assert_same_weights(a: Path, b: Path) -> None:
    torch.testing.assert_close(weights(b), weights(a), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on the torch engine."""
    out = tmp_path_factory.mktemp("torch") / "run"
    assert main([*TRAIN, "--epochs", "2", "--devices", "cpu", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on eight simulated devices."""
    out = tmp_path_factory.mktemp("xla") / "run"
    said = run(*TRAIN, "--epochs", "2", "--engine", "xla", "--devices", "8xcpu", "--out", str(out))
    assert "8 simulated devices" in said
    assert "each batch of 100 samples is padded to 104" in said
    return out


def test_the_run_is_the_torch_engines(alone: Path, simulated: Path) -> None:
    ours, theirs = summary(simulated), summary(alone)
    assert (ours["engine"], ours["devices"], ours["world_size"]) == ("xla", "8xcpu", 8)
    assert ours.keys() == theirs.keys()
    assert ours["images_trained"] == theirs["images_trained"]
    assert ours["test_count"] == theirs["test_count"]
    assert abs(ours["test_correct"] - theirs["test_correct"]) <= 2  # pyright: ignore[reportOperatorIssue]
    assert ours["time_seconds"]["compile"] > 0  # pyright: ignore[reportIndexIssue]
    assert {p.name for p in simulated.iterdir()} == {p.name for p in alone.iterdir()}
    assert_same_weights(alone, simulated)


def test_equal_weights_give_equal_counts_on_every_engine(alone: Path, simulated: Path) -> None:
    """Trained on the accelerator and tested on a processor, where JAX is not needed, and the other way round."""
    trained = flatout.load(simulated)
    assert {p.device.type for p in trained.model.parameters()} == {"cpu"}
    result = trained.evaluate(devices="cpu")
    assert (result["engine"], result["test_correct"]) == ("torch", summary(simulated)["test_correct"])
    result = json.loads(run("evaluate", str(alone), "--engine", "xla", "--devices", "3xcpu", "--json"))
    assert (result["devices"], result["test_correct"]) == ("3xcpu", summary(alone)["test_correct"])


@pytest.mark.slow
def test_a_run_goes_on_on_the_other_engine(alone: Path, tmp_path: Path) -> None:
    """And comes back. The XLA engine's program is that of the run on eight devices, so it is not compiled again."""
    out, whole = (shutil.copytree(alone, tmp_path / name) for name in ("run", "whole"))
    for epochs, engine, devices in ((3, "xla", "8xcpu"), (4, "torch", "cpu")):
        place = ("--engine", engine, "--devices", devices)
        said = run("train", "--resume", "--out", str(out), "--epochs", str(epochs), *place)
        assert f"resumed after epoch {epochs - 1}" in said
    run("train", "--resume", "--out", str(whole), "--epochs", "4", "--devices", "cpu")
    assert_same_weights(whole, out)


@pytest.mark.slow
def test_two_hosts_are_one_mesh(tmp_path: Path) -> None:
    """Two hosts with two simulated devices each; a model in slices, so that weights lie on both."""
    (tmp_path / "small.py").write_text(SMALL)
    data = ("--data", str(write_digits(tmp_path / "digits.npz")), "--set", "augment.rotate=0")
    model = ("--model", f"{tmp_path / 'small.py'}:make", "--batch-size", "50", "--epochs", "1", "--set", "keep=last")
    train = ("train", "digits", *data, *model, "--lr", "0.01", *SGD)
    run(*train, "--devices", "cpu", "--out", str(tmp_path / "alone"))
    place = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--out", str(tmp_path / "run"))
    command = [*FLATOUT, *train, "--engine", "xla", "--devices", "2xcpu", "--set", "shard=full", *place]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    hosts = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(said)
    assert summary(tmp_path / "run")["world_size"] == 4
    assert_same_weights(tmp_path / "alone", tmp_path / "run")


def test_what_is_not_installed_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchax", None)
    said = command(*TRAIN, "--engine", "xla", "--devices", "2xcpu", code=2)
    # The rest of the sentence depends on what is imported already.
    assert re.search("--engine xla: .*torchax", said)
    assert "pip install 'flatout[tpu]'" in said


def test_what_jax_says_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: str) -> None:
        raise RuntimeError("The TPU is already in use by process with pid 4711.\nMore.")

    monkeypatch.setattr("jax.local_devices", refuse)
    with pytest.raises(flatout.InputError) as caught:
        find("tpu", [0])
    for word in ("finds no TPU", "pid 4711.", "one process at a time", "pip install", "--devices 8xcpu"):
        assert word in str(caught.value)


def test_a_model_that_cannot_be_compiled_ends_before_training(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        if x.mean() > 0:\n"
        "            x = -x\n"
        "        return self.head(x.flatten(1))\n"
        "def make(**_):\n"
        "    return Net()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train", "digits", "--model", "mine:make", "--engine", "xla", "--devices", "2xcpu"]
    errors = command(*words, "--out", tmp_path / "run", code=2)
    assert f"{tmp_path / 'mine.py'}, line 7" in errors
    assert "--engine torch" in errors
