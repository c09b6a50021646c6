"""The table of backbones against timm, and the choice among them."""

from itertools import pairwise

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatout.models import backbones
from flatout.models.backbones import BACKBONES, Backbone, choose

SMALLEST, LARGEST = BACKBONES[0], BACKBONES[-1]


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.model)
def test_figures_are_timms(backbone: Backbone):
    name = backbone.model.removeprefix("timm:")
    config = timm.get_pretrained_cfg(name)
    assert config is not None
    assert config.hf_hub_id == f"timm/{name}"
    assert config.license == "apache-2.0"
    assert (*config.mean, *config.std) == (*backbone.mean, *backbone.std)
    assert config.input_size == (3, backbone.image_size, backbone.image_size)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = timm.create_model(name).eval()
        model(torch.empty(1, *config.input_size))
    assert sum(p.numel() for p in model.parameters()) == backbone.parameters
    assert counter.get_total_flops() == 2 * backbone.operations  # a multiplication and an addition


def test_each_row_is_larger_and_more_accurate_than_the_one_before():
    for smaller, larger in pairwise(BACKBONES):
        assert smaller.operations < larger.operations
        assert smaller.top1 < larger.top1


def test_a_cpu_gets_a_small_one_and_an_accelerator_a_large_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backbones, "physical_cores", lambda: 2)
    assert choose(accelerated=False, images=5_000, seconds=None) == SMALLEST
    assert choose(accelerated=True, images=5_000, seconds=None) == LARGEST
    assert choose(accelerated=True, images=10**7, seconds=None) == SMALLEST
    assert choose(accelerated=False, images=0, seconds=60) == LARGEST


@pytest.mark.parametrize("accelerated", [False, True])
def test_more_time_and_fewer_images_never_mean_a_smaller_one(accelerated: bool):
    def sizes(images: list[int], seconds: list[float]) -> list[int]:
        chosen = (choose(accelerated=accelerated, images=n, seconds=s) for n in images for s in seconds)
        return [backbone.operations for backbone in chosen]

    by_time = sizes([2_000], [10.0**e for e in range(7)])
    by_images = sizes([10**e for e in range(9)], [600.0])
    assert by_time == sorted(by_time)
    assert by_images == sorted(by_images, reverse=True)
    assert {by_time[0], by_time[-1]} == {SMALLEST.operations, LARGEST.operations}


def test_the_estimate_is_the_documented_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backbones, "physical_cores", lambda: 4)
    medium = BACKBONES[1]
    enough = 3 * 5 * 1_000 * medium.operations / (4 * 4e9)
    assert choose(accelerated=False, images=1_000, seconds=enough * 1.01) == medium
    assert choose(accelerated=False, images=1_000, seconds=enough * 0.99) == SMALLEST
