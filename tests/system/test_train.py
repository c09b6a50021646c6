"""The command line from end to end: runs, their folders, and what bad input gets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.cli.main import main
from flatout.models.weights import read_weights
from tests.system.run_files import metrics, summary, weights, write_class_folders

FOLDER = "recipe.toml metrics.jsonl summary.json weights.safetensors checkpoints logs report.html predictions.png"
KEYS = """job engine devices world_size batch_size epochs seed parameters train_images images_trained images_per_second
    train_seconds setup_seconds wall_seconds train_loss valid_loss valid_accuracy test_loss test_accuracy test_correct
    test_count peak_rss_bytes peak_device_bytes input_wait_fraction versions"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the digits job."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", "digits", "--epochs", "6", "--devices", "cpu", "--out", str(out)]) == 0
    return out


def test_the_run_folder_is_complete(digits: Path) -> None:
    assert {p.name for p in digits.iterdir()} >= {*FOLDER.split(), "curves.png", "confusion.png"}
    figures = summary(digits)
    assert [key for key in KEYS.split() if key not in figures] == []
    assert figures["test_accuracy"] == figures["test_correct"] / figures["test_count"] >= 0.9
    assert figures["images_trained"] == 6 * figures["train_images"]
    assert figures["images_per_second"] == pytest.approx(figures["images_trained"] / figures["train_seconds"])
    lines = metrics(digits)
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(value, int | float) for line in lines for value in line.values())
    assert "epoch 6/6" in (digits / "logs" / "rank-0.log").read_text()
    _, metadata = read_weights(digits / "weights.safetensors")
    assert json.loads(metadata["classes"]) == list("0123456789")
    assert (metadata["image_size"], metadata["channels"], metadata["model"]) == ("8", "1", "parallel-cnn")


def test_the_model_loads_as_an_ordinary_module(digits: Path) -> None:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    run = flatout.load(digits)
    assert isinstance(run.model, torch.nn.Module)
    assert not run.model.training
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    mean, std = run.recipe.data.mean[0], run.recipe.data.std[0]
    with torch.no_grad():
        by_hand = run.model(((torch.from_numpy(pixels).float() / 255 - mean) / std)[:, None]).argmax(1)
    assert (by_hand.numpy() == data.target).mean() > 0.9
    assert [p.classes[0] for p in run.predict(pixels[:5], top=1)] == [str(int(i)) for i in by_hand[:5]]


def test_an_existing_folder_is_never_replaced_silently(digits: Path, tmp_path: Path, command) -> None:
    before = (digits / "summary.json").read_bytes()
    assert "--overwrite" in command("train", "digits", "--out", digits, code=2)
    assert (digits / "summary.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    command("train", "digits", "--out", tmp_path / "mine", "--overwrite", code=2)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.usefixtures("no_pictures")
def test_overwrite_replaces_the_run_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "digits", "--epochs", "1", "--devices", "cpu", "--out", str(out)]
    assert main(arguments) == 0
    own = [out / "notes.txt", out / "photo.png", out / "checkpoints" / "kept.safetensors", out / "logs" / "mine.log"]
    for path in own:
        path.write_text("mine")
    assert main([*arguments, "--overwrite", "--seed", "2"]) == 0
    assert summary(out)["seed"] == 2
    assert [path.read_text() for path in own] == ["mine"] * 4


@pytest.mark.usefixtures("no_pictures")
def test_folders_of_pictures_without_a_recipe_and_others_of_the_same_classes(tmp_path: Path, command) -> None:
    data = write_class_folders(tmp_path / "data", per_class=20)
    said = command("train", data, "--epochs", "12", "--devices", "cpu", "--out", tmp_path / "run")
    assert "40 images of 2 classes" in said
    assert "image_size = 20" in said
    figures = summary(tmp_path / "run")
    assert figures["classes"] == ["bright", "dark"]
    assert figures["train_images"] + figures["valid_images"] + figures["test_images"] == 40
    assert figures["test_accuracy"] == 1.0
    command("train", data, "--epochs", "1", "--devices", "cpu", "--out", tmp_path / "run2")
    assert summary(tmp_path / "run2")["pack_was_cached"]
    # Classes of other data are matched by name.
    other, run = write_class_folders(tmp_path / "other", per_class=3), tmp_path / "run"
    result = json.loads(command("evaluate", run, "--data", other, "--json"))
    assert (result["test_count"], result["test_correct"]) == (6, 6)
    (other / "bright").rename(other / "purple")
    assert "'purple'" in command("evaluate", run, "--data", other, code=2)


@pytest.mark.usefixtures("no_pictures")
def test_binary_loss_has_one_output(tmp_path: Path) -> None:
    data = write_class_folders(tmp_path / "data", parts=("training_set", "test_set"))
    out = tmp_path / "run"
    changes = ["--set", "image_size=16", "--epochs", "16", "--batch-size", "8", "--lr", "0.003"]
    assert main(["train", "cats-dogs", "--data", str(data), *changes, "--devices", "cpu", "--out", str(out)]) == 0
    assert weights(out)["classifier.6.weight"].shape[0] == 1
    assert summary(out)["test_accuracy"] == 1.0
    (prediction,) = flatout.load(out).predict(data / "test_set" / "dark" / "000.jpg")
    assert prediction.classes[0] == "dark"


INPUT_ERRORS = [
    (["train", "digts"], "did you mean 'digits'"),
    (["train", "digits", "--devices", "3xcpu", "--batch-size", "2"], "is less than one sample for each of the 3 ranks"),
    (
        ["train", "digits", "--devices", "8xtpu"],
        "--devices 8xtpu: this machine has no TPU; to try the engine on simulated devices: --engine xla --devices "
        "8xcpu; to estimate the speed on TPUs: flatout plan",
    ),
    (["train", "digits", "--engine", "xla", "--devices", "mps"], "runs on TPUs, or on at most 64 simulated devices"),
    (["train", "digits", "--engine", "xla", "--devices", "1000xcpu"], "runs on TPUs, or on at most 64 simulated"),
    (["train", "digits", "--engine", "tensorflow"], "--engine tensorflow"),
    (["train", "digits", "--model", "vgg16"], "32x32"),
    (["train", "fashion-mnist", "--data", "/does/not/exist"], "/does/not/exist"),
    (["train", "cats-dogs"], "training_set/cats"),
    (["train", "digits", "--resume"], "--out"),
    (["evaluate", "/does/not/exist"], "not a run folder"),
    (["check", "/does/not/exist"], "/does/not/exist"),
]


@pytest.mark.parametrize(("arguments", "message"), INPUT_ERRORS, ids=lambda value: " ".join(value)[:40])
def test_wrong_input_gets_one_message_and_2(arguments: list[str], message: str, tmp_path, monkeypatch, command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    error = command(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [], "neither a run nor a pack"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--batch-size", "7"], "batch_size = 64"),
        (["--epochs", "3"], "6 are done"),
        (["--overwrite"], "contradict"),
    ],
)
def test_a_run_goes_on_only_as_it_began(digits: Path, changes: list[str], message: str, command) -> None:
    recipe = (digits / "recipe.toml").read_bytes()
    assert message in command("train", "--resume", "--out", digits, *changes, code=2)
    assert (digits / "recipe.toml").read_bytes() == recipe
