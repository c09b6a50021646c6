"""Choose the published network, the image size and the fine-tuning that suit photos and the time budget best.

Expected errors are relative. ImageNet accuracy ranks the networks (Kornblith et al., arXiv 1805.08974). What sizes,
mirrored images and fine-tuning gain is measured by `benchmarks/gains.py`: `benchmarks/results/gains*.json`.
"""

import functools
import itertools
import math
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flatout.config.settings import Size, shown, sides
from flatout.models.build import quiet, usable_size
from flatout.models.hub import Backbone
from flatout.utils.console import duration
from flatout.utils.errors import InputError
from flatout.utils.host import physical_cores

if TYPE_CHECKING:
    from flatout.train.auto_recipe import DatasetStats

# Sides of images that are not square are multiples of the stride of networks for photos; smaller for small images.
STRIDE, STRIDE_FROM, SMALL_STRIDE = 32, 96, 4
# The error grows with this power of published size / size: 1.5, 2.75 and 4.5 % at 224, 160 and 128 pixels.
SIZE_EXPONENT = 1.8
# Candidate sizes: the published one, and multiples of SIZE_STEP below it, down to this share of it.
SIZE_STEP, LEAST_SHARE = 16, 4 / 7
# Assumed multiply-adds per second before measuring: a core with OpenVINO, and a modest GPU.
SPEED_OF_A_CORE, SPEED_OF_AN_ACCELERATOR = 35e9, 2e12
# Maximum number of measured networks.
MEASUREMENTS = 3
# Maximum share of the time spent on measuring, as on a busy machine; and the share kept free, for slower minutes.
MEASURING_SHARE, FREE_SHARE = 0.1, 0.05
# Seconds besides features: of a core to decode an image, and for each million pixels of it; of set-up; of the report.
DECODE_SECONDS, DECODE_SECONDS_PER_MEGAPIXEL, READY_SECONDS, REPORT_SECONDS = 0.0012, 0.002, 3.0, 7.0
# The head takes as long as so many products of all features with its weights on one core, and at least some seconds.
HEAD_PRODUCTS, MIN_HEAD_SECONDS, FEATURES = 580, 1.0, 1280
# Seconds of features in a run without a time budget, which is not fine-tuned.
USUAL_SECONDS = 120.0
# The error grows with this power of the error on ImageNet, and falls by this factor with features of mirrored images.
TOP1_EXPONENT, MIRRORED_GAIN = 2.0, 0.93
FINE_TUNING_EPOCHS = (1, 2, 3, 4, 5, 6, 9)  # candidates
# The factor of the error by steps of fine-tuning, with EfficientNet-Lite 0, whose error on ImageNet follows.
FINE_TUNING_GAINS = {100: 0.97, 180: 0.88, 270: 0.82, 360: 0.72, 450: 0.65, 530: 0.62, 800: 0.58, 1300: 0.55}
GAINS_ARE_AT = 24.9
# Better networks gain less: the exponent of that factor is this power of their relative error on ImageNet.
GAIN_EXPONENT = 4.0
# More epochs hardly help, and are for time that nothing better needs: 6, 9 and 15 on Caltech 101 end at 0.957 to 0.959.
USEFUL_EPOCHS, MAX_FINE_TUNING = 9, 40
# The share of the layers, the last ones, that is fine-tuned; the time of a step on them relative to the features of its
# images; and the part of that time spent in earlier layers.
TRAINED_SHARE, STEP_FACTOR, FROZEN_FACTOR = 0.3, 1.2, 0.75
# Learning rates of AdamW. On Caltech 101, five epochs of EfficientNet-Lite 0 end at 0.958 with the first, at 0.946 with
# the second.
RATE_OF_BATCH_NORM, RATE_OF_OTHERS = 0.001, 0.0003
# Averaged weights remember all steps: 267 on Caltech 101 end at 0.935 with a decay of 0.99, at 0.947 with 0.998.
MIN_AVERAGING, MAX_AVERAGING = 0.99, 0.9999

# Images per second of feature extraction on the devices of the run.
FeatureRate = Callable[[Backbone, Size], float]


