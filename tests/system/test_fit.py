"""The Python interface: modules, arrays and data sets of the user's."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flatout
from tests.system.run_files import grey_levels, weights

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


make_arrays = functools.partial(grey_levels, size=10)


def settings(**changes: object) -> dict:
    usual = {"devices": "cpu", "quiet": True, "batch_size": 16, "epochs": 8, "optimizer": flatout.Adam(lr=0.02)}
    return usual | changes


def test_a_module_and_arrays(tmp_path: Path) -> None:
    net = Net()
    run = flatout.fit(net, make_arrays(), out=tmp_path / "run", **settings())
    assert run.summary["test_accuracy"] >= 0.9
    assert run.summary["train_images"] == 96
    saved = weights(run.path)
    assert all(torch.equal(saved[k], v) for k, v in net.state_dict().items()), "the user's module is the trained one"
    assert (net.training, net.head.weight.device.type) == (False, "cpu")
    images, labels = make_arrays(30)
    assert [int(p.classes[0]) for p in run.predict(images, top=1)] == labels.tolist()
    other = Net()
    again = flatout.load(tmp_path / "run", model=other)
    assert again.model.conv.weight.equal(run.model.conv.weight)  # type: ignore[union-attr,operator]
    assert other.conv.weight.equal(net.conv.weight)
    result = again.evaluate(make_arrays(30), devices="cpu")
    assert (result["test_correct"], result["test_count"]) == (30, 30)
    with pytest.raises(flatout.InputError, match="model=YourModule"):
        _ = flatout.load(tmp_path / "run").model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    """A run on grey images of 10x10."""
    changes = settings(augment=flatout.Augment(shift=0.1), schedule=flatout.Schedule(name="cosine"), epochs=2)
    run = flatout.fit("parallel-cnn", make_arrays(), out=tmp_path_factory.mktemp("runs") / "run", **changes)
    assert (run.recipe.augment, run.recipe.schedule.name) == (flatout.Augment(shift=0.1), "cosine")
    assert sum(p.numel() for p in run.model.parameters()) == run.summary["parameters"]
    return run


def test_images_of_every_form_are_classified(run: flatout.Run, tmp_path: Path) -> None:
    images = make_arrays(6)[0]
    pictures = [Image.fromarray(image) for image in images]
    files = [tmp_path / f"{i}.png" for i in range(6)]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file)
    expected = [p.probabilities for p in run.predict(images)]
    forms = {
        "files": files,
        "a folder": tmp_path,
        "bytes": [file.read_bytes() for file in files],
        "PIL images": pictures,
        "colour": [picture.convert("RGB") for picture in pictures],
        "a list of arrays": list(images),
        "a list of tensors": [torch.from_numpy(image)[None] for image in images],
        "floats in 0..1": images / 255,
        "floats in 0..255": images.astype(np.float32),
        "a tensor": torch.from_numpy(images)[:, None] / 255,
        "channels last": images[..., None],
        "a generator": (image for image in images),
    }
    for form, given in forms.items():
        assert [p.probabilities for p in run.predict(given)] == expected, form
    content = files[0].read_bytes()
    ones = (pictures[0], files[0], str(files[0]), content, images[0], torch.from_numpy(images[0]))
    for one in ones:
        (prediction,) = run.predict(one)
        # A batch of one is rounded otherwise than one of six.
        assert prediction.probabilities == pytest.approx(expected[0], rel=1e-5)
    (prediction,) = run.predict(np.asarray(pictures[0].convert("RGB")))  # one image, not ten of 10x3
    assert prediction.probabilities == pytest.approx(expected[0], rel=1e-5)
    damaged = pictures[0].convert("RGB")
    damaged.info["exif"] = b"Exif\x00\x00no TIFF"
    assert run.predict(damaged)[0].error is None
    larger = pictures[0].resize((40, 30))
    assert run.predict([larger, pictures[1]])[1].probabilities == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (3, "int given; give files, folders, PIL images, arrays or tensors"),
        (io.BytesIO(b"content"), "BytesIO given; give files"),
        ([3], "item 0 is of int"),
        ([io.BytesIO(b"content")], "item 0 is of BytesIO"),
        (b"no image", "0: is not an image"),
        (np.full((2, 10, 10), 300.0), "0..1 or 0..255"),
        ([], "no image to classify"),
        ("gone.png", "there is no such file"),
    ],
)
def test_images_that_cannot_be_classified(run: flatout.Run, images: object, message: str) -> None:
    with pytest.raises(flatout.InputError, match=message):
        run.predict(images)


def test_a_run_shows_itself_in_a_notebook(run: flatout.Run) -> None:
    for name in ("curves.png", "predictions.png"):
        Image.new("L", (2, 2)).save(run.path / name)
    shown = run._repr_html_()
    assert f"accuracy={run.summary['test_accuracy']:.4f}" in shown
    assert shown.count('<img style="max-width:45%" src="data:image/png;base64,') == 2


def test_wrong_arguments_are_named(run: flatout.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fails(message: str, *arguments: object, **changes: object) -> None:
        with pytest.raises(flatout.InputError, match=message):
            flatout.fit(*arguments, **{"quiet": True, "devices": "cpu", **changes})  # pyright: ignore

    data = make_arrays()
    fails(r"choose another --out, or --resume or --overwrite", Net(), data, out=run.path)
    fails(r"did you mean 'optimizer.lr'", Net(), data, learning_rate=0.1)
    fails(r"optimizer\.lr is given twice", Net(), data, lr=0.1, optimizer=flatout.SGD())
    fails(r"optimizer=\"adam\", .* flatout.Adam", Net(), data, optimizer=3)
    fails("must return logits", Net(5), data)
    fails("int", Net(), 3)
    fails("no job and no data")
    fails("resume needs out", Net(), data, resume=True)
    only_head = {"epochs": 0, "linear_probe": True, "transform": torch.nn.Identity()}
    fails("transform: is never called, as only the head is fitted", Net(), data, **only_head)
    fails(r"validation_data: goes with arrays", Net(), "photos", validation_data=data)
    fails(r"validation_data: data has validation images", Net(), {"train": data, "valid": data}, validation_data=data)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(flatout.InputError, match="--top 0: must be at least 1"):
        run.predict(data[0], top=0)


def test_the_words_of_other_libraries(tmp_path: Path) -> None:
    images, labels = make_arrays()
    said: dict[str, Any] = {"devices": "cpu", "quiet": True, "batch_size": np.int64(16), "epochs": 2, "lr": 0.02}
    said |= {"optimizer": "adam", "schedule": "cosine", "augment": {"shift": 0.1}, "weight_decay": 0.001}
    held_out = (images[:30] / 255, labels[:30])
    run = flatout.fit(Net(), images / 255, labels, validation_data=held_out, out=tmp_path / "run", **said)
    assert run.recipe.optimizer == flatout.Adam(lr=0.02, weight_decay=0.001)
    assert (run.recipe.schedule.name, run.recipe.augment.shift) == ("cosine", 0.1)
    assert (run.summary["train_images"], run.summary["valid_images"]) == (120, 30)


class Verbose(Net):
    """Probabilities, and in training the scores of another head too."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        probabilities = super().forward(x).softmax(1)
        return (probabilities, self.other(torch.relu(self.conv(x)).mean((2, 3)))) if self.training else probabilities


def test_a_module_that_returns_more_than_logits(tmp_path: Path) -> None:
    net = Verbose()
    run = flatout.fit(net, make_arrays(), out=tmp_path / "run", **settings())
    assert any("softmax" in note for note in run.summary["notes"])
    assert run.evaluate(make_arrays(30), devices="cpu")["test_correct"] == 30
    images = make_arrays(3)[0]
    mean, std = run.recipe.data.mean[0], run.recipe.data.std[0]
    x = ((torch.from_numpy(images) / 255 - mean) / std)[:, None]
    with torch.no_grad():
        own = net(x)
        assert torch.allclose(run.model(x).softmax(1), own), "the run's model returns logits, the user's what it did"
    np.testing.assert_allclose(run.probabilities(images[..., None]), own, atol=1e-5)
