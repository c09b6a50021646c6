"""What users of other libraries bring: torch's objects, functions of their own; and what a run shows."""

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import cohen_kappa_score, confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchvision.transforms import ToTensor, v2

import flatout
from flatout.data.detect import from_python
from tests.system.run_files import grey_levels

# A class, or a folder.
HOSTILE = "<script>alert(1)"
# With too much noise to know the class always.
make_arrays = functools.partial(grey_levels, noise=120, step=45)
pytestmark = pytest.mark.usefixtures("one_picture_in_module")


def fit(out: Path, data: Any = None, **changes: Any) -> flatout.Run:
    usual = {"epochs": 1, "batch_size": 16, "model": "parallel-cnn", "augment": None, "devices": "cpu", "quiet": True}
    return flatout.fit(data=make_arrays() if data is None else data, out=out, **usual | changes)


def share_of_ones(labels: np.ndarray, answers: np.ndarray) -> float:
    return float((answers == 1).mean())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    """A run from a data set of torch's, with its optimizer, weights of classes, and metrics."""
    images, labels = (torch.from_numpy(array) for array in make_arrays(900))
    return flatout.fit(
        "parallel-cnn",
        TensorDataset(images, labels),
        batch_size=24,
        out=tmp_path_factory.mktemp("runs") / "run",
        epochs=2,
        devices="cpu",
        quiet=True,
        optimizer=flatout.Optimizer(name="torch:RAdam", lr=0.02),
        label_smoothing=0.1,
        class_weights={"1": 2.0},
        metrics=[cohen_kappa_score, share_of_ones],
    )


def test_words_of_other_libraries_are_recipe_keys(run: flatout.Run) -> None:
    recipe = run.recipe
    assert (recipe.batch_size, recipe.label_smoothing, recipe.class_weights) == (24, 0.1, {"1": 2.0})
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("torch:RAdam", 0.02)
    images, labels = make_arrays(900)
    np.savez(run.path.parent / "data.npz", images=images, labels=labels)
    out = run.path.parent / "again"
    again = flatout.fit(job=recipe, data=run.path.parent / "data.npz", out=out, devices="cpu", quiet=True)
    # Without the metrics; a recipe has everything else.
    assert again.epochs[-1]["train_loss"] == run.epochs[-1]["train_loss"]


def test_own_metrics_are_those_of_the_predictions(run: flatout.Run) -> None:
    assert {"valid_cohen_kappa_score", "valid_share_of_ones"} <= run.epochs[0].keys()
    with np.load(run.path / "predictions.npz") as saved:
        labels, predicted = saved["labels"], saved["predicted"]
    assert run.summary["test_cohen_kappa_score"] == pytest.approx(cohen_kappa_score(labels, predicted))
    assert run.summary["test_share_of_ones"] == share_of_ones(labels, predicted)


def test_the_worst_answers_and_the_confusion(run: flatout.Run) -> None:
    with np.load(run.path / "predictions.npz") as saved:
        labels, predicted, probabilities = saved["labels"], saved["predicted"], saved["probabilities"]
    worst = run.top_losses(1000)
    assert len(worst) == len(labels) == 90
    losses = nn.functional.nll_loss(torch.from_numpy(probabilities).log(), torch.from_numpy(labels), reduction="none")
    assert [answer.loss for answer in worst] == pytest.approx(sorted(losses.tolist(), reverse=True), rel=1e-4)
    first, images = worst[0], make_arrays(900)[0]
    assert first.actual == str(labels[first.index])
    assert first.predicted == str(predicted[first.index])
    # The data was given in Python: the run keeps the images that are shown.
    for answer in worst[:25]:
        assert answer.image is not None
        assert (images == answer.image[..., 0]).all((1, 2)).any()
    assert run.top_losses(3)._repr_html_().count("<img") == 3
    confused = run.confusion()
    np.testing.assert_array_equal(confused.counts, confusion_matrix(labels, predicted))
    np.testing.assert_array_equal(np.asarray(confused), confused.counts)
    assert "data:image/png;base64," in confused._repr_html_()


def test_hostile_names_stay_text_in_notebooks(run: flatout.Run) -> None:
    images, labels = make_arrays(30)
    look = flatout.look(images, np.array(["low", HOSTILE, "high"])[labels], quiet=True)
    frame = look._repr_html_()
    # The page is escaped once as the content of the frame, and names in it once more.
    assert "&amp;lt;script&amp;gt;alert(1)" in frame
    assert "&lt;script&gt;alert(1)" not in frame
    folder = shutil.copytree(run.path, run.path.parent / HOSTILE)
    assert "&lt;script&gt;" in flatout.load(folder)._repr_html_()
    assert "<script" not in flatout.load(folder)._repr_html_()
    answer = dataclasses.replace(run.top_losses(1)[0], predicted=HOSTILE)
    assert "<script" not in answer._repr_html_()