@dataclass(frozen=True, kw_only=True)
class PhotoPlan:
    """A network, an image size, and how they are used."""

    backbone: Backbone
    image_size: Size
    mirrored: bool = False  # whether features of mirrored images are computed, too
    epochs: int = 0  # of fine-tuning
    averaging: float = MIN_AVERAGING  # the decay of the averaged weights
    reasons: Mapping[str, str] = field(default_factory=dict)  # by recipe key

    @property
    def operations(self) -> float:
        """Multiply-adds per image."""
        return self.backbone.operations * math.prod(sides(self.image_size)) / self.backbone.image_size**2

    def error(self, steps_per_epoch: int) -> float:
        """Return the expected error, without a unit: errors are only compared."""
        share = math.prod(sides(self.image_size)) ** 0.5 / self.backbone.image_size
        steps = min(self.epochs, USEFUL_EPOCHS) * steps_per_epoch
        gain = min((gain for least, gain in FINE_TUNING_GAINS.items() if steps >= least), default=1.0)
        on_imagenet = 100 - self.backbone.top1
        gain **= min(1.0, on_imagenet / GAINS_ARE_AT) ** GAIN_EXPONENT
        return on_imagenet**TOP1_EXPONENT * max(1.0, 1 / share) ** SIZE_EXPONENT * MIRRORED_GAIN**self.mirrored * gain

    def seconds(self, facts: "DatasetStats", rate: float) -> float:
        """Return the time of features, fine-tuning and the last evaluation, at a rate of features."""
        views = 1 + self.mirrored
        images, held_out = float(views * facts.every), facts.every - facts.images
        if self.epochs:
            # Frozen layers see training images mirrored in any case, and all others once.
            images += FROZEN_FACTOR * facts.images * (2 - views)
            images += STEP_FACTOR * self.epochs * facts.images + (1 - FROZEN_FACTOR) * (self.epochs + views) * held_out
        return images / rate


