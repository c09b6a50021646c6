"""The image sizes that a network of timm's takes together with its published weights, found by trying.

Trials run on torch's meta device, which computes shapes and no values.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flatout.models.load import create_sized, default_shape, quiet, seeded
from flatout.recipe import Recipe
from flatout.settings import Size, one_or_both, sides

if TYPE_CHECKING:
    from torch import nn

# How many multiples of the stride are tried below the wanted size, and above it.
_TRIALS = 4
# Networks that the meta device cannot compute are tried with numbers, up to this many parameters.
_MOST_PARAMETERS = 150_000_000


def usable_size(model_name: str, wanted: Size, *, channels: int) -> Size:
    """Return the largest size up to `wanted` that a network and its published weights take, else the smallest above.

    Weights take a size if no shape of theirs depends on it, or if timm resizes what does, such as position embeddings.
    Where it cannot, the size is the published one. The ratio of height to width is kept where the network takes one
    like it; else the size is a square of about as many pixels. Networks that are not timm's are taken to fit.
    """
    if not model_name.startswith("timm:") or sides(wanted) == sides(default_shape(model_name)[1]):
        return wanted
    with quiet():
        try:
            network = _Network(model_name, channels)
        except Exception:  # timm's code may raise anything; whoever builds the network reports it
            return wanted
        squares = [wanted] if isinstance(wanted, int) else [wanted, math.isqrt(math.prod(wanted))]
        for size in squares:
            for near in network.near(sides(size)):
                if network.takes(near):
                    return one_or_both(near)
                if network.is_fixed:
                    return network.published
    return network.published


class _Network:
    """A network of its published size, and the sizes that it takes.

    Attributes:
        published: the size of its weights.
        is_fixed: whether a trial has shown that its weights fit no other size.
    """

    def __init__(self, name: str, channels: int) -> None:
        import timm

        self._name, self._channels, self._device = name, channels, "meta"
        self._classes, self.published, self._published_channels = default_shape(name)
        self._config: Any = timm.get_pretrained_cfg(name.removeprefix("timm:"))
        least = getattr(self._config, "min_input_size", None) or (3, 1, 1)
        self._least = least[1], least[2]
        self.is_fixed, parameters = False, 0
        with contextlib.suppress(Exception):
            self._model, self._has_option = self._build(self.published, self._published_channels)
            parameters = sum(p.numel() for p in self._model.parameters())
            if self._computes(self._model, sides(self.published), self._published_channels):
                return
        if parameters > _MOST_PARAMETERS:
            raise ValueError("too large to be tried")
        self._device = "cpu"
        self._model, self._has_option = self._build(self.published, self._published_channels)

    def near(self, size: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield sizes of about this ratio: this, smaller ones, larger ones, the nearest first."""
        yield size
        height, width = size
        reductions = [info.get("reduction", 1) for info in getattr(self._model, "feature_info", None) or ()]
        down, across = (math.lcm(patch, *reductions[-1:]) for patch in self._patch())
        if down <= height:
            for count in range(height // down, max(0, height // down - _TRIALS), -1):
                yield count * down, max(1, width * count * down // height // across) * across
        for count in range(-(-height // down), -(-height // down) + _TRIALS):
            yield count * down, -(-width * count * down // height // across) * across
        if self._least[0] > height or self._least[1] > width:
            yield self._least

    def takes(self, size: tuple[int, int]) -> bool:
        """Return whether a size is one for the network and for its weights."""
        if size == sides(self.published):
            return True
        # Pixels that fill no patch would be left out.
        if any(side % patch for side, patch in zip(size, self._patch(), strict=True)):
            return False
        if size[0] < self._least[0] or size[1] < self._least[1]:
            return False
        if not self._has_option:
            return self._computes(self._model, size, self._published_channels)
        try:
            model, _ = self._build(one_or_both(size), self._channels)
        except Exception:  # timm's code may raise anything
            return False
        return self._computes(model, size, self._channels) and self._weights_fit(model, size)

    def _weights_fit(self, model: "nn.Module", size: tuple[int, int]) -> bool:
        published, own = self._model.state_dict(), model.state_dict()
        others = [name for name in own.keys() | published.keys() if _shape(own, name) != _shape(published, name)]
        if others:
            try:
                self._build(one_or_both(size), self._published_channels, published)
            except Exception:  # timm cannot resize them
                self.is_fixed = True
        return not self.is_fixed

    def _patch(self) -> tuple[int, int]:
        """Return height and width of the patches, if they do not overlap; else 1."""
        from torch import nn

        proj = getattr(getattr(self._model, "patch_embed", None), "proj", None)
        if not isinstance(proj, nn.Conv2d) or proj.kernel_size != proj.stride:
            return 1, 1
        return proj.stride[0], proj.stride[1]

    def _build(self, size: Size, channels: int, weights: Any = None) -> "tuple[nn.Module, bool]":
        """Return a model in evaluation mode, and whether it was built for the size."""
        import torch

        recipe = Recipe(model=self._name, image_size=1, channels=3, epochs=1, batch_size=1)
        recipe = recipe.override({"image_size": size, "channels": channels})
        with seeded(0), torch.device(self._device):
            model, options = create_sized(recipe, self._classes, weights)
        return model.to(self._device).eval(), "img_size" in options

    def _computes(self, model: "nn.Module", size: tuple[int, int], channels: int) -> bool:
        import torch

        try:
            with torch.no_grad():
                model(torch.zeros(2, channels, *size, device=self._device))
        except Exception:  # timm's code may raise anything
            return False
        return True


def _shape(tensors: dict[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
