"""`flatout plan --gpu`: traces against hand counts, estimates against published speeds, and bad input."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.analysis.gpu import CHIPS, EXPECTED_ERRORS, chips_named, step_time
from flatout.analysis.gpu_trace import Trace, trace
from tests.conftest import Command


def of_timm(name: str, batch: int, *, train: bool) -> Trace:
    import timm

    with torch.device("meta"):
        model: Any = timm.create_model(name)
        labels = torch.empty(batch, dtype=torch.long)
    shape = (batch, 3, 224, 224)
    return trace(model, shape, lambda logits: functional.cross_entropy(logits, labels), train=train)


# --- traces -----------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_a_hand_count() -> None:
    batch, inputs, hidden, outputs = 256, 128, 1024, 512
    layers = (nn.Linear(inputs, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, outputs, bias=False))
    model = nn.Sequential(nn.Flatten(), *layers).to("meta")
    weights = 4 * (hidden * inputs + outputs * hidden)
    images, logits, features = (4 * batch * width for width in (inputs, outputs, hidden))
    shape = (batch, inputs, 1, 1)
    found = trace(model, shape, lambda y: y.sum(), train=True, half=False, states=2)
    # In the gradient of ReLU: its result, the gradient of that and its own, and the gradient of the last weights. Adam
    # keeps two numbers for each weight. The loss and its gradient take a block of 512 bytes each.
    expected = 3 * weights + images + logits + 3 * features + 4 * outputs * hidden
    assert expected <= found.peak_bytes <= expected + 1024
    # In prediction the features before and after ReLU are alive at once.
    predicted = trace(model, shape, lambda y: y.sum(), train=False, half=False)
    assert predicted.peak_bytes == weights + images + 2 * features


def test_operations_are_those_of_the_publication() -> None:
    # 4.11 billion multiply-adds for an image, as timm counts them in the tables of its folder results/.
    predicted, trained = (of_timm("resnet50", 8, train=train) for train in (False, True))
    forward = sum(call.flops * count for call, count in predicted.calls.items())
    assert forward / 8 == pytest.approx(2 * 4.11e9, rel=0.01)
    # A gradient of weights and one of images, which the first convolution does not need.
    first = 2 * 8 * 64 * 3 * 49 * 112**2
    assert sum(call.flops * count for call, count in trained.calls.items()) == pytest.approx(3 * forward - first)


# --- estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batch", "gpu", "train", "published"),
    [
        # timm, results/benchmark-{train,infer}-amp-*.csv
        ("resnet50", 512, "rtx3090", True, 1218.01),
        ("resnet50", 1024, "rtx3090", False, 3729.86),
        ("vit_base_patch16_224", 512, "rtx4090", False, 2843.0),
        # NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md
        ("resnet50", 256, "a100-80", True, 2470),
        ("resnet50", 256, "t4", False, 1198),
    ],
)
def test_published_speeds(name: str, batch: int, gpu: str, train: bool, published: float) -> None:
    estimated = batch / step_time(CHIPS[gpu], of_timm(name, batch, train=train))[0]
    assert estimated == pytest.approx(published, rel=EXPECTED_ERRORS["training"][1])


def test_rates_of_the_table_agree() -> None:
    """A tensor core does a power of two of operations per clock, so a wrong figure of a row stands out."""
    for name, chip in CHIPS.items():
        per_clock = 1e3 * chip.half / (chip.multiprocessors * chip.clock)
        assert math.log2(per_clock) == pytest.approx(round(math.log2(per_clock)), abs=0.03), name
        assert chip.source.startswith("https://"), name


# --- the command ------------------------------------------------------------------------------------------------------

SMALL = ["--model", "timm:resnet18", "--images", "1000", "--classes", "10", "--image-size", "64"]


def test_json(tmp_path: Path, command: Command) -> None:
    def planned(name: str, *words: str) -> dict[str, Any]:
        return json.loads(command("plan", *SMALL, *words, "--json", "--out", tmp_path / name))

    plan = planned("plan", "--batch-size", "100", "--gpu", "rtx3090,L4", "--price", "2", "--epochs", "3")
    assert [row["gpu"] for row in plan["gpus"]] == ["rtx3090", "l4"]
    for row in plan["gpus"]:
        assert row["images_per_second"] == pytest.approx(100 / row["step_seconds"])
        assert row["job_seconds"] == pytest.approx(3 * row["epoch_seconds"]) == pytest.approx(30 * row["step_seconds"])
        assert row["cost"] == pytest.approx(2 * row["job_seconds"] / 3600)
        assert 11e6 * 12 < row["memory_bytes"] < row["gpu_memory_bytes"] == 24 * 2**30
        assert row["largest_batch"] > 1000
        assert row["limit"] in ("memory", "launches")
        assert 0 < row["expected_error"] < row["expected_error_90"] < 0.4
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["gpus"] == plan["gpus"]
    # A card without bfloat16.
    row = planned("fp32", "--gpu", "t4")["gpus"][0]
    assert (row["precision"], row["shares"]["tensor cores"]) == ("fp32", 0)
    assert sum(row["shares"].values()) == pytest.approx(1)
    predicted = planned("predict", "--gpu", "rtx3090", "--inference")["gpus"][0]
    assert predicted["images_per_second"] > 2 * plan["gpus"][0]["images_per_second"]


def net_file(path: Path, forward: str) -> str:
    """Write a network of one linear layer; return its name."""
    lines = ["import torch", "class Net(torch.nn.Module):", "    def __init__(self, num_classes):"]
    lines += ["        super().__init__()", "        self.head = torch.nn.Linear(3, num_classes)"]
    path.write_text("\n".join([*lines, "    def forward(self, x):", f"        return {forward}"]))
    return f"{path}:Net"


def test_images_that_do_not_fit_on_the_gpu_are_copied(tmp_path: Path, command: Command) -> None:
    model = net_file(tmp_path / "net.py", "self.head(x.mean((2, 3)))")
    options = ["--model", model, "--classes", "10", "--image-size", "64", "--batch-size", "4096", "--gpu", "h100"]
    limits = []
    for images in (10**6, 10**9):
        printed = command("plan", *options, "--images", images, "--json", "--out", tmp_path / str(images))
        limits.append(json.loads(printed)["gpus"][0]["limit"])
    assert limits[0] != "input" == limits[1]


def test_a_batch_that_does_not_fit_names_the_largest(tmp_path: Path, command: Command) -> None:
    arguments = ["plan", "--model", "fast-cnn-16", "--images", "100000", "--classes", "10", "--image-size", "64"]
    arguments += ["--gpu", "rtx4060"]
    message = command(*arguments, "--batch-size", "100000", "--out", tmp_path / "plan", code=2)
    found = re.search(r"100000: does not fit on rtx4060: .* of 8 GiB, the largest that fits is about (.*)\n", message)
    assert found
    largest = int(found[1].replace(",", ""))
    command(*arguments, "--batch-size", int(0.99 * largest), "--out", tmp_path / "fits")
    command(*arguments, "--batch-size", int(1.01 * largest), "--out", tmp_path / "too large", code=2)


def test_names() -> None:
    assert list(chips_named("H100, RTX 4090,a100,rtx6000ada")) == ["h100", "rtx4090", "a100-80", "rtx-6000-ada"]


def test_a_model_that_cannot_be_traced(tmp_path: Path, command: Command) -> None:
    model = net_file(tmp_path / "net.py", "self.head(x.mean((2, 3)) * x.mean().item())")
    arguments = ["--model", model, "--images", "100", "--classes", "10", "--image-size", "32", "--gpu", "l4"]
    errors = command("plan", *arguments, "--out", tmp_path / "plan", code=2)
    assert "cannot be traced without data" in errors
    assert "item()" in errors
