"""A recipe generated from the data, by simple rules that are printed with it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.data.source import DataRef, Source
from flatout.errors import InputError
from flatout.recipe import Recipe, from_dict

# Images whose headers are read to find the usual size and colour.
SAMPLED = 64
# Image sizes to choose from; on a CPU, 128 pixels keep an epoch of a few thousand images within a minute.
SIZES = (32, 64, 96, 128, 160, 224)
LARGEST_ON_CPU, LARGEST_ON_GPU = 128, 224
# Images up to this many pixels on a side are often symbols: they are shifted, never mirrored.
SMALL = 32
# Epochs and batch size by the number of training images: few images need many epochs and small batches.
EPOCHS = ((2_000, 30), (20_000, 20), (100_000, 10), (2**63, 5))
BATCHES = ((5_000, 32), (20_000, 64), (2**63, 256))
# From this ratio of the largest to the smallest class on, classes are weighted.
UNBALANCED = 3.0


@dataclass(frozen=True, kw_only=True)
class _Shape:
    side: int
    channels: int
    reason: str


def advise(found: DataRef | Source, path: str, *, accelerated: bool) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe that suits the data, and a sentence for each key or section of it that gives the reason.

    Args:
        found: recognised data.
        path: what the recipe names as its data.
        accelerated: whether an accelerator will train it.
    """
    largest = LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU
    if isinstance(found, DataRef) and found.kind == "pack":
        from flatout.data.pack import open_pack

        pack = open_pack(found.path, verify=False)
        train, labels, classes = pack.splits["train"], pack.labels, len(pack.classes)
        shape = _Shape(side=pack.images.shape[1], channels=pack.images.shape[3], reason="the pack's images")
        exact = True
    else:
        source = found if isinstance(found, Source) else found.read()
        train, labels, classes = source.splits["train"], source.labels, len(source.classes)
        shape = _shape_of_files(source.files) if source.files is not None else _shape_of_array(source.images)
        exact = source.images is not None and shape.side <= largest
    size = shape.side if exact else _nearest_size(shape.side, largest)
    count = train[1] - train[0]
    counts = np.bincount(labels[train[0] : train[1]], minlength=classes)
    balance = counts.max() / max(1, counts[counts > 0].min())
    model = _model(size, accelerated)
    epochs, batch = _by_count(EPOCHS, count), _by_count(BATCHES, count)
    small = size <= SMALL
    augment = {"shift": 0.1, "zoom": 0.1, "rotate": 8.0} if small else {"flip": True, "shift": 0.1, "zoom": 0.15}
    table = {
        "job": _job_name(path),
        "model": model,
        "image_size": size,
        "channels": shape.channels,
        "epochs": epochs,
        "batch_size": batch,
        "class_weights": "balanced" if balance > UNBALANCED else "none",
        "label_smoothing": 0.1 if classes > 10 else 0.0,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_epochs": 1.0},
        "augment": augment,
        "data": {"path": path},
    }
    colour = "grey" if shape.channels == 1 else "colour"
    device = "an accelerator" if accelerated else "a CPU"
    changes = (
        "shift, rotation and zoom" if small else "flip, shift and zoom; --set augment.flip=false for text and signs"
    )
    reasons = {
        "image_size": f"image_size = {size}, {colour}: {shape.reason}",
        "model": f"model = {model}: suits this size on {device}",
        "epochs": f"epochs = {epochs}: for {count:,} training images",
        "batch_size": f"batch_size = {batch}: for {count:,} training images",
        "augment": f"augment: random {changes}",
        "optimizer": "optimizer = adamw, lr 0.001 with a cosine schedule: needs little tuning",
    }
    if not small:
        reasons["model"] += "; for photos, published weights are better: --model timm:resnet18 --set pretrained=true"
    if balance > UNBALANCED:
        ratio = f"the largest class has {balance:.1f} times the images of the smallest"
        reasons["class_weights"] = f"class_weights = balanced: {ratio}"
    return from_dict(table), reasons


def _shape_of_files(files: object) -> _Shape:
    from flatout.data.decode import BadImage, read_header

    assert isinstance(files, list | tuple)
    headers = []
    for position in np.unique(np.linspace(0, len(files) - 1, min(len(files), SAMPLED)).astype(int)):
        try:
            headers.append(read_header(Path(files[position])))
        except BadImage:
            continue
    if not headers:
        raise InputError(f"{Path(files[0]).parent}: none of the images sampled can be read")
    side = int(np.median([min(h.width, h.height) for h in headers]))
    modes = Counter(h.mode for h in headers)
    channels = 1 if all(mode in ("L", "1", "I;16", "LA") for mode in modes) else 3
    return _Shape(side=side, channels=channels, reason=f"the median of the images' shorter sides is {side} pixels")


def _shape_of_array(images: np.ndarray | None) -> _Shape:
    assert images is not None
    height, width, channels = images.shape[1:]
    return _Shape(side=max(height, width), channels=channels, reason=f"the images are {height}x{width}")


def _nearest_size(side: int, largest: int) -> int:
    """Return the largest of `SIZES` that does not enlarge most images."""
    fitting = [size for size in SIZES if size <= min(side, largest)]
    return fitting[-1] if fitting else side


def _model(size: int, accelerated: bool) -> str:
    if size <= SMALL:
        return "keras-cnn" if size >= 18 else "parallel-cnn"
    return "timm:resnet18" if accelerated else "cats-dogs-cnn"


def _by_count(table: tuple[tuple[int, int], ...], count: int) -> int:
    return next(value for limit, value in table if count < limit)


def _job_name(path: str) -> str:
    return Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name or "data"
