"""A classifier from images as they are to probabilities: every format is made from it.

A plain PyTorch export contains the source of what stands here, so little is imported.

Shape letters: N images, H height, W width, C channels, V views, F features, K classes.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from flatout.models.features import compact
from flatout.numerics.pixels import FROM_16_BITS, view
from flatout.tasks.single_label import averaged_sigmoid


def resize_matrix(
    size: int, offset: torch.Tensor, used: torch.Tensor, filled: torch.Tensor, pixels: torch.Tensor
) -> torch.Tensor:
    """Return the weights float32 [size, pixels] of a bilinear, antialiased resize along one axis.

    Args:
        size: the length of the result.
        offset, used: first pixel and number of pixels that are used of the image.
        filled: how much of the result they fill; it is centred, and zeros are around it.
        pixels: float32, the positions 0, 1, 2 ... of the image.
    """
    start = torch.floor((size - filled) / 2)
    rows = torch.arange(size, dtype=torch.float32)[:, None] - start
    scale = used / filled
    centre = (rows + 0.5) * scale - 0.5
    weights = (1 - (pixels - offset - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((pixels >= offset) & (pixels < offset + used))
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
    return weights * ((rows >= 0) & (rows < filled))


class Resize(nn.Module):
    """Images uint8 or uint16 [N, H, W, C] of any height and width to whole numbers, float32 [N, C, height, width].

    Args:
        size: height and width of the result.
        mode: "squash", "crop" to the largest centred part of that shape, or "pad" with black.
        bits: of the images, 8 or 16.
    """

    def __init__(self, size: tuple[int, int], mode: str, bits: int) -> None:
        super().__init__()
        self.size, self.mode, self.bits = size, mode, bits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the resized images."""
        (rows, columns), (height, width) = self.size, images.shape[1:3]
        y, x = (torch.arange(length, dtype=torch.float32) for length in (height, width))
        used_y, used_x = (torch.full((), length, dtype=torch.float32) for length in (height, width))
        all_y, all_x, filled_y, filled_x = used_y, used_x, used_y * 0 + rows, used_x * 0 + columns
        is_wide = used_y * columns <= used_x * rows
        if self.mode == "crop":
            used_y = torch.where(is_wide, all_y, (all_x * rows / columns).round().clamp(min=1))
            used_x = torch.where(is_wide, (all_y * columns / rows).round().clamp(min=1), all_x)
        elif self.mode == "pad":
            filled_y = torch.where(is_wide, (columns * all_y / all_x).round().clamp(min=1), filled_y)
            filled_x = torch.where(is_wide, filled_x, (rows * all_x / all_y).round().clamp(min=1))
        across = resize_matrix(columns, torch.floor((all_x - used_x) / 2), used_x, filled_x, x)
        down = resize_matrix(rows, torch.floor((all_y - used_y) / 2), used_y, filled_y, y)
        narrow = images.permute(0, 3, 1, 2).float() @ across.T
        if self.bits == 8:  # each pass is rounded, as in 8-bit arithmetic
            narrow = torch.floor(narrow + 0.5)
        return torch.floor(down @ narrow + 0.5)


class Novelty(nn.Module):
    """How unlike the training images an image is: see `docs/trust.md`; from a threshold on, it is unknown.

    The energy of the logits, and the relative Mahalanobis distance of the features if there are any, standardised.

    Attributes:
        within, overall: [F, F], what features are multiplied by so that distances become Euclidean ones.
        means, mean: float32 [K, F] and [1, F], of each class and of all images, multiplied likewise.
        centre, scale: mean and standard deviation of energy and distance.
    """

    within: torch.Tensor
    overall: torch.Tensor
    means: torch.Tensor
    mean: torch.Tensor
    centre: torch.Tensor
    scale: torch.Tensor

    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        shapes = {"centre": [2], "scale": [2]}
        if features:
            square = [features, features]
            shapes |= {"within": square, "overall": square, "means": [classes, features], "mean": [1, features]}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, logits: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the score of each image, float32 [N]."""
        energy = -torch.logsumexp(logits if logits.shape[1] > 1 else logits.abs(), dim=1)
        score = (energy - self.centre[0]) / self.scale[0]
        if hasattr(self, "means"):
            nearest = squared_distances(features @ self.within, self.means).amin(dim=1)
            distance = nearest - squared_distances(features @ self.overall, self.mean)[:, 0]
            score = score + (distance - self.centre[1]) / self.scale[1]
        return torch.where(score.isfinite(), score, torch.inf)


def squared_distances(points: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return squared Euclidean distances, [N, K], of points [N, F] to means [K, F]."""
    return points.square().sum(1, keepdim=True) - 2 * points @ means.T + means.square().sum(1)


