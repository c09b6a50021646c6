"""A sensible recipe for images nobody has written one for: simple rules, each said aloud."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.data.source import Found, Source
from flatout.errors import InputError
from flatout.recipe import Recipe, from_dict

# Images whose headers are read to learn their size and colour.
LOOKED_AT = 64
# Image sizes to choose from; on a CPU, 128 pixels keep an epoch of a few thousand images within a minute.
SIZES = (32, 64, 96, 128, 160, 224)
LARGEST_ON_CPU, LARGEST_ON_GPU = 128, 224
# Up to this many pixels on a side a picture is a symbol as often as a photo: it is shifted, never mirrored.
SMALL = 32
# Epochs and batch by the number of training images: few images need many passes and many updates each.
EPOCHS = ((2_000, 30), (20_000, 20), (100_000, 10), (2**63, 5))
BATCHES = ((5_000, 32), (20_000, 64), (2**63, 256))
# A class with this many times the images of another gets less weight for each.
UNBALANCED = 3.0


@dataclass(frozen=True, kw_only=True)
class _Look:
    side: int
    channels: int
    what: str


def advise(found: Found | Source, path: str, *, accelerated: bool) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe that suits the data, and why: recipe keys or sections with a sentence each.

    Args:
        found: recognised data.
        path: what the recipe names as its data.
        accelerated: whether a GPU or the like will train it.
    """
    if isinstance(found, Found) and found.kind == "pack":
        from flatout.data.pack import open_pack

        pack = open_pack(found.path, verify=False)
        train, labels, classes = pack.splits["train"], pack.labels, len(pack.classes)
        look = _Look(side=pack.images.shape[1], channels=pack.images.shape[3], what="the pack's images")
        exact = True
    else:
        source = found if isinstance(found, Source) else found.read()
        train, labels, classes = source.splits["train"], source.labels, len(source.classes)
        look = _look_at_files(source.files) if source.files is not None else _look_at_array(source.images)
        exact = source.images is not None and look.side <= (LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU)
    size = look.side if exact else _nearest_size(look.side, LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU)
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
        "channels": look.channels,
        "epochs": epochs,
        "batch_size": batch,
        "class_weights": "balanced" if balance > UNBALANCED else "none",
        "label_smoothing": 0.1 if classes > 10 else 0.0,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_epochs": 1.0},
        "augment": augment,
        "data": {"path": path},
    }
    colour = "grey" if look.channels == 1 else "colour"
    where = "an accelerator" if accelerated else "a CPU"
    changes = "shifted, turned and zoomed a little" if small else "mirrored, shifted and zoomed"
    better = "for photos, --model timm:resnet18 --set pretrained=true starts from published weights"
    mirrored = "" if small else "; --set augment.flip=false for text and signs"
    reasons = {
        "image_size": f"image_size = {size}, {colour}: {look.what}",
        "model": f"model = {model}: it suits that size on {where}; {better}",
        "epochs": f"epochs = {epochs}: for {count:,} training images; --epochs changes it",
        "batch_size": f"batch_size = {batch}: for {count:,} training images",
        "augment": f"augment: images are {changes} at random{mirrored}",
        "optimizer": "optimizer = adamw at 0.001 falling as a cosine: it needs the least tuning",
    }
    if balance > UNBALANCED:
        much = f"the largest class has {balance:.1f} times the images of the smallest"
        reasons["class_weights"] = f"class_weights = balanced: {much}"
    return from_dict(table), reasons


def _look_at_files(files: object) -> _Look:
    from flatout.data.decode import BadImage, read_header

    assert isinstance(files, list | tuple)
    headers = []
    for position in np.unique(np.linspace(0, len(files) - 1, min(len(files), LOOKED_AT)).astype(int)):
        try:
            headers.append(read_header(Path(files[position])))
        except BadImage:
            continue
    if not headers:
        raise InputError(f"{Path(files[0]).parent}: none of the first images looked at can be read as an image")
    side = int(np.median([min(h.width, h.height) for h in headers]))
    modes = Counter(h.mode for h in headers)
    channels = 1 if all(mode in ("L", "1", "I;16", "LA") for mode in modes) else 3
    return _Look(side=side, channels=channels, what=f"the images' shorter side is {side} pixels at the median")


def _look_at_array(images: np.ndarray | None) -> _Look:
    assert images is not None
    height, width, channels = images.shape[1:]
    return _Look(side=max(height, width), channels=channels, what=f"the images are {height}x{width}")


def _nearest_size(side: int, largest: int) -> int:
    """Return the largest size to choose from that does not enlarge most images."""
    fitting = [size for size in SIZES if size <= min(side, largest)]
    return fitting[-1] if fitting else side


def _model(size: int, accelerated: bool) -> str:
    if accelerated and size > SMALL:
        return "timm:resnet18"
    if size <= SMALL:
        return "keras-cnn" if size >= 18 else "parallel-cnn"
    return "cats-dogs-cnn"


def _by_count(table: tuple[tuple[int, int], ...], count: int) -> int:
    return next(value for limit, value in table if count < limit)


def _job_name(path: str) -> str:
    return Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name or "data"