def plan_photos(
    facts: "DatasetStats", backbones: Sequence[Backbone], batch_size: int, channels: int, rate: FeatureRate | None
) -> PhotoPlan:
    """Return the plan with the least expected error within the time that is left, at speeds that `rate` measures.

    A single network gets its published size if it takes no other. Raises InputError if it does not take the user's.
    """
    began, seconds = time.perf_counter(), facts.left
    steps = -(-facts.images // batch_size)

    @functools.cache
    def takes(backbone: Backbone, size: Size) -> bool:
        return usable_size(backbone.model, size, channels=channels) == size

    def sizes_of(backbone: Backbone) -> list[Size]:
        found = [facts.size] if facts.is_size_given else _sizes(backbone, facts.ratio)
        if len(backbones) > 1 or takes(backbone, found[0]):
            return found
        if facts.is_size_given:
            size = f"{shown(found[0])}: {backbone.model} takes {backbone.image_size} with its published weights"
            raise InputError(f"image_size = {size}; leave image_size out")
        return [backbone.image_size]

    plans = [
        PhotoPlan(backbone=backbone, image_size=one, mirrored=mirrored, epochs=epochs)
        for backbone in backbones
        for one in sizes_of(backbone)
        for mirrored in (False, True)
        for epochs in ((0, *FINE_TUNING_EPOCHS) if seconds else (0,))
    ]
    plans.sort(key=lambda plan: (plan.error(steps), plan.operations, plan.epochs))
    usual = SPEED_OF_AN_ACCELERATOR if facts.accelerated else SPEED_OF_A_CORE * physical_cores()
    # Multiply-adds per second of measured networks, about the same at all sizes.
    speeds: dict[Backbone, float] = {}
    fixed = 0.0 if seconds is None else _fixed_seconds(facts) + FREE_SHARE * seconds

    def rate_of(plan: PhotoPlan) -> float:
        return speeds.get(plan.backbone, usual) / plan.operations

    def needed(plan: PhotoPlan) -> float:
        return plan.seconds(facts, rate_of(plan))

    def time_left() -> float:
        return USUAL_SECONDS if seconds is None else seconds - fixed - (time.perf_counter() - began)

    def best() -> PhotoPlan:
        """Return the best plan that fits at the known speeds, or else the fastest."""
        left = time_left()
        fitting = [plan for plan in plans if needed(plan) <= left]
        quickest = sorted(plans, key=lambda plan: (needed(plan), plan.error(steps)))
        return next(plan for plan in (*fitting, *quickest) if takes(plan.backbone, plan.image_size))

    chosen = best()
    limit = math.inf if seconds is None else began + MEASURING_SHARE * seconds
    while rate and chosen.backbone not in speeds and len(speeds) < MEASUREMENTS and time.perf_counter() <= limit:
        # The last speed is the best guess at those of the networks that were not measured.
        usual = speeds[chosen.backbone] = rate(chosen.backbone, chosen.image_size) * chosen.operations
        chosen = best()
    if chosen.epochs:
        # More epochs use up the time, as far as they help.
        left = time_left()
        longer = (replace(chosen, epochs=epochs) for epochs in range(chosen.epochs + 1, MAX_FINE_TUNING + 1))
        chosen = [chosen, *itertools.takewhile(lambda plan: needed(plan) <= left, longer)][-1]
    excess = needed(chosen) - time_left() if seconds else 0.0
    reasons = _reasons(chosen, seconds, rate_of(chosen) if speeds else None, excess, is_only=len(backbones) == 1)
    return replace(chosen, averaging=averaging(chosen.epochs * steps), reasons=reasons)


def _fixed_seconds(facts: "DatasetStats") -> float:
    """Return the time of all that no plan changes: decoding, set-up, the head and the report."""
    decoding = DECODE_SECONDS + DECODE_SECONDS_PER_MEGAPIXEL * facts.megapixels if facts.megapixels else 0.0
    head = max(MIN_HEAD_SECONDS, HEAD_PRODUCTS * _product_seconds(facts.images, facts.classes))
    return decoding * facts.every / physical_cores() + READY_SECONDS + head + REPORT_SECONDS


def _product_seconds(images: int, classes: int) -> float:
    """Return the time of a product of all features with the weights of a head on one core, measured on a part."""
    import torch

    rows, threads = min(images, 1000), torch.get_num_threads()
    features, weights = torch.ones(rows, FEATURES), torch.ones(FEATURES, classes)
    torch.set_num_threads(1)
    # The first product prepares the others.
    seconds = min(timeit.repeat(lambda: features @ weights, timer=time.perf_counter, number=1, repeat=4))
    torch.set_num_threads(threads)
    return seconds * images / rows


def _reasons(
    plan: PhotoPlan, seconds: float | None, rate: float | None, excess: float, *, is_only: bool
) -> dict[str, str]:
    backbone, within = plan.backbone, f" in {duration(seconds)}" if seconds and seconds > 0 else ""
    figures = f"{backbone.parameters / 1e6:.0f} million parameters"
    figures += f", {backbone.top1:.1f} % on ImageNet" * (backbone.top1 > 0)
    is_late = excess > 0.5
    best = "the quickest candidate" if is_late else f"the least expected error{within}"
    why = "the only candidate" if is_only else best
    speed = "" if rate is None else f"; {rate:,.0f} images/s here"
    late = f"; even so, the run takes about {duration(excess)} longer than --minutes" * is_late
    is_full = math.prod(sides(plan.image_size)) >= backbone.image_size**2
    short = f"there is no time for fine-tuning{within}" if seconds else "the head alone is fitted"
    tuned = f"the last {TRAINED_SHARE:.0%} of the layers are fine-tuned{within}"
    reasons = {
        "image_size": "; the size of the weights" if is_full else "; larger images take too long",
        "model": f"model = {backbone.model}, from published weights ({figures}): {why}{speed}{late}",
        "linear_probe": "linear_probe = true: the head is fitted to the features of all images, by cross-validation",
    }
    if plan.mirrored:
        reasons["tta"] = (
            "tta = true: an answer is the mean over the image and its mirror image; --set tta=false for one"
        )
    return {**reasons, "epochs": f"epochs = {plan.epochs}: {tuned if plan.epochs else short}"}


def _sizes(backbone: Backbone, ratio: float) -> list[Size]:
    """Return the published size and smaller ones, with the aspect ratio of the images."""
    whole = backbone.image_size
    smaller = range(SIZE_STEP * math.ceil(LEAST_SHARE * whole / SIZE_STEP), whole, SIZE_STEP)
    found = [whole, *reversed(smaller)]
    return [*found] if ratio == 1 else [*dict.fromkeys(of_shape(side, ratio) for side in found)]


def of_shape(side: float, ratio: float) -> tuple[int, int]:
    """Return height and width with about side * side pixels and width / height about `ratio`."""
    stride, longer_by = STRIDE if side >= STRIDE_FROM else SMALL_STRIDE, max(ratio, 1 / ratio)
    shorter = stride * max(1, round(side / math.sqrt(longer_by) / stride))
    longer = stride * round(shorter * longer_by / stride)
    return (shorter, longer) if ratio > 1 else (longer, shorter)


def averaging(steps: int) -> float:
    """Return the decay of the averaged weights in a fine-tuning of some steps."""
    return min(max(MIN_AVERAGING, round(1 - 1 / max(1, steps), 4)), MAX_AVERAGING)


def fine_tuning_of(model: str) -> tuple[str, str, float]:
    """Return `freeze`, `norm` and the learning rate for fine-tuning the last layers of a network."""
    import timm
    import torch

    from flatout.models.layers import layers_before_head

    with quiet(), torch.device("meta"):
        network = timm.create_model(model.removeprefix("timm:"))
    freeze = f"all-but-last-{max(1, round(TRAINED_SHARE * len(layers_before_head(network))))}"
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in network.modules()):
        return freeze, "frozen", RATE_OF_BATCH_NORM
    return freeze, "global", RATE_OF_OTHERS
