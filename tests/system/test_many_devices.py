"""Only `--devices` changes; results stay the same. Whole runs on one to three ranks."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.cli.main import main
from tests.system.run_files import metrics, summary, weights, write_digits

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")

SPECS = ("cpu", "3xcpu")
# Batches of 100, which three ranks cannot share evenly; batch normalisation; a plateau that acts at once.
EPOCHS = 3
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
SETTINGS = [word for key, value in RECIPE.items() for word in ("--set", f"{key}={value}")]
SAME = ("train_images", "images_trained", "seed", "parameters", "test_count", "test_correct", "best_epoch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run on each SPEC, with samples and augmentation recorded."""
    folder = tmp_path_factory.mktemp("runs")
    digits = write_digits(folder / "digits.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_RECORD", "1")
        patch.setenv("FLATOUT_CACHE", str(folder / "cache"))
        for spec in SPECS:
            command = ["train", str(digits), "--model", "fashion-cnn", "--epochs", str(EPOCHS), "--devices", spec]
            assert main([*command, *SETTINGS, "--out", str(folder / spec)]) == 0
    return {spec: folder / spec for spec in SPECS}


def recorded(run: Path) -> list[tuple[int, int, list[int], dict[str, list[Any]]]]:
    """Return what all ranks together took in each step: epoch, step, samples, transforms."""
    paths = sorted((run / "logs").glob("rank-*.samples.jsonl"))
    assert len(paths) == summary(run)["world_size"]
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: (line["epoch"], line["step"]))
    steps = []
    for (epoch, step), shares in groupby(lines, key=lambda line: (line["epoch"], line["step"])):
        parts = list(shares)
        assert len(parts) == len(paths)
        samples = [sample for part in parts for sample in part["samples"]]
        tables = [part["transforms"] for part in parts]
        transforms = {name: [row for table in tables for row in table[name]] for name in tables[0]}
        steps.append((epoch, step, samples, transforms))
    return steps


@pytest.mark.slow
def test_every_step_takes_the_same_samples_and_draws(runs: dict[str, Path]) -> None:
    expected = recorded(runs["cpu"])
    per_epoch = len(expected) // EPOCHS
    for epoch in range(EPOCHS):
        taken = [sample for _, _, samples, _ in expected[epoch * per_epoch :][:per_epoch] for sample in samples]
        assert sorted(taken) == list(range(summary(runs["cpu"])["train_images"]))
    assert len({json.dumps(transforms) for *_, transforms in expected}) == len(expected)
    assert recorded(runs["3xcpu"]) == expected


@pytest.mark.slow
def test_the_result_is_the_same(runs: dict[str, Path]) -> None:
    """Weights agree up to the order of summation."""
    alone, several = (summary(runs[spec]) for spec in SPECS)
    assert alone["images_trained"] == EPOCHS * alone["train_images"]
    assert alone["test_correct"] > alone["test_count"] / 5
    assert {key: several[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert (several["world_size"], several["devices"]) == (3, "3xcpu")
    for line, other in zip(*(metrics(runs[spec]) for spec in SPECS), strict=True):
        assert (line["epoch"], line["learning_rate"]) == (other["epoch"], other["learning_rate"])
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
        assert line["valid_loss"] == pytest.approx(other["valid_loss"], rel=1e-3)
    torch.testing.assert_close(weights(runs["3xcpu"]), weights(runs["cpu"]), rtol=1e-3, atol=1e-4)
