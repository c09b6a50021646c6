"""The picture of `flatout look`: images of each class, and augmented ones."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout import style
from flatout.data.pixels import resize_images
from flatout.data.source import describe
from flatout.style import shorten

if TYPE_CHECKING:
    from flatout.explore.look import Look

COLUMNS, MOST_ROWS, CELL_PIXELS, CELL_INCHES = 8, 12, 96, 0.72


def draw(path: Path, look: "Look") -> None:
    """Write a row of images for each class, up to 12, and a row of views for up to 4 images."""
    source, shown = look.source, look.shown
    rows = [
        (f"{shorten(group.name, 22)}\n{group.count:,}", [shown["thumbs"][i] for i in group.chosen])
        for group in shown["groups"][:MOST_ROWS]
    ]
    views = [("augmented", list(views)) for views in shown["views"][:4]]
    height = CELL_INCHES * (len(rows) + len(views)) + 0.75
    title = shorten(describe(source.kind, source.classes, source.splits, source.task), 90)
    figure = style.new_figure(COLUMNS * CELL_INCHES + 2.0, height, layout=None, title=title)
    width = COLUMNS * CELL_INCHES
    for number, (name, images) in enumerate([*rows, *views]):
        # Views stand a little apart.
        top = 0.45 + CELL_INCHES * number + 0.2 * (number >= len(rows))
        bottom, left = 1 - (top + 0.94 * CELL_INCHES) / height, 1.8 / figure.get_figwidth()
        box = (left, bottom, width / figure.get_figwidth(), 0.94 * CELL_INCHES / height)
        axes = figure.add_axes(box)
        axes.set_axis_off()
        axes.imshow(_strip(images), aspect="auto", interpolation="nearest")
        text = {"fontsize": 8, "color": style.INK, "family": style.families(), "parse_math": False}
        axes.text(-0.02, 0.5, name, transform=axes.transAxes, ha="right", va="center", **text)
    style.write_png(figure, path)


def _strip(images: list[np.ndarray | None]) -> np.ndarray:
    """Return images side by side, each fitted into a square, uint8 [H, W, 3], on white."""
    side = CELL_PIXELS
    strip = np.full((side, COLUMNS * (side + 4), 3), 255, np.uint8)
    for column, image in enumerate(images[:COLUMNS]):
        if image is None:
            continue
        scale = side / max(image.shape[:2])
        height, width = (max(1, round(length * scale)) for length in image.shape[:2])
        if scale >= 2:
            # Whole pixels, so that the reader sees what the model sees.
            rows, columns = (np.arange(n) * old // n for n, old in zip((height, width), image.shape[:2], strict=True))
            fitted = np.broadcast_to(image[rows][:, columns], (height, width, 3))
        else:
            fitted = resize_images(image[None], size=(height, width), channels=3, resize="squash")[0]
        top, left = (side - height) // 2, column * (side + 4) + (side - width) // 2
        strip[top : top + height, left : left + width] = fitted
    return strip
