"""The head fitted to features before the first step: against scikit-learn, and in whole runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import flatout
from flatout.cli import main
from flatout.errors import InputError
from flatout.recipe import Recipe
from flatout.run.linear_probe import STRENGTH, fit_head

RECIPE = Recipe(model="net", image_size=8, epochs=1, batch_size=1)
# A rate so low that training changes nothing.
STILL = ("train", "digits", "--lr", "1e-12", "--epochs", "1", "--set", "linear_probe=true")
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


@pytest.mark.parametrize(("classes", "outputs"), [(2, 1), (2, 2), (5, 5), (4, 6)])
def test_the_head_answers_as_scikit_learn_does(classes: int, outputs: int) -> None:
    """One output, two, many, and more outputs than the training images have classes."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, classes, 200) + (outputs > classes)
    features = (rng.normal(size=(200, 7)) * 3 + 2 + labels[:, None] * rng.normal(size=7)).astype(np.float32)
    head = nn.Linear(7, outputs)
    nn.init.constant_(head.bias, -100.0)  # for the outputs without training images
    fit_head(head, {"train": features}, {"train": labels}, RECIPE)
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    expected = LogisticRegression(C=STRENGTH, max_iter=200).fit(scaled, labels).predict_proba(scaled)
    with torch.no_grad():
        logits = head(torch.from_numpy(features))
    found = torch.sigmoid(logits)[:, 0] if outputs == 1 else logits.softmax(dim=1)[:, labels.min() :][:, :classes]
    np.testing.assert_allclose(found, expected[:, 1] if outputs == 1 else expected, atol=2e-3)


def test_validation_chooses_the_strength() -> None:
    rng = np.random.default_rng(5)
    features = {name: rng.normal(size=(60, 40)).astype(np.float32) for name in ("train", "valid")}
    labels = {name: (values[:, 0] > 0).astype(np.int64) for name, values in features.items()}
    heads = [nn.Linear(40, 2), nn.Linear(40, 2)]
    fit_head(heads[0], features, labels, RECIPE)
    fit_head(heads[1], {"train": features["train"]}, {"train": labels["train"]}, RECIPE)
    right = [(h(torch.from_numpy(features["valid"])).argmax(1).numpy() == labels["valid"]).mean() for h in heads]
    assert right[0] >= right[1]


@pytest.mark.parametrize("devices", ["cpu", pytest.param("2xcpu", marks=pytest.mark.slow)])
def test_a_run_starts_from_the_fitted_head(devices: str, tmp_path: Path) -> None:
    for name, changes in (("probe", ()), ("fresh", ("--set", "linear_probe=false"))):
        assert main([*STILL, *changes, "--devices", devices, "--out", str(tmp_path / name)]) == 0
    probe, fresh = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("probe", "fresh"))
    assert fresh["test_accuracy"] < 0.3
    assert probe["test_accuracy"] > 0.85
    assert any("linear probe" in note for note in probe["notes"])


@pytest.mark.slow
def test_a_resumed_run_keeps_its_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--devices", "cpu", "--out", str(tmp_path / "run")]
    assert main([*STILL, *out]) == 0
    assert "linear probe" in capsys.readouterr().out
    assert main(["train", "--resume", "--epochs", "2", *out]) == 0
    assert "linear probe" not in capsys.readouterr().out


class ConvolutionAtTheEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x)).mean((2, 3))


def test_a_head_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="linear_probe = true: python:ConvolutionAtTheEnd has no single linear layer"):
        flatout.fit(
            ConvolutionAtTheEnd(), job="digits", linear_probe=True, devices="cpu", out=tmp_path / "run", quiet=True
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_restarted_run_that_overwrites_fits_its_own_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoints in the folder are those of the run to overwrite."""
    out = ["--devices", "cpu", "--out", str(tmp_path / "run")]
    assert main([*STILL, *out]) == 0
    capsys.readouterr()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*STILL, *out, "--overwrite"]) == 0
    assert "linear probe" in capsys.readouterr().out
