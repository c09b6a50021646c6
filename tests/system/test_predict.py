"""Predictions for files: those that the run kept, as a table, and with files that cannot be read."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flatout
from tests.conftest import Command
from tests.system.conftest import draw_small_pictures


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of PNG files of 16 bits that use 12 of them; the class is the brightness."""
    folder, rng = tmp_path_factory.mktemp("predict") / "photos", np.random.default_rng(0)
    for index in range(240):
        path = folder / ("bright", "dark")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        level = 600 if index % 2 else 2400
        Image.fromarray(rng.integers(level, level + 1500, (12, 12)).astype(np.uint16)).save(path)
    return folder


@pytest.fixture(scope="module")
def run(photos: Path) -> flatout.Run:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 32, "lr": 0.02, "devices": "cpu", "quiet": True, "tta": True}
    with pytest.MonkeyPatch.context() as patch:
        draw_small_pictures(patch)
        return flatout.fit("parallel-cnn", photos, out=photos.parent / "run", image_size=12, channels=1, **options)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predictions_for_files_of_12_bits_are_those_that_the_run_kept(run: flatout.Run, photos: Path) -> None:
    assert run.recipe.data.bits == 16
    splits = {row["file"]: row for row in rows_of(run.path / "splits.csv")}
    with np.load(run.path / "predictions.npz") as saved:
        names, kept, labels, scores = (saved[key] for key in ("name", "probabilities", "labels", "unknown"))
    assert len(splits) == 240
    assert {name for name, row in splits.items() if row["split"] == "test"} == set(names)
    assert [splits[name]["label"] for name in names] == [run.classes[label] for label in labels]
    found = run.predict([photos / name for name in names], top=2)
    for one, row, score in zip(found, kept, scores, strict=True):
        assert dict(zip(one.classes, one.probabilities, strict=True)) == pytest.approx(
            dict(zip(run.classes, row, strict=True)), abs=1e-5
        )
        assert one.unknown == (score > run.unknown_threshold)
    worst = run.top_losses(1)[0]
    assert worst.file == names[worst.index]


def test_tensors_in_bfloat16_are_images(run: flatout.Run) -> None:
    image = torch.rand(12, 12).bfloat16()
    assert run.predict(image) == run.predict(image.float())


def test_files_that_cannot_be_read(run: flatout.Run, photos: Path, tmp_path: Path, command: Command) -> None:
    for index in (0, 2):
        (tmp_path / f"{index}.png").write_bytes((photos / "bright" / f"{index}.png").read_bytes())
    (tmp_path / "1.png").write_bytes(b"\x89PNG")
    words = ["predict", str(run.path), str(tmp_path), "--json"]
    assert "these images cannot be read" in command(*words, code=2)
    shown = json.loads(command(*words, "--on-bad-image", "skip"))["predictions"]
    assert [list(one)[:2] for one in shown] == [["file", "predictions"], ["file", "error"], ["file", "predictions"]]
    flags = ["--csv", str(tmp_path / "answers.csv"), "--coverage", "0.8", "--explain", str(tmp_path / "maps")]
    assert json.loads(command(*words, *flags))["unreadable"] == 1
    rows = rows_of(tmp_path / "answers.csv")
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    for row, one in zip(rows, shown, strict=True):
        best = one.get("predictions", [{}])[0]
        assert (row["class_1"], row["error"]) == (best.get("class", ""), one.get("error", ""))
        assert float(row["probability_1"] or 0) == best.get("probability", 0)
        assert (row["unknown"] == "true") == one.get("unknown", False)
        assert set(filter(None, row["set"].split("|"))) <= set(run.classes)
    for row in (rows[0], rows[2]):  # the image next to its heatmap, both enlarged
        with Image.open(row["explanation"]) as picture:
            assert picture.size == (2 * 192 + 8, 192)
    assert "maps: exists and is not an empty folder" in command(*words, *flags[2:], code=2)
    assert "answers.csv: exists; choose another --csv" in command(*words, "--csv", tmp_path / "answers.csv", code=2)
    missing = ["predict", str(run.path), str(tmp_path / "nowhere"), "--csv", str(tmp_path / "none.csv")]
    assert "nowhere: there is no such file" in command(*missing, code=2)
    assert not (tmp_path / "none.csv").exists()