def test_a_loss_of_ones_own_is_that_of_the_name(tmp_path: Path) -> None:
    named = fit(tmp_path / "named", seed=3)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, targets, reduction="none")

    own = fit(tmp_path / "own", loss=loss, batch_transforms=torch.clone, seed=3)
    assert own.epochs[0]["train_loss"] == named.epochs[0]["train_loss"]
    assert own.epochs[0]["valid_loss"] == named.epochs[0]["valid_loss"]
    assert sum("recipe.toml does not contain it" in note for note in own.summary["notes"]) == 2
    blind = fit(tmp_path / "blind", loss=nn.MultiMarginLoss(), batch_transforms=[torch.zeros_like], seed=3)
    assert blind.epochs[0]["train_loss"] != named.epochs[0]["train_loss"]


def test_each_image_is_transformed_in_each_epoch(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def shift(image: torch.Tensor) -> torch.Tensor:
        seen.append(image.clone())
        return image.roll(int(torch.randint(1, 8, ())), 2)

    images, labels = make_arrays(48)
    data = dict.fromkeys(("train", "valid", "test"), (images, labels))
    plain, black, run = (
        fit(tmp_path / name, data, epochs=epochs, seed=3, transform=transform)
        for name, epochs, transform in (("plain", 1, None), ("black", 1, torch.zeros_like), ("run", 2, shift))
    )
    # As they are stored, in 0..1, once in each epoch.
    found = np.rint(255 * torch.cat(seen).numpy()).astype(np.uint8)
    assert sorted(map(bytes, found)) == sorted([*map(bytes, images), *map(bytes, images)])
    losses = [one.epochs[0]["train_loss"] for one in (plain, black, run)]
    assert len(set(losses)) == 3
    assert run.summary["notes"][-1:] == ["transform is a function given in Python: recipe.toml does not contain it"]


def test_class_weights_by_name(tmp_path: Path) -> None:
    named, listed = (fit(tmp_path / str(of), class_weights=of) for of in ({"1": 3.0}, [1.0, 3.0, 1.0]))
    assert named.epochs[0]["train_loss"] == listed.epochs[0]["train_loss"]


FUNCTIONS: list[tuple[dict[str, Any], str]] = [
    ({"loss": nn.MultiMarginLoss(), "shard": "full"}, "nor sharded"),
    ({"loss": nn.MultiMarginLoss(), "engine": "xla"}, "loss: a function of your own can be neither compiled"),
    ({"loss": lambda logits, targets: logits.sum()}, r"loss: must return a loss for each image, .* not \(\)"),
    ({"batch_transforms": lambda images: images[:1]}, r"batch_transforms: <lambda> returned \(1, 1, 8, 8\)"),
    ({"metrics": {"accuracy": share_of_ones}}, "accuracy. must be a function .* with an unused name"),
    ({"metrics": ["f1"]}, "'f1' must be a function .*. Always computed: accuracy"),
    ({"metrics": {"broken": lambda labels, answers: 1 / 0}}, "metrics: broken raised ZeroDivisionError"),
    ({"class_weights": [1.0, 2.0]}, "class_weights has 2 numbers, but the data has 3 classes"),
    ({"class_weights": {"0": 1.0, "3": 2.0}}, "class_weights: the data has no class '3'; known: 0, 1, 2"),
    ({"class_weights": {"0": -1.0}}, "class_weights = .*must be at least 0"),
    ({"transform": v2.functional.to_pil_image}, r"returned Image; images are tensors, torch.float32 \[1, 8, 8\] in"),
    ({"transform": [torch.clone, v2.Resize(4)]}, r"transform: Resize returned torch.float32 \[1, 4, 4\]; images are"),
    ({"transform": ToTensor()}, "transform: ToTensor raised TypeError: pic should be PIL Image .*leave ToTensor"),
    ({"transform": "flip"}, "transform: 'f' is not a function of images"),
    ({"augment": torch.clone}, "functions go into transform= or batch_transforms="),
    ({"data": DataLoader(TensorDataset(torch.zeros(3)))}, "instead of a DataLoader, give loader.dataset"),
]


@pytest.mark.parametrize(("given", "message"), FUNCTIONS, ids=[message for _, message in FUNCTIONS])
def test_what_cannot_be_used_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(flatout.InputError, match=message):
        fit(tmp_path / "run", **given)


class Stream(IterableDataset):
    """Dicts, in an order."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        images, labels = make_arrays(1500)
        return ({"img": image, "target": int(label)} for image, label in zip(images, labels, strict=True))


class Rows(list):
    """As a data set of Hugging Face: dicts, and features that name the classes."""

    features = {"image": None, "label": SimpleNamespace(names=("low", "middle", "high"))}  # noqa: RUF012


def test_data_sets_of_dicts_and_streams() -> None:
    images, labels = make_arrays(1500)
    stream = from_python(Stream())
    np.testing.assert_array_equal(stream.images[..., 0], images)  # pyright: ignore
    np.testing.assert_array_equal(stream.labels, labels)
    pairs = zip(images[:30], labels[:30].tolist(), strict=True)
    rows = from_python(Rows({"image": Image.fromarray(image), "label": label, "id": 3} for image, label in pairs))
    assert rows.classes == ("low", "middle", "high")
    np.testing.assert_array_equal(rows.labels, labels[:30])
    with pytest.raises(flatout.InputError, match="the data set is empty"):
        from_python(iter([]))
