"""Pictures of what a run's answers rest on: heatmaps over the images.

Shape letters: N images, H height, W width, C channels.
"""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout import style
from flatout.errors import InputError
from flatout.files import write_atomically
from flatout.report.pictures import heat_scale, overlaid

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import nn

    from flatout.recipe import Recipe
    from flatout.run.folder import Run

# Images that a network explains at once: their activations are kept.
_AT_ONCE = 8
# Images are enlarged to at least so many pixels.
_LEAST_PIXELS = 192
# Below them, the scale of the colours.
_SCALE_PIXELS = 20


def heatmaps(run: "Run", pixels_NHWC: np.ndarray, answers: np.ndarray | None = None) -> np.ndarray:
    """Return heatmaps float32 [N, H, W] in 0..1 for images as `Run.probabilities` takes them.

    Args:
        run: of a cross-validation, the mean over its folds.
        pixels_NHWC: the images.
        answers: the class of each image that is explained, int64 [N]; by default the most probable one. A regression
            explains its number.

    Raises:
        InputError: the model is a Keras model, or has no layer with positions.
    """
    if len(run.members) > 1:
        if answers is None:
            answers = run.probabilities(pixels_NHWC).argmax(axis=1)
        return np.mean([heatmaps(member, pixels_NHWC, answers) for member in run.members], axis=0)
    try:
        return heatmaps_of(run.model, run.recipe, run.task.name, pixels_NHWC, answers)
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from None


def heatmaps_of(
    model: "nn.Module", recipe: "Recipe", task: str, pixels_NHWC: np.ndarray, answers: np.ndarray | None
) -> np.ndarray:
    """Return what `heatmaps` does, for a model of a recipe and its task."""
    import torch

    from flatout.models import explain
    from flatout.models.keras import KerasModule
    from flatout.numerics import augment

    if isinstance(model, KerasModule):
        raise InputError("heatmaps need a torch network; this one is a Keras model")
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    parts = []
    for start in range(0, len(pixels_NHWC), _AT_ONCE):
        batch = torch.from_numpy(np.ascontiguousarray(pixels_NHWC[start : start + _AT_ONCE]))
        images = augment.apply(batch, None, 1 / (255 * std), -mean / std, recipe.eval_sides)
        wanted = None if answers is None else torch.from_numpy(answers[start : start + _AT_ONCE])
        found = explain.heatmaps(model.eval(), images, lambda logits, wanted=wanted: _score(task, logits, wanted))
        if found is None:
            raise InputError(f"{recipe.model} has no layer with positions in the image to explain by")
        parts.append(found.numpy())
    return np.concatenate(parts)


def _score(task: str, logits: "torch.Tensor", answers: "torch.Tensor | None") -> "torch.Tensor":
    """Return the logit of each image's answer; of a single logit, the one that speaks for the answer."""
    if logits.shape[1] == 1:
        if task == "regression":
            return logits[:, 0]
        is_first = logits[:, 0] < 0 if answers is None else answers == 0
        return logits[:, 0].where(~is_first, -logits[:, 0])
    return logits.gather(1, (logits.argmax(dim=1) if answers is None else answers)[:, None])[:, 0]


def cropped(pixels_NHWC: np.ndarray, run: "Run") -> np.ndarray:
    """Return stored images as the model sees them and as they are shown, uint8 [N, H, W, 1 or 3]."""
    from flatout.numerics import pixels
    from flatout.report.run_files import visible

    return visible(pixels.centre(pixels_NHWC, *run.recipe.eval_sides))


class Pictures:
    """Writes a PNG for each image into a folder: the image as the model sees it, and under its heatmap.

    Raises:
        InputError: the folder holds something, or cannot be written.
    """

    def __init__(self, run: "Run", folder: Path | str) -> None:
        self.run, self.folder = run, Path(folder or f"runs/explain-{datetime.now():%Y%m%d-%H%M%S}")
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{self.folder}: exists and is not an empty folder; choose another --explain")
        self._count = 0

    def write(self, names: list[str], pixels_NHWC: np.ndarray) -> list[str]:
        """Write pictures of images as they are stored, and return their paths."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written: {error.strerror}; choose another --explain") from None
        paths = []
        maps, shown = heatmaps(self.run, pixels_NHWC), cropped(pixels_NHWC, self.run)
        for name, image, heatmap in zip(names, shown, maps, strict=True):
            path = self.folder / f"{self._count:05d}-{Path(name).stem[:80]}.png"
            write_atomically(path, _side_by_side(image, overlaid(image, heatmap)))
            paths.append(str(path))
            self._count += 1
        return paths


def _side_by_side(image_HWC: np.ndarray, overlay_HWC: np.ndarray) -> bytes:
    """Return a PNG of both with the scale of the colours below, enlarged by a whole factor where they are tiny."""
    import io

    from PIL import Image

    factor = max(1, -(-_LEAST_PIXELS // max(image_HWC.shape[:2])))
    gap = np.full((image_HWC.shape[0] * factor, 8, 3), 255, np.uint8)
    both = [np.broadcast_to(one, (*one.shape[:2], 3)) for one in (image_HWC, overlay_HWC)]
    first, second = (one.repeat(factor, axis=0).repeat(factor, axis=1) for one in both)
    rows = np.concatenate([first, gap, second], axis=1)
    picture = Image.fromarray(np.pad(rows, ((0, _SCALE_PIXELS), (0, 0), (0, 0)), constant_values=255))
    _draw_scale(picture, first.shape[1] + gap.shape[1], rows.shape[0])
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return buffer.getvalue()


def _draw_scale(picture: "Image.Image", left: int, top: int) -> None:
    """Draw the colours of a heatmap below it, from little to most."""
    from PIL import Image, ImageDraw

    draw, middle = ImageDraw.Draw(picture), top + _SCALE_PIXELS // 2
    ends = int(draw.textlength("little")) + 6, picture.width - left - int(draw.textlength("most")) - 6
    bar = Image.fromarray(np.repeat(heat_scale(max(1, ends[1] - ends[0])), 8, axis=0))
    picture.paste(bar, (left + ends[0], middle - 4))
    draw.text((left, middle), "little", fill=style.INK, anchor="lm")
    draw.text((picture.width, middle), "most", fill=style.INK, anchor="rm")
