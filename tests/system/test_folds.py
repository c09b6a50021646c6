"""Cross-validation: every image is held out once, and the folds answer together."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, mean_absolute_error, r2_score
from torch import nn

import flatout
from flatout.report.page import draw_all
from tests.conftest import Command
from tests.system.interrupted import at_image
from tests.system.run_files import grey_levels, summary

SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "lr": 0.05, "image_size": 8, "schedule": "constant"}
SETTINGS |= {"devices": "cpu", "quiet": True, "folds": 3}
pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


def squares(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return grey_levels(count, noise=120, step=60, seed=seed)


def splits() -> dict[str, Any]:
    return {"train": squares(), "valid": squares(12, 1), "test": squares(15, 2)}


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


def fit(out: Path, data: Any, outputs: int = 3, **changes: Any) -> flatout.Run:
    return flatout.fit(net(outputs), data, out=out, **dict[str, Any](SETTINGS, **changes))


def saved(run: flatout.Run) -> dict[str, np.ndarray]:
    with np.load(run.path / "predictions.npz") as arrays:
        return dict(arrays)


def loaded(run: flatout.Run, outputs: int = 3) -> flatout.Run:
    return flatout.load(run.path, model=net(outputs))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    """Return a cross-validation of data with all three splits."""
    return fit(tmp_path_factory.mktemp("folds") / "run", splits())


def test_every_image_is_held_out_once_and_the_test_images_never(finished: flatout.Run) -> None:
    arrays = saved(finished)
    assert arrays["row"].tolist() == list(range(72))  # of training and validation images
    sizes = []
    for number in (1, 2, 3):
        fold = saved(flatout.load(finished.path / f"fold-{number}"))
        mine = arrays["fold"] == number
        assert np.array_equal(np.sort(fold["row"]), arrays["row"][mine])
        assert np.array_equal(fold["probabilities"][np.argsort(fold["row"])], arrays["probabilities"][mine])
        sizes.append(np.bincount(arrays["labels"][mine]).tolist())
    assert sizes == [[8, 8, 8]] * 3
    assert [fold["train_images"] for fold in finished.summary["folds"]] == [48] * 3
    assert (finished.summary["valid_count"], finished.summary["test_count"]) == (72, 15)


def test_the_figures_are_those_of_the_saved_predictions(finished: flatout.Run) -> None:
    arrays, joint = saved(finished), finished.summary
    assert joint["valid_accuracy"] == accuracy_score(arrays["labels"], arrays["predicted"])
    balanced = balanced_accuracy_score(arrays["labels"], arrays["predicted"])
    assert joint["valid_balanced_accuracy"] == pytest.approx(balanced)
    single = [summary(finished.path / f"fold-{i}") for i in (1, 2, 3)]
    for key in ("valid_accuracy", "valid_loss", "test_accuracy", "test_loss"):
        assert [fold[key] for fold in joint["folds"]] == [fold[key] for fold in single]
        assert joint["mean"][key] == pytest.approx(np.mean([fold[key] for fold in single]))
        assert joint["std"][key] == pytest.approx(np.std([fold[key] for fold in single], ddof=1))
    assert joint["valid_loss"] == pytest.approx(joint["mean"]["valid_loss"])  # of folds of one size
    assert [fold["kept_epoch"] for fold in single] == [2, 2, 2]


def test_the_folds_answer_together(finished: flatout.Run) -> None:
    run, (images, labels) = loaded(finished), squares(15, 2)
    assert isinstance(run, flatout.Ensemble)
    single = [member.probabilities(images[..., None]) for member in run.members]
    mean = run.probabilities(images[..., None])
    assert not np.allclose(single[0], single[1])
    assert np.allclose(mean, np.mean(single, axis=0))
    assert np.allclose(mean, saved(run)["test_probabilities"], atol=1e-6)
    assert [p.classes[0] for p in run.predict(images)] == [str(i) for i in mean.argmax(axis=1)]
    result = run.evaluate(splits(), devices="cpu")
    assert result["test_accuracy"] == run.summary["test_accuracy"] == accuracy_score(labels, mean.argmax(axis=1))
    assert (result["split"], result["test_loss"]) == ("test", None)
    with pytest.raises(flatout.InputError, match="each fold has a model of its own"):
        _ = run.model


def test_the_report_leads_to_those_of_the_folds(finished: flatout.Run) -> None:
    draw_all(finished.path)
    page = (finished.path / "report.html").read_text()
    assert 'href="fold-2/report.html"' in page
    name = "valid_accuracy"
    mean, std = finished.summary["mean"][name], finished.summary["std"][name]
    assert f"{mean:.3f} ± {std:.2g} over 3 folds" in page
    assert "No problems found" not in page
    assert (finished.path / "confusion.png").is_file()


@pytest.mark.slow
def test_a_fold_trains_on_all_devices(finished: flatout.Run, tmp_path: Path) -> None:
    """The last one anew: the others have finished."""
    out = shutil.copytree(finished.path, tmp_path / "run")
    shutil.rmtree(out / "fold-3")
    both, last = fit(out, splits(), devices="2xcpu", resume=True), summary(out / "fold-3")
    assert (last["devices"], last["world_size"]) == ("2xcpu", 2)
    assert np.allclose(saved(finished)["probabilities"], saved(both)["probabilities"], atol=1e-5)
    assert "fold 3 of 3" in (out / "fold-3" / "logs" / "rank-1.log").read_text()
    log = (finished.path / "fold-3" / "logs" / "rank-0.log").read_text()
    assert "fold 3 of 3" in log
    assert "fold 1 of 3" not in log


def test_no_group_is_in_two_folds(tmp_path: Path, command: Command) -> None:
    """Of 36 images, 12 patients have three each."""
    listed, out, rows = tmp_path / "photos" / "list.csv", tmp_path / "run", ["file,label,patient"]
    listed.parent.mkdir()
    for i, (image, label) in enumerate(zip(*squares(36), strict=True)):
        Image.fromarray(image).save(listed.parent / f"{i}.png")
        rows.append(f"{i}.png,{'abc'[label]},p{i % 12}")
    listed.write_text("\n".join(rows))
    flags = ("--model", "fashion-cnn", "--epochs", 1, "--devices", "cpu", "--set", "image_size=28")
    groups = ("--set", "data.group_column=patient", "--set", "data.label_column=label")
    command("train", listed, "--folds", 4, *flags, *groups, "--out", out)
    arrays = saved(flatout.load(out))
    folds_of = [set(arrays["fold"][arrays["row"] % 12 == patient].tolist()) for patient in range(12)]
    assert all(len(folds) == 1 for folds in folds_of)
    assert np.bincount(arrays["fold"])[1:].tolist() == [9, 9, 9, 9]
    result = json.loads(command("evaluate", out, "--devices", "cpu", "--json"))
    assert result["valid_accuracy"] == flatout.load(out).summary["valid_accuracy"]
    assert result["valid_loss"] == pytest.approx(flatout.load(out).summary["valid_loss"], rel=1e-5)
    message = command("train", listed, "--folds", 13, *flags, *groups, "--out", tmp_path / "more", code=2)
    assert "data.folds = 13: there are only 12 groups of data.group_column" in message
    assert not (tmp_path / "more").exists()


@pytest.mark.filterwarnings("ignore:No positive class", "ignore:.*ill-defined")
def test_several_labels_and_numbers(tmp_path: Path) -> None:
    images, classes = squares()
    present = np.eye(3, dtype=np.uint8)[classes] | np.eye(3, dtype=np.uint8)[(classes * classes) % 3]
    run = fit(tmp_path / "labels", (images, present))
    arrays = saved(run)
    assert np.array_equal(arrays["predicted"], arrays["probabilities"] >= 0.5)  # no thresholds were tuned
    assert run.summary["valid_f1_macro"] == pytest.approx(f1_score(present, arrays["predicted"], average="macro"))
    run = fit(tmp_path / "numbers", (images, classes + images[:, 0, 0] / 1000), outputs=1)
    arrays = saved(run)
    assert run.summary["valid_mae"] == pytest.approx(mean_absolute_error(arrays["labels"], arrays["predicted"]))
    assert run.summary["valid_r2"] == pytest.approx(r2_score(arrays["labels"], arrays["predicted"]))
    assert loaded(run, 1).task.label_std == pytest.approx(arrays["labels"].std(), rel=0.2)  # the unit of tolerances
    together = [member.predict(images[0])[0].value or 0.0 for member in loaded(run, 1).members]
    assert loaded(run, 1).predict(images[0])[0].value == pytest.approx(np.mean(together), rel=1e-5)


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    def interrupt_the_second_fold() -> None:
        if (tmp_path / "run" / "fold-2").exists():
            os.kill(os.getpid(), signal.SIGINT)

    whole = fit(tmp_path / "whole", squares(), epochs=4)
    with at_image(3 * 40 + 16, interrupt_the_second_fold), pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", squares(), epochs=4)
    assert summary(tmp_path / "run" / "fold-2")["stopped"] == "interrupted in epoch 4, step 1"
    assert not (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(flatout.InputError, match="the cross-validation has not finished"):
        flatout.load(tmp_path / "run")
    first = (tmp_path / "run" / "fold-1" / "weights.safetensors").stat()
    with pytest.raises(flatout.InputError, match=r"the run has optimizer.lr = 0.05; optimizer.lr = 0.1"):
        fit(tmp_path / "run", squares(), epochs=4, lr=0.1, resume=True)
    with pytest.raises(flatout.InputError, match="run: the data has changed since some of its folds were trained"):
        fit(tmp_path / "run", squares(seed=1), epochs=4, resume=True)
    resumed = fit(tmp_path / "run", squares(), epochs=4, resume=True)
    assert (tmp_path / "run" / "fold-1" / "weights.safetensors").stat() == first
    assert np.array_equal(saved(resumed)["probabilities"], saved(whole)["probabilities"])


class Ends(flatout.Callback):
    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> bool:
        return epoch == 2


def ones(labels: np.ndarray, predicted: np.ndarray) -> float:
    return float((predicted == 1).mean())


def test_functions_and_callbacks_apply_to_all_folds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 4, "callbacks": [Ends()], "metrics": [ones]}
    run = fit(tmp_path / "run", squares(), **options)
    assert run.summary["mean"]["valid_ones"] == pytest.approx(run.summary["valid_ones"], abs=0.05)
    # What a callback has ended is finished.
    resumed = fit(tmp_path / "run", squares(), **options, resume=True)
    assert [fold["epochs_trained"] for fold in resumed.summary["folds"]] == [2] * 3


def test_a_fold_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(flatout.TrainingFailed, match=r"^fold 1: training diverged"):
        fit(tmp_path / "run", squares(), lr=1e30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folds": 1}, "data.folds = 1: must be 0 or at least 2"),
        ({"folds": 61}, "data.folds = 61: there are only 60 images"),
        ({"schedule": "plateau"}, "data.folds = 3: cannot be combined with schedule.name = 'plateau'"),
        ({"minutes": 1}, "data.folds = 3: cannot be combined with --minutes"),
    ],
)
def test_what_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(flatout.InputError, match=message):
        fit(tmp_path / "run", squares(), **changes)
    assert not (tmp_path / "run").exists()


def test_overwriting_removes_the_folds(tmp_path: Path) -> None:
    fit(tmp_path / "run", squares())
    with pytest.raises(flatout.InputError, match="LBFGS"):
        fit(tmp_path / "run", squares(), optimizer="torch:LBFGS", overwrite=True)
    assert flatout.load(tmp_path / "run", model=net()).summary["folds"]
    (tmp_path / "run" / "fold-2" / "mine.txt").touch()
    fit(tmp_path / "run", squares(), folds=0, overwrite=True)
    assert [path.name for path in (tmp_path / "run").glob("fold-*/*")] == ["mine.txt"]
    assert flatout.load(tmp_path / "run", model=net()).summary["test_count"] == 6
