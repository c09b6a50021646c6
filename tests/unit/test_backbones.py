"""The table of backbones against timm."""

from itertools import pairwise

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatout.models.hub import BACKBONES, Backbone


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.model)
def test_figures_are_timms(backbone: Backbone):
    name = backbone.model.removeprefix("timm:")
    config = timm.get_pretrained_cfg(name)
    assert config is not None
    assert config.hf_hub_id == f"timm/{name}"
    assert config.license == "apache-2.0"
    # The weights of packages are not those of the hub, and take other bytes.
    assert backbone.package or (*config.mean, *config.std) == (*backbone.mean, *backbone.std)
    assert config.input_size == (3, backbone.image_size, backbone.image_size)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = timm.create_model(name).eval()
        model(torch.empty(1, *config.input_size))
    assert sum(p.numel() for p in model.parameters()) == backbone.parameters
    assert counter.get_total_flops() == 2 * backbone.operations  # a multiplication and an addition


@pytest.mark.parametrize("is_packaged", [False, True])
def test_each_row_is_larger_and_more_accurate_than_the_one_before(is_packaged: bool):
    for smaller, larger in pairwise(row for row in BACKBONES if bool(row.package) == is_packaged):
        assert smaller.operations < larger.operations
        assert smaller.top1 < larger.top1
