"""The Python interface: modules, arrays and data sets of the user's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flatout


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def make_arrays(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Grey images whose level is their class."""
    labels = np.arange(count) % 3
    noise = np.random.default_rng(0).integers(0, 40, (count, 10, 10))
    return (noise + 90 * labels[:, None, None]).astype(np.uint8), labels


def settings(**changes: object) -> dict:
    return {
        "devices": "cpu",
        "quiet": True,
        "batch_size": 16,
        "epochs": 8,
        "optimizer": flatout.Adam(lr=0.02),
    } | changes


def test_a_module_and_arrays(tmp_path: Path) -> None:
    net = Net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run = flatout.fit(net, make_arrays(), out=tmp_path / "run", **settings())
    assert run.summary["test_accuracy"] >= 0.9
    assert run.summary["train_images"] == 96
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items()), "the user's module stays as it is"
    images, labels = make_arrays(30)
    assert [int(p.classes[0]) for p in run.predict(images, top=1)] == labels.tolist()
    again = flatout.load(tmp_path / "run", model=Net())
    assert again.model.conv.weight.equal(run.model.conv.weight)  # type: ignore[union-attr,operator]
    result = again.evaluate(make_arrays(30), devices="cpu")
    assert (result["test_correct"], result["test_count"]) == (30, 30)
    with pytest.raises(flatout.InputError, match="model=YourModule"):
        _ = flatout.load(tmp_path / "run").model


def test_given_splits_are_kept(tmp_path: Path) -> None:
    images, labels = make_arrays()
    splits = {"train": (images[:90], labels[:90]), "test": (images[90:], labels[90:])}
    run = flatout.fit(Net(), splits, out=tmp_path / "run", **settings())
    assert run.summary["test_count"] == 30
    assert run.summary["train_images"] + run.summary["valid_images"] == 90


class Squares(torch.utils.data.Dataset):
    """A map-style data set of PIL images."""

    classes = ("low", "middle", "high")

    def __init__(self) -> None:
        self.images, self.labels = make_arrays()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])


def test_a_torch_data_set(tmp_path: Path) -> None:
    run = flatout.fit(Net(), Squares(), out=tmp_path / "run", **settings())
    assert run.classes == ("low", "middle", "high")
    assert run.summary["test_accuracy"] >= 0.9


def test_a_named_model_and_recipe_sections(tmp_path: Path) -> None:
    augment = flatout.Augment(shift=0.1)
    changes = settings(augment=augment, schedule=flatout.Schedule(name="cosine"), epochs=2)
    run = flatout.fit("parallel-cnn", make_arrays(), out=tmp_path / "run", **changes)
    assert run.recipe.augment == augment
    assert run.recipe.optimizer == flatout.Adam(lr=0.02)
    assert sum(p.numel() for p in run.model.parameters()) == run.summary["parameters"]


def test_a_job_from_python(tmp_path: Path) -> None:
    run = flatout.fit(job="digits", out=tmp_path / "run", epochs=2, devices="cpu", quiet=True)
    assert run.recipe.job == "digits"
    assert run.evaluate(devices="cpu")["test_correct"] == run.summary["test_correct"]


def test_a_factory_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(100, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    run = flatout.fit("mine:make", make_arrays(), out=tmp_path / "run", **settings(epochs=1))
    assert run.summary["parameters"] == 303
    with pytest.raises(flatout.InputError, match="never run"):
        _ = flatout.load(tmp_path / "run").model


def test_frozen_layers_stay_and_the_rest_moves(tmp_path: Path) -> None:
    changes = settings(epochs=2, freeze="conv.*,norm.*", augment=flatout.Augment())
    run = flatout.fit(Net(), make_arrays(), out=tmp_path / "run", **changes)
    first, trained = Net().state_dict(), run.model.state_dict()
    assert torch.equal(trained["conv.weight"], first["conv.weight"])
    assert torch.equal(trained["norm.running_mean"], first["norm.running_mean"])
    assert not torch.equal(trained["head.weight"], first["head.weight"])
    assert any("computed once" in note for note in run.summary["notes"])


WRONG = [
    (lambda: flatout.fit(Net(5), make_arrays(), **settings()), "must return logits"),
    (lambda: flatout.fit(Net(), (make_arrays()[0], make_arrays()[1][:-1]), **settings()), "119"),
    (lambda: flatout.fit(Net(), make_arrays(), epoch=3), "did you mean 'epochs'"),
    (lambda: flatout.fit(Net(), make_arrays(), optimizer="adam"), "optimizer"),
    (lambda: flatout.fit(Net(), 3), "int"),
    (lambda: flatout.fit(), "no job and no data"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flatout.InputError, match=message):
        call()
    assert not (tmp_path / "runs").exists()


def test_training_does_not_load_the_compiler(tmp_path: Path) -> None:
    """torch's compiler takes a second to import, and nothing here compiles; what keeps it out is undone afterwards."""
    code = (
        "import sys, numpy as np, flatout\n"
        "x = np.arange(60 * 64, dtype=np.uint8).reshape(60, 8, 8)\n"
        f"flatout.fit('parallel-cnn', (x, np.arange(60) % 2), epochs=1, devices='cpu', out={str(tmp_path / 'run')!r})\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch\n"
        "assert not hasattr(torch.optim.Optimizer.zero_grad.__wrapped__, '__dynamo_disable')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
