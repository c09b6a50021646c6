"""Only `--devices` changes; results stay the same. Whole runs on one to three ranks."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.cli.main import main
from tests.system.run_files import metrics, summary, weights

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")

SPECS = ("cpu", "3xcpu")
# 600 images in batches of 100, which three ranks cannot share evenly; batch normalisation; a plateau that acts at once.
TRAIN_IMAGES, TEST_IMAGES, EPOCHS = 600, 101, 3
RECIPE = {
    "batch_size": 100,
    "image_size": 16,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.05,
    "schedule.name": "plateau",
    "schedule.patience": 0,
    "schedule.factor": 0.5,
    "schedule.threshold": 0.99,
    "augment.rotate": 8,
    "augment.shift": 0.1,
}
SAME = ("train_images", "images_trained", "batch_size", "epochs", "seed", "parameters", "test_count", "best_epoch")


def flatout(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights of other numbers of ranks agree up to the order of summation."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def sets(recipe: dict[str, Any]) -> list[str]:
    return [word for key, value in recipe.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real handwritten digits in one file."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images * 15.9, np.uint8).reshape(-1, 8, 8)
    train, test = slice(0, TRAIN_IMAGES), slice(TRAIN_IMAGES, TRAIN_IMAGES + TEST_IMAGES)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x_train=images[train], y_train=labels[train], x_test=images[test], y_test=labels[test])
    return path


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run on each SPEC."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(folder / "cache"))
        for spec in SPECS:
            command = ("train", digits, "--model", "fashion-cnn", "--epochs", EPOCHS, "--devices", spec, *sets(RECIPE))
            flatout(*command, "--out", folder / spec)
    return {spec: folder / spec for spec in SPECS}


@pytest.mark.slow
def test_the_result_is_the_same(runs: dict[str, Path]) -> None:
    expected, expected_weights = summary(runs["cpu"]), weights(runs["cpu"])
    assert expected["test_count"] == TEST_IMAGES
    assert expected["images_trained"] == EPOCHS * expected["train_images"]
    assert expected["test_correct"] > TEST_IMAGES / 5
    assert [line["learning_rate"] for line in metrics(runs["cpu"])] == [0.05, 0.05, 0.025]
    for number, spec in zip((1, 3), SPECS, strict=True):
        found = summary(runs[spec])
        assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
        assert (found["world_size"], found["devices"]) == (number, spec)
        assert found["test_correct"] == expected["test_correct"]
        for line, other in zip(metrics(runs[spec]), metrics(runs["cpu"]), strict=True):
            assert (line["epoch"], line["learning_rate"]) == (other["epoch"], other["learning_rate"])
            assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
            assert line["valid_loss"] == pytest.approx(other["valid_loss"], rel=1e-3)
        assert_close(weights(runs[spec]), expected_weights)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(runs: dict[str, Path], tmp_path: Path) -> None:
    """The last epochs on two ranks instead of three: the weights of an uninterrupted run."""
    out = tmp_path / "run"
    shutil.copytree(runs["3xcpu"], out)
    (first, *_) = sorted((out / "checkpoints").glob("epoch-*"))
    for path in (out / "checkpoints").iterdir():
        if path != first:
            path.unlink()
    # How many epochs have one depends on how long it takes to write.
    assert first.name.startswith(("epoch-00001-", "epoch-00002-"))
    flatout("train", "--devices", "2xcpu", "--resume", "--out", out)
    assert summary(out)["images_trained"] == summary(runs["cpu"])["images_trained"]
    assert summary(out)["devices"] == "2xcpu"
    assert_close(weights(out), weights(runs["cpu"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--devices 1000xcpu", r"--devices 1000xcpu: at most \d+ processes; this host has: cpu \(\d+\)"),
        (
            "--devices 3xcpu --batch-size 2",
            "batch_size = 2 is less than one sample for each of the 3 ranks",
        ),
    ],
)
def test_wrong_devices_are_refused_before_any_work(
    arguments: str,
    said: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    assert main(["train", str(digits), *arguments.split(), "--out", str(tmp_path / "run")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [], "neither a run nor a pack"
