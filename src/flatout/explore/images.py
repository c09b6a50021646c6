"""Single images of a data set: as they are, as a model sees them, and augmented as in training.

Shape letters: M images, V views, H height, W width, C channels.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from flatout.data.batches import Samples, measure
from flatout.data.build import bits_of
from flatout.data.decode import BadImage, decode_image, read_file, read_header
from flatout.data.pixels import resize_images
from flatout.data.source import Source
from flatout.host import usable_cores
from flatout.numerics import augment, pixels
from flatout.recipe import Recipe
from flatout.report.html import THUMBNAIL_PIXELS
from flatout.report.run_files import visible


def thumbnails(source: Source, indices: Sequence[int]) -> list[np.ndarray | None]:
    """Return images in their own shape, uint8 [H, W, 1 or 3], small; None for unreadable ones."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(lambda index: _thumbnail(source, index), indices))


def _thumbnail(source: Source, index: int) -> np.ndarray | None:
    if source.files is None:
        assert source.images is not None
        image = np.asarray(source.images[index])
        size = _fitting(*image.shape[:2])
        how = {"size": size, "channels": image.shape[2], "resize": "squash", "bits": 8 * image.itemsize}
        return visible(resize_images(image[None], **how))[0]
    file = source.files[index]
    try:
        content = file if isinstance(file, Path) else read_file(file)
        header = read_header(content)
        size = _fitting(header.height, header.width)
        return visible(
            decode_image(content, size=size, channels=header.channels, resize="squash", bits=header.bits)[None]
        )[0]
    except BadImage:
        return None


def _fitting(height: int, width: int) -> tuple[int, int]:
    """Return the size of a thumbnail: no side is longer than the limit, and none is empty."""
    scale = min(1.0, THUMBNAIL_PIXELS / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def stored(source: Source, indices: Sequence[int], recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return images as a pack of the recipe stores them, [M, H, W, C], and their indices; unreadable ones are left out.

    Raises:
        InputError: the channels of arrays are not those of the recipe.
    """
    bits = recipe.data.bits or bits_of(source)
    how = {"size": recipe.stored_sides, "channels": recipe.channels, "resize": recipe.data.resize}
    if source.files is None:
        assert source.images is not None
        images = source.images[list(indices)]
        return resize_images(images, **how, bits=bits), np.array(indices, np.int64)
    files = source.files

    def decode(index: int) -> np.ndarray | None:
        try:
            return decode_image(files[index], **how, bits=bits)
        except BadImage:
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        found = list(pool.map(decode, indices))
    kept = [i for i, image in zip(indices, found, strict=True) if image is not None]
    shape = (0, *recipe.stored_sides, recipe.channels)
    images = [image for image in found if image is not None]
    return np.stack(images) if images else np.empty(shape, np.uint8), np.array(kept, np.int64)


def with_statistics(recipe: Recipe, images_MHWC: np.ndarray) -> Recipe:
    """Return a recipe with `data.mean` and `data.std`: those it has, or those of some images."""
    if recipe.data.mean or not len(images_MHWC):
        return recipe
    count = len(images_MHWC)
    mean, std = measure(Samples(images=images_MHWC, rows=np.arange(count), labels=np.zeros(count, np.int64)))
    return recipe.override({"data.mean": mean, "data.std": std})


def augmented(source: Source, indices: np.ndarray, recipe: Recipe, epochs: Sequence[int]) -> np.ndarray:
    """Return training images as the model gets them in some epochs, uint8 [M, V, H, W, 1 or 3].

    Draws, geometry, colours, erasing and mixing are those of the training code; sample i is the i-th training image.

    Args:
        indices: of readable training images, int64 [M].
        recipe: with mean and standard deviation.
        epochs: V of them, from 0.
    """
    import torch
    from torch.nn.functional import interpolate

    mean, std = (torch.tensor(values) for values in (recipe.data.mean, recipe.data.std))
    count, (start, stop) = len(indices), source.splits["train"]
    pictures, _ = stored(source, indices.tolist(), recipe)
    views = []
    for epoch in epochs:
        tables = augment.epoch_transforms(recipe, epoch, stop - start) or {}
        partners = tables.pop("partner", None)

        def made(images: np.ndarray, positions: np.ndarray, tables: dict = tables) -> "torch.Tensor":
            rows = {name: torch.from_numpy(table[positions]) for name, table in tables.items() if name != "mix"}
            batch = torch.from_numpy(np.ascontiguousarray(images))
            return augment.apply(batch, rows, 1 / (255 * std), -mean / std, recipe.image_sides)

        batch = made(pictures, indices - start)
        if partners is not None:
            chosen = partners[indices - start].astype(np.int64)
            others, kept = stored(source, (chosen + start).tolist(), recipe)
            if len(kept) == count:
                batch = augment.mix(batch, made(others, chosen), torch.from_numpy(tables["mix"][indices - start]))
        if (size := augment.training_size(recipe, epoch)) != recipe.image_sides:
            batch = interpolate(interpolate(batch, size=size, mode="area"), size=recipe.image_sides)
        views.append((batch.permute(0, 2, 3, 1) * std + mean).numpy())
    shown = np.stack(views, axis=1) * (1.0 if pictures.itemsize == 1 else 65535 / max(1, int(pictures.max(initial=0))))
    return visible((shown * 255).round().clip(0, 255).astype(np.uint8))


def as_evaluated(images_MHWC: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return stored images as the model sees them in evaluation, uint8 [M, H, W, 1 or 3]."""
    return visible(pixels.centre(images_MHWC, *recipe.eval_sides))