class Member(nn.Module):
    """A network with its normalisation, the average over views, and what turns logits into answers.

    Args:
        network: images [N, C, height, width] to logits [N, K].
        task: "single-label", "multi-label" or "regression".
        size: height and width that the network takes: the centre of the images.
        channels: C.
        views: shift in pixels and whether mirrored, of each view that logits are averaged over; none for the image.
        head: the submodule that reads the features; empty for none.
        novelty: the score of unknown images; None for none.
        dtype: of the network's weights.

    Attributes:
        scale, bias: float32 [C, 1, 1]; a pixel p of 0..255 becomes p * scale + bias.
        temperature: what logits are divided by.
        label_scale, label_bias: what turns the logit of a regression into its number.
    """

    scale: torch.Tensor
    bias: torch.Tensor
    temperature: torch.Tensor
    label_scale: torch.Tensor
    label_bias: torch.Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        task: str,
        size: tuple[int, int],
        channels: int,
        views: Sequence[tuple[int, bool]] = (),
        head: str = "",
        novelty: Novelty | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.network, self.task, self.size, self.views = network, task, size, views
        self.head, self.novelty, self.dtype = head, novelty, dtype
        for name in ("scale", "bias"):
            self.register_buffer(name, torch.zeros(channels, 1, 1))
        for name in ("temperature", "label_scale", "label_bias"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return probabilities [N, K] or numbers [N, 1], and scores [N], of pixels 0..255, float32 [N, C, H, W]."""
        (rows, columns), (height, width) = self.size, pixels.shape[2:]
        top, left = (height - rows) // 2, (width - columns) // 2
        images = pixels[:, :, top : top + rows, left : left + columns] * self.scale + self.bias
        seen: list[torch.Tensor] = []
        head = self.network.get_submodule(self.head) if self.novelty is not None and self.head else None
        hook = head and head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        # All views are one batch: a file then has the network once.
        views = [view(torch, images, *each) for each in self.views]
        logits = self.network((torch.cat(views) if views else images).to(self.dtype)).float()
        if hook:
            hook.remove()
        if views:
            logits = self.averaged(self.by_view(logits, images))
        score = None
        if self.novelty is not None:
            features = compact(seen[-1]) if seen else logits
            score = self.novelty(logits, self.by_view(features, images).mean(dim=0) if views and seen else features)
        return self.answers(logits), score

    def by_view(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Return what a network found in the views of N images, [V * N, ...], as [V, N, ...]."""
        return rows.reshape(len(self.views), images.shape[0], *rows.shape[1:])

    def averaged(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [N, K] whose probabilities, or numbers, are the mean of those of several views, [V, N, K]."""
        if self.task == "regression":
            return logits.mean(dim=0)
        if self.task == "multi-label" or logits.shape[2] == 1:
            return averaged_sigmoid(logits)
        return logits.log_softmax(2).logsumexp(0) - math.log(len(self.views))

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probability of each class, or the number of a regression."""
        if self.task == "regression":
            return logits * self.label_scale + self.label_bias
        if self.task == "multi-label":
            return logits.sigmoid()
        logits = logits / self.temperature
        if logits.shape[1] == 1:
            return torch.cat([1 - logits.sigmoid(), logits.sigmoid()], dim=1)
        return logits.softmax(dim=1)


class Classifier(nn.Module):
    """Images uint8 or uint16 [N, H, W, C] of any height and width to probabilities float32 [N, K].

    A regression has its number in place of probabilities. Several members, as of a cross-validation, are averaged. A
    member that knows unknown images adds a second output: their score, float32 [N].
    """

    def __init__(self, resize: Resize, members: Sequence[Member]) -> None:
        super().__init__()
        self.resize, self.members = resize, nn.ModuleList(members)

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the answers, and the scores if there are any."""
        pixels = self.resize(images)
        if self.resize.bits == 16:
            pixels = pixels * FROM_16_BITS
        found = [member(pixels) for member in self.members]
        probabilities, score = found[0]
        if len(found) > 1:
            return torch.stack([one for one, _ in found]).mean(dim=0)
        return probabilities if score is None else (probabilities, score)
