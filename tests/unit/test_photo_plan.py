"""The plan of a user's minutes on photos, at speeds of machines that do not exist."""

import re
from dataclasses import replace
from typing import Any

import pytest

from flatout.models.build import usable_size
from flatout.models.hub import BACKBONES, Backbone
from flatout.train import photo_plan
from flatout.train.auto_recipe import measure_dataset
from flatout.train.photo_plan import PhotoPlan, plan_photos
from flatout.utils.errors import InputError
from tests.unit.runs import blank_images

SMALL, LARGE = BACKBONES[0], BACKBONES[2]


@pytest.fixture(autouse=True)
def idle_machine_of_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_plan, "physical_cores", lambda: 2)
    # The machine of the tests may be busy.
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    # It would build a network of each size, during the measurements.
    monkeypatch.setattr(photo_plan, "usable_size", lambda name, wanted, **_: wanted)


def plan(
    seconds: float | None, images: int = 2000, backbones: Any = (SMALL, LARGE), *, slowness: float = 1.0, **given: Any
) -> PhotoPlan:
    """Plan for networks of which the small one computes 400 images of 224 pixels per second, and the large one 100."""

    def rate(backbone: Backbone, size: Any) -> float:
        return (100.0 if backbone == LARGE else 400.0) * (224 / size) ** 2 / slowness

    found = blank_images(images, size=300, channels=3, train=images // 2)
    facts = replace(measure_dataset(found, accelerated=False, seconds=seconds), **given)
    return plan_photos(facts, backbones, 32, 3, rate)


def test_more_time_or_speed_gives_a_better_network_then_fine_tuning() -> None:
    short, slow, long = plan(20), plan(600, slowness=60), plan(600)
    assert (short.backbone, short.epochs, short.mirrored) == (SMALL, 0, False)
    assert (slow.backbone, slow.image_size) != (LARGE, 224)
    assert (long.backbone, long.image_size, long.mirrored) == (LARGE, 224, True) and long.epochs > 0
    assert "100 images/s here" in long.reasons["model"] and "in 10 min" in long.reasons["epochs"]


def test_few_images_get_a_larger_network_before_fine_tuning() -> None:
    """Its steps would be too few to change much."""
    few, many = plan(40, 1200), plan(140, 6000)
    assert (few.backbone, few.epochs) == (LARGE, 0)
    assert (many.backbone, many.epochs > 0) == (SMALL, True)


def test_many_epochs_on_few_images_are_no_better_than_a_better_network() -> None:
    """As on cats and dogs, at speeds of two cores without AVX-512."""
    lite = [backbone for backbone in BACKBONES if backbone.package]
    facts = measure_dataset(blank_images(1600, size=300, channels=3, train=1200), accelerated=False, seconds=300)
    speeds = dict(zip(lite, (88.0, 55.0, 41.0), strict=True))
    assert plan_photos(facts, lite, 32, 3, lambda backbone, size: speeds[backbone]).backbone == lite[-1]


def test_what_was_planned_fits_the_time_at_the_measured_speed() -> None:
    for seconds in (30, 60, 120, 300, 600):
        found = plan(seconds)
        rate = (400.0 if found.backbone == SMALL else 100.0) * (224 / int(str(found.image_size))) ** 2
        images = 2000 * (1 + found.mirrored) + found.epochs * 1000 * photo_plan.STEP_FACTOR
        assert images / rate < seconds


def test_more_time_gives_more_epochs_whose_weights_are_averaged() -> None:
    shorter, longer = plan(400), plan(600)
    assert 6 < shorter.epochs < longer.epochs
    assert longer.averaging == pytest.approx(1 - 1 / (32 * longer.epochs), abs=1e-4)
    assert longer.averaging > shorter.averaging


def test_sizes_are_fine_enough_to_use_up_the_time() -> None:
    found = [plan(seconds, 6000, [SMALL]).image_size for seconds in range(18, 36)]
    assert found == sorted(found, key=str)
    assert {144, 176, 208, 224} <= set(found)
    # Large files take time to decode.
    assert [plan(20, 800, [SMALL], megapixels=each).image_size for each in (0.1, 24.0)] == [224, 128]


def test_a_budget_that_nothing_fits_gets_the_quickest_network_and_a_warning() -> None:
    found = plan(12, slowness=10)
    assert (found.backbone, found.image_size, found.epochs) == (SMALL, 128, 0)
    assert re.search(r"quickest candidate; 122 images/s here; .* takes about (15|16) s longer", found.reasons["model"])
    assert "longer" not in plan(60).reasons["model"]


def test_without_a_budget_nothing_is_fine_tuned() -> None:
    assert (plan(None).backbone, plan(None).epochs) == (LARGE, 0)


def test_a_size_that_the_network_or_the_user_demands_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_plan, "usable_size", usable_size)
    fixed, of_user = [replace(SMALL, model="timm:levit_128s")], {"size": 160, "is_size_given": True}
    assert plan(60, 10**6, fixed, slowness=100).image_size == 224
    assert plan(60, 10**6, fixed, slowness=100, ratio=1.5).image_size == 224
    assert plan(600, **of_user).image_size == 160
    with pytest.raises(InputError, match=r"image_size = 160: timm:levit_128s takes 224 .*; leave image_size out"):
        plan(600, backbones=fixed, **of_user)
