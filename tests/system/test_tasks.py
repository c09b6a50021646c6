"""Several labels and numbers, from a CSV file or arrays to the report: pairs of digits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score

import flatout
from flatout.cli.main import main
from flatout.models.weights import read_weights
from tests.conftest import Command

DIGITS: Any = load_digits()


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [N, 8, 16] of two digits, and the digits, int64 [N, 2]."""
    chosen = np.random.default_rng(count).integers(0, len(DIGITS.target), (count, 2))
    images = (DIGITS.images * 15.9).astype(np.uint8)
    return np.concatenate([images[chosen[:, 0]], images[chosen[:, 1]]], axis=2), DIGITS.target[chosen]


def fit(out: Path, data: Any, **changes: Any) -> flatout.Run:
    usual: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": 32, "epochs": 2, "image_size": 28}
    changes = {"optimizer": flatout.Adam(lr=0.005), "seed": 3} | changes
    return flatout.fit("fast-cnn-16", data, out=out, **usual | changes)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 300 images of pairs, and lists of their digits, and of the number that they form."""
    folder = tmp_path_factory.mktemp("listed")
    images, digits = pairs(300)
    (folder / "images").mkdir()
    tags, numbers = ["file,tags"], ["file,number"]
    for i, (image, pair) in enumerate(zip(images, digits.tolist(), strict=True)):
        Image.fromarray(image).save(folder / "images" / f"{i}.png")
        tags.append(f"{i}.png,{'|'.join(map(str, sorted(set(pair))))}")
        numbers.append(f"{i}.png,{pair[0]}{pair[1]}.5")
    (folder / "tags.csv").write_text("\n".join(tags))
    (folder / "numbers.csv").write_text("\n".join(numbers))
    return folder


@pytest.mark.filterwarnings("ignore:No positive class", "ignore:.*ill-defined")
@pytest.mark.parametrize("kind", ["tags", "numbers"])
def test_labels_from_a_csv_file(listed: Path, kind: str, tmp_path: Path, command: Command) -> None:
    changes = {"loss": "huber", "augment": {"mixup": 0.2}} if kind == "numbers" else {}
    run = fit(tmp_path / "run", listed / f"{kind}.csv", epochs=3, **changes)
    summary, page = run.summary, (run.path / "report.html").read_text()
    with np.load(run.path / "predictions.npz") as saved:
        labels, answers, probabilities = (saved[name] for name in ("labels", "predicted", "probabilities"))
    result = json.loads(command("evaluate", run.path, "--devices", "cpu", "--json"))
    found = json.loads(command("predict", run.path, listed / "images" / "7.png", "--json"))["predictions"][0]
    if kind == "numbers":
        expected = {"test_mae": mean_absolute_error(labels, answers), "test_r2": r2_score(labels, answers)}
        assert (summary["task"], summary["classes"], result["per_class"]) == ("regression", [], [])
        assert 40 < run.recipe.data.label_mean < 60
        assert found["value"] == pytest.approx(flatout.load(run.path).predict(listed / "images" / "7.png")[0].value)
        assert "Predicted against actual" in page
    else:
        expected = {"test_map": average_precision_score(labels, probabilities, average="macro")}
        expected |= {f"test_f1_{how}": f1_score(labels, answers, average=how) for how in ("macro", "micro")}
        assert (run.recipe.task, run.recipe.loss) == ("multi-label", "binary-cross-entropy")
        assert run.classes == tuple("0123456789") == tuple(row["class"] for row in result["per_class"])
        assert (answers == (probabilities >= run.task.thresholds)).all()
        assert not [key for key in summary if "accuracy" in key]
        assert {"train_exact_match", "valid_map", "valid_loss"} <= run.epochs[-1].keys()
        assert {row["class"] for row in found["predictions"]} <= set(run.classes)
        assert "Mean average precision" in page
        assert "Precision, recall and F1" in page
        # Heatmaps explain the first class of the answer, whatever the most probable one is.
        maps = list[bytes]()
        for digit in (2, 3):
            run.__dict__["task"] = replace(run.task, thresholds=tuple(2.0 * (k != digit) for k in range(10)))
            (answer,) = run.predict(listed / "images" / "7.png", explain=tmp_path / f"maps-{digit}")
            assert answer.classes == (str(digit),)
            maps.append(Path(str(answer.explanation)).read_bytes())
        assert maps[0] != maps[1]
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    for name in ("predictions.png", "curves.png", "confusion.png"):
        assert (run.path / name).is_file()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_on_listed_images_can_be_used_from_any_folder(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(listed)
    run = fit(tmp_path / "run", "numbers.csv", images="images", epochs=1)
    monkeypatch.chdir(tmp_path)
    assert run.evaluate(devices="cpu")["test_count"] == run.summary["test_count"]
    with np.load(run.path / "predictions.npz") as saved:
        assert all((listed / name).is_file() for name in saved["name"])


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path, task: str) -> None:
    images, digits = pairs(100)
    data = (images, np.eye(10, dtype=np.uint8)[digits].max(axis=1) if task == "multi-label" else digits.sum(axis=1) / 2)
    changes: dict[str, Any] = {"schedule": flatout.Schedule(), "image_size": 16}
    whole = fit(tmp_path / "whole", data, **changes)
    fit(tmp_path / "parts", data, epochs=1, **changes)
    parts = fit(tmp_path / "parts", data, resume=True, **changes)
    assert parts.recipe.task == task
    first, second = (read_weights(run.path / "weights.safetensors") for run in (whole, parts))
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[1] == second[1]
    assert whole.epochs[-1]["valid_loss"] == parts.epochs[-1]["valid_loss"]


@pytest.mark.usefixtures("no_pictures")
def test_a_generated_recipe_learns_numbers(tmp_path: Path) -> None:
    images, digits = pairs(2_500)
    np.savez(tmp_path / "sums.npz", images=images, labels=digits.sum(axis=1) / 2)
    flags = ["--model", "fast-cnn-16", "--epochs", "3", "--devices", "cpu", "--set", "precision=fp32"]
    assert main(["train", str(tmp_path / "sums.npz"), *flags, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["test_r2"] >= 0.6
