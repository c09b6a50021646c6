"""Which published network, at which image size, makes the best of the user's minutes on photos, and what is done then.

Expected errors are relative. ImageNet accuracy ranks the networks (Kornblith et al., arXiv 1805.08974).
`benchmarks/gains.py` measured what image size, mirrored images and fine-tuning gain (`benchmarks/results/gains.json`).
Speeds are measured on the devices of the run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatout.console import duration
from flatout.host import physical_cores
from flatout.models.backbones import Backbone
from flatout.models.sizes import usable_size
from flatout.run.facts import STRIDE, of_shape
from flatout.settings import Size, sides

# The error grows with the power of the published size over the size: 1.5, 2.75 and 4.5 % at 224, 160 and 128 pixels.
SIZE_EXPONENT = 1.8
# Shares of the published size that are considered.
SIZE_SHARES = (1.0, 6 / 7, 5 / 7, 4 / 7)
# Multiply-adds per second before anything is measured: of a core with ONNX Runtime, and of a modest GPU.
SPEED_OF_A_CORE, SPEED_OF_AN_ACCELERATOR = 25e9, 2e12
# Networks that are measured at most. One is measured if it fits with so much more speed than expected.
MEASUREMENTS, OPTIMISM = 3, 1.5
# Seconds besides features: images decoded per second on each core; the network made ready; pictures and report.
DECODED_PER_CORE, READY_SECONDS, REPORT_SECONDS = 400.0, 3.0, 6.0
# Seconds of the head for each image, class and feature, and what it takes at least.
HEAD_SECONDS_PER_PRODUCT, LEAST_HEAD_SECONDS, FEATURES = 1.5e-8, 1.0, 1280
# A run without a time budget computes features for so long, and is not fine-tuned.
USUAL_SECONDS = 120.0
# A training step takes so many times as long as the features of its images: three passes, by torch.
STEP_FACTOR = 9.0
# Fine-tuning begins to pay after so many epochs, and adds nothing after more than those.
LEAST_EPOCHS, MOST_EPOCHS = 2, 12

# Images per second whose features are computed on the devices of the run, by model and image size.
FeatureRate = Callable[[str, Size], float]


@dataclass(frozen=True, kw_only=True)
class PhotoPlan:
    """What to do with the time.

    Attributes:
        backbone: the network.
        image_size: of the images.
        mirrored: whether features are computed of mirrored images, too.
        epochs: of fine-tuning; 0 for none.
        seconds: what all of it takes, as far as known; None where nothing was measured.
        reasons: a sentence for each choice, by recipe key.
    """

    backbone: Backbone
    image_size: Size
    mirrored: bool
    epochs: int
    seconds: float | None
    reasons: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    backbone: Backbone
    size: Size

    @property
    def operations(self) -> float:
        height, width = sides(self.size)
        return self.backbone.operations * height * width / self.backbone.image_size**2

    @property
    def error(self) -> float:
        height, width = sides(self.size)
        share = (height * width) ** 0.5 / self.backbone.image_size
        return (100 - self.backbone.top1) * max(1.0, 1 / share) ** SIZE_EXPONENT


def plan_photos(
    backbones: Sequence[Backbone],
    *,
    images: int,
    training_images: int,
    classes: int,
    ratio: float,
    size: Size | None,
    accelerated: bool,
    seconds: float | None,
    rate: FeatureRate | None,
    channels: int = 3,
) -> PhotoPlan:
    """Return the network with the least expected error whose features fit into the time, and what fits after them.

    Args:
        backbones: to choose from.
        images: of all splits.
        training_images: of them, those to train on.
        ratio: of width to height.
        size: of the images, where the user gives it.
        accelerated: whether a GPU or TPU computes.
        seconds: what is left of the user's time; None for no budget.
        rate: measures; None where the devices are not at hand.
        channels: of the images.
    """
    began = time.perf_counter()
    candidates = [
        _Candidate(backbone=backbone, size=one)
        for backbone in backbones
        for one in ([size] if size else _sizes(backbone, ratio))
    ]
    candidates.sort(key=lambda candidate: (candidate.error, candidate.operations))
    cores = physical_cores()
    speed = SPEED_OF_AN_ACCELERATOR if accelerated else SPEED_OF_A_CORE * cores
    head = max(LEAST_HEAD_SECONDS, HEAD_SECONDS_PER_PRODUCT * training_images * classes * FEATURES)
    fixed = images / (DECODED_PER_CORE * cores) + READY_SECONDS + head + REPORT_SECONDS

    def left() -> float:
        return USUAL_SECONDS if seconds is None else seconds - fixed - (time.perf_counter() - began)

    measured: dict[_Candidate, float] = {}
    chosen = candidates[-1]
    for candidate in candidates:
        optimism = 1.0 if measured or rate is None else OPTIMISM
        if images / (optimism * speed / candidate.operations) > left():
            continue
        if usable_size(candidate.backbone.model, candidate.size, channels=channels) != candidate.size:
            continue
        if rate is None or len(measured) == MEASUREMENTS:
            chosen = candidate
            break
        measured[candidate] = rate(candidate.backbone.model, candidate.size)
        if images / measured[candidate] <= left():
            chosen = candidate
            break
        # The others are expected to be as much slower.
        speed = measured[candidate] * candidate.operations
    else:
        chosen = min(candidates, key=lambda candidate: candidate.operations)
    per_second = measured.get(chosen, speed / chosen.operations)
    features = images / per_second
    mirrored = 2 * features <= left() * (0.5 if seconds is None else 1.0)
    used = features * (1 + mirrored)
    epoch = training_images * STEP_FACTOR / per_second
    epochs = 0
    if seconds is not None and left() - used >= LEAST_EPOCHS * epoch:
        epochs = min(MOST_EPOCHS, int((left() - used) / epoch))
    figures = f"{chosen.backbone.parameters / 1e6:.0f} million parameters"
    figures += f", {chosen.backbone.top1:.1f} % on ImageNet" * (chosen.backbone.top1 > 0)
    within = "" if seconds is None else f" into {duration(seconds)}"
    why = f"the most accurate whose features of {images:,} images fit{within}" if len(backbones) > 1 else "as you chose"
    speeds = f", {per_second:,.0f} images/s here" if measured else ""
    name = chosen.backbone.model
    reasons = {
        "model": f"model = {name}, from published weights ({figures}): {why}{speeds}",
        "image_size": "; "
        + (
            "as the weights are"
            if sides(chosen.size)[0] >= chosen.backbone.image_size
            else "larger images take too long"
        ),
        "linear_probe": "linear_probe = true: the head is fitted to the features of all images, by cross-validation",
        "epochs": f"epochs = {epochs}: "
        + (
            "all layers are fine-tuned from the fitted head" if epochs else "the network before its head is not trained"
        ),
    }
    if mirrored:
        reasons["tta"] = (
            "tta = true: features are the mean over each image and its mirror image; --set tta=false for one"
        )
    total = None if not measured else fixed + used + (time.perf_counter() - began)
    return PhotoPlan(
        backbone=chosen.backbone,
        image_size=chosen.size,
        mirrored=mirrored,
        epochs=epochs,
        seconds=total,
        reasons=reasons,
    )


def _sizes(backbone: Backbone, ratio: float) -> list[Size]:
    """Return the published size and smaller ones, of the shape of the images where that is no square."""
    found = []
    for share in SIZE_SHARES:
        side = share * backbone.image_size
        square = backbone.image_size if share == 1 else STRIDE * round(side / STRIDE)
        found.append(square if ratio == 1 else of_shape(side, ratio))
    return list(dict.fromkeys(found))
