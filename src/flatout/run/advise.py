"""A recipe generated from the data, by simple rules that are printed with it."""

import contextlib
from collections.abc import Sequence
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


def advise(found: DataRef | Source, path: str, *, accelerated: bool) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe that suits the data, and a sentence for each key or section of it that gives the reason.

    Args:
        found: recognised data.
        path: what the recipe names as its data.
        accelerated: whether an accelerator will train it.
    """
    largest, is_pack = LARGEST_ON_GPU if accelerated else LARGEST_ON_CPU, False
    if isinstance(found, DataRef) and found.kind == "pack":
        from flatout.data.pack import open_pack

        source, is_pack = open_pack(found.path, verify=False), True
    else:
        source = found if isinstance(found, Source) else found.read()
    if source.images is not None:
        height, width, channels = source.images.shape[1:]
        size, shape = max(height, width), f"the images are {height}x{width}"
    else:
        size, channels = _shape_of_files(source.files or ())
        shape = f"the median of the images' shorter sides is {size} pixels"
    if source.images is None or (size > largest and not is_pack):
        # The largest size that does not enlarge most images.
        size = max((usual for usual in SIZES if usual <= min(size, largest)), default=size)
    start, stop = source.splits["train"]
    counts = np.bincount(source.labels[start:stop], minlength=len(source.classes))
    balance = counts.max() / max(1, counts[counts > 0].min())
    epochs, batch = (next(v for limit, v in table if stop - start < limit) for table in (EPOCHS, BATCHES))
    why_model = f"suits this size on {'an accelerator' if accelerated else 'a CPU'}"
    if size <= SMALL:
        model = "keras-cnn" if size >= 18 else "parallel-cnn"
        augment, changes = {"shift": 0.1, "zoom": 0.1, "rotate": 8.0}, "shift, rotation and zoom"
    else:
        model = "timm:resnet18" if accelerated else "cats-dogs-cnn"
        why_model += "; for photos, published weights are better: --model timm:resnet18 --set pretrained=true"
        augment = {"flip": True, "shift": 0.1, "zoom": 0.15}
        changes = "flip, shift and zoom; --set augment.flip=false for text and signs"
    recipe = {
        "job": Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name or "data",
        "model": model,
        "image_size": size,
        "channels": channels,
        "epochs": epochs,
        "batch_size": batch,
        "class_weights": "balanced" if balance > UNBALANCED else "none",
        "label_smoothing": 0.1 if len(source.classes) > 10 else 0.0,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_epochs": 1.0},
        "augment": augment,
        "data": {"path": path},
    }
    reasons = {
        "image_size": f"image_size = {size}, {'grey' if channels == 1 else 'colour'}: {shape}",
        "model": f"model = {model}: {why_model}",
        "epochs": f"epochs = {epochs}: for {stop - start:,} training images",
        "batch_size": f"batch_size = {batch}: for {stop - start:,} training images",
        "augment": f"augment: random {changes}",
        "optimizer": "optimizer = adamw, lr 0.001 with a cosine schedule: needs little tuning",
    }
    if balance > UNBALANCED:
        ratio = f"the largest class has {balance:.1f} times the images of the smallest"
        reasons["class_weights"] = f"class_weights = balanced: {ratio}"
    return from_dict(recipe), reasons


def _shape_of_files(files: Sequence[Path]) -> tuple[int, int]:
    """Return the usual length of the shorter side, and the channels."""
    from flatout.data.decode import BadImage, read_header

    headers = []
    for position in np.unique(np.linspace(0, len(files) - 1, min(len(files), SAMPLED)).astype(int)):
        with contextlib.suppress(BadImage):
            headers.append(read_header(Path(files[position])))
    if not headers:
        raise InputError(f"{Path(files[0]).parent}: none of the images sampled can be read")
    is_grey = all(header.mode in ("L", "1", "I;16", "LA") for header in headers)
    return int(np.median([min(header.width, header.height) for header in headers])), 1 if is_grey else 3
